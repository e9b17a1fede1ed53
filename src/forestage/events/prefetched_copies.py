"""Copies that were made for pending jobs: which of them a job has used. Pure.

The one definition, for `explain`, the report and the metrics.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from forestage.events.event_log import (
    WHOLE_RESULTS,
    ByteOrigin,
    CopyOutcome,
    EventRecord,
    RequestOutcome,
)

CopyFate = Literal["copied", "used", "unused"]
"""A copy is `copied` first, then `used` by a job, or `unused`: evicted before any job had it."""

MAX_UNUSED_COPIES = (
    10_000  # copies whose fate is open; `forestage evict` leaves no event of those it evicts
)


class CopyFateChange(msgspec.Struct, frozen=True):
    """What an event says of a copy that was made ahead, and how many bytes that is."""

    fate: CopyFate
    copy: CopyOutcome

    @property
    def bytes_by_origin(self) -> dict[ByteOrigin, int]:
        """By where they came from; of a copy that a job took over, those before."""
        taken: dict[ByteOrigin, int] = {"source": self.copy.ahead}
        return taken if self.copy.ahead else self.copy.bytes_by_origin


class PrefetchedBytes(msgspec.Struct):
    """Bytes that were copied for pending jobs, by where they came from.

    A job had `used` ones; `unused` ones were evicted before any had them.
    """

    copied: dict[str, int] = {}
    used: dict[str, int] = {}
    unused: dict[str, int] = {}

    def add_change(self, change: CopyFateChange) -> None:
        numbers: dict[str, int] = getattr(self, change.fate)
        for origin, number in change.bytes_by_origin.items():
            numbers[origin] = numbers.get(origin, 0) + number


class UnusedCopies(msgspec.Struct):
    """The copies of a node that no job has used yet, in the order of its log; `left` by key."""

    left: dict[str, CopyOutcome] = {}

    def add_event(self, event: EventRecord) -> Iterator[CopyFateChange]:
        """What one event changes; to be read to its end."""
        outcome = event.outcome
        for key in outcome.evicted:
            yield from self._remove_copy(key, "unused")
        if isinstance(outcome, CopyOutcome) and outcome.result == "copied":
            yield from self._remove_copy(
                outcome.key, "unused"
            )  # what made room for it left no event
            if outcome.expected:
                yield CopyFateChange("copied", outcome)
                self._add_copy(outcome)
            if outcome.ahead:
                yield from self._remove_copy(outcome.key, "used")
        elif isinstance(outcome, RequestOutcome) and outcome.result in WHOLE_RESULTS:
            yield from self._remove_copy(outcome.key, "used")

    def add_event_for_job(self, job: int, event: EventRecord) -> dict[str, CopyOutcome]:
        """Adds an event; the copies, by key, of which it says that this job is the first to use."""
        used = [
            one.copy for one in self.add_event(event) if one.fate == "used" and event.job == job
        ]
        return {copy.key: copy for copy in used}

    def _add_copy(self, copy: CopyOutcome) -> None:
        self.left[copy.key] = copy
        while len(self.left) > MAX_UNUSED_COPIES:
            del self.left[next(iter(self.left))]

    def _remove_copy(self, key: str, fate: CopyFate) -> Iterator[CopyFateChange]:
        copy = self.left.pop(key, None)
        if copy is not None:
            yield CopyFateChange(fate, copy)
