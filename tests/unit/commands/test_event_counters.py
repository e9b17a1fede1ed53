"""What is counted of the events: nothing twice, nothing that was not so, and never less."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from forestage.commands.event_counters import RATE_BOUNDS, WAIT_BOUNDS, EventTally, Histogram
from forestage.events import (
    CopyOutcome,
    EventHook,
    EventRecord,
    Outcome,
    OutcomeResult,
    ReleaseOutcome,
    RequestOutcome,
    saved_time,
)

GIB = 1 << 30


def event(hook: EventHook, outcome: Outcome, job: int = 7) -> EventRecord:
    return EventRecord(time=1.0, hook=hook, job=job, outcome=outcome)


def served(
    result: OutcomeResult, key: str = "a", redirect: str = "mounted", size: int = 10
) -> Outcome:
    return RequestOutcome(result, key=key, redirect=redirect, size=size, wait=0.05)


def counted(*events: EventRecord) -> EventTally:
    tally = EventTally()
    for one in events:
        tally.add_event(one)
    return tally


RELEASED = ReleaseOutcome("released")


@dataclass(frozen=True)
class Spared:
    """Hook runs, and the bytes that jobs did not read from the shared file system for them."""

    why: str
    runs: tuple[tuple[EventHook, Outcome], ...]
    bytes: int


@pytest.mark.parametrize(
    "case",
    [
        Spared("a hit is one read less", (("prolog", served("hit")),), 10),
        Spared("so is somebody else's copy", (("prolog", served("joined")),), 10),
        Spared("one's own copy is a read", (("prolog", served("copied")),), 0),
        Spared(
            "the first step asks for what the Prolog had",
            (("prolog", served("hit")), ("step", served("hit", redirect="kept"))),
            10,
        ),
        Spared(
            "each further step would have read the image again",
            (("prolog", served("hit")), *(("step", served("hit", redirect="kept")),) * 3),
            30,
        ),
        Spared(
            "the first step of a job that copied reads what it copied",
            (("prolog", served("copied")), *(("step", served("hit", redirect="kept")),) * 2),
            10,
        ),
        Spared(
            "the step waits for the copy that its own Prolog started",
            (("prolog", served("started", redirect="spank")), ("step", served("joined"))),
            0,
        ),
        Spared("a step that no Prolog could see", (("step", served("hit")),), 10),
        Spared("no step was shown it", (("prolog", served("hit", redirect="spank")),), 0),
        Spared(
            "each step that is shown it",
            (
                ("prolog", served("hit", redirect="spank")),
                *(("step", served("hit", redirect="spank")),) * 2,
            ),
            20,
        ),
        Spared("nobody reads the copy", (("prolog", served("hit", redirect="none")),), 0),
        Spared(
            "another image of the job is another read",
            (("prolog", served("copied")), ("step", served("hit", key="b"))),
            10,
        ),
        Spared(
            "a requeued job begins anew",
            (
                ("prolog", served("hit")),
                ("prolog", served("hit")),
                ("step", served("hit", redirect="kept")),
            ),
            20,
        ),
        Spared(
            "a job's number comes again after its Epilog",
            (("prolog", served("hit")), ("epilog", RELEASED), ("step", served("hit"))),
            20,
        ),
        Spared(
            "declined is read as ever",
            (("prolog", RequestOutcome("declined", key="a", reason="deadline", size=10)),),
            0,
        ),
    ],
    ids=lambda case: case.why,
)
def test_spared_bytes_are_counted_once_per_start_from_the_copy(case: Spared) -> None:
    tally = counted(*(event(hook, outcome) for hook, outcome in case.runs))
    assert sum(tally.spared.values()) == case.bytes


@pytest.mark.parametrize(("first", "then"), [("copied", "hit"), ("started", "joined")])
def test_cold_start_is_counted_once_and_not_as_a_hit_of_its_first_step(
    first: OutcomeResult, then: OutcomeResult
) -> None:
    """Its own step finds what its Prolog has copied; that says nothing of the cache."""
    runs = [event("prolog", served(first)), *[event("step", served(then))] * 2]
    assert counted(*runs).starts == {first: 1, then: 1}, "the second step is a start of its own"


@pytest.mark.parametrize(
    ("step", "counted_as"),
    [("through", "through"), ("started", "started"), ("hit", "copied"), ("joined", "copied")],
)
def test_cold_start_with_the_companion_is_counted_by_the_result_of_its_first_step(
    step: OutcomeResult, counted_as: str
) -> None:
    """The Prolog only starts the copy; whether the job read through shows in its first step."""
    runs = [
        event("prolog", served("started", redirect="spank")),
        event("step", served(step, redirect="spank")),
    ]
    found = counted(*runs)
    assert (found.starts, found.hit_ratio) == ({counted_as: 1}, 0.0)
    assert found.spared == {}
    again = [*runs, event("epilog", RELEASED), event("step", served("hit", redirect="spank"))]
    assert counted(*again).starts == {counted_as: 1, "hit": 1}


@pytest.mark.parametrize(("first", "start"), [("started", "through"), ("hit", "hit")])
def test_start_with_data_is_counted_by_the_steps_result(
    first: OutcomeResult, start: OutcomeResult
) -> None:
    seen = served(start, redirect="spank")
    found = counted(event("prolog", RequestOutcome(first, key="a", data=True)), event("step", seen))
    assert found.starts == {start: 1}
    assert found.spared == ({"hit": 10} if start == "hit" else {})


def test_saved_and_lost_seconds_are_baseline_minus_wait() -> None:
    def start(job: int, wait: float, baseline: float) -> EventRecord:
        outcome = RequestOutcome("hit", key="a", redirect="spank", wait=wait, baseline=baseline)
        return event("step", outcome, job)

    found = counted(start(1, 0.5, 10.0), start(2, 9.0, 4.0), start(3, 1.0, 0.0))
    assert (found.saved, found.lost) == (9.5, 5.0)


def test_bytes_read_through_a_copy_are_split_into_copy_and_source() -> None:
    outcome = CopyOutcome("copied", size=9, read_through=GIB, read_straight=GIB // 4)
    found = counted(
        event("stager", outcome), event("stager", CopyOutcome("failed", read_through=GIB))
    )
    assert found.read_through == {"copy": GIB - GIB // 4, "source": GIB // 4}


def test_tally_remembers_a_bounded_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_time, "MAX_JOBS", 3)
    tally = counted(*(event("prolog", served("hit"), job) for job in range(10)))
    assert list(tally.expected) == [7, 8, 9]


def test_copied_bytes_are_split_by_origin_and_the_rate_excludes_resumed_bytes() -> None:
    outcome = CopyOutcome(
        "copied", size=3 * GIB, from_peers=GIB, from_others=1, resumed=GIB, copying=4.0
    )
    tally = counted(event("stager", outcome))
    assert tally.copied == {"source": 2 * GIB, "peers": GIB - 1, "others": 1}
    assert tally.copies == {"copied": 1}
    assert tally.rates.sum == 2 * GIB / 4.0
    assert tally.rates.counts[RATE_BOUNDS.index(1e9)] == 1


def test_failed_copy_has_no_bytes_and_no_rate() -> None:
    tally = counted(event("stager", CopyOutcome("failed", reason="io", size=9, copying=1.0)))
    assert (tally.copies, tally.copied, sum(tally.rates.counts)) == ({"failed": 1}, {}, 0)
    assert tally.errors == {}, "the hook that waits for it tells of it"


def test_tally_counts_declines_errors_by_reason_and_evictions_by_hook() -> None:
    tally = counted(
        event(
            "prolog", RequestOutcome("declined", reason="deadline", wait=15.0, evicted=("e", "f"))
        ),
        event("step", RequestOutcome("failed", reason="io")),
        event("epilog", ReleaseOutcome("failed", reason="busy")),
        event("epilog", ReleaseOutcome("released", evicted=("a", "b"))),
        event("stager", CopyOutcome("copied", evicted=("c",))),
        event("sweep", RELEASED, job=9),
        event("sweep", ReleaseOutcome("released", evicted=("d",)), job=0),
    )
    assert tally.declined == {"deadline": 1}
    assert tally.errors == {"io": 1, "busy": 1}
    assert tally.evicted == {"epilog": 2, "stager": 1, "prolog": 2, "sweep": 1}
    assert tally.swept == 1, "job 0 is no lease"
    assert tally.requests == {"prolog": {"declined": 1}, "step": {"failed": 1}}
    assert tally.waits["prolog"].sum == 15.0


@pytest.mark.parametrize(
    ("value", "bucket"),
    [
        (0.0, 0),
        (WAIT_BOUNDS[0], 0),
        (WAIT_BOUNDS[0] + 1e-9, 1),
        (WAIT_BOUNDS[-1], len(WAIT_BOUNDS) - 1),
        (1e9, len(WAIT_BOUNDS)),
    ],
)
def test_histogram_bucket_includes_its_upper_bound(value: float, bucket: int) -> None:
    found = Histogram.make_empty(WAIT_BOUNDS)
    found.add_value(value)
    assert found.counts.index(1) == bucket


def test_requests_for_data_are_counted_as_requests_and_as_data() -> None:
    """As requests, and among those for data."""
    directory = RequestOutcome("started", data=True)
    found = counted(event("prolog", served("hit")), event("prolog", directory))
    assert found.requests == {"prolog": {"hit": 1, "started": 1}}
    assert found.of_data == {"prolog": {"started": 1}}


def test_registry_images_are_counted_by_arrival() -> None:
    steps = (
        RequestOutcome("hit", came="stored", digest="x", wait=1.0),
        RequestOutcome("copied", came="imported", digest="x", wait=700.0),
        RequestOutcome("through", came="waited", digest="x", wait=70.0),
        RequestOutcome("declined", "registry-silent", came="enroot", wait=30.0),
    )
    found = counted(*(event("step", one) for one in steps), event("step", served("hit")))
    assert found.registry == {"stored": 1, "imported": 1, "waited": 1, "enroot": 1}
    assert (sum(found.imports.counts), found.imports.sum) == (2, 770.0)
    assert found.declined == {"registry-silent": 1}


def test_copies_for_pending_jobs_are_counted_as_used_unused_or_left() -> None:
    def copy(key: str) -> EventRecord:
        return event("stager", CopyOutcome("copied", key=key, size=GIB, expected=1.0), 0)

    gone = event("epilog", ReleaseOutcome("released", evicted=("b",)))
    found = counted(copy("a"), copy("b"), copy("c"), event("step", served("hit")), gone)
    assert found.ahead.copied["source"] == 3 * GIB
    assert found.ahead.used["source"] == found.ahead.unused["source"] == GIB
    assert list(found.unused.left) == ["c"]
    assert found.copied["source"] == 3 * GIB
