"""HTTP connection to one peer's service, bounded in time: whatever the peer does, a call ends.

http.client reads nothing but by `_BoundedSocket.recv_into`, so that is where silence and the limit
are noticed. All waiting is done in moments, with a look in between at whether the response is still
wanted: a copy that is complete must not wait for the peers it had asked.

Why not aiohttp's client: docs/decisions/0014-chunks-over-http-known-by-munge.md.
"""

import contextlib
import http.client
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from forestage.config import ServiceAddress
from forestage.features.peers.schedule import FailureReason

CONNECT_TIMEOUT = 1.0  # seconds for each address of a name; as long for the name itself
SILENCE_TIMEOUT = 1.5  # seconds without a byte
POLL_INTERVAL = 0.05  # seconds between two looks at whether the answer is still wanted
MANY = 256 << 10  # bytes that are worth waking up for
MAX_SMALL = 4096  # bytes of a response that is no chunk


class PeerRequestError(Exception):
    """A chunk did not come from a peer; `why` is what the schedule learns from it.

    absent: the service runs and does not have the chunk (yet) · refused: not reached, or turned
    away · silent: no byte for a while · wrong: bytes or MAC are not right · slow: it took too long,
    or the copy does not want it any more.
    """

    def __init__(self, why: FailureReason, detail: str) -> None:
        super().__init__(f"{why}: {detail}")
        self.why: FailureReason = why


class ResponseDeadline:
    """How long one response may take; seconds.

    Its first byte may take `wait` longer than SILENCE_TIMEOUT, which is the limit between two
    reads. `until` (monotonic) is the limit for all of it; `outcome_if_late` is the reason
    once that is over.
    """

    def __init__(
        self,
        wait: float,
        until: float,
        stop: Callable[[], bool],
        outcome_if_late: FailureReason = "slow",
    ) -> None:
        self._patience = wait + SILENCE_TIMEOUT
        self._until = until
        self._stop = stop
        self._late = outcome_if_late

    def silence_deadline(self) -> float:
        """When the peer counts as silent if no byte comes from now on; monotonic."""
        return time.monotonic() + self._patience

    def seconds_to_next_check(self, until: float) -> float:
        """Seconds until the next look. Raises PeerRequestError; TimeoutError at `until`."""
        if self._stop():
            raise PeerRequestError("slow", "it is not wanted any more")
        now = time.monotonic()
        if now >= self._until:
            raise PeerRequestError(self._late, "it took too long")
        if now >= until:
            raise TimeoutError
        return min(POLL_INTERVAL, self._until - now, until - now)

    def mark_received(self) -> None:
        self._patience = SILENCE_TIMEOUT


class _BoundedSocket(socket.socket):
    """A connected socket; http.client reads it by nothing but `recv_into`."""

    limit: ResponseDeadline
    _enough = 1  # bytes that wake a waiting thread

    def recv_into(self, *args: Any) -> int:
        """Reads what has arrived, once it is much, or a moment is over."""
        silent_at = self.limit.silence_deadline()
        self._set_wakeup_size(len(args[0]))
        self.setblocking(False)
        arrived = select.poll()
        arrived.register(self, select.POLLIN)
        while True:
            arrived.poll(self.limit.seconds_to_next_check(silent_at) * 1000)
            # Caught here: the file object around a socket refuses all reads after a time-out.
            with contextlib.suppress(BlockingIOError):
                count = super().recv_into(*args)
                self.limit.mark_received()
                return count

    def _set_wakeup_size(self, room: int) -> None:
        """Has poll(2) return for many bytes where there is room for many, else for any.

        Chunks from several peers trickle in at once. Without SO_RCVLOWAT each packet woke a thread,
        which was most of the processor time of a copy.
        """
        enough = min(room, MANY) if room >= MANY // 4 else 1
        if enough != self._enough:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            self._enough = enough


class PeerConnection(http.client.HTTPConnection):
    """A connection that is made when it is needed, and kept. For one thread at a time."""

    sock: _BoundedSocket | None

    def __init__(self, address: ServiceAddress) -> None:
        super().__init__(address.host, address.port)
        self._address = address

    @property
    def is_open(self) -> bool:
        return self.sock is not None

    def ensure_open(self, limit: ResponseDeadline) -> None:
        """Connects, if need be, and sets the limit of what follows. Raises PeerRequestError."""
        if self.sock is None:
            try:
                self.sock = _connect_with_fallback(self._address, limit)
            except OSError as error:
                raise PeerRequestError("refused", str(error)) from None
        self.sock.settimeout(SILENCE_TIMEOUT)
        self.sock.limit = limit

    def fetch_response(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        limit: ResponseDeadline,
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        """Sends a request and returns its response, of which the head has been read.

        Raises PeerRequestError, OSError (TimeoutError: silence), http.client.HTTPException. The
        caller must `close` after an error, and after a response that was not read to its end.
        """
        self.ensure_open(limit)
        self.request(method, path, body, headers)
        return self.getresponse()


class _ResolveError(OSError):
    """A name for which the name service has no address, or none in time."""


_unresolved_hosts: set[str] = set()
"""Such names, for which this process, that of one copy, does not wait a second time."""


def _connect_with_fallback(address: ServiceAddress, limit: ResponseDeadline) -> _BoundedSocket:
    """Raises PeerRequestError where it is not wanted or late, OSError where nobody is reached."""
    if not address.fallback_host:
        return _connect_to_host(address.host, address.port, limit, 2 * CONNECT_TIMEOUT)
    if address.host not in _unresolved_hosts:
        try:
            return _connect_to_host(address.host, address.port, limit, CONNECT_TIMEOUT)
        except _ResolveError:
            _unresolved_hosts.add(address.host)
    return _connect_to_host(address.fallback_host, address.port, limit, 2 * CONNECT_TIMEOUT)


def _connect_to_host(
    host: str, port: int, limit: ResponseDeadline, patience: float
) -> _BoundedSocket:
    """Connect to a host, for whose address its name service has `patience` seconds.

    Raises as `_connect_with_fallback`. Nothing can interrupt getaddrinfo(3), so this has a thread
    of its own, which is abandoned if need be.
    """
    made: list[socket.socket] = []
    failed: list[Exception] = []
    resolved = threading.Event()

    def connect() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter: no name that DNS could have
            failed.append(error)
            return
        resolved.set()
        for family, kind, protocol, _, to in found:
            one = socket.socket(family, kind, protocol)
            try:
                one.settimeout(CONNECT_TIMEOUT)
                one.connect(to)
            except OSError as error:
                one.close()
                failed[:] = [error]
            else:
                made.append(one)
                return

    start = time.monotonic()
    thread = threading.Thread(target=connect, name="connect", daemon=True)
    thread.start()
    while thread.is_alive():
        if not resolved.is_set() and time.monotonic() >= start + patience:
            raise _ResolveError(f"{host}: its name service does not answer")
        thread.join(limit.seconds_to_next_check(start + 2 * CONNECT_TIMEOUT))
    if not made:
        kind = OSError if resolved.is_set() else _ResolveError
        raise kind(f"{host}: {failed[0]}")
    line = _BoundedSocket(fileno=made[0].detach())
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def read_short_body(response: http.client.HTTPResponse) -> bytes:
    """The whole of a short body. Raises what `PeerConnection.fetch_response` raises."""
    body = response.read(MAX_SMALL)
    if not response.isclosed():
        raise http.client.HTTPException("a response that is long, or of no known length")
    return body
