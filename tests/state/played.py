"""How a hook is run here: with everything real but slurmd, and with the answer it gave."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.commands import sweep
from forestage.events import Outcome
from forestage.hooks.boundary import HookRun, has_no_work
from forestage.paths import NodePaths
from forestage.slurm.job import Job
from forestage.slurm.slurm_client import JobState
from forestage.slurm.slurm_client import SlurmClient as RealSlurm

Name = Literal["prolog", "step", "epilog"]


@dataclass(frozen=True)
class Ended:
    """How a hook ended; `error` is what reached the fail-open boundary, if anything did.

    `answer` are the fields for the companion, `bad` the keys of which a sweep says so. One that is
    `paused` has not ended yet.
    """

    outcomes: tuple[Outcome, ...] = ()
    answer: tuple[str, ...] = ()
    error: str = ""
    bad: tuple[str, ...] = ()
    killed: bool = False
    paused: bool = False


class Watched(HookRun):
    """A hook whose outcomes and answer can be seen without its event file, which may be full."""

    outcomes: tuple[Outcome, ...] = ()
    given: tuple[str, ...] = ()

    def record_outcomes(
        self, job: Job, outcomes: Sequence[Outcome], places: NodePaths, clock: Clock
    ) -> None:
        self.outcomes = tuple(outcomes)
        super().record_outcomes(job, outcomes, places, clock)

    def write_answer(self, *fields: str) -> None:
        self.given = self.given or fields

    def write_log_line(self, text: str) -> None:
        """Not to the machine's log."""


def play(name: Name, environ: Mapping[str, str], places: NodePaths, clock: Clock) -> Ended:
    """As `hooks._main` does it, boundary and all."""
    if has_no_work(name, environ, str(places.root)):
        return Ended()
    hook = Watched(name, environ, time.monotonic())
    try:
        hook.run(places, clock)
    except Exception as error:
        return Ended(hook.outcomes, hook.given, repr(error))
    return Ended(hook.outcomes, hook.given)


class Slurm(NamedTuple):
    """A Slurm that knows these jobs, and answers at once; see forestage.slurm."""

    jobs: frozenset[int]
    node: str = "n1"

    def find_job(self, job: int) -> JobState | None:
        return JobState("RUNNING", "n1") if job in self.jobs else None

    def has_node(self, node: str) -> bool:
        return node == "n1"

    def list_jobs_with_steps(self) -> frozenset[int]:
        return frozenset()


def swept(node: Node, jobs: frozenset[int], dry_run: bool) -> Ended:
    """`forestage sweep`, while Slurm knows these jobs; what it could not do is the error."""
    try:
        done = sweep.run_sweep(node, cast(RealSlurm, Slurm(jobs)), dry_run, lambda _: None)
    except Exception as error:
        return Ended(error=repr(error))
    bad = tuple(one.key for one in done.verified if one.result == "bad")
    return Ended(error="; ".join(filter(None, (done.doubt, *done.problems))), bad=bad)
