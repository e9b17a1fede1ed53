"""What a start saved: only where its image's own rate is known, and never more than that says."""

from typing import Any

import pytest

from forestage.events import OutcomeResult, ReleaseOutcome, RequestOutcome, saved_time


def outcome(**changes: Any) -> RequestOutcome:
    facts = {"result": "hit", "redirect": "spank", "baseline": 12.0, "wait": 0.5, **changes}
    return RequestOutcome(**facts)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 11.5),
        ({"redirect": "mounted"}, 11.5),
        ({"redirect": "kept"}, 11.5),
        ({"result": "copied", "wait": 15.0}, -3.0),
        ({"result": "joined", "wait": 2.0}, 10.0),
        ({"baseline": 0.0}, None),
        ({"redirect": "none"}, None),
        ({"redirect": "later"}, None),
        ({"redirect": ""}, None),
    ],
)
def test_saved_time_of_a_start_is_baseline_minus_wait(
    changes: dict[str, Any], seconds: float | None
) -> None:
    assert saved_time.find_saved_seconds(outcome(**changes)) == seconds


@pytest.mark.parametrize("result", ["started", "through", "declined", "failed"])
def test_saved_time_is_unknown_for_a_start_that_also_read_the_source(result: OutcomeResult) -> None:
    assert saved_time.find_saved_seconds(outcome(result=result)) is None
    assert saved_time.format_saving(outcome(result=result)) == "what that saves is not known"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "which saves about 12s"),
        ({"baseline": 754.0}, "which saves about 12m30s"),
        ({"wait": 12.0}, "as fast as from its source"),
        ({"wait": 14.04}, "which costs about 2s"),
    ],
)
def test_saved_time_is_formatted_with_two_digits(changes: dict[str, Any], text: str) -> None:
    assert saved_time.format_saving(outcome(**changes)) == text


BIND = (("prolog", "hit", "mounted"), ("step", "hit", "kept"), ("step", "hit", "kept"))


@pytest.mark.parametrize(
    ("runs", "starts"),
    [
        (BIND, [True, False, True]),  # the first step is the Prolog's start
        ((BIND[0], ("epilog", "", ""), BIND[1]), [True, False, True]),  # another job of that number
        ((("prolog", "hit", "spank"), ("step", "hit", "spank")), [False, True]),
        ((("prolog", "started", "later"), ("step", "hit", "kept")), [False, True]),
        ((("prolog", "started", "spank"), ("step", "through", "spank")), [False, False]),
        ((("prolog", "declined", ""), ("step", "failed", "")), [False, False]),
        ((("prolog", "hit", "none"),), [False]),  # nobody reads that copy
    ],
)
def test_start_from_a_copy_by_prolog_and_step_is_counted_once(
    runs: Any, starts: list[bool]
) -> None:
    told = saved_time.StartTracker()
    outcomes = [
        (
            hook,
            outcome(result=result, redirect=redirect, key="a")
            if result
            else ReleaseOutcome("released"),
        )
        for hook, result, redirect in runs
    ]
    assert [told.is_new_start(hook, 7, one) for hook, one in outcomes] == starts


def test_start_tracker_remembers_a_bounded_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_time, "MAX_JOBS", 3)
    told = saved_time.StartTracker()
    for job in range(10):
        told.is_new_start("prolog", job, outcome(redirect="mounted", key="a"))
    assert list(told.counted) == [7, 8, 9]
