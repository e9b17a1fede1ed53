"""Client side of the peer protocol: how a session is opened, and how a chunk is fetched.

    POST /v1/session               a credential (auth.py); returns the session's name, with a MAC
    GET  /v1/chunk/<key>/<number>  Range: the chunk's bytes; request and response carry a MAC
    GET  /v1/look/<job>/<name>     what it has found in a directory (features/data/shared_scan.py);
                                   likewise
    GET  /v1/copies/<key>[/<node>]  who may have a copy (known_copies.py); likewise
    GET  /v1/expected              which images pending jobs name
                                   (features/prefetch/expected_list.py); likewise
    GET  /v1/wrong/<key>/<reader>  what the reader read is wrong (wrong_data_notices.py); likewise

Forestage-Reach says who asks for a chunk: `job n5`, a node of the same job, or `cluster n5`.
Forestage-Has says who read the chunk from the source.

Whatever a peer does becomes a `PeerRequestError`, in bounded time. A connection is closed unless
the response was read to its end, so a connection that is kept is always between two responses.
"""

import contextlib
import hashlib
import http.client
import itertools
import re
import time
from collections.abc import Callable, Iterator

import msgspec

from forestage.cache import digest
from forestage.errors import ForestageError
from forestage.features.peers import auth, connection
from forestage.features.peers.auth import Authenticator, BadCredential, SessionReply
from forestage.features.peers.connection import PeerConnection, PeerRequestError, ResponseDeadline

HANDSHAKE_TIMEOUT = 4.0  # seconds for munge on the other side, which a busy node may need


Stop = Callable[[], bool]
_HAS = re.compile(r"([0-9a-f]+)(!?)@([A-Za-z0-9._-]+)")


class SessionUnknown(Exception):
    """The peer does not know the session: its service was restarted."""


class PeerSession(msgspec.Struct, frozen=True):
    """A copy's session with one peer. `next(counter)` is atomic, so all threads share it."""

    name: str
    secret: bytes
    counter: Iterator[int] = msgspec.field(default_factory=itertools.count)


class ChunkRequest(msgspec.Struct, frozen=True):
    """One chunk to fetch. `start` and `size` are bytes of the image.

    Seconds: the peer may `wait` for the chunk if it does not have it, `timeout` is the limit for
    all of it. `reach` is the header Forestage-Reach.
    """

    number: int
    start: int
    size: int
    timeout: float
    wait: float
    reach: str = "job"

    @property
    def span(self) -> str:
        return f"bytes={self.start}-{self.start + self.size - 1}"


class ChunkReceiver(msgspec.Struct, frozen=True):
    """Where the pieces of a chunk go: `write(offset in the image, piece)`, through `buffer`.

    `on_peer_chunks` is called with the chunks that the peer has (bit 5 is chunk 5), if it has any
    of the image, and with whether its source fails; `on_digest` with the digest (hex) that it has
    for the chunk, and who it says has read that from the source ("": nobody knows). `is_unwanted`
    returns true once the chunk is not wanted any more.
    """

    buffer: memoryview
    write: Callable[[int, memoryview], None]
    on_peer_chunks: Callable[[int, bool], None]
    is_unwanted: Stop
    on_digest: Callable[[str, str], None] = lambda digest, reader: None


def open_session(
    peer_connection: PeerConnection, key: str, authenticator: Authenticator, stop: Stop
) -> PeerSession:
    """Proves to the peer that this is root of the cluster, and checks the peer's own proof.

    Raises PeerRequestError; `slow` only when it was stopped.
    """

    def limit() -> ResponseDeadline:
        return ResponseDeadline(
            HANDSHAKE_TIMEOUT, time.monotonic() + HANDSHAKE_TIMEOUT, stop, outcome_if_late="refused"
        )

    with contextlib.ExitStack() as undo, _convert_errors():
        undo.callback(peer_connection.close)
        # First the connection: no credential is made for a node that is out of reach.
        peer_connection.ensure_open(limit())
        offer = authenticator.make_credential(key)
        response = peer_connection.fetch_response(
            "POST", "/v1/session", {}, limit(), offer.text.encode()
        )
        if response.status != http.client.OK:
            raise PeerRequestError("refused", f"status {response.status}")
        opened = msgspec.json.decode(connection.read_short_body(response), type=SessionReply)
        # A host that cannot read the credential cannot make this MAC: it is no node of ours.
        if not auth.is_same_mac(auth.session_mac(offer.secret, opened.session), opened.mac):
            raise PeerRequestError("wrong", "a wrong MAC on a session")
        undo.pop_all()
        return PeerSession(opened.session, offer.secret)


def fetch_chunk(
    peer_connection: PeerConnection,
    session: PeerSession,
    key: str,
    chunk: ChunkRequest,
    receiver: ChunkReceiver,
) -> bytes:
    """Writes a chunk to the receiver and returns its digest, which the bytes were checked against.

    Raises PeerRequestError, and SessionUnknown: then nothing that was written counts. What
    `receiver.write` raises goes through.
    """
    path = f"/v1/chunk/{key}/{chunk.number}"
    limit = ResponseDeadline(chunk.wait, time.monotonic() + chunk.timeout, receiver.is_unwanted)
    with contextlib.ExitStack() as undo:
        undo.callback(peer_connection.close)
        with _convert_errors():
            response, counter = _send_request(peer_connection, session, path, chunk, limit)
            if response.status != http.client.PARTIAL_CONTENT:
                connection.read_short_body(response)
                undo.pop_all()
        expected, reader = _parse_chunk_head(response, session, counter, receiver)
        receiver.on_digest(expected, reader)
        if response.length != chunk.size:
            raise PeerRequestError("wrong", f"{response.length} bytes of {chunk.size}")
        found = _receive_chunk(response, chunk, receiver)
        if found.hex() != expected:
            raise PeerRequestError("wrong", "the bytes do not have their digest")
        undo.pop_all()
    return found


def fetch_reply(
    peer_connection: PeerConnection,
    session: PeerSession,
    path: str,
    max_bytes: int,
    limit: ResponseDeadline,
) -> bytes | None:
    """What a peer has found, proven by a MAC; None where it has nothing, or nothing yet.

    `max_bytes` is in bytes. Raises PeerRequestError, SessionUnknown.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(peer_connection.close)
        with _convert_errors():
            response, counter = _send_request(peer_connection, session, path, None, limit)
            if response.length is None or response.length > max_bytes:
                raise PeerRequestError("wrong", f"a look of {response.length} bytes")
            length, body = response.length, response.read()
            undo.pop_all()
    if response.status == http.client.UNAUTHORIZED:
        raise SessionUnknown
    said = response.headers.get("Forestage-Digest", "")
    right = auth.response_mac(session.secret, counter, response.status, "", said, length)
    if response.status not in (http.client.OK, http.client.NOT_FOUND):
        raise PeerRequestError("refused", f"status {response.status}")
    if not auth.is_same_mac(right, response.headers.get("Forestage-Mac", "")):
        raise PeerRequestError("wrong", "a wrong MAC on a look")
    if response.status == http.client.NOT_FOUND:
        return None
    if hashlib.sha256(body).hexdigest() != said:
        raise PeerRequestError("wrong", "a look does not have its digest")
    return body


def _send_request(
    peer_connection: PeerConnection,
    session: PeerSession,
    path: str,
    chunk: ChunkRequest | None,
    limit: ResponseDeadline,
) -> tuple[http.client.HTTPResponse, int]:
    """The response's head, and the number that the request had."""
    span, wait, reach = (chunk.span, chunk.wait, chunk.reach) if chunk else ("", 0.0, "")
    while True:
        counter, was_open = next(session.counter), peer_connection.is_open
        headers = {
            "Range": span,
            "Forestage-Session": session.name,
            "Forestage-Counter": str(counter),
            "Forestage-Wait": f"{wait:.3f}",
            "Forestage-Reach": reach,
            "Forestage-Mac": auth.request_mac(
                session.secret, session.name, "GET", path, span, counter
            ),
        }
        try:
            return peer_connection.fetch_response("GET", path, headers, limit), counter
        except ConnectionError:
            # The service closes a connection that was idle, perhaps just now: once more on a new
            # one, with a new number, as the service may have seen this one.
            peer_connection.close()
            if not was_open:
                raise


def _parse_chunk_head(
    response: http.client.HTTPResponse, session: PeerSession, counter: int, receiver: ChunkReceiver
) -> tuple[str, str]:
    """The digest of the chunk that follows, and who read it from the source.

    Raises PeerRequestError, SessionUnknown where none follows.
    """
    if response.status == http.client.UNAUTHORIZED:  # then the peer has no secret for a MAC
        raise SessionUnknown
    length = response.length or 0
    has, expected = (response.headers.get(f"Forestage-{name}", "") for name in ("Has", "Digest"))
    right = auth.response_mac(session.secret, counter, response.status, has, expected, length)
    mac = response.headers.get("Forestage-Mac", "")
    # Without a MAC it proves nothing, so it is no lie either: a proxy, or trouble over there.
    if response.status == http.client.FORBIDDEN or (response.status >= 400 and not mac):
        raise PeerRequestError("refused", f"status {response.status}")
    if not auth.is_same_mac(right, mac):
        raise PeerRequestError("wrong", "a wrong MAC on a response")
    known = _HAS.fullmatch(has) if has else None
    if has and not known:
        raise PeerRequestError("wrong", "no set of chunks")
    if known:
        receiver.on_peer_chunks(int(known[1], 16), bool(known[2]))
    if response.status in (http.client.NOT_FOUND, http.client.SERVICE_UNAVAILABLE):
        raise PeerRequestError("absent", f"status {response.status}")
    if response.status != http.client.PARTIAL_CONTENT:
        raise PeerRequestError("refused", f"status {response.status}")
    return expected, known[3] if known else ""


def _receive_chunk(
    response: http.client.HTTPResponse, chunk: ChunkRequest, receiver: ChunkReceiver
) -> bytes:
    """The digest of the bytes that came."""
    running = digest.RunningDigest()
    end = chunk.start + chunk.size
    for at in range(chunk.start, end, len(receiver.buffer)):
        piece = receiver.buffer[: min(len(receiver.buffer), end - at)]
        with _convert_errors():
            count = response.readinto(piece)
        if count != len(piece):
            raise PeerRequestError("refused", "the connection was closed half-way")
        running.add(piece)
        receiver.write(at, piece)
    return running.digest()


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    """Turns all that a connection or a prover may raise into PeerRequestError."""
    try:
        yield
    except TimeoutError:
        raise PeerRequestError("silent", "no byte came") from None
    except (BadCredential, ForestageError) as error:
        raise PeerRequestError("refused", str(error)) from None
    except (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError) as error:
        raise PeerRequestError("refused", repr(error)) from None
