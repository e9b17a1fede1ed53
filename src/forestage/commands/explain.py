"""History of one job on this node: what it asked for, what was done, why, and how long it took.

Made of the event log and the job's lease only, so it works with a broken configuration and without
a cache. For a user it is made of their own events alone (events/user_files.py): what the job holds
now, and who else copies its images, is root's to see.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import click
import msgspec

from forestage.cache.lease import Lease, LeaseDirectory
from forestage.commands.command_context import CommandContext, as_json, complete_jobs, print_result
from forestage.commands.inventory import LeaseHolder, make_holder
from forestage.errors import Failed, NotFoundError
from forestage.events import (
    WHOLE_RESULTS,
    BadEntryOutcome,
    CopyOutcome,
    EventHook,
    EventRecord,
    Outcome,
    ReleaseOutcome,
    RequestOutcome,
    losses,
    read_events,
    read_user_events,
    saved_time,
)
from forestage.events.losses import LostEvents
from forestage.events.prefetched_copies import UnusedCopies
from forestage.events.reasons import collect_reasons
from forestage.features.contexts import ExplainFacts, ExplainPart
from forestage.features.doors import EXPLAIN_EXPLAIN_OUTCOME, load_doors
from forestage.paths import NodePaths
from forestage.system.terminal import (
    NamedValues,
    OutputBlock,
    TextLine,
    format_age,
    format_count,
    format_local_time,
    short_key,
)
from forestage.units import format_duration, format_rate, format_rough_duration, format_size

# slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT.
STEP_NAMES = {0xFFFFFFFA: "interactive", 0xFFFFFFFB: "batch", 0xFFFFFFFC: "extern"}

UNASKED_TEXT = (
    "No step of this job asked forestage for its copies: it ended before its first step, or Slurm"
    " on this node does not load forestage's SPANK plugin (the admin: `forestage check`)."
)
FAILED_TASKS_TEXT = "some task of the step could not be given it: see below"
ORIGIN_NAMES = {"option": "--container-image", "hint": "stage= in the comment"}


class ExplainedOutcome(msgspec.Struct, frozen=True):
    """One outcome, and sentences about it for people."""

    outcome: Outcome
    sentences: tuple[str, ...]


class RecordedRun(msgspec.Struct, frozen=True):
    """One run of a hook, or the life of a stager; a requeued job has several.

    `time` is its end, `total` its seconds. `job` is another one where this job waited for the copy
    that the other had started. `step` is set for a step's hook. `options` and `ignored` are a
    Prolog's: what was asked with --stage, and what the comment says in vain beside it.
    """

    time: float
    hook: EventHook
    job: int
    node: str
    partition: str
    user: str
    total: float
    problems: tuple[str, ...]
    explained: tuple[ExplainedOutcome, ...]
    step: int | None = None
    options: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


class JobHistory(msgspec.Struct, frozen=True):
    """All that is recorded about a job on this node.

    `unasked`: its Prolog left the copies to its steps, none asked for them, and the job is over.
    `yours`: it was made for a user, who is not told of leases.
    """

    job: int
    runs: tuple[RecordedRun, ...]
    lease: LeaseHolder | None
    problems: tuple[str, ...] = ()
    unasked: bool = False
    yours: bool = False


def read_job_history(places: NodePaths, job: int, uid: int = 0) -> JobHistory:
    """Reads the log and the job's lease; for a user what they may read.

    Raises NotFoundError where nothing is recorded: in the same words for another user's job.
    """
    if uid:
        return make_job_history(job, read_user_events(places, uid), None, yours=True)
    lease: Lease | None = None
    problems: tuple[str, ...] = ()
    try:
        lease = LeaseDirectory(places.leases).find_lease(job)
    except Failed as failed:
        problems = (str(failed),)
    lost = losses.find_loss(places.lost_events)
    return make_job_history(job, read_events(places.events), lease, problems, lost=lost)


def make_job_history(
    job: int,
    events: Iterable[EventRecord],
    lease: Lease | None,
    problems: tuple[str, ...] = (),
    yours: bool = False,
    lost: LostEvents | None = None,
) -> JobHistory:
    """Pure: the job's events by hook run. Raises NotFoundError where nothing is recorded.

    `yours`: there is nothing but one user's own in what is given. `lost`: what the log lacks.
    """
    own: list[EventRecord] = []
    copies: list[EventRecord] = []
    bad: list[EventRecord] = []
    images: dict[str, str] = {}
    unused, ahead = UnusedCopies(), dict[str, CopyOutcome]()
    for event in events:
        ahead |= unused.add_event_for_job(job, event)
        if isinstance(event.outcome, BadEntryOutcome):  # of job 0
            bad.append(event)
            continue
        # Of another user's copy its users know the key alone.
        if (
            not isinstance(event.outcome, ReleaseOutcome)
            and event.outcome.key
            and event.outcome.image
        ):
            images[event.outcome.key] = event.outcome.image
        if event.job == job:
            own.append(event)
        elif event.hook == "stager":
            copies.append(event)
    if not (own or lease or problems):
        raise _make_not_found(job, lost, yours)
    problems += _list_loss_sentences(lost, own)
    failed = [event for event in own if event.hook == "step" and _is_task_failure(event.outcome)]
    missed = [event for event in own if event.outcome.reason == "deadline"]
    runs: list[list[EventRecord]] = []
    for event in own:
        # A hook writes its lines at once, each with the same duration to a tenth of a millisecond.
        one = runs[-1][0] if runs else None
        alike = one and (one.hook, one.step, one.total) == (event.hook, event.step, event.total)
        if one and alike and event.time - one.time < 1:
            runs[-1].append(event)
        else:
            runs.append([event])
    # The other jobs' copies that this job waited for until its deadline.
    runs += [
        [copy] for copy in copies if any(_was_copying_at_deadline(copy, event) for event in missed)
    ]
    # By their beginning: the stager is done, and on record, before the hook that started it.
    runs.sort(key=lambda run: (round(run[0].time - run[0].total, 1), run[0].hook == "stager"))
    held = make_holder(lease, images) if lease else None
    told = tuple(_make_run(run, images, missed, bad, ahead, failed) for run in runs)
    return JobHistory(job, told, held, problems, _is_unasked(own), yours)


def _make_not_found(job: int, lost: LostEvents | None, yours: bool) -> NotFoundError:
    """Return what is said where there is no record of a job. Pure."""
    if yours:
        what = f"nothing is recorded about your job {job} on this node"
        there = f"srun --jobid={job} --overlap -w NODE forestage explain {job}"
        why = "it asked for no image, is too long ago, or /run here is no tmpfs with ACLs"
        return NotFoundError(what, f"while it runs: {there}; or {why}")
    what = f"nothing is recorded about job {job} on this node"
    hint = "it asked for no image, ran elsewhere, never reached this node, or is too long ago"
    if lost is None:
        return NotFoundError(what, hint)
    return NotFoundError(f"{what}, and {_format_loss(lost)}", f"root: `forestage check`; or {hint}")


def _list_loss_sentences(lost: LostEvents | None, own: Sequence[EventRecord]) -> tuple[str, ...]:
    """Return what is said of lost events to a job that may lack some. Pure."""
    return (_format_loss(lost),) if lost is not None and losses.may_lack_events(lost, own) else ()


def _format_loss(lost: LostEvents) -> str:
    """Return the sentence about events that could not be recorded. Pure."""
    if lost.since == lost.until:
        return f"an event could not be recorded at {format_local_time(lost.since)}: {lost.why}"
    since, until = format_local_time(lost.since), format_local_time(lost.until)
    return f"events could not be recorded between {since} and {until}: {lost.why}"


def _is_unasked(own: Iterable[EventRecord]) -> bool:
    """Pure: whether no step asked for what the job's last Prolog had for its steps."""
    left = unasked = False
    for event in own:
        outcome = event.outcome
        if event.hook == "prolog":
            if isinstance(outcome, RequestOutcome):
                begun = outcome.data and outcome.result == "started"
                left |= begun or outcome.redirect == "spank"
            unasked = False
        elif event.hook == "step":
            left = False
        elif isinstance(outcome, ReleaseOutcome):
            left, unasked = False, left
    return unasked


def _was_copying_at_deadline(copy: EventRecord, deadline: EventRecord) -> bool:
    """Pure: whether the copy of this image was under way when a hook gave up."""
    # What was asked for may be a link to it; of another user's copy there is the key alone.
    waited, copied = deadline.outcome, copy.outcome
    if not (isinstance(waited, RequestOutcome) and isinstance(copied, CopyOutcome)):
        return False
    alike = copied.image == (waited.image or waited.request) or copied.key == waited.key
    return alike and copy.time - copy.total <= deadline.time <= copy.time


def _make_run(
    events: list[EventRecord],
    images: dict[str, str],
    missed: list[EventRecord],
    bad: list[EventRecord],
    ahead: Mapping[str, CopyOutcome],
    failed: list[EventRecord],
) -> RecordedRun:
    first = events[0]
    late = max(
        (first.time - event.time for event in missed if _was_copying_at_deadline(first, event)),
        default=None,
    )
    more: tuple[str, ...] = ()
    is_copy = isinstance(first.outcome, CopyOutcome) and first.outcome.result == "copied"
    if is_copy and late is not None:
        more = (
            f"The job had stopped waiting {format_duration(late)} before; the next one has it.",
        )
    explained = tuple(
        ExplainedOutcome(
            event.outcome,
            (
                *_list_outcome_sentences(event, failed, images),
                *more,
                *_list_feature_sentences(event, ahead),
                *_list_bad_entry_warnings(event, bad),
            ),
        )
        for event in events
    )
    return RecordedRun(
        time=first.time,
        hook=first.hook,
        job=first.job,
        node=first.node,
        partition=first.partition,
        user=first.user or str(first.uid),
        total=first.total,
        problems=first.problems,
        explained=explained,
        step=first.step if first.hook == "step" else None,
        options=first.options,
        ignored=first.ignored,
    )


def _list_outcome_sentences(
    event: EventRecord, failed: Iterable[EventRecord], images: dict[str, str]
) -> tuple[str, ...]:
    """Pure: the sentences about an outcome; of a step whose tasks did not all get it, only that."""
    outcome = event.outcome
    if event.hook != "step" or not isinstance(outcome, RequestOutcome) or _is_task_failure(outcome):
        return format_sentences(event, images)
    if not any(_is_same_subject(event, one) for one in failed):
        return format_sentences(event, images)
    return (FAILED_TASKS_TEXT,)


def _is_task_failure(outcome: Outcome) -> bool:
    """Pure: whether the companion noted it for tasks (src/spank); a helper's has a request."""
    if not isinstance(outcome, RequestOutcome) or outcome.result != "declined":
        return False
    return bool(outcome.image) and not outcome.request


def _is_same_subject(event: EventRecord, failed: EventRecord) -> bool:
    """Pure: whether a step's tasks were to be given what the event is about."""
    one, other = event.outcome, failed.outcome
    if not (isinstance(one, RequestOutcome) and isinstance(other, RequestOutcome)):
        return False
    places = {one.image, one.request.rpartition("@")[2]}
    return event.step == failed.step and one.data == other.data and other.image in places


def _list_bad_entry_warnings(start: EventRecord, bad: Iterable[EventRecord]) -> Iterator[str]:
    """Pure: what a job must know that began with an entry which was found to be bad later."""
    for event in bad:
        outcome = event.outcome
        if not (isinstance(outcome, BadEntryOutcome) and isinstance(start.outcome, RequestOutcome)):
            continue
        if outcome.key == start.outcome.key and outcome.since <= start.time <= event.time:
            right = (
                f"its bytes were last right {format_local_time(outcome.since)}"
                if outcome.since
                else ""
            )
            what = (
                format_count(outcome.chunks, "chunk")
                if outcome.chunks
                else "its record or its rights"
            )
            yield (
                f"WRONG BYTES? {format_local_time(event.time)} `{event.hook}` found this entry bad:"
                f" {what}" + (f"; {right}" if right else "")
            )


def format_sentences(event: EventRecord, images: dict[str, str]) -> tuple[str, ...]:
    """Pure: what became of one request, or of a job's lease, in plain words."""
    outcome = event.outcome
    made_room = tuple(
        f"{text}, to free space" for text in _explain_evictions(outcome.evicted, images)
    )
    if isinstance(outcome, ReleaseOutcome) and outcome.result == "released":
        return _explain_release(outcome, images)
    if isinstance(outcome, CopyOutcome) and outcome.result == "copied":
        return (_explain_copy(outcome), *made_room)
    parts = _load_feature_parts(event.hook, outcome)
    if isinstance(outcome, RequestOutcome) and (found := _explain_served(outcome, parts)):
        return (*found, *made_room)
    meaning = collect_reasons().get(outcome.reason, "")
    what = f"{outcome.result} ({outcome.reason}): {meaning}".removesuffix(": ")
    detail = (outcome.detail,) if outcome.detail else ()
    return (what, *detail, *made_room, _explain_consequence(event, parts))


def _load_feature_parts(
    hook: EventHook, outcome: Outcome, ahead: Mapping[str, CopyOutcome] | None = None
) -> list[ExplainPart]:
    """Return what features say of an outcome. Pure."""
    facts = ExplainFacts(hook, outcome, ahead or {})
    return [explain_outcome(facts) for explain_outcome in load_doors(EXPLAIN_EXPLAIN_OUTCOME)]


def _list_feature_sentences(event: EventRecord, ahead: Mapping[str, CopyOutcome]) -> Iterator[str]:
    """Yield the sentences that features add. Pure."""
    for part in _load_feature_parts(event.hook, event.outcome, ahead):
        yield from part.sentences


def _explain_served(outcome: RequestOutcome, parts: Sequence[ExplainPart]) -> tuple[str, ...]:
    if outcome.result == "started":
        return (*_explain_started(outcome), _explain_redirect(outcome, parts))
    if outcome.result == "through":
        return ("through: the step read copied parts locally, and the rest from the source",)
    return (
        (_explain_staged(outcome), _explain_redirect(outcome, parts))
        if outcome.result in WHOLE_RESULTS
        else ()
    )


def _explain_started(outcome: RequestOutcome) -> Iterator[str]:
    yield "started: the job started while the copy was under way"
    if outcome.reason:
        meaning = collect_reasons().get(outcome.reason, outcome.reason)
        yield f"{meaning.removesuffix('.')}: {outcome.detail}".removesuffix(": ")


def _explain_staged(outcome: RequestOutcome) -> str:
    if outcome.result == "hit":
        took = format_rough_duration(outcome.wait)
        return "hit: the cache had it" + (f" ({took})" if took else "")
    took = _format_tenths(outcome.wait)
    if outcome.result == "joined":
        return f"joined: another copy of it was under way; waited {took} for that one"
    size = f" until its {format_size(outcome.bytes)} were here" if outcome.bytes else ""
    return f"copied: waited {took}{size}"


def _format_tenths(seconds: float) -> str:
    return format_rough_duration(seconds) or "less than 0.1s"


def _explain_copy(outcome: CopyOutcome) -> str:
    fetched = outcome.bytes - outcome.resumed
    rate = format_rate(fetched, outcome.copying or outcome.wait)
    took = _format_tenths(outcome.wait)
    sent = f", {format_size(outcome.uploaded)} of it sent to other nodes meanwhile"
    uploaded = sent if outcome.uploaded else ""
    made = f"copied {format_size(outcome.bytes)} in {took} ({rate}){uploaded}, and published"
    if outcome.from_peers:
        rest = max(0, fetched - outcome.from_peers)
        server = f"{format_size(rest) if rest else 0} of {format_size(fetched)}"
        made += (
            f"; from {', '.join(outcome.givers) or 'other nodes'}; {server} from the file server"
        )
    if not outcome.read_through:
        return made
    read, straight = format_size(outcome.read_through), format_size(outcome.read_straight)
    return f"{made}; jobs read {read} before that, {straight} of it from the source"


def _explain_redirect(outcome: RequestOutcome, parts: Sequence[ExplainPart]) -> str:
    if said := next((part.redirect for part in parts if part.redirect), ""):
        return said
    why = "`redirect: none`, or Slurm's files could not be read, or it saves its container there"
    if outcome.result == "started":
        why = "no copy was here"
    return {
        "mounted": "redirect mounted: the path showed the local copy",
        "kept": "redirect kept: the path showed the local copy already, for another job or step",
        "spank": "redirect by the SPANK plugin: each step gets the local copy when it starts",
        "later": "redirect later: the path showed the original until the copy was complete",
        "none": f"no redirect: the job read the original path ({why})",
    }.get(outcome.redirect, f"redirect: {outcome.redirect or 'not recorded'}")


def _explain_consequence(event: EventRecord, parts: Sequence[ExplainPart]) -> str:
    if event.hook == "epilog":
        return "What it could not release is still there: see `forestage status`."
    if event.hook == "stager":
        return "Nothing was published; a job that waited for it kept its original path."
    who = "step" if event.hook == "step" else "job"
    if event.hook == "prolog" and getattr(event.outcome, "redirect", "") == "spank":
        return "Each step looks again, with the groups that Slurm gave it."
    if event.outcome.reason == "deadline":
        return (
            f"The {who} kept its original path. The copy continues if it has begun;"
            " `forestage status` shows its progress."
        )
    if event.outcome.reason == "bad-hint":
        return "The hint was ignored."
    if event.outcome.reason in ("registry", "bare-name"):
        return "enroot imports it, as without forestage."
    said = next((part.consequence for part in parts if part.consequence), "")
    return said or f"The {who} kept its original path."


def _explain_release(outcome: ReleaseOutcome, images: dict[str, str]) -> tuple[str, ...]:
    # The detail: why, if a sweep did it; of an Epilog, what it could not unmount.
    found = ["released the job's lease" + (f": {outcome.detail}" if outcome.detail else "")]
    if outcome.unmounted:
        found.append(
            f"unmounted {format_count(outcome.unmounted, 'redirect')} that no job needed any more"
        )
    return (*found, *_explain_evictions(outcome.evicted, images))


def _explain_evictions(keys: Iterable[str], images: dict[str, str]) -> Iterator[str]:
    for key in keys:
        known = f": {images[key]}" if key in images else ""
        yield f"evicted {short_key(key)}{known}"


def format_output(found: JobHistory, now: float) -> list[OutputBlock]:
    """Pure: what `explain` prints."""
    lines: list[OutputBlock] = [TextLine(_format_heading(found), heading=True)]
    counted = saved_time.StartTracker()
    options = {name for run in found.runs if run.job == found.job for name in run.options}
    for run in found.runs:
        tenths = format_rough_duration(run.total)
        took = f", {tenths}" if tenths else ""
        whose = f" of job {run.job}" if run.job else " of another job"
        whose = whose if run.job != found.job else ""
        step = "" if run.step is None else f" {STEP_NAMES.get(run.step, run.step)}"
        head = f"{format_local_time(run.time)}  {run.hook.capitalize()}{step}{whose}{took}"
        lines += [TextLine(""), TextLine(head, heading=True)]
        lines += [TextLine(text, 2) for text in _list_submission_lines(run)]
        if run.hook != "epilog":  # it has read the same comment again
            lines += [TextLine(f"hint problem: {problem}", 2) for problem in run.problems]
        for number, one in enumerate(run.explained):
            starts = (
                _is_new_start(one.outcome, run, counted) and FAILED_TASKS_TEXT not in one.sentences
            )
            lines += [TextLine("")] * (number > 0) + _format_request(one, run.hook, starts, options)
    if found.unasked:
        lines += [TextLine(""), TextLine(UNASKED_TEXT)]
    lines += [TextLine(f"Problem: {problem}") for problem in found.problems]
    return lines + _format_current_lease(found, now)


def _format_heading(found: JobHistory) -> str:
    own = [run for run in found.runs if run.job == found.job]
    if not own:
        return f"Job {found.job}: no event is recorded"
    last = own[-1]
    partition = f", partition {last.partition}" if last.partition else ""
    return f"Job {found.job} of {last.user} on {last.node or 'this node'}{partition}"


def _list_submission_lines(run: RecordedRun) -> Iterator[str]:
    """Pure: what was asked with options, and what did not count beside them."""
    if run.options:
        yield f"asked at submission: {', '.join(f'--{name}' for name in run.options)}"
    if run.ignored:
        words = ", ".join(f"{name}=" for name in run.ignored)
        yield f"not counted: {words} in the comment, as the option was given"


def _format_request_origin(outcome: RequestOutcome, name: str, options: Collection[str]) -> str:
    """Pure: where a request was asked; `options` are those that the job was submitted with.

    `name` is that of the request's own option.
    """
    if outcome.via == "hint" and name in options:
        return f"--{name}"
    return ORIGIN_NAMES.get(outcome.via or "", outcome.via or "")


def _format_request(
    explained: ExplainedOutcome, hook: EventHook, starts: bool, options: Collection[str]
) -> list[OutputBlock]:
    outcome, parts = explained.outcome, _load_feature_parts(hook, explained.outcome)
    facts = []
    request = outcome.request if isinstance(outcome, RequestOutcome) else ""
    if isinstance(outcome, RequestOutcome) and request:
        name = next((part.option for part in parts if part.option), "stage")
        via = _format_request_origin(outcome, name, options)
        facts.append(("request", f"{request} ({via})" if via else request))
    facts += [row for part in parts for row in part.rows]
    if isinstance(outcome, RequestOutcome | CopyOutcome):
        if outcome.image and outcome.image != request:
            facts.append(("data" if outcome.data else "image", outcome.image))
        if outcome.key:
            size = f", {format_size(outcome.size)}" if outcome.size else ""
            facts.append(("entry", f"{short_key(outcome.key)}{size}"))
    facts += [
        ("done" if not number else "", text) for number, text in enumerate(explained.sentences)
    ]
    tenths = (
        format_rough_duration(outcome.wait)
        if isinstance(outcome, RequestOutcome | CopyOutcome)
        else ""
    )
    if tenths and outcome.result not in WHOLE_RESULTS:
        facts.append(("took", tenths))
    if isinstance(outcome, RequestOutcome) and starts:
        facts.append(("saved", _format_saving(outcome)))
    return [NamedValues(tuple(facts), indent=2)]


def _is_new_start(outcome: Outcome, run: RecordedRun, counted: saved_time.StartTracker) -> bool:
    """Whether something began to read a copy; `counted` has what was asked about before."""
    return counted.is_new_start(run.hook, run.job, outcome)


def _format_saving(outcome: RequestOutcome) -> str:
    """What a start had of it, and against what."""
    found = saved_time.find_saved_seconds(outcome)
    if found is None:
        return (
            "not known: the copy has not measured how fast its source is (it came from other nodes"
            " too, or read too little at full speed)"
        )
    against = f"reading it from its source takes this node {_format_tenths(outcome.baseline)}"
    tenths = format_rough_duration(abs(found))
    if not tenths:
        return f"nothing worth naming ({against})"
    return f"nothing: it took {tenths} longer ({against})" if found < 0 else f"{tenths} ({against})"


def _format_current_lease(found: JobHistory, now: float) -> list[OutputBlock]:
    if found.lease is None:
        hooks = [run for run in found.runs if run.hook != "stager"]
        last = hooks[-1] if hooks else None
        held = last and any(
            one.outcome.result in (*WHOLE_RESULTS, "started", "through") for one in last.explained
        )
        if last and last.hook in ("prolog", "step") and held:
            what = "no lease, and no Epilog is recorded; the node was restarted?"
            if found.yours:
                what = "no Epilog is recorded; what the job holds, root sees on this node."
            return [TextLine(""), TextLine(f"Now: {what}")]
        return []
    since = f"{format_local_time(found.lease.since)} ({format_age(now - found.lease.since)})"
    uses = tuple((short_key(one.key), one.path or "an image") for one in found.lease.images)
    return [
        TextLine(""),
        TextLine(f"Now: holds a lease since {since}", heading=True),
        NamedValues(uses, 2),
    ]


def _parse_job_id(ctx: click.Context, parameter: click.Parameter, value: str) -> int:
    """Slurm's numeric id, also in front of a step's; `12_3` is a name that only Slurm can tell."""
    named = re.fullmatch(r"([0-9]{1,10})(\.[0-9a-z]+)?", value, re.ASCII)
    if named:
        return int(named[1])
    if re.fullmatch(r"[0-9]{1,10}[_+][0-9]{1,10}", value, re.ASCII):
        raise click.BadParameter(
            f"{value} is part of an array or a het job, and has an id of its own:"
            f" squeue -h -j {value} -o %A   (sacct -n -X -j {value} -o JobIDRaw, once it is over)"
        )
    raise click.BadParameter(f"{value!r} is no job id: expected a number such as 4242")


@click.command()
@as_json
@click.argument("job", callback=_parse_job_id, metavar="JOBID", shell_complete=complete_jobs)
@click.pass_obj
def explain(world: CommandContext, job: int, as_json: bool) -> None:
    """What a job asked for, what was done, why, and how long it took.

    Finished jobs too, as far back as the event log goes. Of an array, JOBID is the task's own id.
    Users see their own jobs, on a node of the job.
    """
    found = read_job_history(world.places, job, os.geteuid())
    print_result(found, format_output(found, world.clock.wall()), as_json)


COMMANDS = (explain,)
