"""Counters of what the event log records: requests, copies, bytes, evictions, waits. Pure.

`forestage metrics` keeps them between its runs, since the log is rotated and counters must not
fall; `forestage report` counts logs from the beginning.
"""

from bisect import bisect_left
from typing import Literal

import msgspec

from forestage.events import BadEntryOutcome, CopyOutcome, EventRecord, RequestOutcome, saved_time
from forestage.events.prefetched_copies import PrefetchedBytes, UnusedCopies

WAIT_BOUNDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Seconds: a warm hit, a copy from peers, what a Prolog may take, what srun may take."""

IMPORT_BOUNDS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0)
"""Seconds: an image of some MiB, and one of 65 GB from a registry that is far."""

RATE_BOUNDS = (5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10)
"""Bytes per second: from one stream over a slow link to NVMe's own pace."""

HIT_RESULTS = ("hit", "joined")  # results of an image that was here, or came by another job's copy
STEP_COPY_RESULTS = (*HIT_RESULTS, "started")  # of a Prolog, where steps are shown the copy

StartKind = Literal["hit", "joined", "through", "waited", "shared", "original", "excluded"]
"""Of a start. Of those whose image was not here, `through` read through the copy, `waited` had it
at their first step, and `shared` read the shared path while it was made. `original`: it was to be
staged and had to read the original path. `excluded`: it was not to be staged, by a rule or at the
job's wish.
"""


class Histogram(msgspec.Struct):
    """How many values are at most each of `bounds`, and not at most the one before.

    The last of `counts` are those above all. One that was begun keeps its bounds.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def make_empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        return cls(bounds, [0] * (len(bounds) + 1))

    def add_value(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class JobStart(msgspec.Struct, frozen=True):
    """An image that a job, or a further step of it, began with.

    `spared` are the bytes that it had from the cache instead of the shared file system.
    """

    kind: StartKind
    spared: int = 0


class EventTally(msgspec.Struct):
    """All that was counted on this node; it only grows. Sizes are bytes.

    `requests` and `waits` are by hook (prolog, step), the former by result below that; `of_data`
    are those requests that were for data; `starts` are by result, once for a Prolog and its job's
    first step, and `excluded` what was not to be staged; `declined` and `errors` by reason;
    `copies` by result, `copied` by where the bytes came from (source, peers, others), `evicted`
    by the hook that made room.
    `spared` are bytes that a job had from the cache instead of the shared file system, by result.
    `saved` and `lost` are seconds of starts that their copies made faster, and slower
    (events/saved_time); `read_through` is what jobs read of copies before these were complete, by
    where it came from.
    `ahead` are bytes that were copied for pending jobs, `unused` those copies no job has used yet.
    `registry` are images of registries that steps named, by how they came, `imports` what the
    steps waited that did not begin at once. `bad` are entries with wrong bytes, by who found them.
    `swept` are leases whose Epilog never ran.
    """

    requests: dict[str, dict[str, int]] = {}
    of_data: dict[str, dict[str, int]] = {}
    starts: dict[str, int] = {}
    waits: dict[str, Histogram] = {}
    declined: dict[str, int] = {}
    errors: dict[str, int] = {}
    copies: dict[str, int] = {}
    copied: dict[str, int] = {}
    rates: Histogram = msgspec.field(default_factory=lambda: Histogram.make_empty(RATE_BOUNDS))
    spared: dict[str, int] = {}
    evicted: dict[str, int] = {}
    registry: dict[str, int] = {}
    imports: Histogram = msgspec.field(default_factory=lambda: Histogram.make_empty(IMPORT_BOUNDS))
    bad: dict[str, int] = {}
    swept: int = 0
    expected: dict[int, list[str]] = {}  # by job, the keys that its first step asks for once more
    begun: dict[int, list[str]] = {}  # by job, keys whose copy its Prolog started for its steps
    from_copy: saved_time.StartTracker = msgspec.field(default_factory=saved_time.StartTracker)
    saved: float = 0.0
    lost: float = 0.0
    read_through: dict[str, int] = {}
    ahead: PrefetchedBytes = msgspec.field(default_factory=PrefetchedBytes)
    unused: UnusedCopies = msgspec.field(default_factory=UnusedCopies)

    def add_event(self, event: EventRecord) -> JobStart | None:
        """Counts one event; returns the start it reports, unless an earlier event reported it."""
        outcome, start = event.outcome, None
        is_from_copy = self.from_copy.is_new_start(event.hook, event.job, outcome)
        if is_from_copy and isinstance(outcome, RequestOutcome):
            seconds = saved_time.find_saved_seconds(outcome) or 0.0
            self.saved += max(0.0, seconds)
            self.lost += max(0.0, -seconds)
        for change in self.unused.add_event(event):
            self.ahead.add_change(change)
        if isinstance(outcome, CopyOutcome):
            self._add_copy(outcome)
        elif isinstance(outcome, RequestOutcome):
            start = self._add_request(event, outcome)
        elif isinstance(outcome, BadEntryOutcome):
            _increment(self.bad, event.hook)
        else:
            self.expected.pop(event.job, None)
            self.begun.pop(event.job, None)
            # Job 0 stands for what belonged to no job.
            self.swept += event.hook == "sweep" and event.job != 0
            if outcome.result == "failed":
                _increment(self.errors, outcome.reason)
        if outcome.evicted:
            _increment(self.evicted, event.hook, len(outcome.evicted))
        return start

    def _add_copy(self, outcome: CopyOutcome) -> None:
        _increment(self.copies, outcome.result)
        if outcome.result != "copied":
            return
        for origin, number in outcome.bytes_by_origin.items():
            _increment(self.copied, origin, number)
        _increment(self.read_through, "source", outcome.read_straight)
        _increment(self.read_through, "copy", max(0, outcome.read_through - outcome.read_straight))
        fetched = outcome.bytes - outcome.resumed
        if fetched > 0 and outcome.copying > 0:
            self.rates.add_value(fetched / outcome.copying)

    def _add_request(self, event: EventRecord, outcome: RequestOutcome) -> JobStart | None:
        _increment(self.requests.setdefault(event.hook, {}), outcome.result)
        if outcome.came and event.hook == "step":
            _increment(self.registry, outcome.came)
            if outcome.came in ("imported", "waited"):
                self.imports.add_value(outcome.wait)
        if outcome.data:
            _increment(self.of_data.setdefault(event.hook, {}), outcome.result)
        if outcome.result == "declined":
            _increment(self.declined, outcome.reason)
        if outcome.result == "failed":
            _increment(self.errors, outcome.reason)
        self.waits.setdefault(event.hook, Histogram.make_empty(WAIT_BOUNDS)).add_value(outcome.wait)
        return None if self._repeats_prolog(event, outcome) else self._add_start(event, outcome)

    def _add_start(self, event: EventRecord, outcome: RequestOutcome) -> JobStart | None:
        is_for_steps = outcome.redirect == "spank" or outcome.data
        if event.hook == "prolog" and is_for_steps and outcome.result in STEP_COPY_RESULTS:
            # Nobody has seen the copy yet: the step that is shown it is the start.
            self.expected[event.job].remove(outcome.key)
            if outcome.result == "started":
                saved_time.remember_key(self.begun, event.job, outcome.key)
            return None
        begun = self.begun.get(event.job, ()) if event.hook == "step" else ()
        if outcome.key in begun:
            self.begun[event.job].remove(outcome.key)
            if outcome.result in HIT_RESULTS:
                # What a job's own Prolog began to copy is no hit of its step, however fast it was.
                outcome = msgspec.structs.replace(outcome, result="copied")
        kind = classify_start(outcome)
        _increment(self.starts, "excluded" if kind == "excluded" else outcome.result)
        if not (outcome.redirect in saved_time.LOCAL_REDIRECTS and outcome.result in HIT_RESULTS):
            return JobStart(kind)
        _increment(self.spared, outcome.result, outcome.size)
        return JobStart(kind, spared=outcome.size)

    def _repeats_prolog(self, event: EventRecord, outcome: RequestOutcome) -> bool:
        """Whether the job's first step repeats what was counted for the job's Prolog."""
        key, job = outcome.key, event.job
        if outcome.result not in ("hit", "joined", "copied", "started", "through"):
            return False
        if event.hook == "prolog":
            saved_time.remember_key(self.expected, job, key)
            return False
        if key not in self.expected.get(job, ()):
            return False
        self.expected[job].remove(key)
        return True

    @property
    def tried_starts(self) -> int:
        """Starts for which staging was tried."""
        return sum(number for result, number in self.starts.items() if result != "excluded")

    @property
    def hit_ratio(self) -> float | None:
        """Hits by the starts for which staging was tried; None if there are none."""
        return self.starts.get("hit", 0) / self.tried_starts if self.tried_starts else None


def _increment(counts: dict[str, int], name: str, number: int = 1) -> None:
    counts[name] = counts.get(name, 0) + number


def classify_start(outcome: RequestOutcome) -> StartKind:
    """Pure: what a start was. `original` ones were to be staged and had to read the original path;
    `excluded` ones were not to be staged, by a rule or at the job's wish.

    The hit ratio is hits by all starts but the excluded ones, in status, report and dashboard.
    """
    if outcome.result == "hit":
        return "hit"
    if outcome.result == "joined":
        return "joined"
    if outcome.result == "through":
        return "through"
    if outcome.result == "copied":
        return "waited"
    if outcome.result == "started":
        return "shared"
    # A request that was declined before its image was opened has no key.
    was_tried = outcome.result == "failed" or (outcome.key and outcome.reason != "off")
    return "original" if was_tried else "excluded"
