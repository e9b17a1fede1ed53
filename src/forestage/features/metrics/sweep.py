"""What a sweep removes of what the metrics wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forestage.features.metrics import textfile

if TYPE_CHECKING:
    from forestage.features.contexts import SweepFacts


def afterwards(facts: SweepFacts) -> Mapping[str, tuple[object, ...]]:
    """Delete what was written before `metrics.textfile` was changed, as the next run would.

    Raises lock.LockTimeout, OSError.
    """
    places, path = facts.node.places, facts.node.config.metrics.textfile
    if not facts.dry_run and textfile.find_last_textfile(places) != path:
        with textfile.hold_metrics_lock(places, textfile.LOCK_TIMEOUT):
            textfile.replace_last_textfile(places, path)
    return {}
