"""What a client and the peer service say to each other, as the client sees it.

Whatever a peer does becomes a `Failed` (refusal.py), in bounded time; the connection is closed
unless the answer was read to its end.
"""

import contextlib
import http.client
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from forestage import credential, errors, wire
from forestage.cache import digest
from forestage.credential import Prover, Refused
from forestage.refusal import Failed, Why
from forestage.wire import Limit, Line

HANDSHAKE = 4.0  # seconds for munge there, which a busy node may need

Stop = Callable[[], bool]
_HAS = re.compile(r"([0-9a-f]+)(!?)")


class Forgotten(Exception):
    """The peer does not know the session: its service was started anew."""


class Session:
    """What a peer knows a copy by."""

    def __init__(self, name: str, secret: bytes) -> None:
        self.name = name
        self.secret = secret
        self.counter = itertools.count()  # next() is one step for all threads


class Chunk(msgspec.Struct, frozen=True):
    """`start` and `size` in bytes of the image; seconds: `wait` there for it, `give_up` for all."""

    key: str
    number: int
    start: int
    size: int
    give_up: float
    wait: float

    @property
    def path(self) -> str:
        return f"/v1/chunk/{self.key}/{self.number}"

    @property
    def span(self) -> str:
        return f"bytes={self.start}-{self.start + self.size - 1}"


class _Opened(msgspec.Struct, frozen=True):
    session: str
    seal: str


def open_session(line: Line, key: str, prover: Prover, stop: Stop) -> Session:
    """Proves to the peer who we are, and has it prove that it can tell. Raises Failed.

    `slow` only when it was stopped.
    """
    limit = Limit(HANDSHAKE, time.monotonic() + HANDSHAKE, stop)
    with contextlib.ExitStack() as undo, _told(late="refused"):
        undo.callback(line.close)
        challenge = _expect(line.ask("GET", "/v1/challenge", {}, limit), 200).decode()
        try:
            offer = prover.offer(key, challenge, stop)
        except (Refused, errors.ForestageError) as error:
            raise Failed("slow" if stop() else "refused", str(error)) from None
        limit = Limit(HANDSHAKE, time.monotonic() + HANDSHAKE, stop)
        answer = line.ask("POST", "/v1/session", {}, limit, offer.text.encode())
        try:
            opened = msgspec.json.decode(_expect(answer, 200), type=_Opened)
        except msgspec.MsgspecError as error:
            raise Failed("refused", str(error)) from None
        # Who cannot read the credential cannot make the seal: it is no node of this cluster.
        if not credential.same(credential.of_session(offer.secret, opened.session), opened.seal):
            raise Failed("wrong", "a wrong seal on a session")
        undo.pop_all()
        return Session(opened.session, offer.secret)


class Taker(NamedTuple):
    """Where to the pieces of a chunk go: `sink(offset in the image, piece)` through `buffer`.

    `knows` is told what the peer has (bit 5 is chunk 5), if it has any of the image, and whether
    its source fails; `stop` says whether the chunk is wanted no more.
    """

    buffer: memoryview
    sink: Callable[[int, memoryview], None]
    knows: Callable[[int, bool], None]
    stop: Stop


def fetch(line: Line, session: Session, chunk: Chunk, to: Taker) -> bytes:
    """The chunk's digest, once all of it went to `sink` and was right. Raises Failed, Forgotten.

    What `sink` raises goes through.
    """
    limit = Limit(chunk.wait, time.monotonic() + chunk.give_up, to.stop)
    with contextlib.ExitStack() as undo:
        undo.callback(line.close)
        with _told(late="slow"):
            answer, counter = _asked(line, session, chunk, limit)
            if answer.status != http.client.PARTIAL_CONTENT:
                wire.small(answer)
                undo.pop_all()
        told = _told_truly(answer, session, counter, to)
        if answer.length != chunk.size:
            raise Failed("wrong", f"{answer.length} bytes of {chunk.size}")
        found = _received(answer, chunk, to)
        if found.hex() != told:
            raise Failed("wrong", "the bytes do not have their digest")
        undo.pop_all()
    return found


def _asked(
    line: Line, session: Session, chunk: Chunk, limit: Limit
) -> tuple[http.client.HTTPResponse, int]:
    """The answer's head, and the number that the request had."""
    while True:
        counter, kept = next(session.counter), line.is_open
        seal = credential.of_request(session.secret, "GET", chunk.path, chunk.span, counter)
        headers = {
            "Range": chunk.span,
            "Forestage-Session": session.name,
            "Forestage-Counter": str(counter),
            "Forestage-Wait": f"{chunk.wait:.3f}",
            "Forestage-Seal": seal,
        }
        try:
            return line.ask("GET", chunk.path, headers, limit), counter
        except ConnectionError:
            # The other side may have ended a connection that was not used for a while.
            line.close()
            if not kept:
                raise


def _told_truly(answer: http.client.HTTPResponse, session: Session, counter: int, to: Taker) -> str:
    """The digest of the chunk that follows. Raises Failed, Forgotten where none does."""
    if answer.status == http.client.UNAUTHORIZED:  # then there is no secret to seal with
        raise Forgotten
    length = answer.length or 0
    has, told = (answer.headers.get(f"Forestage-{name}", "") for name in ("Has", "Digest"))
    seal = credential.of_answer(session.secret, counter, answer.status, has, told, length)
    sealed = answer.headers.get("Forestage-Seal", "")
    # Turned away, or trouble there: it proves nothing, so it is no lie either.
    if answer.status == http.client.FORBIDDEN or (answer.status >= 400 and not sealed):
        raise Failed("refused", f"status {answer.status}")
    if not credential.same(seal, sealed):
        raise Failed("wrong", "a wrong seal on an answer")
    if has:
        known = _HAS.fullmatch(has)
        if not known:
            raise Failed("wrong", "no set of chunks")
        to.knows(int(known[1], 16), bool(known[2]))
    if answer.status in (http.client.NOT_FOUND, http.client.SERVICE_UNAVAILABLE):
        raise Failed("absent", f"status {answer.status}")
    if answer.status != http.client.PARTIAL_CONTENT:
        raise Failed("refused", f"status {answer.status}")
    return told


def _received(answer: http.client.HTTPResponse, chunk: Chunk, to: Taker) -> bytes:
    running = digest.Running()
    end = chunk.start + chunk.size
    for at in range(chunk.start, end, len(to.buffer)):
        piece = to.buffer[: min(len(to.buffer), end - at)]
        with _told(late="slow"):
            count = answer.readinto(piece)
        if count != len(piece):
            raise Failed("refused", "the connection was closed half-way")
        running.add(piece)
        to.sink(at, piece)
    return running.digest()


def _expect(answer: http.client.HTTPResponse, status: int) -> bytes:
    if answer.status != status:
        raise Failed("refused", f"status {answer.status}")
    return wire.small(answer)


@contextlib.contextmanager
def _told(late: Why) -> Iterator[None]:
    """Makes a Failed of all that a connection may raise; `late` is what running out of time is."""
    try:
        yield
    except wire.Stopped:
        raise Failed("slow", "it is not wanted any more") from None
    except wire.Late:
        raise Failed(late, "it took too long") from None
    except wire.Unreachable as error:
        raise Failed("refused", str(error)) from None
    except TimeoutError:
        raise Failed("silent", "no byte came") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed("refused", repr(error)) from None
