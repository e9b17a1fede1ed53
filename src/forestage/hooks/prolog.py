"""What happens when a job starts: each image it asks for is staged; one outcome for each."""

from forestage.cache.lease import Lease
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.events import Outcome
from forestage.hooks import image as request
from forestage.hooks.image import Patience, Served
from forestage.slurm import timeouts
from forestage.slurm.job import Asked, Job
from forestage.slurm.timeouts import Limits
from forestage.system import lock
from forestage.units import printable


def misread(job: Job) -> list[Outcome]:
    """Pure: the outcome of a job that names no image, but tried to tell us something."""
    if not job.hints.problems:
        return []
    detail = printable("; ".join(job.hints.problems))
    return [Outcome(result="declined", reason="bad-hint", detail=detail)]


def prolog(node: Node, job: Job, limits: Limits, off: str = "") -> list[Outcome]:
    """Stages all that the job asks for. Never raises for a request: each gets its outcome.

    `off`: why the admin has switched staging off on this node; "" if not.
    """
    config = node.config
    seconds = timeouts.patience(limits, config.deadline, job.hints.wait, config.max_stage_wait)
    end = Deadline.after(seconds, node.clock)
    copy = end
    if config.prolog_wait is not None:
        copy = Deadline.after(min(config.prolog_wait, seconds), node.clock)
    patience = Patience(end, copy, "hand-over" if config.redirect == "spank" else "release")
    if off or not config.enabled:
        why = off or "`enabled: false`"
        outcomes = [request.refuse(node, job, asked, why, end).outcome for asked in job.asked]
    else:
        outcomes = [request.serve(node, job, asked, patience).outcome for asked in job.asked]
    if job.hints.off:
        noted = request.told(Asked("", "hint"), node.clock, lambda: _note_off(node, job, end))
        # Each image has its own outcome, which says the same.
        if noted.outcome.result == "failed" or not outcomes:
            outcomes.append(noted.outcome)
    return outcomes


def _note_off(node: Node, job: Job, end: Deadline) -> Served:
    """Notes stage=off for the job's steps, which see no comment."""
    with lock.held_if_writable(node.cache.space_lock, end.left()):
        since = node.clock.wall()
        held = node.leases.read(job.id) or Lease(
            job.id, job.user, since, str(node.cache.root), node=job.node
        )
        node.leases.put(held.switched_off())
    return Served(Outcome(result="declined", via="hint", reason="off", detail="stage=off"))
