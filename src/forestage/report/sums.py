"""Running sums over the events of many nodes, in memory that does not grow with the logs.

`Sums.add` takes events one by one; figures.py computes the report from the sums. Distributions
are histograms of 2 % wide bins, starts and bytes are kept per quarter of an hour.
"""

import math

import msgspec

from forestage.admin.tally import Start, Tally
from forestage.events import Copied, Event, Handled

QUARTER = 900  # seconds; the days of every time zone begin at a multiple
EARLIEST = 1_577_836_800  # 2020 in seconds since the epoch: forestage has no older events
MAX_AHEAD = 86_400.0  # seconds that a node's clock may be ahead of ours
BIN_RATIO = 1.02


class Distribution:
    """A histogram with bins that are 2 % wide, for medians."""

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count = 0
        self.largest = 0.0

    def add(self, value: float) -> None:
        number = math.floor(math.log(max(value, 1e-6), BIN_RATIO))
        self.bins[number] = self.bins.get(number, 0) + 1
        self.count += 1
        self.largest = max(self.largest, value)

    def median(self) -> float | None:
        """Returns at least the true median and at most 2 % more; None without values."""
        below = 0
        for number in sorted(self.bins):
            below += self.bins[number]
            if 2 * below >= self.count:
                return min(BIN_RATIO ** (number + 1), self.largest)
        return None


class Window(msgspec.Struct, frozen=True):
    """The time range of a report: `since` is in it, `until` is not; seconds since the epoch."""

    since: float | None = None
    until: float | None = None

    def contains(self, time: float) -> bool:
        after = self.since is None or time >= self.since
        return after and (self.until is None or time < self.until)


class Slot(msgspec.Struct):
    """Starts by kind, bytes, evicted entries and `seconds` waited, in a quarter of an hour or more.

    The kinds are those of admin/tally.
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

    def add(self, other: "Slot") -> None:
        for name in Slot.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ImageSums:
    """Sums of one path; `size` is its latest size, `waited` the seconds of all hooks."""

    def __init__(self) -> None:
        self.starts = 0
        self.hits = 0
        self.copies = 0
        self.kept_off = 0
        self.waited = 0.0
        self.size = 0
        self.data = False


class UserSums:
    """Sums of one user; `baseline` are the seconds that their starts from a copy would have taken.

    Of these starts, `measured` have one.
    """

    def __init__(self) -> None:
        self.starts = 0
        self.hits = 0
        self.local = 0
        self.measured = 0
        self.kept_off = 0
        self.baseline = 0.0
        self.waited = 0.0


class Sums:
    """All that the report needs of the events added so far; `now` is in seconds since the epoch."""

    def __init__(self, window: Window, now: float) -> None:
        self.window = window
        self.now = now
        self.outside_window = 0
        self.impossible_time = 0
        self.events = 0
        self.first = math.inf
        self.last = 0.0
        self.nodes: set[str] = set()
        self.slots: dict[int, Slot] = {}
        self.images: dict[str, ImageSums] = {}
        self.users: dict[str, UserSums] = {}
        self.rates = Distribution()
        self.warm = Distribution()
        self.cold = Distribution()
        self.kept_off = {"hit": 0, "joined": 0, "peers": 0}
        self.reasons: dict[str, int] = {}
        self.evicted: dict[str, int] = {}
        self._tallies: dict[str, Tally] = {}

    def add(self, event: Event, log: str) -> None:
        """Counts one event; a node's events come in the order of its log.

        `log` stands for the node in events that do not name one.
        """
        node = event.node or log
        # Before the window is checked: a Prolog before it makes the job's first step in it no
        # further start.
        start = self._tallies.setdefault(node, Tally()).add(event)
        if not EARLIEST <= event.time <= self.now + MAX_AHEAD:
            self.impossible_time += 1
            return
        if not self.window.contains(event.time):
            self.outside_window += 1
            return
        self.events += 1
        self.nodes.add(node)
        self.first = min(self.first, event.time)
        self.last = max(self.last, event.time)
        slot = self.slots.setdefault(int(event.time // QUARTER), Slot())
        outcome = event.outcome
        if isinstance(outcome, Copied):
            self._add_copy(outcome, slot)
        elif isinstance(outcome, Handled):
            user = self.users.setdefault(event.user or str(event.uid), UserSums())
            user.waited += outcome.wait
            self._add_wait(outcome, slot)
            if start:
                self._add_start(outcome, start, slot)
                _add_user(user, outcome, start)
        if evicted := len(outcome.evicted):
            slot.evicted += evicted
            self.evicted[event.hook] = self.evicted.get(event.hook, 0) + evicted

    def _add_copy(self, outcome: Copied, slot: Slot) -> None:
        if outcome.result != "copied":
            return
        slot.read += max(0, outcome.bytes - outcome.from_peers)
        slot.kept_off += outcome.from_peers
        self.kept_off["peers"] += outcome.from_peers
        image = self.images.setdefault(outcome.image, ImageSums())
        image.copies += 1
        image.size = outcome.size
        image.data = outcome.data
        # The stager that copied the resumed bytes was killed, so its seconds are in no event.
        if not outcome.resumed and outcome.bytes and outcome.copying > 0:
            self.rates.add(outcome.bytes / outcome.copying)

    def _add_wait(self, outcome: Handled, slot: Slot) -> None:
        slot.seconds += outcome.wait
        if outcome.image:
            self.images.setdefault(outcome.image, ImageSums()).waited += outcome.wait
        if outcome.result == "hit":
            self.warm.add(outcome.wait)
        elif outcome.result in ("joined", "copied") or outcome.reason == "deadline":
            self.cold.add(outcome.wait)

    def _add_start(self, outcome: Handled, start: Start, slot: Slot) -> None:
        kind, kept_off = start.kind, start.spared
        setattr(slot, kind, getattr(slot, kind) + 1)
        if outcome.reason:
            self.reasons[outcome.reason] = self.reasons.get(outcome.reason, 0) + 1
        if kept_off:
            slot.kept_off += kept_off
            self.kept_off[outcome.result] += kept_off
        if outcome.image:
            image = self.images.setdefault(outcome.image, ImageSums())
            image.starts += kind != "excluded"
            image.hits += kind == "hit"
            image.kept_off += kept_off
            image.size = outcome.size or image.size
            image.data = outcome.data


def _add_user(user: UserSums, outcome: Handled, start: Start) -> None:
    kind, kept_off = start.kind, start.spared
    user.starts += kind != "excluded"
    user.hits += kind == "hit"
    user.kept_off += kept_off
    user.local += kept_off > 0
    if kept_off and outcome.baseline:
        user.measured += 1
        user.baseline += outcome.baseline
