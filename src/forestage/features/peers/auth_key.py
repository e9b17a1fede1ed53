"""Slurm's AuthType, and the keys of auth/slurm where slurmd finds them.

As auth/slurm of Slurm 24.05 to 26.05 has it (init_internal() in its internal.c, and
get_extra_conf_path()); tried with 26.05. slurm.jwks holds several keys and, where it is there,
takes the place of slurm.key. Both lie beside slurm.conf; of a configless node, whose slurm.conf is
slurmd's own copy, in the directory where slurm.conf would be.
"""

import base64
import contextlib
import os
import stat
from pathlib import Path
from typing import Literal

import msgspec

from forestage.slurm.slurm_conf import USUAL_CONF, SlurmConf, locate_conf
from forestage.system.files import open_descriptor

KEY_FILE_NAMES = ("slurm.jwks", "slurm.key")
MIN_KEY_BYTES = 16  # bytes: of slurm.jwks auth/slurm takes no shorter key
MAX_FILE_BYTES = 64 << 10  # bytes of a file
_COPIES = ("/run/slurm/conf/", "/conf-cache/")

AuthType = Literal["munge", "slurm", "other"]


class SlurmAuthKeys(msgspec.Struct, frozen=True):
    """The keys of a cluster: with `default` tokens are made, with all of them they are read."""

    default: bytes
    others: tuple[bytes, ...] = ()


class _JwksKey(msgspec.Struct, frozen=True):
    """One key of slurm.jwks: `k` in base64 or base64url, `exp` in seconds since the epoch."""

    k: str
    use: str = ""
    exp: int | None = None


class _JwksFile(msgspec.Struct, frozen=True):
    keys: tuple[_JwksKey, ...]


def read_auth_type(slurm_conf_path: str, root: Path = Path("/")) -> AuthType:
    """Return how Slurm's daemons know each other; `slurm_conf_path` is $SLURM_CONF or "".

    A slurm.conf that is not there or cannot be read says nothing: munge is Slurm's default.
    """
    value = "auth/munge"
    if path := locate_conf(slurm_conf_path, root):
        with contextlib.suppress(OSError, ValueError):
            value = SlurmConf(path).values.get("authtype", value)
    kind = value.removeprefix("auth/")
    return "munge" if kind == "munge" else "slurm" if kind == "slurm" else "other"


def find_key_file(slurm_conf_path: str, root: Path = Path("/")) -> Path | None:
    """Return the file of this node's keys, or None. `slurm_conf_path` as in `read_auth_type`."""
    conf = locate_conf(slurm_conf_path, root)
    folders = [Path(conf).parent] if conf else []
    if not conf or any(copy in conf for copy in _COPIES):
        folders += [root / Path(usual).parent.relative_to("/") for usual in USUAL_CONF]
    files = (folder / name for folder in folders for name in KEY_FILE_NAMES)
    return next((file for file in files if file.exists()), None)


def load_keys(file: Path, now: float) -> SlurmAuthKeys:
    """Return the keys of slurm.key or slurm.jwks; `now` is the time, by which keys of it end.

    Raises OSError; ValueError where slurmd would not start with the file, or the key is too short.
    """
    # A secret of Kubernetes is a link.
    with open_descriptor(file, os.O_RDONLY | os.O_NONBLOCK) as fd:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & stat.S_IRWXO:
            raise ValueError(f"{file} can be read or written by all")
        text = os.read(fd, MAX_FILE_BYTES)
    return (
        _parse_jwks(file, text, now)
        if file.name.endswith(".jwks")
        else SlurmAuthKeys(_check_length(file, text))
    )


def _parse_jwks(file: Path, text: bytes, now: float) -> SlurmAuthKeys:
    try:
        keys = msgspec.json.decode(text, type=_JwksFile).keys
        decoded = [(key, _decode_base64(key.k)) for key in keys]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no list of keys: {error}") from None
    found = [(key, _check_length(file, raw)) for key, raw in decoded]
    default = next((raw for key, raw in found if key.use.lower() == "default"), None)
    good = [raw for key, raw in found if key.exp is None or key.exp > now]
    if default is None and not found:
        raise ValueError(f"{file} has no key")
    first = default if default is not None else found[0][1]
    return SlurmAuthKeys(first, tuple(raw for raw in good if raw != first))


def _decode_base64(text: str) -> bytes:
    plain = text.rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


def _check_length(file: Path, key: bytes) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"{file} holds a key of {len(key)} bytes, expected {MIN_KEY_BYTES} or more"
        )
    return key
