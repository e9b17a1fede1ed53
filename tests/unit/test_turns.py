"""Waiting for a chunk, and for one's share of the bandwidth: it ends, and nobody is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from forestage import shelf, turns
from forestage.cache import digest
from forestage.cache.layout import Cache
from forestage.turns import Arrivals, Pace

KEY = "k"


def note(cache: Cache, *each: bool) -> None:
    cache.part_dir(KEY).mkdir(exist_ok=True)
    digests = (digest.UNKNOWN if one else digest.MISSING for one in each)
    cache.part(KEY).map.write_bytes(b"".join(digests))


def test_each_waits_for_its_own_chunk(cache: Cache) -> None:
    note(cache, False, False)

    async def scene() -> list[bool]:
        arrivals = Arrivals(cache)
        waits = [asyncio.create_task(arrivals.wait(KEY, number, 600.0)) for number in (0, 1, 1)]
        await asyncio.sleep(0.05)
        assert not any(wait.done() for wait in waits)
        note(cache, False, True)
        await asyncio.gather(*waits[1:])
        seen = [wait.done() for wait in waits]
        note(cache, True, True)
        await waits[0]
        return seen

    assert asyncio.run(scene()) == [False, True, True]


def test_when_nobody_waits_nobody_looks(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    note(cache, False)
    looks = 0

    def arrived(*_: object) -> bytes:
        nonlocal looks
        looks += 1
        return b""

    monkeypatch.setattr(shelf, "arrived", arrived)

    async def scene() -> tuple[int, int]:
        arrivals = Arrivals(cache)
        await arrivals.wait(KEY, 0, 0.05)
        await asyncio.sleep(5 * turns.POLL)
        before = looks
        await asyncio.sleep(5 * turns.POLL)
        assert not arrivals._polls
        return before, looks

    before, after = asyncio.run(scene())
    assert 0 < before == after


def test_many_who_wait_cost_one_look(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def arrived(*_: object) -> bytes:
        nonlocal looks
        looks += 1
        return digest.UNKNOWN if looks == 3 else b""

    monkeypatch.setattr(shelf, "arrived", arrived)

    async def scene() -> None:
        arrivals = Arrivals(cache)
        await asyncio.gather(*(arrivals.wait(KEY, 0, 600.0) for _ in range(100)))

    asyncio.run(scene())
    assert looks == 3


def test_a_disk_that_fails_does_not_end_the_waiting_of_others(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [OSError(5, "EIO"), b"", digest.UNKNOWN]

    def arrived(*_: object) -> bytes:
        one = said.pop(0)
        if isinstance(one, OSError):
            raise one
        return one

    monkeypatch.setattr(shelf, "arrived", arrived)
    asyncio.run(Arrivals(cache).wait(KEY, 0, 600.0))
    assert said == []


def test_the_end_of_the_service_wakes_all(cache: Cache) -> None:
    async def scene() -> None:
        arrivals = Arrivals(cache)
        waits = [asyncio.create_task(arrivals.wait(KEY, number, 600.0)) for number in range(3)]
        await asyncio.sleep(0)
        arrivals.end()
        await asyncio.gather(*waits)

    asyncio.run(scene())


class Now:
    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is slept, without sleeping."""
    seconds: list[float] = []

    async def sleep(long: float) -> None:
        seconds.append(long)

    monkeypatch.setattr(turns.asyncio, "sleep", sleep)
    return seconds


def test_chunks_go_one_after_the_other_at_the_rate(slept: list[float]) -> None:
    async def scene() -> list[bool]:
        pace = Pace(10, Now())
        return [await pace.take(20, 110.0) for _ in range(3)]

    assert asyncio.run(scene()) == [True, True, True]
    assert slept == [0.0, 2.0, 4.0]


def test_who_would_come_too_late_is_told_at_once_and_takes_no_room(slept: list[float]) -> None:
    async def scene() -> list[bool]:
        pace = Pace(10, Now())
        return [await pace.take(20, end) for end in (100.0, 101.0, 102.0)]

    assert asyncio.run(scene()) == [True, False, True]
    assert slept == [0.0, 2.0]


def test_a_chunk_that_may_go_now_goes_whatever_the_end(slept: list[float]) -> None:
    assert asyncio.run(Pace(10, Now()).take(20, end=0.0))


def test_without_a_rate_nobody_waits(slept: list[float]) -> None:
    assert asyncio.run(Pace(None, Now()).take(1 << 40, 0.0))
    assert slept == []
