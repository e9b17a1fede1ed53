"""Sessions and connections of the peer service's clients, and their limits.

A session belongs to one client and one key. It is found by a random name, and ends after
SESSION_IDLE seconds without a request, twice as long as a credential is good for. No request of it
is answered twice, and no credential opens a second session while there is the first.

A connection is unproven until a session was opened, or a request with a right MAC came, through it.
At most MAX_UNPROVEN of these stay, for UNPROVEN seconds each; then a proven one may be idle for
CONNECTION_IDLE seconds. aiohttp alone would wait without limit for the rest of a request.

Times are monotonic seconds. All calls come from the event loop.
"""

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from forestage.peers.auth import Claim, Refused

MAX_SESSIONS = 16384  # one for each copy of another node; some 500 bytes each
SESSION_IDLE = 120.0  # seconds; a client whose session has ended opens another
WINDOW = 4096  # requests of one session under way at once; threads do not ask in order
MAX_UNPROVEN = 256  # connections; some 20 KiB each
UNPROVEN = 15.0  # seconds within which a client must have proven itself
CONNECTION_IDLE = 60.0  # seconds between two requests of one that has


class Session:
    """One client's session for one key. `client` is an address; `chunks`, `bytes` were uploaded."""

    def __init__(self, claim: Claim, client: str, now: float) -> None:
        self.id = secrets.token_hex(16)
        self.key = claim.key
        self.secret = claim.secret
        self.client = client
        self.began = self.used = now
        self.chunks = 0
        self.bytes = 0
        self._highest = -1
        self._seen = 0  # bit n: the request `_highest` - n has come

    def is_new(self, counter: int) -> bool:
        """Notes a request's number. False where it came before, or is too old to tell."""
        ahead = counter - self._highest
        if ahead > 0:
            # A shift by a number that the client chose would take any amount of memory.
            self._seen = 1 if ahead >= WINDOW else (self._seen << ahead | 1) & ((1 << WINDOW) - 1)
            self._highest = counter
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True

    def summary(self) -> str:
        """For the log, when the session has ended."""
        took = self.used - self.began
        return (
            f"client={self.client} key={self.key} chunks={self.chunks} bytes={self.bytes}"
            f" seconds={took:.1f}"
        )


class Sessions:
    """The open sessions, least recently used first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Session] = OrderedDict()
        self._secrets: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> list[Session]:
        """Returns those that had to end for it. Raises Refused where its secret was used before."""
        if session.secret in self._secrets:
            raise Refused("a credential a second time")
        self._secrets.add(session.secret)
        self._by_id[session.id] = session
        return self._end_while(lambda oldest: len(self._by_id) > MAX_SESSIONS)

    def find(self, name: str, now: float) -> Session | None:
        session = self._by_id.get(name)
        if session is not None:
            session.used = now
            self._by_id.move_to_end(name)
        return session

    def expire(self, now: float) -> list[Session]:
        """Ends, and returns, those that were not used for SESSION_IDLE."""
        return self._end_while(lambda oldest: now - oldest.used > SESSION_IDLE)

    def end(self) -> list[Session]:
        """Ends, and returns, all."""
        return self._end_while(lambda oldest: True)

    def _end_while(self, due: Callable[[Session], bool]) -> list[Session]:
        ended: list[Session] = []
        while self._by_id and due(next(iter(self._by_id.values()))):
            ended.append(self._by_id.popitem(last=False)[1])
            self._secrets.discard(ended[-1].secret)
        return ended


class Transport(Protocol):
    """asyncio.Transport, as far as it is used."""

    def abort(self) -> None: ...


class _Connection:
    """`since`: when it was made, or its last request was answered."""

    def __init__(self, transport: Transport, now: float) -> None:
        self.transport = transport
        self.since = now
        self.proven = False
        self.busy = False


class Connections:
    """The open connections, oldest first. A `name` is whatever tells one from the others."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open: dict[Hashable, _Connection] = {}
        self._unproven: dict[Hashable, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def made(self, name: Hashable, transport: Transport) -> None:
        """Adds one. Of too many unproven ones the oldest is cut: it had the most time."""
        self._open[name] = _Connection(transport, self._now())
        self._unproven[name] = None
        if len(self._unproven) > MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            self._open[oldest].transport.abort()

    def lost(self, name: Hashable) -> None:
        self._open.pop(name, None)
        self._unproven.pop(name, None)

    def proven(self, name: Hashable) -> None:
        self._unproven.pop(name, None)
        if name in self._open:
            self._open[name].proven = True

    @contextlib.contextmanager
    def busy(self, name: Hashable) -> Iterator[None]:
        """Around the answer to a request, which has limits of its own."""
        connection = self._open.get(name)
        if connection is None:  # it was cut a moment ago
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
        """Cuts the connections whose time is over."""
        now = self._now()
        for connection in list(self._open.values()):
            limit = CONNECTION_IDLE if connection.proven else UNPROVEN
            if now - connection.since > limit and not (connection.busy and connection.proven):
                connection.transport.abort()
