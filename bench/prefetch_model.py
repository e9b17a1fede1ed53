"""Histories of a cluster: what waited with which plans, minute by minute, and what started where.

`read_recording` reads those of a real slurmctld (bench/prefetch_record.py), a second of which
counts as a minute. `simulate_queue` makes others: backfill as Slurm does it, all plans made anew in
each pass, over bitmaps of slots and a table of times. What it leaves out: priorities (first come,
first), licenses, topology.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from forestage.features.prefetch.policy import PendingJob

USERS = 8
ALL = ("all",)  # partitions


class QueueLine(NamedTuple):
    """A line of the queue as a look shows it; `named`: nodes of all its plans so far."""

    line: PendingJob
    named: frozenset[int]


class JobPartStart(NamedTuple):
    """A part of a job: all with one image. `asked`: when it was submitted."""

    at: int
    end: int
    asked: int
    image: str
    nodes: tuple[int, ...]


class QueueHistory(NamedTuple):
    """`looks`: the queue at each minute, after what started then."""

    nodes: int
    starts: Sequence[JobPartStart]
    looks: Sequence[Sequence[QueueLine]]


class QueueShape(NamedTuple):
    """A random queue. `slots`: jobs that a node can take, 1 is exclusive.

    `arrays`, `het`: parts of all jobs; `reserved`: part of the nodes, in the middle third, for one
    user; `grain`: of plans, in minutes.
    """

    nodes: int = 32
    minutes: int = 600
    queue: int = 40
    largest: int = 8
    slots: int = 1
    arrays: float = 0.0
    het: float = 0.0
    reserved: float = 0.0
    grain: int = 1


class SimulatedJob(NamedTuple):
    line: int
    user: int
    images: tuple[str, ...]  # of a heterogeneous job one for each part
    wants: int  # nodes of each part
    whole: bool
    course: bool
    runs: int
    limit: int
    asked: int


def draw_zipf(images: int, chance: random.Random) -> Iterator[str]:
    weights = [1 / rank for rank in range(1, images + 1)]
    while True:
        yield from (f"i{number}" for number in chance.choices(range(images), weights, k=100))


def assign_images(history: QueueHistory, images: int, seed: int) -> QueueHistory:
    """The same jobs with so many images, a Zipf distribution of them."""
    names = draw_zipf(images, random.Random(seed))
    label: defaultdict[str, str] = defaultdict(lambda: next(names))
    starts = [start._replace(image=label[start.image]) for start in history.starts]
    looks = [[_named(job, label) for job in look] for look in history.looks]
    return QueueHistory(history.nodes, starts, looks)


def _named(job: QueueLine, label: Mapping[str, str]) -> QueueLine:
    images = tuple(label[image] for image in job.line.images)
    return job._replace(line=msgspec.structs.replace(job.line, images=images))


def read_recording(path: Path) -> QueueHistory:
    """A recording; each line of its queue has an image of its own."""
    data = json.loads(path.read_text())
    jobs, plans = data["jobs"], data["plans"]
    lines: dict[str, list[tuple[int, int, str]]] = {}  # by line: start and count of its tasks
    starts = []
    for job in jobs.values():
        at, nodes = round(job["start"]), tuple(int(name[1:]) - 1 for name in job["nodes"])
        asked = round(plans[job["base"]][0][0]) if job["base"] in plans else at
        starts.append(JobPartStart(at, round(job["end"]), asked, job["base"], nodes))
        lines.setdefault(job["base"], []).append((at, job["count"], job["user"]))
    ends = max(start.at for start in starts)
    users = {
        name: number for number, name in enumerate(sorted({job["user"] for job in jobs.values()}))
    }
    looks: list[list[QueueLine]] = [[] for _ in range(ends + 1)]
    for base, seen in plans.items():
        named: frozenset[int] = frozenset()
        tasks = lines.get(base, [(ends + 1, max(1, *(len(p[1]) for p in seen), 1), "nobody")])
        for (at, nodes), (until, _) in zip(seen, [*seen[1:], (ends + 1, ())], strict=True):
            named |= {int(name[1:]) - 1 for name in nodes}
            for now in range(
                round(at), min(round(until), max(task[0] for task in tasks), ends + 1)
            ):
                count = sum(count for start, count, _ in tasks if start > now)
                line = PendingJob(users.get(tasks[0][2], -1), (base,), count, ALL)
                looks[now].append(QueueLine(line, named))
    return QueueHistory(1 + max(n for s in starts for n in s.nodes), sorted(starts), looks)


class BackfillPass:
    """One pass: the slots free from each time on, and what is taken of them, job by job.

    Slot s of node n is bit s * nodes + n.
    """

    def __init__(self, shape: QueueShape, now: int, running: Sequence[tuple[int, int]]) -> None:
        """`running`: by when its limit ends, and its slots."""
        self.shape, self.now = shape, now
        self.row = (1 << shape.nodes) - 1
        busy, free = 0, (1 << shape.nodes * shape.slots) - 1
        ends: dict[int, int] = {}
        for end, slots in running:
            busy |= slots
            after = max(now + 1, -(-end // shape.grain) * shape.grain)
            ends[after] = ends.get(after, 0) | slots
        self.times, self.free = [now], [free & ~busy]
        for end in sorted(ends):
            self.times.append(end)
            self.free.append(self.free[-1] | ends[end])
        third = shape.minutes // 3
        self.course = (third, 2 * third, (1 << int(shape.nodes * shape.reserved)) - 1)

    def place(self, job: SimulatedJob) -> tuple[int, int]:
        """When it starts, and its slots, taken."""
        begin, end, reserved = self.course
        for index, at in enumerate(self.times):
            until, free = at + job.limit, self.free[index]
            nodes = self.row
            if job.course:
                nodes = reserved if begin <= at < end else 0
            elif at < end and until > begin:
                nodes &= ~reserved
            last = index
            want = job.wants * len(job.images)
            while (usable := self._nodes(free, job.whole) & nodes).bit_count() >= want:
                last += 1
                if last == len(self.times) or self.times[last] >= until:
                    slots = self._take(free, usable, want, job.whole)
                    self._book(index, last, until, slots)
                    return at, slots
                free &= self.free[last]
        return self.times[-1] + 1, 0  # after the course, say: no plan

    def _nodes(self, free: int, whole: bool) -> int:
        rows = [free >> self.shape.nodes * slot & self.row for slot in range(self.shape.slots)]
        found = rows[0]
        for row in rows[1:]:
            found = found & row if whole else found | row
        return found

    def _take(self, free: int, usable: int, count: int, whole: bool) -> int:
        taken = 0
        for _ in range(count):
            node = usable & -usable
            usable ^= node
            slots = [node << self.shape.nodes * slot for slot in range(self.shape.slots)]
            taken |= sum(slots) if whole else next(slot for slot in slots if slot & free)
        return taken

    def _book(self, first: int, last: int, until: int, slots: int) -> None:
        if last == len(self.times) or self.times[last] > until:
            self.times.insert(last, until)
            self.free.insert(last, self.free[last - 1])
        for index in range(first, last):
            self.free[index] &= ~slots


def simulate_queue(shape: QueueShape, seed: int) -> QueueHistory:
    """A random queue; each part of a line of it has an image of its own."""
    chance = random.Random(seed)
    running: list[tuple[int, int, int]] = []  # end, its limit's end, slots
    queue: list[SimulatedJob] = []
    named: dict[int, int] = {}  # of each line: the nodes of all its plans
    starts: list[JobPartStart] = []
    looks = []
    row = (1 << shape.nodes) - 1
    line = 0
    for now in range(shape.minutes):
        running = [job for job in running if job[0] > now]
        while len({job.line for job in queue}) < shape.queue:
            line += 1
            queue += _draw_jobs(shape, line, chance, now)
        table = BackfillPass(shape, now, [job[1:] for job in running])
        waiting: dict[int, list[SimulatedJob]] = {}
        for job in queue:
            at, slots = table.place(job)
            nodes = 0
            for slot in range(shape.slots):
                nodes |= slots >> shape.nodes * slot & row
            if slots and at == now:
                running.append((now + job.runs, now + job.limit, slots))
                numbers = tuple(_list_bits(nodes))
                for part, image in enumerate(job.images):
                    on = numbers[part * job.wants : (part + 1) * job.wants]
                    starts.append(JobPartStart(now, now + job.runs, job.asked, image, on))
            else:
                if job.line not in waiting:  # of an array squeue shows one task's plan
                    named[job.line] = named.get(job.line, 0) | nodes
                waiting.setdefault(job.line, []).append(job)
        queue = [job for jobs in waiting.values() for job in jobs]
        looks.append([_make_queue_line(jobs, named[number]) for number, jobs in waiting.items()])
    return QueueHistory(shape.nodes, starts, looks)


def _make_queue_line(jobs: Sequence[SimulatedJob], named: int) -> QueueLine:
    """A line of the queue. Of a heterogeneous job only the first image is known."""
    job = jobs[0]
    line = PendingJob(job.user, job.images[:1], job.wants * len(jobs), ALL)
    return QueueLine(line, frozenset(_list_bits(named)))


def _draw_jobs(shape: QueueShape, line: int, chance: random.Random, now: int) -> list[SimulatedJob]:
    """A job, or an array's tasks; half are of one node, and a limit is up to 6 times the run."""
    runs = chance.randint(8, 45)
    kind = chance.random()
    array, het = kind < shape.arrays, shape.arrays <= kind < shape.arrays + shape.het
    count = 1 if array or chance.random() < 0.5 else chance.randint(1, shape.largest)
    user = chance.randrange(USERS)
    job = SimulatedJob(
        line,
        user,
        (str(line), f"{line}+1") if het else (str(line),),
        count,
        shape.slots == 1 or chance.random() < 0.5,
        bool(shape.reserved and user == 0 and now < shape.minutes // 2 and not het),
        runs,
        int(runs * chance.uniform(1, 6)) + 1,
        now,
    )
    return [job] * (chance.randint(2, 8) if array else 1)


def _list_bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
