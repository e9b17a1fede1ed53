"""The Prolog: stages each image that a starting job names, one outcome for each."""

from forestage.cache.lease import Lease
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, ForestageError
from forestage.events import Handled
from forestage.hooks import image
from forestage.hooks.image import Wait
from forestage.slurm import timeouts
from forestage.slurm.job import Job, Request
from forestage.slurm.timeouts import Limits
from forestage.stage import source
from forestage.system import lock
from forestage.units import printable


def bad_hint(job: Job) -> list[Handled]:
    """Pure: the outcome of a job that names no image, but has hints with problems."""
    if not job.hints.problems:
        return []
    detail = printable("; ".join(job.hints.problems))
    return [Handled(result="declined", reason="bad-hint", detail=detail)]


def prolog(node: Node, job: Job, limit: Wait, refusal: Declined | None) -> list[Handled]:
    """Stages all that the job asks for. Never raises for a request: each gets its outcome.

    `refusal` is why nothing may be staged on this node now.
    """
    outcomes = [
        image.handle(node, job, request, limit, refusal).outcome for request in job.requests
    ]
    if job.hints.off:
        noted = _note_off(node, job, limit.end)
        # Each image has its own outcome, which says the same.
        if noted.result == "failed" or not outcomes:
            outcomes.append(noted)
    return outcomes


def waiting(node: Node, job: Job, limits: Limits, refusal: Declined | None) -> Wait:
    """Returns how long this job's Prolog may go on, and wait for a copy.

    Where all is refused no copy is waited for: then neither the admin's nor the user's word for
    that shortens or lengthens the search for stale redirects.
    """
    config = node.config
    wished, hint = config.deadline, job.hints.wait
    if refusal:
        wished, hint = source.HOOK_TIMEOUT, None
    seconds = timeouts.patience(limits, wished, hint, config.max_stage_wait)
    end = copy = Deadline.after(seconds, node.clock)
    if config.prolog_wait is not None:
        copy = Deadline.after(min(config.prolog_wait, seconds), node.clock)
    return Wait(end, copy, "hand-over" if config.redirect == "spank" else "release")


def _note_off(node: Node, job: Job, end: Deadline) -> Handled:
    """Notes stage=off in the lease for the job's steps, which see no comment."""
    try:
        with lock.held_if_writable(node.cache.space_lock, end.left()):
            since = node.clock.wall()
            lease = node.leases.read(job.id) or Lease(
                job.id, job.user, since, str(node.cache.root), node=job.node
            )
            node.leases.put(lease.switched_off())
    except (ForestageError, OSError) as error:
        return image.of_error(Request("", "hint"), error)
    return Handled(result="declined", via="hint", reason="off", detail="stage=off")
