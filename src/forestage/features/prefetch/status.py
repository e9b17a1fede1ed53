"""What `forestage status` says of pending jobs: what the node expects, and what of it is here."""

from typing import TYPE_CHECKING

from forestage.features.contexts import StatusPart
from forestage.features.prefetch import prefetch_state

if TYPE_CHECKING:
    from forestage.features.contexts import StatusFacts


def read_status(facts: "StatusFacts") -> StatusPart:
    """Return what pending jobs have the node expect, None if it asks for none. Raises OSError."""
    found = prefetch_state.find_prefetch_state(facts.node.places, facts.items, facts.now)
    rows = tuple(prefetch_state.format_rows(found, facts.now)) if found else ()
    return StatusPart({"prefetched": found}, after="stopped", rows=rows)
