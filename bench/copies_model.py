"""Simulated cluster: which share of the copies finds a warm node, and at how many questions?

Nodes ask as forestage does: the code that decides whom to ask, what those remember and who is
tried is features/peers/known_copies. Time goes in jobs; each takes the next free nodes at random,
and one
image drawn by Zipf's law. A node keeps the images it used last, so many as fit.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from forestage.features.peers import known_copies
from forestage.features.peers.known_copies import KnownCopiesReply, RequesterTable


class CopiesCase(NamedTuple):
    """`dead`: share of the nodes that answer nobody and run no jobs. `restarts`: of the services,
    for each job, which then remember nothing. `kept` images fit on a node. `spacing`: seconds
    between two jobs. `liars` announce themselves for every key, again and again, and have none."""

    nodes: int = 2000
    images: int = 200
    jobs: int = 4000
    width: int = 4  # nodes of a job
    kept: int = 5
    dead: float = 0.05
    restarts: float = 0.1
    spacing: float = 10.0
    liars: int = 1
    remembers: bool = True


class CopiesResult(NamedTuple):
    """Of copies whose image some node had: `oracle` counts them, `gain` is the share that found
    one. `questions` and `tries` are per copy."""

    copies: int
    oracle: int
    gain: float
    questions: float
    tries: float


class SimulatedNode:
    def __init__(self) -> None:
        self.askers = RequesterTable()
        self.images: OrderedDict[str, None] = OrderedDict()
        self.dead = False


class CopiesSimulation:
    """All nodes, and who really has what."""

    def __init__(self, case: CopiesCase, seed: int = 1) -> None:
        self.case = case
        self.chance = random.Random(seed)
        self.names = [f"n{number}" for number in range(case.nodes)]
        self.nodes = {name: SimulatedNode() for name in self.names}
        for name in self.chance.sample(self.names, round(case.dead * case.nodes)):
            self.nodes[name].dead = True
        self.alive = [name for name in self.names if not self.nodes[name].dead]
        self.liars = self.alive[: case.liars]
        self.keys = [f"{number:032x}" for number in range(case.images)]
        self.asked = {
            key: known_copies.pick_nodes_to_query(key, self.names, "") for key in self.keys
        }
        self.holders: Counter[str] = Counter()
        self.count: Counter[str] = Counter()

    def run(self) -> CopiesResult:
        case = self.case
        weights = [1 / rank for rank in range(1, case.images + 1)]
        for number in range(case.jobs):
            now = number * case.spacing
            self._trouble(number, now)
            (key,) = self.chance.choices(self.keys, weights)
            job = self.chance.sample(self.alive[case.liars :], case.width)
            cold = [name for name in job if key not in self.nodes[name].images]
            warm_elsewhere = self.holders[key] > case.width - len(cold)
            # Where a node of the job has it, the job's own nodes are enough.
            if len(cold) == len(job):
                for name in job:
                    self._copy(name, key, job, warm_elsewhere, now)
            for name in job:
                self._use(name, key)
        counts = self.count
        return CopiesResult(
            counts["copies"],
            counts["oracle"],
            counts["found"] / max(1, counts["oracle"]),
            counts["questions"] / counts["copies"],
            counts["tries"] / counts["copies"],
        )

    def _trouble(self, number: int, now: float) -> None:
        if self.chance.random() < self.case.restarts:
            self.nodes[self.chance.choice(self.names)].askers = RequesterTable()
        for liar, key in itertools.product(self.liars, self.keys if number % 50 == 0 else ()):
            self._ask(liar, key, [liar], now)

    def _ask(
        self, name: str, key: str, job: Sequence[str], now: float
    ) -> list[tuple[str, KnownCopiesReply]]:
        asked = self.asked[key]
        if name in asked:
            asked = known_copies.pick_nodes_to_query(key, self.names, name)
        says = name if known_copies.should_announce(key, job, name) else None
        answers = []
        for other in asked:
            node = self.nodes[other]
            if not node.dead:
                names = node.askers.record_and_list(key, says, now) if self.case.remembers else ()
                has = key in node.images or other in self.liars
                answers.append((other, KnownCopiesReply(has, names)))
        if name not in self.liars:
            self.count["questions"] += len(set(asked) - {name})
        return answers

    def _copy(self, name: str, key: str, job: Sequence[str], warm: bool, now: float) -> None:
        known = frozenset(self.names).difference(job)
        tried = known_copies.pick_givers(self._ask(name, key, job, now), known)
        self.count["copies"] += 1
        self.count["tries"] += len(tried)
        self.count["oracle"] += warm
        self.count["found"] += any(key in self.nodes[one].images for one in tried)

    def _use(self, name: str, key: str) -> None:
        images = self.nodes[name].images
        self.holders[key] += key not in images
        images[key] = None
        images.move_to_end(key)
        if len(images) > self.case.kept:
            gone, _ = images.popitem(last=False)
            self.holders[gone] -= 1
