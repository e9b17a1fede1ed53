"""AuthType, and the keys of auth/slurm where slurmd finds them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from forestage.features.peers import auth_key
from forestage.features.peers.auth_key import SlurmAuthKeys

ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


def site(root: Path, lines: str = "AuthType=auth/slurm\n", folder: str = "etc/slurm") -> Path:
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / "slurm.conf").write_text(lines)
    return root / folder


def jwk(name: str, key: bytes, **more: object) -> dict[str, object]:
    coded = base64.urlsafe_b64encode(key).decode().rstrip("=")
    return {"alg": "HS256", "kty": "oct", "kid": name, "k": coded, **more}


def keys_file(path: Path, *keys: dict[str, object]) -> Path:
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ("", "munge"),
        ("AuthType=auth/munge", "munge"),
        ("authtype = auth/slurm", "slurm"),
        ("AuthType=slurm", "slurm"),
        ("AuthType=auth/none", "other"),
        ("include auth.conf", "slurm"),
        ("AuthType=auth/slurm CredType=cred/slurm", "munge"),
    ],
)
def test_auth_type_is_read_from_slurm_conf_and_defaults_to_munge(
    tmp_path: Path, lines: str, kind: str
) -> None:
    (site(tmp_path, f"{lines}\n") / "auth.conf").write_text("AuthType=auth/slurm\n")
    assert auth_key.read_auth_type("", tmp_path) == kind


def test_auth_type_without_slurm_conf_is_munge_and_no_slurm_key_is_found(tmp_path: Path) -> None:
    assert auth_key.read_auth_type("", tmp_path) == "munge"
    assert auth_key.find_key_file("", tmp_path) is None


def test_slurm_jwks_beside_slurm_conf_is_preferred_to_slurm_key(tmp_path: Path) -> None:
    folder = site(tmp_path)
    assert auth_key.find_key_file("", tmp_path) is None
    (folder / "slurm.key").touch()
    assert auth_key.find_key_file("", tmp_path) == folder / "slurm.key"
    (folder / "slurm.jwks").touch()
    assert auth_key.find_key_file("", tmp_path) == folder / "slurm.jwks"
    other = site(tmp_path, folder="opt/site")
    assert auth_key.find_key_file(str(other / "slurm.conf"), tmp_path) is None


def test_slurm_key_of_a_configless_node_is_found_in_etc_slurm(tmp_path: Path) -> None:
    site(tmp_path, folder="run/slurm/conf")
    key = site(tmp_path) / "slurm.key"
    (key.parent / "slurm.conf").unlink()
    key.touch()
    assert auth_key.read_auth_type("", tmp_path) == "slurm"
    assert auth_key.find_key_file("", tmp_path) == key


def test_slurm_key_is_all_bytes_of_its_file_even_through_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "slurm.key"
    real.write_bytes(ONE + b"\n")
    real.chmod(0o640)
    link.symlink_to(real)  # as a secret of Kubernetes is mounted
    assert auth_key.load_keys(link, 0.0) == SlurmAuthKeys(ONE + b"\n")


def test_slurm_jwks_default_key_signs_and_all_unexpired_keys_verify(tmp_path: Path) -> None:
    file = keys_file(
        tmp_path / "slurm.jwks",
        jwk("a", ONE, exp=1000),
        jwk("b", TWO, use="default"),
        jwk("c", THREE, exp=3000),
    )
    assert auth_key.load_keys(file, 500.0) == SlurmAuthKeys(TWO, (ONE, THREE))
    assert auth_key.load_keys(file, 2000.0) == SlurmAuthKeys(TWO, (THREE,))
    first = keys_file(tmp_path / "slurm.jwks", jwk("a", ONE), jwk("b", TWO))
    assert auth_key.load_keys(first, 0.0) == SlurmAuthKeys(ONE, (TWO,))


@pytest.mark.parametrize(
    ("name", "text", "mode"),
    [
        ("slurm.key", b"short", 0o600),
        ("slurm.key", ONE, 0o604),
        ("slurm.key", ONE, 0o602),
        ("slurm.jwks", b"", 0o600),
        ("slurm.jwks", b'{"keys": []}', 0o600),
        ("slurm.jwks", b'{"keys": [{"k": "AAAA"}]}', 0o600),
        ("slurm.jwks", b'{"keys": [{"k": "!"}]}', 0o600),
    ],
)
def test_slurm_key_that_is_short_damaged_or_world_accessible_is_refused(
    tmp_path: Path, name: str, text: bytes, mode: int
) -> None:
    file = tmp_path / name
    file.write_bytes(text)
    file.chmod(mode)
    with pytest.raises(ValueError, match=name):
        auth_key.load_keys(file, 0.0)
