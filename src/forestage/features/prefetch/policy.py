"""Prefetch policy: which image a node copies before a job starts, and what stays for that.

Pure. On one host `compute_expected_starts` turns what waits, in Slurm's order, into expected
starts; that is the same for all nodes of a partition, as where Slurm plans a job says little
(docs/decisions/0052). On each node `choose_copy` returns what to copy now, or None. Sizes are
bytes, times seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec


class PendingJob(msgspec.Struct, frozen=True):
    """A line of the queue: a job, or what waits of an array.

    `user` is their uid, `nodes` how many all its tasks want. `partitions` may be several.
    """

    user: int
    images: tuple[str, ...]
    nodes: int
    partitions: tuple[str, ...]


class ExpectedStarts(msgspec.Struct, frozen=True):
    """How many of a user's jobs with this image are expected to start on each node of a partition.

    `starts` is a chance, or more than 1 where several such jobs wait. A row for each user, so that
    one who names an image that is not theirs takes it from nobody.
    """

    partition: str
    image: str
    user: int
    starts: float


class WantedImage(NamedTuple):
    """An image as this node would copy it: as `user`; `starts` are those of all its rows."""

    size: int
    user: int
    starts: float


class HeldCopy(NamedTuple):
    """A copy on this node. `used`: when last, or when it was made for `user` if it is `fresh`.

    `fresh`: no job has used it yet. `stays`: it is leased, pinned or under way.
    """

    size: int
    used: float
    user: int = 0
    fresh: bool = False
    stays: bool = False


class PrefetchChoice(NamedTuple):
    """What a node should copy now; of the copies that it holds, `stay` are not to be evicted."""

    image: str
    user: int
    stay: frozenset[str]


class PrefetchRules(NamedTuple):
    """The figures of the policy; docs/prefetch-policy.md shows what others would give.

    least   expected starts below which nothing is copied
    late    what a job's starts are worth each time that the jobs ahead of it fill the partition
    crowd   how often one user's jobs can fill it for those of others
    quiet   seconds for which a copy stays after its last use
    margin  a copy stays unless the new one is expected so many times as much
    quota   part of the room that fresh copies may fill
    share   part of the room that one user's fresh copies may fill
    """

    least: float = 0.1
    late: float = 0.5
    crowd: float = 2.0
    quiet: float = 1800
    margin: float = 2.0
    quota: float = 0.75
    share: float = 0.5


DEFAULT_RULES = PrefetchRules()


def compute_expected_starts(
    queue: Iterable[PendingJob], nodes: Mapping[str, int], rules: PrefetchRules = DEFAULT_RULES
) -> tuple[ExpectedStarts, ...]:
    """The expected starts, most first; `queue` is in Slurm's order, `nodes` each partition's count.

    A job's starts add up to the nodes that it wants.
    """
    found: Counter[tuple[str, str, int]] = Counter()
    # How often the jobs before this one fill each partition: all of them, and one user's alone.
    ahead = dict.fromkeys(nodes, 0.0)
    own: defaultdict[tuple[str, int], float] = defaultdict(float)
    for job in queue:
        partitions = [name for name in job.partitions if nodes.get(name)]
        starts = job.nodes / max(1, sum(nodes[name] for name in partitions))
        for name in partitions:
            before = own[name, job.user]
            counted = min(before, rules.crowd)
            worth = rules.late ** (ahead[name] - counted + before)
            own[name, job.user] += starts
            ahead[name] += min(before + starts, rules.crowd) - counted
            for image in job.images:
                found[name, image, job.user] += starts * worth
    return tuple(ExpectedStarts(*row, starts) for row, starts in found.most_common())


def choose_copy(
    wanted: Mapping[str, WantedImage],
    held: Mapping[str, HeldCopy],
    room: int,
    now: float,
    rules: PrefetchRules = DEFAULT_RULES,
) -> PrefetchChoice | None:
    """The most expected image that this node lacks and the rules allow; `room` is all of it."""
    fresh: Counter[int] = Counter()
    for copy in held.values():
        fresh[copy.user] += copy.size * copy.fresh
    all_fresh = fresh.total()
    stay = {
        name
        for name, copy in held.items()
        if copy.stays or (not copy.fresh and copy.used > now - rules.quiet)
    }
    staying = sum(held[name].size for name in stay)
    # Less and less is expected of what is lacking, so more and more of these stay: the last first.
    others = sorted((wanted[name].starts, name) for name in held if name in wanted)
    others = [one for one in others if one[1] not in stay]
    lacking = [(one.starts, image) for image, one in wanted.items() if image not in held]
    for starts, image in sorted(lacking, reverse=True):
        size, user, _ = wanted[image]
        if starts < rules.least:
            break
        while others and others[-1][0] * rules.margin >= starts:
            _, name = others.pop()
            stay.add(name)
            staying += held[name].size
        if all_fresh + size > rules.quota * room or fresh[user] + size > rules.share * room:
            continue
        if size + staying <= room:
            return PrefetchChoice(image, user, frozenset(stay))
    return None
