"""munge as proof, with a munged of ours: root of this cluster gets in, and nobody else does."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.errors import PeerError
from forestage.features.peers import auth
from forestage.features.peers.auth import MungeAuthenticator
from peering import Client, Munged, Node, Stranger, image, of_chunk


@pytest.fixture(scope="module")
def munged(machine: None) -> Iterator[Munged]:
    # Others than root have to reach the socket, to be refused by what it says of them: not below
    # pytest's own folder, which the next pytest process that begins closes to them again.
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        made = Munged(Path(top) / "munge")
        yield made
        made.end()


@pytest.fixture(scope="module")
def node(munged: Munged, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("n1"))
    made.configure(munge=str(munged.socket))
    made.publish()
    with made.serving():
        yield made


@pytest.fixture
def stranger(node: Node) -> Stranger:
    return Stranger(node.port)


@pytest.fixture
def mine(munged: Munged) -> MungeAuthenticator:
    return MungeAuthenticator(str(munged.socket))


def encode(munged: Munged, payload: bytes, *options: str, uid: int = 0) -> bytes:
    """A credential of anybody's own making."""
    ran = subprocess.run(
        ["munge", f"--socket={munged.socket}", *options],
        input=payload,
        capture_output=True,
        check=True,
        user=uid,
        group=uid,
        extra_groups=[],
    )
    return ran.stdout.strip()


def payload(protocol: str = auth.PROTOCOL, secret: str = "ab" * 32) -> str:
    return f'{{"protocol":"{protocol}","key":"{image().key}","secret":"{secret}"}}'


def test_client_with_a_munge_credential_of_root_gets_the_chunk(node: Node) -> None:
    assert Client(node, image().key).fetch(3) == of_chunk(3)


def test_munge_credential_of_another_user_is_refused(
    munged: Munged, stranger: Stranger, node: Node
) -> None:
    said = encode(munged, payload().encode(), "--restrict-uid=0", uid=65534)
    assert stranger.ask("/v1/session", "POST", said)[0] == 403
    said = encode(munged, payload().encode(), "--restrict-uid=0")
    assert stranger.ask("/v1/session", "POST", said)[0] == 200, "the same made by root is not"


def test_munge_credential_cannot_be_decoded_by_other_users(
    munged: Munged, mine: MungeAuthenticator
) -> None:
    text = mine.make_credential(image().key).text
    ran = subprocess.run(
        ["unmunge", f"--socket={munged.socket}"],
        input=text.encode(),
        capture_output=True,
        check=False,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    assert (ran.returncode, b"secret" in ran.stdout) == (18, False)


def test_munge_credential_used_a_second_time_is_refused(
    stranger: Stranger, mine: MungeAuthenticator
) -> None:
    said = mine.make_credential(image().key).text.encode()
    assert stranger.ask("/v1/session", "POST", said)[0] == 200
    assert stranger.ask("/v1/session", "POST", said)[0] == 403


def test_expired_munge_credential_is_refused(munged: Munged, stranger: Stranger) -> None:
    said = encode(munged, payload().encode(), "--ttl=1")
    time.sleep(2.1)
    assert stranger.ask("/v1/session", "POST", said)[0] == 403


OTHER_KINDS = (
    payload(protocol="forestage-0"),
    payload(secret="ab"),
    payload(secret="zz" * 32),
    "\0\1slurm",  # Slurm's own are munge credentials of root as well
    "",
)


@pytest.mark.parametrize("carried", OTHER_KINDS)
def test_munge_credential_with_another_payload_is_refused(
    munged: Munged, stranger: Stranger, carried: str
) -> None:
    said = encode(munged, carried.encode())
    assert stranger.ask("/v1/session", "POST", said)[0] == 403


def test_munge_command_lines_contain_no_secret(
    mine: MungeAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = auth.run.run_program

    def spy(argv: list[str], *args: object, **limits: object) -> object:
        seen.extend(argv)
        return real(argv, *args, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr(auth.run, "run_program", spy)
    offer = mine.make_credential(image().key)
    assert mine.read_credential(offer.text).secret == offer.secret
    assert seen
    assert not [word for word in seen if offer.secret.hex() in word or offer.text in word]


def test_server_refuses_new_sessions_and_logs_why_after_its_munged_stopped(tmp_path: Path) -> None:
    """A munged of its own for each side, with the same key: only the server's ends."""
    ours, theirs = Munged(tmp_path / "a"), Munged(tmp_path / "b", like=tmp_path / "a")
    node = Node(tmp_path / "n1")
    node.configure(munge=str(theirs.socket))
    key = node.publish()
    with node.serving():
        client = Client(node, key, munge=str(ours.socket))
        assert client.fetch(0) == of_chunk(0)
        theirs.end()
        assert client.fetch(1) == of_chunk(1), "who has a session needs no munged any more"
        assert Client(node, key, munge=str(ours.socket)).why(0) == "refused"
        node.until_said(b"peer refused=1 last: client=127.0.0.1 why='unmunge: exit")
    code, said = node.start_in_vain()
    ours.end()
    assert code == 6
    assert said.startswith("forestage: munge: exit")
    assert said.endswith("(is munged running?)\n")


def test_client_without_a_munged_reports_refused(node: Node, tmp_path: Path) -> None:
    assert Client(node, image().key, munge=str(tmp_path / "none")).why(0) == "refused"


def test_hanging_munged_raises_a_peer_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MUNGE_TIMEOUT", 0.3)
    munged = Munged(tmp_path / "a")
    os.kill(munged.process.pid, signal.SIGSTOP)
    with pytest.raises(PeerError):
        MungeAuthenticator(str(munged.socket)).make_credential(image().key)
    os.kill(munged.process.pid, signal.SIGCONT)
    munged.end()
