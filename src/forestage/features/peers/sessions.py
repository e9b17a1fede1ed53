"""Sessions and unproven connections of the peer service's clients, and their limits.

A session belongs to one client and one key. It is found by a random name, and ends after
SESSION_IDLE seconds without a request, twice as long as a credential is good for. No request of it
is answered twice, and no credential opens a second session while there is the first.

A connection is unproven until a session was opened, or a request with a right MAC came, through it.
At most MAX_UNPROVEN of these stay, for PROOF_TIMEOUT seconds each. aiohttp alone would wait without
limit for the rest of a request.

Times are monotonic seconds. All calls come from the event loop.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable

from forestage import log
from forestage.features.peers.auth import BadCredential, VerifiedClaim

MAX_SESSIONS = 16384  # one for each copy of another node; some 500 bytes each
SESSION_IDLE = 120.0  # seconds; a client whose session has ended opens another
COUNTER_WINDOW = 4096  # requests of one session under way at once; threads do not ask in order
MAX_UNPROVEN = 256  # connections; some 20 KiB each
PROOF_TIMEOUT = 15.0  # seconds within which a client must have proven itself


class ClientSession:
    """One client's session for one key. `client` is an address; `chunks`, `bytes` were uploaded."""

    def __init__(self, claim: VerifiedClaim, client: str, now: float) -> None:
        self.id = secrets.token_hex(16)
        self.key = claim.key
        self.secret = claim.secret
        self.client = client
        self.began = self.used = now
        self.chunks = 0
        self.bytes = 0
        self._highest = -1
        self._seen = 0  # bit n: the request `_highest` - n has come

    def try_use_counter(self, counter: int) -> bool:
        """Notes a request's number. False where it came before, or is too old to tell."""
        ahead = counter - self._highest
        if ahead > 0:
            # A shift by a number that the client chose would take any amount of memory.
            self._seen = (
                1
                if ahead >= COUNTER_WINDOW
                else (self._seen << ahead | 1) & ((1 << COUNTER_WINDOW) - 1)
            )
            self._highest = counter
            return True
        if -ahead >= COUNTER_WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class SessionTable:
    """The open sessions, least recently used first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, ClientSession] = OrderedDict()
        self._secrets: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: ClientSession) -> None:
        """Ends the one used longest ago if need be.

        Raises BadCredential for a secret used before.
        """
        if session.secret in self._secrets:
            raise BadCredential("a credential a second time")
        self._secrets.add(session.secret)
        self._by_id[session.id] = session
        self._end_while(lambda oldest: len(self._by_id) > MAX_SESSIONS)

    def find(self, name: str) -> ClientSession | None:
        return self._by_id.get(name)

    def touch(self, session: ClientSession, now: float) -> None:
        """Notes a request whose MAC was right: only such a one keeps a session."""
        session.used = now
        if session.id in self._by_id:
            self._by_id.move_to_end(session.id)

    def end_expired(self, now: float) -> None:
        """Ends those that were not used for SESSION_IDLE."""
        self._end_while(lambda oldest: now - oldest.used > SESSION_IDLE)

    def end_sessions(self) -> None:
        """Ends all, because the service is being stopped."""
        self._end_while(lambda oldest: True)

    def _end_while(self, due: Callable[[ClientSession], bool]) -> None:
        while self._by_id and due(next(iter(self._by_id.values()))):
            _, session = self._by_id.popitem(last=False)
            self._secrets.discard(session.secret)
            log.write_log_line(
                f"peer client={session.client} key={session.key} chunks={session.chunks}"
                f" bytes={session.bytes} seconds={session.used - session.began:.1f}",
                by_slurm=False,
            )


class UnprovenConnections:
    """The connections that have not proven anything, oldest first, by whatever names them."""

    def __init__(self) -> None:
        self._since: dict[Hashable, tuple[float, asyncio.Transport]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, name: Hashable, transport: asyncio.Transport, now: float) -> None:
        """Of too many the oldest is cut: it had the most time."""
        self._since[name] = now, transport
        if len(self._since) > MAX_UNPROVEN:
            self._cut_oldest()

    def discard(self, name: Hashable) -> None:
        """It has proven itself, or has gone."""
        self._since.pop(name, None)

    def cut_expired(self, now: float) -> None:
        """Cuts those whose time is over, whatever they are doing."""
        while self._since and now - next(iter(self._since.values()))[0] > PROOF_TIMEOUT:
            self._cut_oldest()

    def _cut_oldest(self) -> None:
        _, transport = self._since.pop(next(iter(self._since)))
        transport.abort()
