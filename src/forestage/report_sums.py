"""What do many nodes' events come to? Added up one by one, in bounded memory. Pure.

`Sums` is what grows; report.py makes of it what is told.
"""

import math
from typing import Literal

import msgspec

from forestage.events import Event, Outcome
from forestage.events.reasons import REASONS
from forestage.tally import Tally
from forestage.units import MAX_DURATION, MAX_SIZE

Kind = Literal["hit", "joined", "cold", "original", "aside"]

QUARTER = 900  # seconds; every time zone's days begin at one
EARLIEST = 1_577_836_800  # 2020, in seconds since the epoch: no event is older than forestage
LATEST = 86_400.0  # seconds that a node's clock may be before ours
BACK = 3600.0  # seconds; hooks write in the order of their ends, but for so little
IMAGES = 10_000  # told apart by name; further ones are added up under OTHERS
OTHERS = ""
SIZES = tuple(gib << 30 for gib in (1, 4, 16, 64))  # bytes: where the next class of images begins
STEP = 1.02  # how exact a Spread is


class Spread:
    """How values are spread, to 2 %: so many numbers are kept, however many values there are."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.number = 0
        self.largest = 0.0

    def add(self, value: float) -> None:
        place = math.floor(math.log(max(value, 1e-6), STEP))
        self.counts[place] = self.counts.get(place, 0) + 1
        self.number += 1
        self.largest = max(self.largest, value)

    def median(self) -> float | None:
        """Not below the true one, and at most 2 % above; None of nothing."""
        return self.at(0.5)

    def at(self, share: float) -> float | None:
        """The value that this share of all do not exceed."""
        below = 0
        for place in sorted(self.counts):
            below += self.counts[place]
            if below >= share * self.number:
                return min(STEP ** (place + 1), self.largest)
        return None


class Window(msgspec.Struct, frozen=True):
    """Which events count: from `since` up to `until`, in seconds since the epoch."""

    since: float | None = None
    until: float | None = None

    def holds(self, time: float) -> bool:
        after = self.since is None or time >= self.since
        return after and (self.until is None or time < self.until)


class Slot(msgspec.Struct):
    """A quarter of an hour, or several: starts by kind, bytes, entries evicted, seconds waited."""

    hit: int = 0
    joined: int = 0
    cold: int = 0
    original: int = 0
    aside: int = 0
    kept_off: int = 0
    read: int = 0
    evicted: int = 0
    waited: float = 0.0

    def take(self, other: "Slot") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ImageSums:
    """One path; `waited` is what every hook waited for it, `size` its latest bytes."""

    def __init__(self) -> None:
        self.starts = 0
        self.hits = 0
        self.copies = 0
        self.spared = 0
        self.waited = 0.0
        self.size = 0
        self.rates = Spread()


class SizeSums:
    """Copies of images of about one size."""

    def __init__(self) -> None:
        self.copies = 0
        self.took = Spread()
        self.rates = Spread()


class Left(msgspec.Struct):
    """Events that count nowhere, and what is odd about the rest."""

    outside: int = 0
    undated: int = 0
    unsound: int = 0
    went_back: int = 0


class Sums:
    """All that is known of the events so far. `now`: seconds since the epoch."""

    def __init__(self, window: Window, now: float) -> None:
        self.window = window
        self.now = now
        self.left = Left()
        self.events = 0
        self.first = math.inf
        self.last = 0.0
        self.nodes: set[str] = set()
        self.slots: dict[int, Slot] = {}
        self.images: dict[str, ImageSums] = {}
        self.sizes = tuple(SizeSums() for _ in range(len(SIZES) + 1))
        self.rates = Spread()
        self.warm = Spread()
        self.cold = Spread()
        self.spared = {"hit": 0, "joined": 0, "peers": 0}
        self.reasons: dict[str, int] = {}
        self.evicted: dict[str, int] = {}
        self._tallies: dict[str, Tally] = {}
        self._clocks: dict[str, float] = {}

    def add(self, event: Event, log: str) -> None:
        """Counts one event; a node's in its log's order. `log` stands for a node without a name."""
        if not is_sound(event):
            self.left.unsound += 1
            return
        node = event.node or log
        # Outside the window too: a Prolog before it has told of the step within it.
        start = self._tallies.setdefault(node, Tally()).add(event)
        if not EARLIEST <= event.time <= self.now + LATEST:
            self.left.undated += 1
            return
        self.left.went_back += event.time < self._clocks.get(node, 0.0) - BACK
        self._clocks[node] = event.time
        if not self.window.holds(event.time):
            self.left.outside += 1
            return
        self.events += 1
        self.nodes.add(node)
        self.first = min(self.first, event.time)
        self.last = max(self.last, event.time)
        slot = self.slots.setdefault(int(event.time // QUARTER), Slot())
        if event.hook == "stager":
            self._copy(event.outcome, event.total, slot)
        elif event.hook in ("prolog", "step"):
            self._waited(event.outcome, slot)
            if start:
                self._start(event.outcome, start.spared, slot)
        gone = len(event.outcome.evicted)
        if gone:
            slot.evicted += gone
            self.evicted[event.hook] = self.evicted.get(event.hook, 0) + gone

    def image(self, path: str) -> ImageSums:
        if path not in self.images and len(self.images) >= IMAGES:
            path = OTHERS
        return self.images.setdefault(path, ImageSums())

    def _copy(self, outcome: Outcome, took: float, slot: Slot) -> None:
        if outcome.result != "copied":
            return
        slot.read += max(0, outcome.bytes - outcome.from_peers)
        slot.kept_off += outcome.from_peers
        self.spared["peers"] += outcome.from_peers
        image = self.image(outcome.image)
        image.copies += 1
        image.size = outcome.size
        about = self.sizes[sum(outcome.size >= bound for bound in SIZES)]
        about.copies += 1
        about.took.add(took)
        # What was resumed is of another stager, whose seconds nobody has told.
        if not outcome.resumed and outcome.bytes and outcome.copying > 0:
            for rates in (image.rates, about.rates, self.rates):
                rates.add(outcome.bytes / outcome.copying)

    def _waited(self, outcome: Outcome, slot: Slot) -> None:
        slot.waited += outcome.wait
        if outcome.image:
            self.image(outcome.image).waited += outcome.wait
        if outcome.result == "hit":
            self.warm.add(outcome.wait)
        elif outcome.result in ("joined", "copied") or outcome.reason == "deadline":
            self.cold.add(outcome.wait)

    def _start(self, outcome: Outcome, spared: int, slot: Slot) -> None:
        found = kind(outcome)
        setattr(slot, found, getattr(slot, found) + 1)
        if outcome.reason:
            reason = outcome.reason if outcome.reason in REASONS else "other"
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if spared:
            slot.kept_off += spared
            self.spared[outcome.result] += spared
        if outcome.image:
            image = self.image(outcome.image)
            image.starts += found != "aside"
            image.hits += found == "hit"
            image.spared += spared
            image.size = outcome.size or image.size


def kind(outcome: Outcome) -> Kind:
    """Pure: what a start found. `aside`: nothing was to be staged, by a rule or the job's wish."""
    if outcome.result == "hit":
        return "hit"
    if outcome.result == "joined":
        return "joined"
    if outcome.result in ("copied", "started"):
        return "cold"
    # A request that was declined before its image was found has no key.
    was_tried = outcome.result == "failed" or (outcome.key and outcome.reason != "off")
    return "original" if was_tried else "aside"


def is_sound(event: Event) -> bool:
    """Pure: whether its figures can be: a damaged line may still be JSON."""
    outcome = event.outcome
    sizes = (outcome.bytes, outcome.size, outcome.resumed, outcome.from_peers)
    times = (outcome.wait, outcome.copying, event.total)
    parts = (outcome.resumed, outcome.from_peers)
    return (
        all(0 <= size <= MAX_SIZE for size in sizes)
        and all(0 <= time <= MAX_DURATION for time in times)
        and (outcome.result != "copied" or event.hook != "stager" or max(parts) <= outcome.bytes)
    )
