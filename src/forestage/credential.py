"""Who asks? Proof that a peer is root on a node of this cluster, and seals on what both sides say.

The server gives out a challenge, the client answers with a credential that holds it, the key it
will ask for, and a fresh secret. The credential is one of munge's, which encrypts it for root of
this cluster, or is made with a key file that all nodes share. From then on each request and each
answer carries a seal (HMAC-SHA256) that only who knows the secret can make.
"""

import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from forestage.errors import PeerError
from forestage.system import run

PROTOCOL = "forestage-1"
CHALLENGE_SECONDS = 30.0  # a busy node may take seconds to start munge
CREDENTIAL_SECONDS = 60  # of munge's own clock, which nodes have in common by some seconds only
PATIENCE = 5.0  # seconds for munge or unmunge
SECRET_BYTES = 32
MAX_TEXT = 4096  # bytes of a credential; ours have some 500
MAX_KEY_FILE = 4096  # bytes

Stop = Callable[[], bool]


class Refused(Exception):
    """A credential, a challenge or a seal that proves nothing; the text is for our own log."""


class Offer(msgspec.Struct, frozen=True):
    """What a client sends, and the secret that is inside for those who may read it."""

    text: str
    secret: bytes


class Claim(msgspec.Struct, frozen=True):
    """What a credential says, once it is known that root of this cluster made it."""

    key: str
    challenge: str
    secret: bytes


def _never() -> bool:
    return False


class Prover(Protocol):
    """A way to prove it. Both calls may take milliseconds, and raise Refused or an error.

    `stop` says whether the offer is wanted no more.
    """

    def offer(self, key: str, challenge: str, stop: Stop = _never) -> Offer: ...

    def read(self, text: str) -> Claim: ...


class _Payload(msgspec.Struct, frozen=True):
    """What munge carries; it is encrypted on the way. `secret` in hex."""

    protocol: str
    key: str
    challenge: str
    secret: str


class _Signed(msgspec.Struct, frozen=True):
    """What goes over the wire where a key file takes munge's place; `nonce`, `seal` in hex."""

    protocol: str
    key: str
    challenge: str
    nonce: str
    seal: str


class Munge(msgspec.Struct, frozen=True):
    """munged vouches for the uid, encrypts, and decodes each credential only once on a node.

    `socket` of another munged than the node's own; "" is that.
    """

    socket: str = ""

    def offer(self, key: str, challenge: str, stop: Stop = _never) -> Offer:
        secret = secrets.token_bytes(SECRET_BYTES)
        payload = msgspec.json.encode(_Payload(PROTOCOL, key, challenge, secret.hex()))
        argv = ("munge", "--restrict-uid=0", f"--ttl={CREDENTIAL_SECONDS}")
        ran = self._run(payload, stop, *argv)
        if ran.code:
            raise PeerError(ran.explained(), "is munged running?")
        return Offer(ran.out.strip(), secret)

    def read(self, text: str) -> Claim:
        ran = self._run(text.encode(), _never, "unmunge", "--numeric", "--keys=UID")
        if ran.code:
            raise Refused(ran.explained())
        facts, _, payload = ran.out.partition("\n\n")
        name, _, uid = facts.partition(":")
        if (name.strip(), uid.strip()) != ("UID", "0"):
            raise Refused(f"made by uid {uid.strip()!r}, expected root")
        try:
            said = msgspec.json.decode(payload, type=_Payload)
            secret = bytes.fromhex(said.secret)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Refused(f"not of this kind: {error}") from None
        if said.protocol != PROTOCOL or len(secret) != SECRET_BYTES:
            raise Refused("of another protocol")
        return Claim(said.key, said.challenge, secret)

    def _run(self, told: bytes, stop: Stop, *argv: str) -> run.Ran:
        """What is secret never is an argument, which all users see in ps(1)."""
        with _in_memory(told) as fd:
            where = [f"--socket={self.socket}"] if self.socket else []
            return run.run([*argv, f"--input=/proc/self/fd/{fd}", *where], [fd], _Enough(stop))


class KeyFile(msgspec.Struct, frozen=True):
    """A secret that all nodes share; what a session uses is derived and never sent."""

    shared: bytes

    @classmethod
    def load(cls, path: Path) -> "KeyFile":
        """Raises PeerError unless it is root's own, of some length, and nobody else can read it."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            facts = os.fstat(fd)
            if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                raise PeerError(f"{path} is not root's with mode 0600", "chmod it")
            shared = os.read(fd, MAX_KEY_FILE)
        finally:
            os.close(fd)
        if len(shared) < SECRET_BYTES:
            raise PeerError(
                f"{path} holds {len(shared)} bytes, expected {SECRET_BYTES} or more",
                "head -c 64 /dev/urandom makes a good one",
            )
        return cls(shared)

    def offer(self, key: str, challenge: str, stop: Stop = _never) -> Offer:
        nonce = secrets.token_hex(SECRET_BYTES)
        signed = _Signed(
            PROTOCOL, key, challenge, nonce, self._seal("session", key, challenge, nonce).hex()
        )
        text = msgspec.json.encode(signed).decode()
        return Offer(text, self._seal("secret", key, challenge, nonce))

    def read(self, text: str) -> Claim:
        try:
            said = msgspec.json.decode(text, type=_Signed)
        except msgspec.MsgspecError as error:
            raise Refused(f"not of this kind: {error}") from None
        right = self._seal("session", said.key, said.challenge, said.nonce)
        if said.protocol != PROTOCOL or not hmac.compare_digest(right, _bytes(said.seal)):
            raise Refused("made with another key file")
        secret = self._seal("secret", said.key, said.challenge, said.nonce)
        return Claim(said.key, said.challenge, secret)

    def _seal(self, purpose: str, *said: str) -> bytes:
        return _mac(self.shared, PROTOCOL, purpose, *said)


class Challenges:
    """Questions of this server. A stranger may have as many as he likes: none is remembered.

    Only one that was answered rightly is, until it is too old anyway. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._own = secrets.token_bytes(SECRET_BYTES)
        self._spent: dict[str, float] = {}

    def fresh(self, now: float) -> str:
        body = f"{now * 1000:.0f}.{secrets.token_hex(16)}"
        return f"{body}.{_mac(self._own, body).hex()}"

    def spend(self, challenge: str, now: float) -> None:
        """Raises Refused where it is not ours, too old, or was answered before."""
        body, _, seal = challenge.rpartition(".")
        if not hmac.compare_digest(_mac(self._own, body), _bytes(seal)):
            raise Refused("answers a challenge of another server, or none")
        made = int(body.partition(".")[0]) / 1000
        if now - made > CHALLENGE_SECONDS:
            raise Refused(f"answers a challenge {now - made:.0f}s old")
        if challenge in self._spent:
            raise Refused("answers a challenge a second time")
        self._spent = {one: at for one, at in self._spent.items() if now - at <= CHALLENGE_SECONDS}
        self._spent[challenge] = made


def prover(key_file: str | None, munge_socket: str) -> Prover:
    """What the configuration says. Raises PeerError, OSError."""
    return Munge(munge_socket) if key_file is None else KeyFile.load(Path(key_file))


def check(prover: Prover) -> None:
    """Proves it to oneself: what fails now fails with every peer. Raises PeerError."""
    try:
        prover.read(prover.offer("", "").text)
    except Refused as refused:
        raise PeerError(str(refused), "run it as root, and see munged") from None


def of_session(secret: bytes, session: str) -> str:
    """The seal on a server's first answer: it could read the credential."""
    return _mac(secret, "session", session).hex()


def of_request(secret: bytes, method: str, path: str, span: str, counter: int) -> str:
    """The seal on a request; `span` is its Range header."""
    return _mac(secret, "request", method, path, span, str(counter)).hex()


def of_answer(
    secret: bytes, counter: int, status: int, has: str, digest: str = "", length: int = 0
) -> str:
    """The seal on an answer; `digest` in hex, "" where no chunk follows, as `has` is of no copy."""
    return _mac(secret, "answer", str(counter), str(status), has, digest, str(length)).hex()


def same(seal: str, other: str) -> bool:
    """Compares without telling by the time it takes how much of it was right."""
    return hmac.compare_digest(seal.encode(), other.encode(errors="replace"))


def _mac(secret: bytes, *said: str) -> bytes:
    # Each with its length: no two lists of words are the same bytes.
    told = "".join(f"{len(word)}:{word}" for word in said)
    return hmac.digest(secret, told.encode(errors="surrogateescape"), hashlib.sha256)


def _bytes(digits: str) -> bytes:
    """Of hex digits; b"", which no seal is, where they are none."""
    try:
        return binascii.unhexlify(digits)
    except ValueError:
        return b""


@contextlib.contextmanager
def _in_memory(told: bytes) -> Iterator[int]:
    """A file that has no name, for a program that reads what nobody else is to see."""
    fd = os.memfd_create("credential", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, told, 0)
        yield fd
    finally:
        os.close(fd)


class _Enough(threading.Event):
    """Is set when a program has had time enough, or nobody wants to know any more."""

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop = stop
        self._until = time.monotonic() + PATIENCE

    def is_set(self) -> bool:
        return self._stop() or time.monotonic() >= self._until
