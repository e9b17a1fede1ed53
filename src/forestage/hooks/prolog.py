"""The Prolog: stages each image that a starting job names, one outcome for each."""

import contextlib

import msgspec

from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, ForestageError
from forestage.events import Handled
from forestage.hooks import image
from forestage.hooks.image import Answer, Wait
from forestage.slurm import timeouts
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
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


def prolog(node: Node, job: Job, limit: Wait, refusal: Declined | None) -> list[Answer]:
    """Stages all that the job asks for. Never raises for a request: each gets its answer.

    `refusal` is why nothing may be staged on this node now.
    """
    answers = image.handle(node, job, job.requests, limit, refusal)
    if node.config.redirect == "spank":
        _note_hinted(node, job, answers)
    if job.hints.for_steps:
        noted = _note_hints(node, job, limit.end)
        # Each image has its own outcome, which says the same.
        if noted and (noted.result == "failed" or not answers):
            answers.append(Answer(noted))
    return answers or [Answer(one) for one in bad_hint(job)]


def waiting(node: Node, job: Job, limits: Limits, refusal: Declined | None) -> Wait:
    """Returns how long this job's Prolog may go on, and wait for copies.

    Where all is refused neither the admin's nor the user's word for that shortens or lengthens the
    search for stale redirects.
    """
    config, hint = node.config, job.hints.wait
    if refusal:
        seconds = timeouts.patience(limits, source.HOOK_TIMEOUT)
        return Wait.of(node.clock, seconds, None, small=False)
    seconds = timeouts.patience(limits, config.deadline)
    if config.redirect == "spank":  # the steps wait, where no timeout of Slurm's ends that
        return Wait.of(node.clock, seconds, None, small=False)
    wish = image.wished(config, hint, limits.hurts)
    copy = None if wish is None else timeouts.patience(limits, wish)
    return Wait.of(node.clock, seconds, copy, small=hint != 0)


def _note_hinted(node: Node, job: Job, answers: list[Answer]) -> None:
    """Has the job's steps, which see no comment, show the images that it names."""
    found = [
        answer.image.path
        for request, answer in zip(job.requests, answers, strict=True)
        if request.via == "hint" and answer.image and answer.outcome.redirect == "spank"
    ]
    if found:
        # Without it the steps read the shared path.
        with (
            contextlib.suppress(ForestageError, OSError),
            lock.held(node.cache.space_lock, image.GIVE_UP),
        ):
            if node.leases.read(job.id) is not None:
                node.leases.note_hinted(job.id, found)


def _note_hints(node: Node, job: Job, end: Deadline) -> Handled | None:
    """Notes in the lease what the comment says to the job's steps, which do not see it.

    Returns the outcome of stage=off, or of an error.
    """
    hints = job.hints
    try:
        with lock.held_if_writable(node.cache.space_lock, end.left()):
            lease = image.lease_of(node, job)
            node.leases.put(msgspec.structs.replace(lease, off=hints.off, wait=hints.wait))
    except (ForestageError, OSError) as error:
        return image.of_error(Request("", "hint"), error)
    if not hints.off:
        return None
    return Handled(result="declined", via="hint", reason="off", detail="stage=off")
