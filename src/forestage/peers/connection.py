"""HTTP connection to one peer's service, bounded in time: whatever the peer does, a call ends.

http.client reads nothing but by `_Bounded.recv_into`, so that is where silence and the limit are
noticed. All waiting is done in moments, with a look in between at whether the response is still
wanted: a copy that is complete must not wait for the peers it had asked.

Why not aiohttp's client: docs/decisions/0018-the-client-reads-with-http-client.md.
"""

import contextlib
import errno
import http.client
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from forestage.config import Address

CONNECT = 1.0  # seconds, for a name's addresses, and then for each of them
STALL = 1.5  # seconds without a byte
MOMENT = 0.2  # seconds between two looks at whether the answer is still wanted
MANY = 256 << 10  # bytes that are worth waking up for
MAX_SMALL = 4096  # bytes of a response that is no chunk


class Stopped(Exception):
    """The caller does not want the response any more."""


class Late(Exception):
    """Bytes came, but not fast enough for the limit."""


class Unreachable(Exception):
    """No connection could be made."""


class Limit:
    """How long one response may take; seconds.

    Its first byte may take `wait` longer than STALL, which is the limit between two reads. `until`
    (monotonic) is the limit for all of it.
    """

    def __init__(self, wait: float, until: float, stop: Callable[[], bool]) -> None:
        self._patience = wait + STALL
        self._until = until
        self._stop = stop

    def silent_at(self) -> float:
        """When the peer counts as silent if no byte comes from now on; monotonic."""
        return time.monotonic() + self._patience

    def moment(self, until: float) -> float:
        """Seconds until the next look. Raises Stopped, Late; TimeoutError at `until`."""
        if self._stop():
            raise Stopped
        now = time.monotonic()
        if now >= self._until:
            raise Late
        if now >= until:
            raise TimeoutError
        return min(MOMENT, self._until - now, until - now)

    def arrived(self) -> None:
        self._patience = STALL


class _Bounded(socket.socket):
    """A connected socket; http.client reads it by nothing but `recv_into`."""

    limit: Limit
    _enough = 1  # bytes that wake a waiting thread

    def recv_into(self, *args: Any) -> int:
        """Reads what has arrived, once it is much, or a moment is over."""
        silent_at = self.limit.silent_at()
        self._wake_at(len(args[0]))
        self.setblocking(False)
        arrived = select.poll()
        arrived.register(self, select.POLLIN)
        while True:
            arrived.poll(self.limit.moment(silent_at) * 1000)
            # Caught here: the file object around a socket refuses all reads after a time-out.
            with contextlib.suppress(BlockingIOError):
                count = super().recv_into(*args)
                self.limit.arrived()
                return count

    def _wake_at(self, room: int) -> None:
        """Has poll(2) return for many bytes where there is room for many, else for any.

        Chunks from several peers trickle in at once. Without SO_RCVLOWAT each packet woke a thread,
        which was most of the processor time of a copy.
        """
        enough = min(room, MANY) if room >= MANY // 4 else 1
        if enough != self._enough:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            self._enough = enough


class _Http(http.client.HTTPConnection):
    limit: Limit

    def connect(self) -> None:
        self.sock = _connected(Address(self.host, self.port), self.limit)

    def bound(self, limit: Limit) -> None:
        """Sets the limit of the next request and its response."""
        if isinstance(self.sock, _Bounded):
            self.sock.settimeout(STALL)
            self.sock.limit = limit


class Connection:
    """A connection that is made when it is needed, and kept. For one thread at a time."""

    def __init__(self, address: Address) -> None:
        self._http = _Http(address.host, address.port)

    @property
    def is_open(self) -> bool:
        return self._http.sock is not None

    def open(self, limit: Limit) -> None:
        """Connects, if need be. Raises Unreachable, Stopped, Late."""
        if not self.is_open:
            self._http.limit = limit
            try:
                self._http.connect()
            except OSError as error:
                raise Unreachable(str(error)) from None

    def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        limit: Limit,
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        """Sends a request and returns its response, of which the head has been read.

        Raises Unreachable, OSError (TimeoutError: silence), http.client.HTTPException, Stopped,
        Late. The caller must `close` after an error, and after a response that was not read to its
        end.
        """
        self.open(limit)
        self._http.bound(limit)
        self._http.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            self._http.putheader(name, value)
        if body is not None:
            self._http.putheader("Content-Length", str(len(body)))
        self._http.endheaders(body)
        return self._http.getresponse()

    def close(self) -> None:
        self._http.close()


def _connected(address: Address, limit: Limit) -> _Bounded:
    """Tries each address of the host. Raises Stopped, Late, and the OSError of the last one."""
    failed = OSError(f"{address.host} has no address")
    for family, kind, protocol, _, where in _addresses(address, limit):
        try:
            return _connected_to(where, _Bounded(family, kind, protocol), limit)
        except OSError as error:
            failed = error
    raise failed


def _connected_to(where: Any, line: _Bounded, limit: Limit) -> _Bounded:
    with contextlib.ExitStack() as undo:
        undo.callback(line.close)
        line.setblocking(False)
        code = line.connect_ex(where)
        if code == errno.EINPROGRESS:
            until = time.monotonic() + CONNECT
            made = select.poll()
            made.register(line, select.POLLOUT)
            while not made.poll(limit.moment(until) * 1000):
                pass
            code = line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return line


def _addresses(address: Address, limit: Limit) -> list[Any]:
    """The addresses of getaddrinfo(3). Raises Stopped, Late, OSError.

    Nothing can interrupt that call, so it has a thread of its own, which is abandoned if need be.
    """
    found: list[Any] = []
    failed: list[Exception] = []

    def resolve() -> None:
        try:
            found.extend(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # the latter: no name that DNS could have
            failed.append(error)

    until = time.monotonic() + CONNECT
    thread = threading.Thread(target=resolve, name="addresses", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(limit.moment(until))
    if failed:
        raise OSError(f"{address.host}: {failed[0]}")
    return found


def read_small(response: http.client.HTTPResponse) -> bytes:
    """The whole of a short body. Raises what `Connection.send` raises."""
    body = response.read(MAX_SMALL)
    if not response.isclosed():
        raise http.client.HTTPException("a response that is long, or of no known length")
    return body
