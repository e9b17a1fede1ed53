"""What a step is shown of its job's data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forestage.features.data import requests

if TYPE_CHECKING:
    from forestage.features.contexts import AfterLeaseFacts, StepPart


def after_lease(facts: AfterLeaseFacts) -> StepPart:
    """Show the data: after the image, for which the tasks wait."""
    return requests.show_job_data(facts.node, facts.job, facts.limit, facts.refusal)
