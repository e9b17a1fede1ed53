"""Running sums over the events of many nodes, in memory that does not grow with the logs.

`ReportSums.add_event` takes events one by one; figures.py computes the report from the sums.
Distributions are histograms of 2 % wide bins, starts and bytes are kept per quarter of an hour.
"""

import math

import msgspec

from forestage.commands.event_counters import EventTally, JobStart
from forestage.events import CopyOutcome, EventRecord, RequestOutcome, saved_time
from forestage.events.prefetched_copies import PrefetchedBytes, UnusedCopies

QUARTER = 900  # seconds; the days of every time zone begin at a multiple
EARLIEST = 1_577_836_800  # 2020 in seconds since the epoch: forestage has no older events
MAX_AHEAD = 86_400.0  # seconds that a node's clock may be ahead of ours
BIN_RATIO = 1.02
MAX_READING_STEPS = 10_000  # steps of a node that read through one copy


class WaitStats(msgspec.Struct, frozen=True):
    """What starts waited for staging; `median` and `most` are at most 2 % too high.

    95 of 100 waited `most` seconds or less.
    """

    count: int
    median: float | None
    most: float | None


class Distribution:
    """A histogram with bins that are 2 % wide, for medians and percentiles."""

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count = 0
        self.largest = 0.0

    def add(self, value: float) -> None:
        number = math.floor(math.log(max(value, 1e-6), BIN_RATIO))
        self.bins[number] = self.bins.get(number, 0) + 1
        self.count += 1
        self.largest = max(self.largest, value)

    def quantile(self, share: float) -> float | None:
        """Returns what `share` of all are not above, at most 2 % too high; None without values."""
        below = 0
        for number in sorted(self.bins):
            below += self.bins[number]
            if below >= share * self.count:
                return min(BIN_RATIO ** (number + 1), self.largest)
        return None

    def median(self) -> float | None:
        return self.quantile(0.5)

    def make_wait_stats(self) -> WaitStats:
        return WaitStats(self.count, self.median(), self.quantile(0.95))


class TimeWindow(msgspec.Struct, frozen=True):
    """The time range of a report: `since` is in it, `until` is not; seconds since the epoch."""

    since: float | None = None
    until: float | None = None

    def contains(self, time: float) -> bool:
        after = self.since is None or time >= self.since
        return after and (self.until is None or time < self.until)


class PeriodSums(msgspec.Struct):
    """Starts by kind, bytes, evicted entries and `seconds` waited, in a quarter of an hour or more.

    The kinds are those of commands/event_counters.
    """

    hit: int = 0
    joined: int = 0
    through: int = 0
    waited: int = 0
    shared: int = 0
    original: int = 0
    excluded: int = 0
    kept_off: int = 0
    read: int = 0
    evicted: int = 0
    seconds: float = 0.0

    @property
    def cold(self) -> int:
        """Starts whose image was not here, whatever they did until it was."""
        return self.through + self.waited + self.shared

    @property
    def tried(self) -> int:
        """Starts for which staging was tried."""
        return self.hit + self.joined + self.cold + self.original

    @property
    def hit_ratio(self) -> float | None:
        """Hits divided by all starts for which staging was tried; None if there are none.

        This is the only definition. A start that waited for another job's copy, or whose image
        staging failed to bring, is no hit; an excluded start is in neither number.
        """
        return self.hit / self.tried if self.tried else None

    def add(self, other: "PeriodSums") -> None:
        for name in PeriodSums.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class GroupFigures(msgspec.Struct):
    """Figures of a user, a partition, a node or an image.

    `saved` is in seconds, as `forestage explain` has it (events/saved_time), of the `measured`
    starts of `local` ones from a copy; None where none was measured.
    """

    name: str
    starts: int = 0
    hits: int = 0
    local: int = 0
    measured: int = 0
    kept_off: int = 0
    saved: float | None = None

    def add(self, start: JobStart | None, found: float | None, is_local: bool) -> None:
        if start and start.kind != "excluded":
            self.starts += 1
            self.hits += start.kind == "hit"
        if start:
            self.kept_off += start.spared
        self.local += is_local
        if found is not None:
            self.measured += 1
            self.saved = (self.saved or 0.0) + found


class ImageFigures(GroupFigures, kw_only=True):
    """Figures of one image path, or of a directory; `size` is its latest."""

    size: int = 0
    copies: int = 0
    kind: str = "image"


class NodeFigures(GroupFigures, kw_only=True):
    """`rate` is the median of the node's copies in bytes per second; `failed` counts failures."""

    failed: int = 0
    rate: float | None = None
    waits: WaitStats = WaitStats(0, None, None)


class NodeSums:
    """Figures of one node, and the state that its events have."""

    def __init__(self, name: str) -> None:
        self.figures = NodeFigures(name)
        self.rates = Distribution()
        self.waits = Distribution()
        self.events = 0  # of the report's time
        self.tally = EventTally()
        self.from_copy = saved_time.StartTracker()
        self.unused = UnusedCopies()
        self.reading: dict[str, list[float]] = {}  # by key, when steps began to read through


class ReadThroughFigures(msgspec.Struct):
    """What reading through was worth.

    Of `steps` that read through, those whose copy was completed began `ahead` seconds before that
    (the median; `seconds` in all). Until then jobs read so many bytes, `straight` of them from the
    source.
    """

    steps: int = 0
    ahead: float | None = None
    seconds: float = 0.0
    read: int = 0
    straight: int = 0


class ReportSums:
    """All that the report needs of the events added so far; `now` is in seconds since the epoch."""

    def __init__(self, window: TimeWindow, now: float) -> None:
        self.window = window
        self.now = now
        self.outside_window = 0
        self.impossible_time = 0
        self.events = 0
        self.first = math.inf
        self.last = 0.0
        self.slots: dict[int, PeriodSums] = {}
        self.total = GroupFigures("")
        self.images: dict[str, ImageFigures] = {}
        self.users: dict[str, GroupFigures] = {}
        self.partitions: dict[str, GroupFigures] = {}
        self.nodes: dict[str, NodeSums] = {}
        self._latest: dict[str, str] = {}  # the node of a log's last event
        self.rates = Distribution()
        self.waits = Distribution()
        self.through = ReadThroughFigures()
        self.copied_ahead = PrefetchedBytes()
        self.ahead = Distribution()
        self.kept_off = {"hit": 0, "joined": 0, "peers": 0}
        self.original: dict[str, int] = {}
        self.excluded: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.evicted: dict[str, int] = {}

    def add_event(self, event: EventRecord, log: str) -> None:
        """Counts one event; a node's events come in the order of its log.

        Events that name no node, such as what `verify` found, are of the log's latest one; before
        there is one, `log` stands for it.
        """
        outcome, name = event.outcome, event.node or self._latest.get(log, log)
        self._latest[log] = name
        node = self.nodes.get(name) or NodeSums(name)
        # Before the window is checked: a Prolog before it makes the job's first step in it no
        # further start.
        start = node.tally.add_event(event)
        is_local = node.from_copy.is_new_start(event.hook, event.job, outcome)
        changes = tuple(node.unused.add_event(event))
        self.nodes[name] = node
        if not EARLIEST <= event.time <= self.now + MAX_AHEAD:
            self.impossible_time += 1
            return
        if not self.window.contains(event.time):
            self.outside_window += 1
            return
        self.events += 1
        node.events += 1
        self.first = min(self.first, event.time)
        self.last = max(self.last, event.time)
        for change in changes:
            self.copied_ahead.add_change(change)
        slot = self.slots.setdefault(int(event.time // QUARTER), PeriodSums())
        if isinstance(outcome, CopyOutcome):
            self._add_copy(event, outcome, node, slot)
        elif isinstance(outcome, RequestOutcome):
            self._add_request(event, outcome, node, slot)
            self._add_start(event, outcome, start, is_local, node, slot)
        if outcome.result == "failed":
            node.figures.failed += 1
            self.failed[outcome.reason] = self.failed.get(outcome.reason, 0) + 1
        if evicted := len(outcome.evicted):
            slot.evicted += evicted
            self.evicted[event.hook] = self.evicted.get(event.hook, 0) + evicted

    def _add_copy(
        self, event: EventRecord, outcome: CopyOutcome, node: NodeSums, slot: PeriodSums
    ) -> None:
        began = node.reading.pop(outcome.key, [])
        if outcome.result != "copied":
            return
        for time in began:
            if time < event.time - outcome.wait:  # of an earlier copy, which was over before it
                continue
            ahead = max(0.0, event.time - time)
            self.ahead.add(ahead)
            self.through.seconds += ahead
        self.through.read += outcome.read_through
        self.through.straight += outcome.read_straight
        slot.read += max(0, outcome.bytes - outcome.from_peers)
        slot.kept_off += outcome.from_peers
        self.kept_off["peers"] += outcome.from_peers
        image = self._image_figures(outcome)
        image.copies += 1
        # The stager that copied the resumed bytes was killed, so its seconds are in no event.
        if not outcome.resumed and outcome.bytes and outcome.copying > 0:
            self.rates.add(outcome.bytes / outcome.copying)
            node.rates.add(outcome.bytes / outcome.copying)

    def _image_figures(self, outcome: RequestOutcome | CopyOutcome) -> ImageFigures:
        """Of this path, as it is now."""
        image = self.images.setdefault(outcome.image, ImageFigures(outcome.image))
        image.size = outcome.size or image.size
        image.kind = "data" if outcome.data else "image"
        return image

    def _add_request(
        self, event: EventRecord, outcome: RequestOutcome, node: NodeSums, slot: PeriodSums
    ) -> None:
        slot.seconds += outcome.wait
        if outcome.result == "through":
            self.through.steps += 1
            began = node.reading.setdefault(outcome.key, [])
            if len(began) < MAX_READING_STEPS:
                began.append(event.time)

    def _add_start(
        self,
        event: EventRecord,
        outcome: RequestOutcome,
        start: JobStart | None,
        is_local: bool,
        node: NodeSums,
        slot: PeriodSums,
    ) -> None:
        found = saved_time.find_saved_seconds(outcome) if is_local else None
        user, partition = event.user or str(event.uid), event.partition or "-"
        groups = [self.total, node.figures]
        groups.append(self.users.setdefault(user, GroupFigures(user)))
        groups.append(self.partitions.setdefault(partition, GroupFigures(partition)))
        if outcome.image:
            groups.append(self._image_figures(outcome))
        for group in groups:
            group.add(start, found, is_local)
        if start is None:
            return
        setattr(slot, start.kind, getattr(slot, start.kind) + 1)
        slot.kept_off += start.spared
        if start.spared:
            self.kept_off[outcome.result] += start.spared
        if start.kind != "excluded":
            self.waits.add(outcome.wait)
            node.waits.add(outcome.wait)
        if outcome.reason and start.kind in ("original", "excluded"):
            reasons = self.original if start.kind == "original" else self.excluded
            reasons[outcome.reason] = reasons.get(outcome.reason, 0) + 1
