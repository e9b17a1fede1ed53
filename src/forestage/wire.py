"""HTTP to one peer's service, bounded in time: whatever the peer does, a call ends.

Every byte that arrives comes through `_Bounded.recv_into`. Whatever waits does so for a moment at
a time, and looks in between whether the answer is still wanted: a copy that is complete must not
wait for those it had asked.
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
MAX_SMALL = 4096  # bytes of an answer that is no chunk


class Stopped(Exception):
    """The caller does not want it any more."""


class Late(Exception):
    """It came, but not fast enough."""


class Unreachable(Exception):
    """No connection could be made."""


class Limit:
    """How long an answer may take: `wait` until its first byte beyond STALL, `until` as a whole.

    Seconds; `until` is monotonic.
    """

    def __init__(self, wait: float, until: float, stop: Callable[[], bool]) -> None:
        self._patience = wait + STALL
        self._until = until
        self._stop = stop

    def silent_at(self) -> float:
        """When nothing has come for too long, as of now; monotonic."""
        return time.monotonic() + self._patience

    def moment(self, until: float) -> float:
        """How long to wait before the next look. Raises Stopped, Late; TimeoutError at `until`."""
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
        """What has come, once it is much, or a moment is over."""
        silent_at = self.limit.silent_at()
        self._wake_at(len(args[0]))
        self.setblocking(False)
        arrived = select.poll()
        arrived.register(self, select.POLLIN)
        while True:
            arrived.poll(self.limit.moment(silent_at) * 1000)
            # Kept in here: the file around a socket gives up for good when it sees a time-out.
            with contextlib.suppress(BlockingIOError):
                count = super().recv_into(*args)
                self.limit.arrived()
                return count

    def _wake_at(self, room: int) -> None:
        """Waits for many bytes where there is room for many, else for any.

        A chunk that trickles in, one of several, woke its thread for every packet: of what a copy
        took of the processors, most was that.
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
        """For the next request and its answer."""
        if isinstance(self.sock, _Bounded):
            self.sock.settimeout(STALL)
            self.sock.limit = limit


class Line:
    """A connection to a peer, made when it is needed, and kept. For one thread at a time."""

    def __init__(self, address: Address) -> None:
        self._http = _Http(address.host, address.port)

    @property
    def is_open(self) -> bool:
        return self._http.sock is not None

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        limit: Limit,
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        """Sends a request and gives the answer, of which the head has come.

        Raises Unreachable, OSError (TimeoutError: silence), http.client.HTTPException, Stopped,
        Late. After an error, and after an answer that was not read to its end, `close` is the
        caller's duty.
        """
        if not self.is_open:
            self._http.limit = limit
            try:
                self._http.connect()
            except OSError as error:
                raise Unreachable(str(error)) from None
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
    """Raises Stopped, Late, OSError: that of the last address."""
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
    """As of getaddrinfo(3), which nothing can interrupt: its thread is left to itself then.

    Raises Stopped, Late, OSError.
    """
    found: list[Any] = []
    failed: list[Exception] = []

    def look() -> None:
        try:
            found.extend(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # the latter: no name that DNS could have
            failed.append(error)

    until = time.monotonic() + CONNECT
    thread = threading.Thread(target=look, name="addresses", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(limit.moment(until))
    if failed:
        raise OSError(f"{address.host}: {failed[0]}")
    return found


def small(answer: http.client.HTTPResponse) -> bytes:
    """The whole of a short body. Raises as `Line.ask` does."""
    body = answer.read(MAX_SMALL)
    if not answer.isclosed():
        raise http.client.HTTPException("an answer that is long, or of no known length")
    return body
