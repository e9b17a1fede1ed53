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


def test_explain_of_a_prefetched_image_gives_the_expected_since_time_and_the_saved_time() -> None:
    start = event(hit(redirect="spank", baseline=41.0, wait=0.0), hook="step", step=0)
    text = " ".join(printed(ahead(), start).split())
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW - 600))
    assert f"expected since {since}: copied before the job began, in 40s" in text
    assert "; that saved about 41s" in text


def test_explain_of_a_prefetched_image_omits_the_saved_time_without_a_baseline() -> None:
    text = printed(ahead(), event(hit(redirect="spank"), hook="step", step=0))
    assert "copied before the job began" in text
    assert "that saved" not in text


def test_explain_shows_an_ordinary_hit_for_the_second_job_of_a_prefetched_entry() -> None:
    first = event(hit(), job=6)
    assert "expected since" not in printed(ahead(), first, event(hit()))
    assert "expected since" not in printed(event(hit()))


@pytest.mark.parametrize(
    ("copying", "resumed", "saved"), [(5.0, 4 << 30, "5s"), (0.1, (8 << 30) - 1, "")]
)
def test_explain_of_a_copy_resumed_from_a_prefetched_part_gives_the_saved_time(
    copying: float, resumed: int, saved: str
) -> None:
    taken = ahead(copying=copying, resumed=resumed, ahead=resumed).outcome
    text = " ".join(printed(event(taken, hook="stager")).split())
    assert "expected since" in text
    assert "were here before the job began" in text
    assert (f"that saved about {saved}" in text) if saved else ("that saved" not in text)
