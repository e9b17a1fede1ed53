"""The step hook: the SPANK companion runs it once per step and node, before the tasks start.

It answers in the lines of slurm/step_protocol.py.
"""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence

import msgspec

from forestage import events
from forestage.cache import step_record
from forestage.cache.lease import LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.cache.step_record import RecordedImage
from forestage.clock import Deadline
from forestage.errors import Declined, Failed, ForestageError, classify_node_error
from forestage.events import RequestOutcome
from forestage.hooks import leases, serve, user_messages
from forestage.hooks.hook_deadlines import HookDeadlines, requested_wait
from forestage.hooks.request_results import RequestResult, with_baseline
from forestage.slurm import timeouts
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import (
    STEP_ENVIRONMENT_VARIABLE,
    LineFields,
    has_control_characters,
)
from forestage.sources import opening
from forestage.stage.copy_wait import ignore_progress
from forestage.system import as_user, lock
from forestage.units import is_number

MEASURED_FIELDS = frozenset(("time", "total", "step"))  # of an event, by the companion
COPIER_GRACE = 7.0  # seconds of the companion's for what a copier says when its time is over
NAME_TIMEOUT = 1.0  # seconds for a user's name, which no decision needs
MAX_ENVIRONMENT_BYTES = 8 << 20  # bytes; the kernel takes 6 MiB at most


class StepResult(msgspec.Struct, frozen=True):
    """What the requests came to, for log and events, and the fields of the answer's line.

    `hint_fields` are those of the images that the job's comment named, for lines before it.
    """

    results: list[RequestResult]
    answer_fields: LineFields
    hint_fields: tuple[LineFields, ...] = ()

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [answer.outcome for answer in self.results]


def make_step_deadlines(
    node: Node,
    job: Job,
    timeout: str,
    write_message: user_messages.WriteMessage,
    refusal: Declined | None,
    write_progress: user_messages.WriteMessage | None = None,
) -> HookDeadlines:
    """Returns how long a step may go on, and wait for a copy.

    `timeout` is the companion's own limit in seconds, as text. Where all is refused there is only
    the search for stale redirects. `write_progress` writes lines while the step waits for data.
    """
    config, hint = node.config, job.hints.wait
    wish = None if refusal else requested_wait(config, hint, timeouts.STEP_WAIT)
    copy = None if wish is None else timeouts.step_budget(wish, timeout)
    end = timeouts.step_budget(opening.HOOK_TIMEOUT, timeout)
    filled = timeouts.STEP_WAIT if hint is None else min(hint, config.max_stage_wait)
    longest = max(0.0, timeouts.step_budget(math.inf, timeout) - COPIER_GRACE)
    tells = config.user_messages != "none"
    waits = user_messages.WaitReporter(node.clock, write_message, math.inf)
    brings = write_progress and user_messages.WaitReporter(
        node.clock, write_progress, user_messages.REPEAT_MESSAGE_AFTER
    )
    return msgspec.structs.replace(
        HookDeadlines.from_seconds(node.clock, end, copy, small=hint != 0, room=hint != 0),
        fill=Deadline.after(min(filled, longest), node.clock),
        is_read_through=config.cold_start_mode == "through",
        on_copy_wait=waits if tells and copy is not None else ignore_progress,
        on_data_wait=brings if tells and brings else ignore_progress,
    )


def serve_step(node: Node, job: Job, limit: HookDeadlines, refusal: Declined | None) -> StepResult:
    """Stages the step's image; `refusal` is why nothing may be staged on this node now."""
    answers = serve.serve_requests(node, job, job.requests, limit, refusal)
    own: LineFields = ("leave", "no-image")
    also = []
    for request, answer in zip(job.requests, answers, strict=True):
        words = format_answer_fields(node, answer)
        if request.via == "option":
            own = words
        elif words[0] != "leave":
            also.append(words)
    return StepResult(answers, own, tuple(also))


def with_step_variables(job: Job, environ: Mapping[str, str]) -> Job:
    """Returns the job with the variables of its step, in the open file that the companion names.

    What is too long for a program to be started with is left out: nobody knows it then.
    """
    number = environ.get(STEP_ENVIRONMENT_VARIABLE, "")
    if not is_number(number):
        return job
    data = b""
    with contextlib.suppress(OSError):
        while len(data) <= MAX_ENVIRONMENT_BYTES and (
            more := os.pread(int(number), 1 << 20, len(data))
        ):
            data += more
    if not data or len(data) > MAX_ENVIRONMENT_BYTES:
        return job
    # Of a name that comes twice the last counts, as with putenv(3).
    entries = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0"))
    found = {name: value for name, equals, value in entries if equals}
    return msgspec.structs.replace(job, variables=found)


def with_identified_user(node: Node, job: Job, timeout: str) -> tuple[Job, Declined | None]:
    """Returns the job with its user's name and groups, and why nothing may be staged without them.

    The groups are those that Slurm gave the step, of which the node's name service may not know
    all; it is asked for them where the companion does not say them. The name is for people.
    """
    user = job.user
    if user.groups is None:
        try:
            user = as_user.query_name_service(
                user, timeouts.step_budget(opening.HOOK_TIMEOUT, timeout)
            )
        except Declined as slow:
            return job, slow
        except OSError:  # no process can be started: each request says so
            return job, None
    if not user.name:
        with contextlib.suppress(Failed, OSError):
            lease = node.leases.find_own_lease(job.id, user.uid)
            if lease is not None:
                user = msgspec.structs.replace(user, name=lease.user.name)
    if not user.name:
        with contextlib.suppress(Declined, OSError):
            named = as_user.query_name_service(user, NAME_TIMEOUT)
            user = msgspec.structs.replace(user, name=named.name)
    return msgspec.structs.replace(job, user=user), None


def with_hinted_images(noted: LeaseDirectory, job: Job) -> Job:
    """Returns the job with the images that its comment named, as its Prolog noted them."""
    hinted = tuple(Request(path, "hint") for path in noted.list_hinted_images(job.id, job.user.uid))
    return msgspec.structs.replace(job, requests=job.requests + hinted)


def with_prolog_notes(
    node: Node, job: Job, refusal: Declined | None
) -> tuple[Job, Declined | None]:
    """Returns the job with what its Prolog noted: what the comment says, and the job's nodes.

    A lease that cannot be read is a refusal, unless there is one already.
    """
    job = with_hinted_images(node.leases, job)
    job = msgspec.structs.replace(job, nodelist=node.leases.read_nodelist(job.id, job.user.uid))
    try:
        lease = node.leases.find_own_lease(job.id, job.user.uid)
        said = node.leases.read_notes(job.id, job.user.uid)
    except Failed as damaged:
        return job, refusal or damaged
    except OSError as error:
        return job, refusal or classify_node_error(error)
    if lease is None:
        return job, refusal
    noted = {"off": said.off, "wait": said.wait, "tell": said.tell, "problems": said.say}
    hints = msgspec.structs.replace(job.hints, words=said.words, **noted)
    return msgspec.structs.replace(job, hints=hints, waited=said.waited), refusal


def format_answer_fields(node: Node, answer: RequestResult) -> LineFields:
    """Pure: the fields of the line that ends the companion's wait."""
    outcome, wanted = answer.outcome, answer.image
    if outcome.result == "started":
        return "leave", "started"
    if outcome.reason or wanted is None:
        return "leave", outcome.reason
    # With `bind` too: job_container/tmpfs has given the job its own, older, view of the mounts, and
    # where a task already sees the entry there is nothing to do.
    if outcome.redirect == "none":
        return "leave", "none" if node.config.redirect == "none" else "saves"
    found = wanted.identity
    facts = (found.inode, found.size, found.mtime_ns, found.ctime_ns)
    tell = "0" if node.config.user_messages == "none" else "1"
    word = "through" if answer.socket else "use"
    place = answer.socket or node.cache.image_path(wanted.key)
    words = (str(place), found.path, *map(str, facts), tell)
    if any(map(has_control_characters, words)):
        return "leave", "bad-path"
    return word, *words


def record_images_for_steps(
    node: Node, job: Job, decided_by: Sequence[str], answers: Sequence[RequestResult]
) -> None:
    """Notes what further steps of the job are shown, so that they need no helper.

    The Prolog's answers or a step's, the first of them in the order of the job's requests.
    `decided_by` is what cache/step_record.py found before the configuration was read.
    """
    if job.step is None and node.config.user_messages == "all":
        return  # the first step has a line to write, which takes a helper
    # The off switch and a lease that says stage=off leave no answer that counts.
    found = [
        _make_recorded_image(node, job, *pair) for pair in zip(job.requests, answers, strict=False)
    ]
    images = [image for image in found if image is not None]
    by_binds = next((answer.decision_lines for answer in answers if answer.decision_lines), ())
    if images and by_binds:
        # Only a further step's time depends on it.
        with (
            contextlib.suppress(ForestageError, OSError),
            lock.held(node.cache.space_lock, leases.SHORT_LOCK_TIMEOUT),
        ):
            if decided_by:
                decided_by = [
                    *decided_by,
                    step_record.format_room_line(node.cache, node.config),
                    *by_binds,
                ]
            step_record.add_images(node.leases, job.id, decided_by, images)


def _make_recorded_image(
    node: Node, job: Job, request: Request, first: RequestResult
) -> RecordedImage | None:
    outcome = first.outcome
    answer = _result_for_further_step(node, first)
    if answer is None or outcome.redirect != "spank" or outcome.reason:
        return None
    if job.mounts_home is False:  # a further step need not say so
        return None
    changes = {"result": answer.outcome.result, "baseline": answer.outcome.baseline}
    same = {"via": "option", "wait": 0.0, "evicted": ()}
    further = msgspec.structs.replace(outcome, **changes, **same)
    event = msgspec.to_builtins(events.make_job_event(job, "step", further))
    # The companion writes these before the rest.
    event = {name: value for name, value in event.items() if name not in MEASURED_FIELDS}
    event["outcome"].pop("wait", None)
    return RecordedImage(
        requested_path=os.path.join(job.work_dir, request.path),
        uid=job.user.uid,
        event=msgspec.json.encode(event).decode().removeprefix("{"),
        reply_fields=format_answer_fields(node, answer),
    )


def _result_for_further_step(node: Node, first: RequestResult) -> RequestResult | None:
    """What a further step gets: the entry, or the keeper of the copy that is under way.

    It need not listen yet. Where nobody does in the end, the companion asks a helper.
    """
    # Not one of an earlier boot, which nobody has proven yet.
    entry = node.cache.find_entry(first.image) if first.image else None
    if entry is not None and entry.binds:  # which a helper has to look at
        return None
    if entry is not None:
        return with_baseline(
            node, RequestResult(RequestOutcome("hit"), SourceImage(entry.identity, entry.access))
        )
    return (
        RequestResult(RequestOutcome("through"), first.image, first.socket)
        if first.socket
        else None
    )
