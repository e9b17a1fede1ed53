"""What a history's nodes would have held with a policy, and how many starts had found their image.

All images have one size, 1. A copy takes a minute, and a node makes one at a time; a job that
starts meanwhile is cold. What a cold job starts with stays in the cache; what was used longest ago
goes for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from prefetch_model import ALL, JobPartStart, QueueHistory, QueueLine

from forestage.features.prefetch.policy import (
    DEFAULT_RULES,
    HeldCopy,
    PrefetchRules,
    WantedImage,
    choose_copy,
    compute_expected_starts,
)

MINUTE = 60.0
EAGER = PrefetchRules(
    least=0.0, quiet=0, margin=1, quota=1, share=1
)  # of those that ours is compared with
Wants = Callable[[int], Mapping[str, WantedImage]]  # what a node wants


class PolicyFacts(NamedTuple):
    """What a policy may know. `past`: each image's share of the starts; `future`: the oracle's."""

    nodes: int
    queue: tuple[QueueLine, ...]
    past: Mapping[str, float]
    future: Mapping[tuple[int, str], int]  # minutes until the next start among the jobs that wait


class PrefetchPolicy(NamedTuple):
    wants: Callable[[PolicyFacts], Wants]
    rules: PrefetchRules = EAGER


class ReplayResult(NamedTuple):
    """Node starts and copies.

    `unused`: copies made before a job that no job used in the end; `needed`: cold starts of what a
    prefetch had evicted; `by_job`, `by_any`: images read from the source, if a job's nodes help
    each other, and if any node that has the image does.
    """

    starts: int
    cold: int
    copies: int
    prefetched: int
    unused: int
    needed: int
    by_job: int
    by_any: int


def _same(expected: Mapping[str, float]) -> Wants:
    wanted = {image: WantedImage(1, 0, starts) for image, starts in expected.items()}
    return lambda node: wanted


def plan_nothing(facts: PolicyFacts) -> Wants:
    return _same({})


def plan_popular_images(facts: PolicyFacts) -> Wants:
    return _same(facts.past)


def plan_everywhere(facts: PolicyFacts) -> Wants:
    return _same({image: 1.0 for look in facts.queue for image in look.line.images})


def make_queue_policy(rules: PrefetchRules = DEFAULT_RULES) -> PrefetchPolicy:
    """Ours, as it is shipped."""

    def wants(facts: PolicyFacts) -> Wants:
        wanted: dict[str, WantedImage] = {}
        for one in compute_expected_starts(
            (look.line for look in facts.queue), {ALL[0]: facts.nodes}, rules
        ):
            first = wanted.get(one.image, WantedImage(1, one.user, 0.0))
            wanted[one.image] = first._replace(starts=first.starts + one.starts)
        return lambda node: wanted

    return PrefetchPolicy(wants, rules)


def make_plan_policy(rules: PrefetchRules = DEFAULT_RULES, named: float = 0.3) -> PrefetchPolicy:
    """The same, and of a job's starts `named` are on each node that one of its plans has named."""

    def wants(facts: PolicyFacts) -> Wants:
        anywhere: Counter[str] = Counter()
        here: defaultdict[int, Counter[str]] = defaultdict(Counter)
        users: dict[str, int] = {}
        ahead = 0
        for (user, (image, *_), nodes, _), on in map(_parts, facts.queue):
            worth = rules.late ** (ahead / facts.nodes)
            ahead += nodes
            users.setdefault(image, user)
            each = min(named, nodes / max(1, len(on)))
            for node in on:
                here[node][image] += each * worth
            anywhere[image] += (nodes - each * len(on)) / facts.nodes * worth
        return lambda node: {
            image: WantedImage(1, users[image], starts)
            for image, starts in (anywhere + here[node]).items()
        }

    return PrefetchPolicy(wants, rules)


def _parts(
    look: QueueLine,
) -> tuple[tuple[int, tuple[str, ...], int, tuple[str, ...]], frozenset[int]]:
    line = look.line
    return (line.user, line.images, line.nodes, line.partitions), look.named


def plan_as_oracle(facts: PolicyFacts) -> Wants:
    """The real nodes of all that waits, the next start first."""
    here: defaultdict[int, dict[str, WantedImage]] = defaultdict(dict)
    for (node, image), after in facts.future.items():
        here[node][image] = WantedImage(1, 0, 1 / (1 + after))
    return lambda node: here[node]


POLICIES = {
    "none": PrefetchPolicy(plan_nothing),
    "popular": PrefetchPolicy(plan_popular_images),
    "everywhere": PrefetchPolicy(plan_everywhere),
    "queue": make_queue_policy(),
    "plans": make_plan_policy(),
    "oracle": PrefetchPolicy(plan_as_oracle),
}


class PolicyReplay:
    def __init__(self, history: QueueHistory, room: int, policy: PrefetchPolicy) -> None:
        self.history, self.room, self.policy = history, room, policy
        self.holds: list[dict[str, HeldCopy]] = [{} for _ in range(history.nodes)]
        self.jobs: list[Counter[str]] = [Counter() for _ in range(history.nodes)]  # that run
        self.copying: dict[int, tuple[str, int]] = {}  # by node: a prefetch, and when it ends
        self.having: Counter[str] = Counter()  # nodes with each image, or a part of it
        self.evicted: set[tuple[int, str]] = set()  # by a prefetch, not copied again since
        self.past: Counter[str] = Counter()
        self.found: Counter[str] = Counter()

    def run(self) -> ReplayResult:
        starting, ending, asked = defaultdict(list), defaultdict(list), defaultdict(list)
        for start in self.history.starts:
            starting[start.at].append(start)
            ending[start.end].append(start)
            asked[start.asked].append(start)
        waiting: dict[int, JobPartStart] = {}
        for now, look in enumerate(self.history.looks):
            waiting.update((id(start), start) for start in asked[now])
            for start in ending[now]:
                self._end(start, now)
            for node, (image, ready) in list(self.copying.items()):
                if ready <= now:
                    del self.copying[node]
                    self._set(node, image, stays=self.jobs[node][image] > 0)
            for start in starting[now]:
                waiting.pop(id(start), None)
                self._start(start, now)
            self._prefetch(now, tuple(look), waiting)
        self.found["unused"] += sum(held.fresh for holds in self.holds for held in holds.values())
        return ReplayResult(**{name: self.found[name] for name in ReplayResult._fields})

    def _set(self, node: int, image: str, **changes: Any) -> None:
        self.holds[node][image] = self.holds[node][image]._replace(**changes)

    def _end(self, start: JobPartStart, now: int) -> None:
        for node in start.nodes:
            self.jobs[node][start.image] -= 1
            if start.image in self.holds[node] and not self.jobs[node][start.image]:
                self._set(node, start.image, used=now * MINUTE, stays=False)

    def _start(self, start: JobPartStart, now: int) -> None:
        image = start.image
        had = self.having[image]
        missing = [node for node in start.nodes if image not in self.holds[node]]
        self.found["by_job"] += len(missing) == len(start.nodes)
        self.found["by_any"] += bool(missing) and not had
        for node in start.nodes:
            self.found["starts"] += 1
            self.past[image] += 1
            self.jobs[node][image] += 1
            self.found["cold"] += node in missing or self.copying.get(node, ("", 0))[0] == image
            if node in missing:
                self.found["copies"] += 1
                self.found["needed"] += (node, image) in self.evicted
                self.evicted.discard((node, image))
                if self._make_room(node, self._busy(node)):  # else it reads the shared path
                    self._add(node, image, HeldCopy(1, now * MINUTE, stays=True))
            else:
                self._set(node, image, used=now * MINUTE, fresh=False, stays=True)

    def _add(self, node: int, image: str, held: HeldCopy) -> None:
        self.holds[node][image] = held
        self.having[image] += 1

    def _busy(self, node: int) -> frozenset[str]:
        return frozenset(image for image, held in self.holds[node].items() if held.stays)

    def _make_room(self, node: int, stay: frozenset[str], early: bool = False) -> bool:
        """As cache/evict does; `early`: for a prefetch."""
        holds = self.holds[node]
        if len(holds) >= self.room:
            idle = [(held.used, image) for image, held in holds.items() if image not in stay]
            if not idle:
                return False
            image = min(idle)[1]
            self.found["unused"] += holds.pop(image).fresh
            self.having[image] -= 1
            if early:
                self.evicted.add((node, image))
        return True

    def _prefetch(
        self, now: int, looks: tuple[QueueLine, ...], waiting: dict[int, JobPartStart]
    ) -> None:
        total = self.past.total() or 1
        past = {image: count / total for image, count in self.past.items()}
        facts = PolicyFacts(self.history.nodes, looks, past, dict(_future(waiting, now)))
        wants = self.policy.wants(facts)
        for node, holds in enumerate(self.holds):
            if node in self.copying:
                continue
            copy = choose_copy(wants(node), holds, self.room, now * MINUTE, self.policy.rules)
            if copy is None:
                continue
            self._make_room(node, copy.stay, early=True)
            self.evicted.discard((node, copy.image))
            self.found["copies"] += 1
            self.found["prefetched"] += 1
            self.found["by_job"] += 1
            self.found["by_any"] += not self.having[copy.image]
            self._add(
                node, copy.image, HeldCopy(1, now * MINUTE, copy.user, fresh=True, stays=True)
            )
            self.copying[node] = (copy.image, now + 1)


def _future(waiting: Mapping[int, JobPartStart], now: int) -> Iterator[tuple[tuple[int, str], int]]:
    soon: dict[tuple[int, str], int] = {}
    for start in waiting.values():
        for node in start.nodes:
            after = start.at - now
            soon[node, start.image] = min(after, soon.get((node, start.image), after))
    return iter(soon.items())
