"""The Prolog: stages each image that a starting job names, one outcome for each."""

import contextlib
import os
from collections.abc import Sequence

import msgspec

from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, ForestageError
from forestage.events import UNSERVED_RESULTS, Outcome, RequestOutcome
from forestage.hooks import leases, serve
from forestage.hooks.hook_deadlines import HookDeadlines, requested_wait
from forestage.hooks.request_results import RequestResult, make_error_outcome
from forestage.slurm import timeouts
from forestage.slurm.hints import MAX_PROBLEMS, OF_OPTION, Request
from forestage.slurm.job import Job
from forestage.slurm.timeouts import HookTimeLimits
from forestage.sources import opening
from forestage.system import as_user
from forestage.units import make_printable

HINT_REMEDIES = {
    "missing": "it has to be there when the job starts",
    "bad-path": "write the path of a file",
    "no-permission": "give yourself the right to read it",
    "not-a-file": "a directory is written with a slash: DIR/",
    "not-a-directory": "a file is written without a slash",
    "empty": "there is nothing to copy",
    "not-squashfs": "name an image, made by `forestage pack` or enroot",
    "truncated": "nothing can start from it",
    "outside-sources": "copy it there, or ask your admin",
    "too-large": "make it smaller, or ask your admin",
    "too-many-files": "make one image of them with `forestage pack`",
    "registry": "a path begins with / or ./, and an image of a registry is for --container-image",
    "bare-name": "a path begins with / or ./",
    "bad-hint": "man forestage-hooks says what it may hold",
}
"""What a user can do about a hint that was declined, by reason."""

LIST_NAME = "what stage-list= names"  # in place of the path: a list is none of those in it


def make_bad_hint_outcomes(job: Job) -> list[RequestOutcome]:
    """Pure: the outcome of a job that names no image, but has hints with problems."""
    if not job.hints.problems:
        return []
    detail = make_printable("; ".join(job.hints.problems))
    return [RequestOutcome(result="declined", reason="bad-hint", detail=detail)]


def serve_prolog(
    node: Node, job: Job, limit: HookDeadlines, refusal: Declined | None
) -> list[RequestResult]:
    """Stages all that the job asks for. Never raises for a request: each gets its answer.

    `refusal` is why nothing may be staged on this node now.
    """
    answers = serve.serve_requests(node, job, job.requests, limit, refusal)
    if node.config.redirect == "spank":
        answers = [_leave_to_steps(answer) for answer in answers]
        _record_hinted_images(node, job, answers)
    elif job.hints.tell or node.config.user_messages == "all":
        _record_wait(node, job, answers)
    if job.hints.for_steps:
        noted = _record_hints(node, job, limit.end)
        # Each image has its own outcome, which says the same.
        if noted and (noted.result == "failed" or not answers):
            answers.append(RequestResult(noted))
    return answers or [RequestResult(outcome) for outcome in make_bad_hint_outcomes(job)]


def with_identified_user(job: Job, limit: HookDeadlines) -> tuple[Job, Declined | None]:
    """Returns the job with its user's groups and home, and why nothing may be staged without them.

    Once, for all processes that act as the user: each answer may take seconds.
    """
    try:
        user = as_user.query_name_service(job.user, limit.end.seconds_left())
    except Declined as unknown:
        return job, unknown
    except OSError:  # no process can be started: each request says so
        return job, None
    return msgspec.structs.replace(job, user=user), None


def _leave_to_steps(answer: RequestResult) -> RequestResult:
    """Pure: the answer, for a step to ask again where the user may have groups that count.

    The node may not know all groups of a user: slurmctld looks them up where it runs, and gives
    each step its own (slurm.conf(5), `enable_nss_slurm`).
    """
    if answer.outcome.reason != "no-permission":
        return answer
    return answer.with_facts(redirect="spank")


def make_prolog_deadlines(
    node: Node, job: Job, limits: HookTimeLimits, refusal: Declined | None, ready: bool = False
) -> HookDeadlines:
    """Returns how long this job's Prolog may go on, and wait for copies.

    `ready`: in the background, where nobody waits for it. Where all is refused neither the admin's
    nor the user's word for that shortens or lengthens the search for stale redirects.
    """
    config, hint = node.config, job.hints.wait
    seconds = timeouts.prolog_budget(limits, opening.HOOK_TIMEOUT if refusal else config.deadline)
    if refusal or config.redirect == "spank":  # whose steps wait: no timeout of Slurm's ends that
        return HookDeadlines.from_seconds(
            node.clock, seconds, None, small=False, ready=ready, room=hint != 0
        )
    wish = requested_wait(config, hint, limits.job_lost_after)
    copy = None if wish is None else timeouts.prolog_budget(limits, wish)
    return HookDeadlines.from_seconds(node.clock, seconds, copy, hint != 0, ready, room=hint != 0)


def _record_wait(node: Node, job: Job, answers: list[RequestResult]) -> None:
    """Notes how long this Prolog took, for the line that the job's user reads in its first step."""
    waited = sum(answer.outcome.wait for answer in answers)
    with contextlib.suppress(ForestageError, OSError):  # only a figure
        leases.change_job_lease(
            node,
            job,
            lambda lease: node.leases.add_notes_and_keep_lease(lease, waited=round(waited, 4)),
        )


def _record_hinted_images(node: Node, job: Job, answers: list[RequestResult]) -> None:
    """Has the job's steps, which see no comment, show the images that it names."""
    found = [
        answer.image.path if answer.image else os.path.join(job.work_dir, request.path)
        for request, answer in zip(job.requests, answers, strict=True)
        if request.via == "hint" and answer.outcome.redirect == "spank"
    ]
    if found:
        # Without it the steps read the shared path. There may be no lease yet.
        paths = tuple(map(os.fsencode, found))
        with contextlib.suppress(ForestageError, OSError):
            leases.save_job_notes(node, job, leases.SHORT_LOCK_TIMEOUT, to_steps=True, hinted=paths)


def record_hint_problems(node: Node, job: Job, outcomes: Sequence[Outcome]) -> None:
    """Has the job's first step say which of its hints came to nothing: nobody else would.

    A Prolog has nobody who reads it. Of a job on several nodes only the first says it: a script may
    run a step on each. Without the lock in time they are in `explain` alone.
    """
    lines = [
        f"ignored{'' if problem.startswith(OF_OPTION) else ' in --comment'}: {problem}"
        " (man forestage-hooks)"
        for problem in job.hints.problems
    ]
    word = "--stage" if "stage" in job.hints.options else "stage"
    lines += [
        f"{f'{word}={outcome.request}' if outcome.request else LIST_NAME} is not staged:"
        f" {outcome.detail}; {HINT_REMEDIES[outcome.reason]}"
        for outcome in outcomes
        if isinstance(outcome, RequestOutcome)
        and outcome.via == "hint"
        and outcome.reason in HINT_REMEDIES
        and outcome.redirect != "spank"  # a step says it, if it finds the same
        and outcome.request != "stage-dir"  # which the step has a line for
    ]
    lines += _list_unserved_messages(job, outcomes)
    if not lines or node.config.user_messages == "none" or job.node_index.node not in (None, 0):
        return
    say = tuple(make_printable(line) for line in lines[:MAX_PROBLEMS])
    with contextlib.suppress(ForestageError, OSError):
        leases.save_job_notes(node, job, leases.SHORT_LOCK_TIMEOUT, to_steps=True, say=say)


def _list_unserved_messages(job: Job, outcomes: Sequence[Outcome]) -> list[str]:
    """Pure: of images in the comment that no step asks for again, for who wants to hear of each."""
    if not job.hints.tell:
        return []
    from forestage.hooks import user_messages

    found = (
        user_messages.format_message(outcome, "all")
        for outcome in outcomes
        if isinstance(outcome, RequestOutcome)
        and outcome.via == "hint"
        and outcome.request
        and not outcome.data
        if outcome.result in UNSERVED_RESULTS and outcome.reason not in HINT_REMEDIES
    )
    return list(filter(None, found))


def _record_hints(node: Node, job: Job, end: Deadline) -> RequestOutcome | None:
    """Notes in the lease what the comment says to the job's steps, which do not see it.

    Returns the outcome of stage=off, or of an error.
    """
    hints = job.hints
    try:
        said = {"off": hints.off, "wait": hints.wait, "tell": hints.tell, "words": hints.words}
        leases.save_job_notes(node, job, end.seconds_left(), to_steps=bool(hints.words), **said)
    except (ForestageError, OSError) as error:
        return make_error_outcome(Request("", "hint"), error)
    if not hints.off:
        return None
    return RequestOutcome(result="declined", via="hint", reason="off", detail="stage=off")
