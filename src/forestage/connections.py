"""Who is connected? Strangers are few and soon gone; who has proven itself may stay a while.

An HTTP server waits for the rest of a request, slow as it may come. Here is what bounds that.
Times are monotonic seconds.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

MAX_STRANGERS = 256  # some 20 KiB each
STRANGER = 15.0  # seconds within which a connection must have proven itself
IDLE = 60.0  # seconds between two requests of one that has


class Transport(Protocol):
    """What can be cut off; asyncio's own has much more."""

    def abort(self) -> None: ...


class _Connection:
    def __init__(self, transport: Transport, now: float) -> None:
        self.transport = transport
        self.since = now  # made, or done with its last request
        self.proven = False
        self.busy = False


class Connections:
    """All that are open, oldest first."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open: dict[Hashable, _Connection] = {}
        self._strangers: dict[Hashable, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def made(self, name: Hashable, transport: Transport) -> None:
        """One more; where strangers are too many, the oldest goes: it had the most time."""
        self._open[name] = _Connection(transport, self._now())
        self._strangers[name] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self._open[oldest].transport.abort()

    def lost(self, name: Hashable) -> None:
        self._open.pop(name, None)
        self._strangers.pop(name, None)

    def proven(self, name: Hashable) -> None:
        self._strangers.pop(name, None)
        if name in self._open:
            self._open[name].proven = True

    @contextlib.contextmanager
    def busy(self, name: Hashable) -> Iterator[None]:
        """While a request is answered, which bounds itself."""
        connection = self._open.get(name)
        if connection is None:  # it was cut off a moment ago
            yield
            return
        connection.busy = True
        try:
            yield
        finally:
            connection.busy = False
            if connection.proven:
                connection.since = self._now()

    def sweep(self) -> None:
        """Cuts off those whose time is over."""
        now = self._now()
        for connection in list(self._open.values()):
            patience = IDLE if connection.proven else STRANGER
            if now - connection.since > patience and not (connection.busy and connection.proven):
                connection.transport.abort()
