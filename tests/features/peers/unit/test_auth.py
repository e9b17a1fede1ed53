"""Credentials and MACs: what proves nothing is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.errors import PeerError
from forestage.features.peers import auth
from forestage.features.peers.auth import CREDENTIAL_SECONDS, BadCredential, KeyFileAuthenticator
from forestage.paths import NodePaths

OURS = KeyFileAuthenticator(b"a" * 32)


def key_file(path: Path, content: bytes = b"a" * 32, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_key_file_credential_yields_the_same_secret_without_containing_the_secret(
    tmp_path: Path,
) -> None:
    prover = KeyFileAuthenticator.from_file(key_file(tmp_path / "key"))
    offer = prover.make_credential("k")
    claim = OURS.read_credential(offer.text)
    assert (claim.key, claim.secret) == ("k", offer.secret)
    assert offer.secret.hex() not in offer.text
    assert prover.make_credential("k").secret != offer.secret


@pytest.mark.parametrize("field", ["protocol", "key", "nonce", "mac"])
def test_key_file_credential_with_a_changed_field_is_refused(field: str) -> None:
    said = msgspec.json.decode(OURS.make_credential("k").text)
    for changed in ("", "0", said[field] + "0", said[field][:-1]):
        with pytest.raises(BadCredential):
            OURS.read_credential(msgspec.json.encode(said | {field: changed}).decode())


@pytest.mark.parametrize(
    ("content", "mode", "reader"),
    [
        (b"a" * 31, 0o600, 0),
        (b"", 0o600, 0),
        (b"a" * 32, 0o604, 0),
        (b"a" * 32, 0o600, 1),
    ],
)
def test_key_file_that_is_short_world_readable_or_not_owned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, mode: int, reader: int
) -> None:
    path = key_file(tmp_path / "key", content, mode)
    monkeypatch.setattr(auth.os, "geteuid", lambda: path.stat().st_uid + reader)
    with pytest.raises(PeerError, match=r"mode 0600|expected 32"):
        KeyFileAuthenticator.from_file(path)


@pytest.mark.parametrize(
    ("age", "is_good"),
    [
        (0, True),
        (CREDENTIAL_SECONDS - 1, True),
        (-CREDENTIAL_SECONDS + 1, True),
        (CREDENTIAL_SECONDS + 1, False),
        (-CREDENTIAL_SECONDS - 1, False),
    ],
)
def test_key_file_credential_older_or_newer_than_its_lifetime_is_refused(
    monkeypatch: pytest.MonkeyPatch, age: float, is_good: bool
) -> None:
    monkeypatch.setattr(auth.time, "time", lambda: 1e9)
    offer = OURS.make_credential("k")
    monkeypatch.setattr(auth.time, "time", lambda: 1e9 + age)
    with contextlib.nullcontext() if is_good else pytest.raises(BadCredential, match="ago"):
        OURS.read_credential(offer.text)


WORDS = st.lists(st.text(alphabet="a1:", max_size=4), min_size=4, max_size=4)


@given(WORDS, WORDS)
def test_macs_of_different_peer_requests_differ(one: list[str], other: list[str]) -> None:
    macs = {auth.request_mac(b"s", *words, 1) for words in (one, other)}  # type: ignore[call-arg,arg-type]
    assert len(macs) == len({tuple(one), tuple(other)})


def test_session_mac_differs_from_response_mac_and_comparison_accepts_non_ascii() -> None:
    assert auth.session_mac(b"s", "1") != auth.response_mac(b"s", 1, 2, "")
    assert auth.is_same_mac("ab", "ab")
    assert not auth.is_same_mac("ab", "\udcff")


def test_authenticator_check_fails_if_its_own_credential_is_refused(tmp_path: Path) -> None:
    class Lost:
        def make_credential(self, key: str) -> auth.Credential:
            return auth.Credential("", b"")

        def read_credential(self, text: str) -> auth.VerifiedClaim:
            raise BadCredential("made by uid 5")

    with pytest.raises(PeerError, match="uid 5"):
        auth.check_authenticator(Lost())
    auth.check_authenticator(OURS)


# --- by Slurm's AuthType

SHARED = bytes(range(32))


def site(root: Path, auth_type: str = "auth/slurm", key: bytes = SHARED) -> NodePaths:
    folder = root / "etc/slurm"
    folder.mkdir(parents=True)
    (folder / "slurm.conf").write_text(f"AuthType={auth_type}\n")
    key_file(folder / "slurm.key", key)
    return NodePaths(root)


def test_derived_key_equals_the_test_vector_of_rfc_5869() -> None:
    """Test case 3: without salt and info; the first 32 bytes of its output."""
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert auth.derive_key(b"\x0b" * 22, b"").hex() == expected


def test_auth_slurm_credential_is_not_readable_with_the_raw_slurm_key(tmp_path: Path) -> None:
    prover = auth.make_authenticator(None, site(tmp_path))
    offer = prover.make_credential("k")
    assert prover.read_credential(offer.text).secret == offer.secret
    auth.check_authenticator(prover)
    for other in (
        KeyFileAuthenticator(SHARED),
        KeyFileAuthenticator(auth.derive_key(SHARED, b"other")),
    ):
        with pytest.raises(BadCredential, match="another key"):
            other.read_credential(offer.text)


def test_replaced_slurm_key_is_used_without_a_restart(tmp_path: Path) -> None:
    places = site(tmp_path)
    prover = auth.make_authenticator(None, places)
    before = prover.make_credential("k")
    key_file(tmp_path / "etc/slurm/slurm.key", b"n" * 32)
    with pytest.raises(BadCredential, match="another key"):
        prover.read_credential(before.text)
    assert prover.read_credential(prover.make_credential("k").text).key == "k"
    (tmp_path / "etc/slurm/slurm.key").unlink()
    with pytest.raises(PeerError, match=r"slurm\.key"):
        prover.read_credential(before.text)


def test_nodes_with_old_and_new_slurm_keys_accept_credentials_mutually() -> None:
    before, after = (
        KeyFileAuthenticator(b"o" * 32, (b"n" * 32,)),
        KeyFileAuthenticator(b"n" * 32, (b"o" * 32,)),
    )
    for one, other in ((before, after), (after, before)):
        offer = one.make_credential("k")
        assert other.read_credential(offer.text).secret == offer.secret


@pytest.mark.parametrize(("auth_type", "why"), [("auth/none", "AuthType"), ("auth/slurm", "slurm")])
def test_authenticator_without_a_usable_auth_type_or_slurm_key_raises_no_credential(
    tmp_path: Path, auth_type: str, why: str
) -> None:
    places = site(tmp_path, auth_type)
    (tmp_path / "etc/slurm/slurm.key").unlink()
    with pytest.raises(auth.NoCredential, match=why):
        auth.make_authenticator(None, places)


def test_key_file_takes_precedence_over_auth_type_and_munge_is_the_default(tmp_path: Path) -> None:
    places = site(tmp_path)
    ours = key_file(tmp_path / "peer.key")
    assert auth.make_authenticator(str(ours), places) == OURS
    (tmp_path / "etc/slurm/slurm.conf").write_text("ClusterName=c\n")
    assert isinstance(auth.make_authenticator(None, places), auth.MungeAuthenticator)


def test_authenticator_without_munge_installed_raises_no_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth.run, "find_program", lambda program: "")
    with pytest.raises(auth.NoCredential, match="munge is not installed"):
        auth.make_authenticator(None, NodePaths(tmp_path))
