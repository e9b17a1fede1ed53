"""Copies made for pending jobs: counted once, as used by the first job or as evicted before any."""

from __future__ import annotations

import pytest

from forestage.events import (
    CopyOutcome,
    EventHook,
    EventRecord,
    Outcome,
    ReleaseOutcome,
    RequestOutcome,
    prefetched_copies,
)
from forestage.events.prefetched_copies import PrefetchedBytes, UnusedCopies

SINCE = 1_800_000_000.0
KEY = "a" * 32


def event(outcome: Outcome, job: int = 7, hook: EventHook = "step") -> EventRecord:
    return EventRecord(time=SINCE, hook=hook, job=job, outcome=outcome)


def copied(key: str = KEY, size: int = 10, **changes: object) -> EventRecord:
    made = CopyOutcome("copied", key=key, size=size, expected=SINCE, **changes)  # type: ignore[arg-type]
    return event(made, 0, "stager")


def hit(key: str = KEY, job: int = 7) -> EventRecord:
    return event(RequestOutcome("hit", key=key), job)


def evicted(key: str = KEY) -> EventRecord:
    return event(ReleaseOutcome("released", evicted=(key,)), 0, "sweep")


def fates(*events: EventRecord) -> list[str]:
    copies = UnusedCopies()
    return [change.fate for one in events for change in copies.add_event(one)]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ((copied(), hit()), ["copied", "used"]),
        ((copied(), hit(), hit(job=8), evicted()), ["copied", "used"]),
        ((copied(), evicted(), hit()), ["copied", "unused"]),
        ((copied(), hit("b" * 32)), ["copied"]),
        ((copied(), copied(), hit()), ["copied", "unused", "copied", "used"]),
        ((copied(), event(RequestOutcome("declined", key=KEY))), ["copied"]),
        ((event(CopyOutcome("copied", key=KEY, size=9), 0, "stager"), hit()), []),
        (
            (
                event(CopyOutcome("declined", "stopped", key=KEY, expected=SINCE), 0, "stager"),
                hit(),
            ),
            [],
        ),
    ],
    ids=[
        *("used", "used once", "never used", "another image", "evicted by hand", "declined"),
        *("no job waited for it", "stopped"),
    ],
)
def test_copy_made_ahead_is_counted_as_used_by_the_first_job_or_evicted_unused(
    events: tuple[EventRecord, ...], found: list[str]
) -> None:
    assert fates(*events) == found


def test_copy_taken_over_by_a_job_counts_as_used_for_the_bytes_copied_ahead() -> None:
    taken = event(CopyOutcome("copied", key=KEY, size=10, resumed=6, ahead=6, expected=SINCE))
    sums, copies = PrefetchedBytes(), UnusedCopies()
    for change in copies.add_event(taken):
        sums.add_change(change)
    assert (sums.copied, sums.used, sums.unused) == ({"source": 6}, {"source": 6}, {})
    assert copies.left == {}


def test_bytes_copied_ahead_are_counted_by_origin() -> None:
    sums, copies = PrefetchedBytes(), UnusedCopies()
    for one in (copied(from_peers=7, from_others=4), hit(), copied("b" * 32), evicted("b" * 32)):
        for change in copies.add_event(one):
            sums.add_change(change)
    assert sums.copied == {"source": 13, "peers": 3, "others": 4}
    assert sums.used == {"source": 3, "peers": 3, "others": 4}
    assert sums.unused == {"source": 10, "peers": 0, "others": 0}


def test_tracker_of_unused_copies_remembers_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetched_copies, "MAX_UNUSED_COPIES", 2)
    copies = UnusedCopies()
    for number in range(9):
        list(copies.add_event(copied(str(number))))
    assert list(copies.left) == ["7", "8"]
