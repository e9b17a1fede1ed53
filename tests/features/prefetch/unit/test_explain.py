"""What `forestage explain` says of a copy that was made for a pending job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from forestage.events import CopyOutcome, EventRecord
from histories import KEY, NOW, event, hit, printed


def ahead(**changes: Any) -> EventRecord:
    made = {"image": "/a.sqsh", "key": KEY, "size": 8 << 30, "copying": 40.0, **changes}
    outcome = CopyOutcome(**{"result": "copied", "expected": NOW - 600, **made})
    return event(outcome, time=NOW - 60, hook="stager", job=0)


def test_image_copied_before_the_job_began_is_said_with_since_when_and_what_that_saved() -> None:
    start = event(hit(redirect="spank", baseline=41.0, wait=0.0), hook="step", step=0)
    text = " ".join(printed(ahead(), start).split())
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW - 600))
    assert f"expected since {since}: copied before the job began, in 40s" in text
    assert "; that saved about 41s" in text


def test_what_a_copy_ahead_saved_is_said_only_where_it_was_measured() -> None:
    text = printed(ahead(), event(hit(redirect="spank"), hook="step", step=0))
    assert "copied before the job began" in text
    assert "that saved" not in text


def test_copy_that_another_job_was_the_first_to_use_is_a_hit_as_any() -> None:
    first = event(hit(), job=6)
    assert "expected since" not in printed(ahead(), first, event(hit()))
    assert "expected since" not in printed(event(hit()))


@pytest.mark.parametrize(
    ("copying", "resumed", "saved"), [(5.0, 4 << 30, "5s"), (0.1, (8 << 30) - 1, "")]
)
def test_part_that_the_job_took_over_is_said_with_the_seconds_that_it_would_have_taken(
    copying: float, resumed: int, saved: str
) -> None:
    taken = ahead(copying=copying, resumed=resumed, ahead=resumed).outcome
    text = " ".join(printed(event(taken, hook="stager")).split())
    assert "expected since" in text
    assert "were here before the job began" in text
    assert (f"that saved about {saved}" in text) if saved else ("that saved" not in text)
