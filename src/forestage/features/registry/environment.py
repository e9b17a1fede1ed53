"""What a user's enroot would go by: the job's environment, then enroot.conf, which is shell.

Called as the user only, in the worker. Nothing here may be believed of more than that user.
"""

import os
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.features.registry.reference import TAG_DIGEST
from forestage.slurm import enroot
from forestage.system import run
from forestage.system.tree import RootedTree
from forestage.units import make_printable

MAX_BYTES = 4 << 20  # of an environment; the kernel takes 6 MiB at most of a program's stack
MAX_ENTRIES = 16384
LONGEST = 128 * 1024 - 1  # bytes of one entry: execve(2) takes no more (MAX_ARG_STRLEN)
SQUASH_OPTIONS = "-comp lzo -noD -exit-on-error"
"""enroot's own (config::export in enroot.in, 4.1)."""

# enroot_deny_env in pyxis_slurmstepd.c (0.24), and all of LD_.
DENIED = {
    *("PATH", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "PMIX_RANK", "PMI_FD"),
    *("ENROOT_LIBRARY_PATH", "ENROOT_SYSCONF_PATH", "ENROOT_RUNTIME_PATH"),
    *("ENROOT_CACHE_PATH", "ENROOT_DATA_PATH", "ENROOT_TEMP_PATH"),
    *("ENROOT_ZSTD_OPTIONS", "ENROOT_TRANSFER_RETRIES"),
    *("ENROOT_CONNECT_TIMEOUT", "ENROOT_MAX_CONNECTIONS", "ENROOT_ALLOW_HTTP"),
}

# As config::load of enroot reads its files: a value is shell, what the environment has comes first,
# of a file that bash cannot parse nothing is used, a last line without its end does not count.
# With -u, so that a value with a variable that is not set is none.
_LOAD = r"""
set -eu -o pipefail
load() {
    [ -e "$1" ] || return 0
    if [ -s "$1" ] && ! bash -n "$1" 2> /dev/null; then
        exit 99
    fi
    while IFS=$' \t=' read -r name value; do
        [[ $name =~ ^(ENROOT_[[:upper:]_]+|(MELLANOX_|NVIDIA_).*)$ ]] ||
            [[ $name =~ ^(SSL_CERT_(DIR|FILE)|(all|no|http|https)_proxy)$ ]] || continue
        value=$(eval echo "$value" 2> /dev/null < /dev/null) || :
        export "$name=${!name:-$value}"
    done < "$1"
}
conf=$(cat)
export HOME="${HOME:-$(echo ~)}"
load "$conf"
if [ -d "$conf.d" ]; then
    shopt -s nullglob
    for part in "$conf.d"/*.conf; do
        load "$part"
    done
fi
exec env -0
"""
_UNPARSED = 99

_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")


class EnrootSettings(msgspec.Struct, frozen=True):
    """How this user's images are fetched on this node.

    `variables` are the environment for enroot and curl, `credentials` is the path of enroot's
    .credentials, `arch` the machine's as uname says it, `enroot_version` (0, 0, 0) if unknown.
    """

    variables: Mapping[str, str]
    credentials: str
    allow_http: bool
    squash_options: str
    arch: str
    enroot_version: tuple[int, int, int]

    @property
    def can_import_digests(self) -> bool:
        """Whether this enroot can be told which manifest to import.

        See `ImageReference.enroot_uri`.
        """
        return self.enroot_version >= TAG_DIGEST


def parse_environment(block: bytes) -> dict[str, str]:
    """Reads a job's environment, entries that end with NUL, without what pyxis keeps from enroot.

    Of a name that comes twice the last counts, as with putenv(3). Raises Declined if it is larger
    than any that a program can be started with.
    """
    entries = block.split(b"\0") if len(block) <= MAX_BYTES else []
    if not entries or len(entries) > MAX_ENTRIES:
        raise Declined("environment", "the job's environment is too large", "unset some of it")
    found = {}
    for entry in entries:
        name, equals, value = entry.partition(b"=")
        if name and equals and len(entry) <= LONGEST:
            found[os.fsdecode(name)] = os.fsdecode(value)
    denied = {name for name in found if name in DENIED or name.startswith("LD_")}
    return {name: value for name, value in found.items() if name not in denied}


def read_enroot_settings(
    environ: Mapping[str, str], stop: Deadline, conf: str = ""
) -> EnrootSettings:
    """Return what enroot and curl are to be called with, for a user with this environment.

    `environ` is what `parse_environment` gave.

    `conf` is enroot's configuration, "" for that of the `enroot` which is installed.
    Raises Declined: `enroot` where its configuration cannot be evaluated, or it does not say its
    release; Failed where it is not installed.
    """
    variables = _evaluate_enroot_conf(
        environ, stop, conf or enroot.read_enroot_setup(RootedTree()).conf
    )
    return EnrootSettings(
        variables,
        f"{enroot_folder(variables, 'CONFIG')}/.credentials",
        enroot.is_true_setting(variables.get("ENROOT_ALLOW_HTTP", "")),
        variables.get("ENROOT_SQUASH_OPTIONS") or SQUASH_OPTIONS,
        os.uname().machine,
        _read_enroot_version(variables, stop),
    )


def enroot_folder(variables: Mapping[str, str], kind: Literal["CACHE", "CONFIG", "DATA"]) -> str:
    """Pure: where enroot keeps what is of this kind (config::export in enroot.in)."""
    default = {"CACHE": ".cache", "CONFIG": ".config", "DATA": ".local/share"}[kind]
    above = variables.get(f"XDG_{kind}_HOME") or f"{variables.get('HOME', '')}/{default}"
    return variables.get(f"ENROOT_{kind}_PATH") or f"{above}/enroot"


def temporary_folder(variables: Mapping[str, str]) -> str:
    """Pure: where enroot makes its temporary files (config::export in enroot.in)."""
    return variables.get("ENROOT_TEMP_PATH") or variables.get("TMPDIR") or "/tmp"  # noqa: S108


def _evaluate_enroot_conf(environ: Mapping[str, str], stop: Deadline, conf: str) -> dict[str, str]:
    """The environment with what enroot's configuration adds to it."""
    argv = ("bash", "--norc", "-c", _LOAD)
    ran = run.run_as_current_user(argv, environ, stop.seconds_left(), MAX_BYTES, os.fsencode(conf))
    if ran.cut:
        raise Declined("enroot", f"the evaluation of {conf} takes too long or never ends")
    if ran.code:
        word = "is no shell" if ran.code == _UNPARSED else f"ends with {ran.code}"
        raise Declined("enroot", f"{conf} or a file of {conf}.d {word}")
    entries = (os.fsdecode(entry).partition("=") for entry in ran.out.split(b"\0"))
    return {name: value for name, equals, value in entries if equals}


def _read_enroot_version(variables: Mapping[str, str], stop: Deadline) -> tuple[int, int, int]:
    ran = run.run_as_current_user(("enroot", "version"), variables, stop.seconds_left(), 1 << 16)
    if ran.code:
        last = ran.err.decode(errors="replace").strip().rpartition("\n")[2]
        raise Declined("enroot", f"`enroot version` failed: {make_printable(last)}")
    return parse_release(ran.out.decode(errors="replace"))


def parse_release(said: str) -> tuple[int, int, int]:
    """Pure: the release that `enroot version` says; (0, 0, 0) if it is unknown."""
    match = _VERSION.search(said)
    major, minor, patch = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    return major, minor, patch
