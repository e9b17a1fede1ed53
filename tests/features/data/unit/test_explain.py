"""What `forestage explain` says of a job's data."""

from __future__ import annotations

import pytest

from forestage.events import RequestOutcome
from histories import event, hit, printed


def test_directory_in_a_prolog_says_what_its_steps_get() -> None:
    text = printed(event(RequestOutcome("started", request="/d/", via="hint", data=True)))
    assert "each step is shown it, once all of it is here" in text


def test_job_that_could_not_be_given_its_data_went_on_without_it() -> None:
    without = RequestOutcome("declined", reason="no-mount", detail="no such place", data=True)
    assert "The job went on without it." in printed(event(without))
    assert "The step went on without it." in printed(event(without, hook="step", step=0))


@pytest.mark.parametrize(
    ("options", "via"),
    [(("stage",), "stage= in the comment"), (("stage-dir",), "--stage-dir")],
)
def test_directory_of_the_job_is_told_with_where_it_was_asked(
    options: tuple[str, ...], via: str
) -> None:
    text = printed(event(hit(via="hint", request="stage-dir", data=True), options=options))
    assert f"stage-dir ({via})" in text
