"""When may a chunk be sent? When it has arrived, and when the bandwidth allows."""

import asyncio
import contextlib
from collections.abc import Callable

from forestage import shelf
from forestage.cache.layout import Cache

POLL = 0.02  # seconds; one look at a copy's map, for all who wait for chunks of it


class Arrivals:
    """Waits for chunks of copies under way."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._waiting: dict[str, dict[int, list[asyncio.Future[None]]]] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}

    async def wait(self, key: str, number: int, seconds: float) -> None:
        """Returns when the chunk is in, or the time is over."""
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, {}).setdefault(number, []).append(arrival)
        if key not in self._polls:
            self._polls[key] = asyncio.create_task(self._poll(key))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(arrival, max(0.0, seconds))

    def end(self) -> None:
        """Nobody waits any longer: the service is stopped."""
        for waiting in self._waiting.values():
            for arrivals in waiting.values():
                _wake(arrivals)

    async def _poll(self, key: str) -> None:
        waiting = self._waiting[key]
        try:
            while waiting:
                await asyncio.sleep(POLL)
                with contextlib.suppress(OSError):  # whoever waits looks himself, and finds it
                    digests = shelf.arrived(self._cache, key)
                    for number in waiting:
                        if shelf.is_in(digests, number):
                            _wake(waiting[number])
                for number, arrivals in list(waiting.items()):
                    if all(arrival.done() for arrival in arrivals):
                        del waiting[number]
        finally:
            del self._waiting[key], self._polls[key]
            for arrivals in waiting.values():
                _wake(arrivals)


class Pace:
    """Holds all uploads together to a number of bytes per second; None is no limit."""

    def __init__(self, rate: int | None, now: Callable[[], float]) -> None:
        self._rate = rate
        self._now = now
        self._free_at = 0.0

    async def take(self, size: int, end: float) -> bool:
        """Returns when `size` bytes may go; False, at once, where that is later than `end`."""
        if self._rate is None:
            return True
        now = self._now()
        start = max(self._free_at, now)
        if start > max(end, now):
            return False
        self._free_at = start + size / self._rate
        await asyncio.sleep(start - now)
        return True


def _wake(arrivals: list[asyncio.Future[None]]) -> None:
    for arrival in arrivals:
        if not arrival.done():  # else its time was over
            arrival.set_result(None)
