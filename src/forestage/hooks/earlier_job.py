"""What an earlier job of the same number left: a Prolog releases it, as that Epilog would have.

A number comes again with another job where slurmctld has lost its state or MaxJobId is passed, and
with a later run of a job whose node was down when the first one ended. What a running job has
stays: a job whose number it is, too, does without (hooks/leases.read_or_make_lease).
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage import events
from forestage.cache.lease import Lease, LeaseDirectory
from forestage.clock import Clock
from forestage.errors import Failed
from forestage.events import ReleaseOutcome
from forestage.hooks import background_prolog, epilog
from forestage.hooks.hook_worker import HookPipe
from forestage.paths import NodePaths
from forestage.slurm.hints import JobHints
from forestage.slurm.job import Job
from forestage.slurm.slurm_client import SlurmClient
from forestage.slurm.timeouts import HookTimeLimits
from forestage.system import processes

RELEASE_TIMEOUT = 10.0  # seconds for the space lock, of the Prolog's own


def release_earlier_job(
    places: NodePaths, clock: Clock, job: Job, limits: HookTimeLimits, watched: HookPipe
) -> HookTimeLimits:
    """Releases what another job of this number left here; returns what is left of the limits.

    For a Prolog: nothing else may do so, as only it comes before all else of its job.
    """
    began = clock.monotonic()
    lease = None
    with contextlib.suppress(Failed, OSError):  # whose a damaged lease is, nobody knows
        lease = LeaseDirectory(places.leases).find_lease(job.id)
    if lease is None or lease.belongs_to(job.user.uid, job.start):
        return limits
    if _has_step_manager(job.id, places.root / "proc"):
        return limits
    earlier = _job_from_lease(lease)
    mark = os.fspath(places.leases / f"{job.id}.prolog")
    background_prolog.stop_prolog(mark, {"SLURM_JOB_UID": str(lease.user.uid)})
    most = (
        RELEASE_TIMEOUT
        if limits.node_drained_after is None
        else min(RELEASE_TIMEOUT, limits.node_drained_after / 4)
    )
    short = msgspec.structs.replace(limits, epilog_killed_after=most)
    outcomes: list[ReleaseOutcome] = []
    epilog.run_epilog(None, places, clock, earlier, short, outcomes.append, watched)
    took = clock.monotonic() - began
    with contextlib.suppress(OSError):  # a full log disk keeps no job from being served
        events.record_outcomes(places, clock.wall(), "epilog", earlier, outcomes, took)
    drains = (
        None if limits.node_drained_after is None else max(0.0, limits.node_drained_after - took)
    )
    return msgspec.structs.replace(
        limits, node_drained_after=drains, job_lost_after=max(0.0, limits.job_lost_after - took)
    )


def _job_from_lease(lease: Lease) -> Job:
    """Pure: the job that has the lease, as its Epilog would have known it."""
    return Job(
        id=lease.job,
        user=lease.user,
        node=lease.node,
        partition="",
        work_dir="",
        requests=(),
        saves=None,
        hints=JobHints(),
        start=lease.start,
        restart=lease.restart,
    )


def _has_step_manager(job: int, proc: Path) -> bool:
    """Whether a job of this number has a step manager on this node, but for the one of this hook.

    With PrologFlags=RunInJob the Prolog runs in that of the job's own extern step.
    """
    above, pid = set(), os.getpid()
    while pid > 1 and pid not in above:
        above.add(pid)
        try:
            pid = processes.read_stat(proc / str(pid)).parent
        except OSError:  # of a test's node, or the hook was given to another parent
            break
    managers = SlurmClient("", proc=proc).list_step_managers()
    return any(number == job and pid not in above for pid, number in managers.items())
