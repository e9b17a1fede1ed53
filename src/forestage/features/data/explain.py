"""What `forestage explain` says of a job's data."""

from typing import TYPE_CHECKING

from forestage.events import RequestOutcome
from forestage.features.contexts import ExplainPart

if TYPE_CHECKING:
    from forestage.features.contexts import ExplainFacts


def explain_outcome(facts: "ExplainFacts") -> ExplainPart:
    """Return how it is shown, and what a job does that could not be given it. Pure."""
    outcome = facts.outcome
    if not (isinstance(outcome, RequestOutcome) and outcome.data):
        return ExplainPart()
    shown = "" if outcome.redirect else "each step is shown it, once all of it is here"
    who = "step" if facts.hook == "step" else "job"
    without = f"The {who} went on without it." if outcome.reason == "no-mount" else ""
    option = outcome.request if outcome.request == "stage-dir" else ""
    return ExplainPart(redirect=shown, consequence=without, option=option)
