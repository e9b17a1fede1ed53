"""What a start saved: only where its image's own rate is known, and never more than that says."""

from typing import Any

import pytest

from forestage.events import Handled, Result, saved


def outcome(**changes: Any) -> Handled:
    facts = {"result": "hit", "redirect": "spank", "baseline": 12.0, "wait": 0.5, **changes}
    return Handled(**facts)


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
def test_start_saves_its_reading_less_its_wait(
    changes: dict[str, Any], seconds: float | None
) -> None:
    assert saved.seconds(outcome(**changes)) == seconds


@pytest.mark.parametrize("result", ["started", "through", "declined", "failed"])
def test_start_that_read_the_source_as_well_saves_nobody_knows_what(result: Result) -> None:
    assert saved.seconds(outcome(result=result)) is None
    assert saved.phrase(outcome(result=result)) == "what that saves is not known"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "which saves about 12s"),
        ({"baseline": 754.0}, "which saves about 12m30s"),
        ({"wait": 12.0}, "as fast as from its source"),
        ({"wait": 14.04}, "which costs about 2s"),
    ],
)
def test_user_reads_two_digits_of_it(changes: dict[str, Any], text: str) -> None:
    assert saved.phrase(outcome(**changes)) == text
