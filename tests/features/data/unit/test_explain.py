"""What `forestage explain` says of a job's data."""

from __future__ import annotations

import pytest

from forestage.events import RequestOutcome
from histories import event, hit, printed


def test_explain_of_a_prologs_directory_says_that_steps_are_shown_the_complete_copy() -> None:
    text = printed(event(RequestOutcome("started", request="/d/", via="hint", data=True)))
    assert "each step is shown it, once all of it is here" in text


def test_explain_of_declined_data_says_that_the_job_or_step_went_on_without() -> None:
    without = RequestOutcome("declined", reason="no-mount", detail="no such place", data=True)
    assert "The job went on without it." in printed(event(without))
    assert "The step went on without it." in printed(event(without, hook="step", step=0))


@pytest.mark.parametrize(
    ("options", "via"),
    [(("stage",), "stage= in the comment"), (("stage-dir",), "--stage-dir")],
)
def test_explain_of_a_job_directory_names_the_comment_or_option_that_requested_the_directory(
    options: tuple[str, ...], via: str
) -> None:
    text = printed(event(hit(via="hint", request="stage-dir", data=True), options=options))
    assert f"stage-dir ({via})" in text
