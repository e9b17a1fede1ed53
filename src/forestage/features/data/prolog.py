"""What the Prolog begins of a job's data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forestage.features.data import requests

if TYPE_CHECKING:
    from forestage.events import RequestOutcome
    from forestage.features.contexts import AfterLeaseFacts


def after_lease(facts: AfterLeaseFacts) -> list[RequestOutcome]:
    """Begin to bring the data; nobody waits for it."""
    return requests.start_job_data(facts.node, facts.job, facts.limit, facts.refusal)
