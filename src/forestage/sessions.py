"""Who has proven it? Sessions of peers: what each may ask for, and that nothing is asked twice.

Pure but for the random name; times are monotonic seconds.
"""

import secrets
from collections import OrderedDict

from forestage.credential import Claim

MAX_SESSIONS = 16384  # one for each copy of another node; some 500 bytes each
IDLE = 120.0  # seconds; a client whose session is gone makes another
WINDOW = 4096  # requests of one session under way at once; threads do not ask in order


class Session:
    """One client's, for one key. `client` is its address; `chunks` and `bytes` it was given."""

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
        """Notes a request's number; False where it came before, or may have."""
        ahead = counter - self._highest
        if ahead > 0:
            # Not shifted by what a client says it may be: that would be memory for the asking.
            self._seen = 1 if ahead >= WINDOW else (self._seen << ahead | 1) & ((1 << WINDOW) - 1)
            self._highest = counter
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True

    def told(self) -> str:
        """For the log, when it is over."""
        took = self.used - self.began
        return (
            f"client={self.client} key={self.key} chunks={self.chunks} bytes={self.bytes}"
            f" seconds={took:.1f}"
        )


class Sessions:
    """The sessions there are, least recently used first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> list[Session]:
        """Gives those that had to go for it."""
        self._by_id[session.id] = session
        gone = []
        while len(self._by_id) > MAX_SESSIONS:
            gone.append(self._by_id.popitem(last=False)[1])
        return gone

    def find(self, name: str, now: float) -> Session | None:
        session = self._by_id.get(name)
        if session is not None:
            session.used = now
            self._by_id.move_to_end(name)
        return session

    def expire(self, now: float) -> list[Session]:
        """Takes out, and gives, those that were not used for a while."""
        gone = []
        while self._by_id:
            oldest = next(iter(self._by_id.values()))
            if now - oldest.used <= IDLE:
                break
            gone.append(self._by_id.popitem(last=False)[1])
        return gone

    def end(self) -> list[Session]:
        gone = list(self._by_id.values())
        self._by_id.clear()
        return gone
