"""What `forestage explain` says of an image of a registry."""

from typing import TYPE_CHECKING

from forestage.events import RequestOutcome
from forestage.features.contexts import ExplainPart

if TYPE_CHECKING:
    from forestage.features.contexts import ExplainFacts


def explain_outcome(facts: "ExplainFacts") -> ExplainPart:
    """Return what the reference meant. Pure."""
    outcome = facts.outcome
    if isinstance(outcome, RequestOutcome) and outcome.digest:
        return ExplainPart(rows=(("digest", outcome.digest),))
    return ExplainPart()
