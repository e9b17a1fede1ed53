"""Credentials and seals: what proves nothing is refused, whoever it comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage import credential
from forestage.credential import CHALLENGE_SECONDS, Challenges, KeyFile, Munge, Refused
from forestage.errors import PeerError
from forestage.system import run

OURS = KeyFile(b"a" * 32)


def key_file(path: Path, content: bytes = b"a" * 32, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_both_sides_of_a_key_file_derive_one_secret_that_is_not_sent(tmp_path: Path) -> None:
    prover = KeyFile.load(key_file(tmp_path / "key"))
    offer = prover.offer("k", "c")
    claim = OURS.read(offer.text)
    assert (claim.key, claim.challenge, claim.secret) == ("k", "c", offer.secret)
    assert offer.secret.hex() not in offer.text


def test_no_two_offers_have_one_secret() -> None:
    assert OURS.offer("k", "c").secret != OURS.offer("k", "c").secret


@pytest.mark.parametrize("field", ["protocol", "key", "challenge", "nonce", "seal"])
def test_an_offer_of_which_anything_was_changed_is_refused(field: str) -> None:
    said = msgspec.json.decode(OURS.offer("k", "c").text)
    for changed in ("", "0", said[field] + "0", said[field][:-1]):
        with pytest.raises(Refused):
            OURS.read(msgspec.json.encode(said | {field: changed}).decode())


@given(st.text())
def test_any_text_is_refused_and_no_more(text: str) -> None:
    with pytest.raises(Refused):
        OURS.read(text)


@pytest.mark.parametrize(
    ("content", "mode"), [(b"a" * 31, 0o600), (b"", 0o600), (b"a" * 32, 0o604)]
)
def test_a_key_file_that_is_weak_or_open_is_refused(
    tmp_path: Path, content: bytes, mode: int
) -> None:
    with pytest.raises(PeerError, match=r"mode 0600|expected 32"):
        KeyFile.load(key_file(tmp_path / "key", content, mode))


def test_a_key_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = key_file(tmp_path / "key")
    monkeypatch.setattr(credential.os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PeerError):
        KeyFile.load(path)


def test_a_challenge_is_answered_once() -> None:
    challenges = Challenges()
    asked = challenges.fresh(5.0)
    challenges.spend(asked, 6.0)
    with pytest.raises(Refused, match="second time"):
        challenges.spend(asked, 7.0)


def test_a_challenge_gets_old_and_is_then_forgotten() -> None:
    challenges = Challenges()
    asked = challenges.fresh(5.0)
    challenges.spend(asked, 5.0)
    with pytest.raises(Refused, match="old"):
        challenges.spend(asked, 5.1 + CHALLENGE_SECONDS)
    other = challenges.fresh(40.0)
    challenges.spend(other, 40.0)
    assert list(challenges._spent) == [other]


@pytest.mark.parametrize("made", ["", ".", "..", "5000.x.y", "5000.x.", "é.é.é", "5000..00"])
def test_a_challenge_of_somebody_else_is_refused(made: str) -> None:
    for other in (made, Challenges().fresh(5.0)):
        with pytest.raises(Refused, match="another server"):
            Challenges().spend(other, 5.0)


def test_questions_cost_no_memory() -> None:
    challenges = Challenges()
    for _ in range(100):
        challenges.fresh(1.0)
    assert not challenges._spent


WORDS = st.lists(st.text(alphabet="a1:", max_size=4), min_size=3, max_size=3)


@given(WORDS, WORDS)
def test_no_two_requests_have_one_seal(one: list[str], other: list[str]) -> None:
    seals = {credential.of_request(b"s", *words, 1) for words in (one, other)}  # type: ignore[call-arg,arg-type]
    assert len(seals) == len({tuple(one), tuple(other)})


def test_a_seal_of_one_kind_is_none_of_another() -> None:
    assert credential.of_session(b"s", "1") != credential.of_answer(b"s", 1, 2, "")
    assert credential.of_request(b"s", "G", "p", "b", 1) != credential.of_request(
        b"s", "G", "p", "b", 2
    )
    assert credential.same("ab", "ab")
    assert not credential.same("ab", "\udcff")


def test_a_prover_that_does_not_believe_itself_is_no_good(tmp_path: Path) -> None:
    class Lost:
        def offer(
            self, key: str, challenge: str, stop: Callable[[], bool] = lambda: False
        ) -> credential.Offer:
            return credential.Offer("", b"")

        def read(self, text: str) -> credential.Claim:
            raise Refused("made by uid 5")

    with pytest.raises(PeerError, match="uid 5"):
        credential.check(Lost())
    credential.check(OURS)


def test_munge_is_not_waited_for_when_nobody_wants_its_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "munge"
    program.write_text("#!/bin/sh\nsleep 600\necho MUNGE:late:\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{run.PATH}"
    monkeypatch.setattr(run, "PATH", path)
    monkeypatch.setitem(run.ENVIRONMENT, "PATH", path)
    monkeypatch.setattr(credential, "PATIENCE", 600.0)
    with pytest.raises(PeerError, match="signal 9"):
        Munge().offer("k", "c", lambda: True)
