"""What `forestage explain` says of an image that was copied before the job asked for it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forestage.events import WHOLE_RESULTS, CopyOutcome, RequestOutcome, saved_time
from forestage.features.contexts import ExplainPart
from forestage.system.terminal import format_local_time
from forestage.units import format_rough_duration, format_size

if TYPE_CHECKING:
    from forestage.features.contexts import ExplainFacts

MIN_MEASURED_PART = (
    8  # the part of an image from which a copy's rate is taken to be that of the rest
)


def explain_outcome(facts: "ExplainFacts") -> ExplainPart:
    """Return since when it was expected, and what that saved. Pure."""
    return ExplainPart(sentences=tuple(_list_sentences(facts)))


def _list_sentences(facts: "ExplainFacts") -> Iterator[str]:
    outcome = facts.outcome
    if isinstance(outcome, CopyOutcome) and outcome.ahead:
        here = f"{format_size(outcome.ahead)} of it were here before the job began"
        fetched = outcome.bytes - outcome.resumed
        known = fetched >= outcome.bytes / MIN_MEASURED_PART
        spared = outcome.ahead * outcome.copying / fetched if known else 0.0
        since = format_local_time(outcome.expected)
        yield f"expected since {since}: {here}{_format_saving(spared)}"
    copy = facts.copies_ahead.get(outcome.key) if isinstance(outcome, RequestOutcome) else None
    if (
        isinstance(outcome, RequestOutcome)
        and copy
        and not copy.ahead
        and outcome.result in WHOLE_RESULTS
    ):
        took = format_rough_duration(copy.copying) or "less than 0.1s"
        since = format_local_time(copy.expected)
        told = f"expected since {since}: copied before the job began, in {took}"
        yield f"{told}{_format_saving(saved_time.find_saved_seconds(outcome) or 0.0)}"


def _format_saving(seconds: float) -> str:
    about = format_rough_duration(float(f"{seconds:.2g}")) if seconds > 0 else ""
    return f"; that saved about {about}" if about else ""
