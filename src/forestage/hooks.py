"""The hooks as slurmd runs them: stay out of the way, fail open, one line in the log.

slurmd drains a node whose Prolog or Epilog does not exit 0 (slurm.conf(5), `Prolog`). So nothing
that goes wrong here gets out, unless the admin asked for it with `on_error: drain`. A hook must run
no Slurm command, gets no PATH, and imports next to nothing before it knows that there is work: a
job without an image pays for one bare interpreter start.
"""

from __future__ import annotations

import gc
import os
import time

from forestage import log

TYPE_CHECKING = False  # the real one costs the import of typing, 9 ms; checkers know it by name
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, NoReturn

    from forestage.clock import Clock
    from forestage.config import Config
    from forestage.events import Outcome
    from forestage.job import Job
    from forestage.places import Places

    Name = Literal["prolog", "epilog"]

DRAIN = 75
"""The one exit status that the shell guard of the hooks does not turn into 0."""

IMAGE_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_image"


def main(name: Name) -> NoReturn:
    """What prolog/forestage and epilog/forestage call, as root. Ends the process."""
    # A hook lives for a tenth of a second and leaves nothing to clean up: collecting garbage and
    # taking the interpreter apart cost a warm hit 14 ms of 100.
    gc.disable()
    os._exit(_main(name))


def _main(name: Name) -> int:
    hook = Hook(name, os.environ, time.monotonic())
    if nothing_to_do(name, os.environ, "/run/forestage/leases"):
        hook.say("result=none")
        return 0
    try:
        from forestage.clock import Clock
        from forestage.places import Places

        return hook.run(Places(), Clock())
    except Exception as error:  # noqa: BLE001 - the fail-open boundary, the only one in the program
        what = f"reason={type(error).__name__} at={_place(error)} detail={str(error)[:1000]!r}"
        hook.say(f"result=failed {what}")
        return DRAIN if hook.drains else 0


def nothing_to_do(name: Name, environ: Mapping[str, str], leases: str) -> bool:
    """Whether this job is none of ours: told without an import, and never wrongly."""
    if name == "prolog":
        return IMAGE_OPTION not in environ and "stage" not in environ.get("SLURM_JOB_COMMENT", "")
    return not os.path.exists(f"{leases}/{environ.get('SLURM_JOB_ID', '')}.json")


class Hook:
    """One run of a hook. `drains` tells the boundary what the admin wants of a failure."""

    def __init__(self, name: Name, environ: Mapping[str, str], start: float) -> None:
        self.name = name
        self.environ = environ
        self.start = start
        self.drains = False

    def run(self, places: Places, clock: Clock) -> int:
        """The work, its log line and its events. Expected errors become outcomes; others rise."""
        from forestage.job import Job

        job = Job.from_environ(self.environ)
        outcomes = (
            self._epilog(job, places, clock)
            if self.name == "epilog"
            else self._prolog(job, places, clock)
        )
        self._report(job, outcomes, places, clock)
        failed = any(outcome.result == "failed" for outcome in outcomes)
        return DRAIN if failed and self.drains else 0

    def _prolog(self, job: Job, places: Places, clock: Clock) -> list[Outcome]:
        from forestage import deadline, prolog
        from forestage.errors import ConfigError, Failed
        from forestage.node import Node

        if not job.asked:
            return prolog.misread(job)
        try:
            config = self._config(job, places)
        except ConfigError as error:
            failed = Failed("config", error.one_line)
            return [prolog.outcome_of(asked, failed) for asked in job.asked]
        return prolog.prolog(
            Node.of(config, places, clock), job, deadline.read(self.environ.get("SLURM_CONF", ""))
        )

    def _epilog(self, job: Job, places: Places, clock: Clock) -> list[Outcome]:
        from forestage import deadline, epilog
        from forestage.errors import ConfigError

        try:
            config = self._config(job, places)
        except ConfigError as error:
            self.say(f"result=failed reason=config detail={error.one_line!r}")
            config = None
        limits = deadline.read(self.environ.get("SLURM_CONF", ""))
        return epilog.epilog(config, places, clock, job, limits)

    def _config(self, job: Job, places: Places) -> Config:
        from forestage import settings

        found = settings.load(places.etc, owner=os.geteuid()).for_partition(job.partition)
        self.drains = found.on_error == "drain"
        return found

    def _report(self, job: Job, outcomes: list[Outcome], places: Places, clock: Clock) -> None:
        from forestage import events

        total = time.monotonic() - self.start
        self.say(events.summary(job, outcomes, total))
        try:
            events.record(places.events, clock.wall(), self.name, job, outcomes, total)
        except OSError as error:
            # The job is served; a full log disk is no reason to drain its node.
            self.say(f"result=unrecorded detail={str(error)!r}")

    def say(self, text: str) -> None:
        """The hook's line in the log."""
        line = f"{self.name} job={self.environ.get('SLURM_JOB_ID', '?')[:20]} {text}"
        log.say(line, by_slurm="SLURM_SCRIPT_CONTEXT" in self.environ)


def _place(error: Exception) -> str:
    """File and line of the code that raised, for a log that has one line."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else "?"
