"""What happened to this job? The events and the lease of one job, told as a story.

It reads the log and the lease only, so it works with a broken configuration and without a cache.
"""

from collections.abc import Iterable

import msgspec

from forestage.entries import Holder, holder
from forestage.events import Event, Hook, Outcome
from forestage.exits import NotFound
from forestage.lease import Lease
from forestage.screen import Facts, Line, Piece, age, count, moment, short
from forestage.units import format_duration, format_rate, format_size

STAGED = ("hit", "joined", "copied")

REASONS = {
    "registry": "Only paths are staged; an image from a registry is fetched by pyxis itself.",
    "bad-path": "This is no path that can be staged.",
    "missing": "The file was not there when the job started.",
    "no-permission": "The job's user could not read the file.",
    "not-a-file": "Only regular files are staged.",
    "outside-sources": "The admin has not named this directory in `sources:`.",
    "empty": "There is nothing to copy.",
    "too-large": "The image is above the admin's `max_image_size:`.",
    "source-error": "The shared file system gave an error.",
    "source-hangs": "The shared file system did not answer before the deadline.",
    "no-room": "The cache could not make room: what it holds is leased or pinned, or the image is"
    " larger than what it may take.",
    "deadline": "The copy took longer than this job may wait; `stage-wait=` in the comment or the"
    " admin's `deadline:` moves that.",
    "busy": "A lock of the node was held too long.",
    "changed": "The file was being written to; what cannot be copied whole is not used.",
    "stopped": "The copy was stopped by the admin's `on_deadline: abort`; it can be resumed.",
    "off": "The job asked for this with stage=off.",
    "disabled": "The admin has switched staging off for this partition or node.",
    "access": "The file server grants this user more than the file's mode shows, so the local copy"
    " would not have been readable.",
    "bad-hint": "The comment names no image, but has a hint that could not be read.",
    "evicted-stays": "What was evicted could not be deleted.",
    "lease-damaged": "A lease file on the node cannot be read.",
    "config": "The configuration on the node could not be used: see `forestage config`.",
    "cache-not-mounted": "The cache's disk was not mounted: see `forestage status`.",
    "cache-not-ours": "The cache's directory is not root's alone.",
    "cache-format": "The cache was written by another release.",
    "copy": "The program that copies ended with an error.",
    "program": "A program that forestage needs is not installed.",
    "helper": "A process of forestage's own died.",
    "acl": "The cache's file system cannot keep the file's access rights.",
    "redirect": "The local copy could not be laid over the path, or be taken off it.",
    "io": "The node had an I/O error.",
}
"""What each reason of an outcome means, for people; its `detail` is added to it."""

VIAS = {"option": "--container-image", "hint": "stage= in the comment"}


class Told(msgspec.Struct, frozen=True):
    """One outcome and its sentences."""

    outcome: Outcome
    sentences: tuple[str, ...]


class Run(msgspec.Struct, frozen=True):
    """One run of a hook: a requeued job has several. `total` is the hook's seconds."""

    time: float
    hook: Hook
    node: str
    partition: str
    user: str
    total: float
    problems: tuple[str, ...]
    told: tuple[Told, ...]


class Story(msgspec.Struct, frozen=True):
    """All that is recorded about a job on this node."""

    job: int
    runs: tuple[Run, ...]
    lease: Holder | None
    problems: tuple[str, ...] = ()


def story(
    job: int, events: Iterable[Event], lease: Lease | None, problems: tuple[str, ...] = ()
) -> Story:
    """Pure: the job's events, in hook runs. Raises NotFound where there is nothing to tell."""
    own: list[Event] = []
    images: dict[str, str] = {}
    for event in events:
        if event.outcome.key and event.outcome.image:
            images[event.outcome.key] = event.outcome.image
        if event.job == job:
            own.append(event)
    if not (own or lease or problems):
        raise NotFound(
            f"nothing is recorded about job {job} on this node",
            "it asked for no image, ran elsewhere, never reached this node, or is too long ago",
        )
    runs: list[list[Event]] = []
    for event in own:
        if runs and _same_run(runs[-1][0], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    held = holder(lease, images) if lease else None
    return Story(job, tuple(_run(run, images) for run in runs), held, problems)


def _same_run(one: Event, other: Event) -> bool:
    # A hook writes its lines at once, each with the same duration to a tenth of a millisecond.
    return (one.hook, one.total) == (other.hook, other.total) and other.time - one.time < 1


def _run(events: list[Event], images: dict[str, str]) -> Run:
    first = events[0]
    told = tuple(Told(event.outcome, sentences(event, images)) for event in events)
    return Run(
        time=first.time,
        hook=first.hook,
        node=first.node,
        partition=first.partition,
        user=first.user or str(first.uid),
        total=first.total,
        problems=first.problems,
        told=told,
    )


def sentences(event: Event, images: dict[str, str]) -> tuple[str, ...]:
    """Pure: what became of one request, or of what a job held, in plain words."""
    outcome = event.outcome
    if outcome.result == "released":
        return _released(outcome, images)
    if outcome.result in STAGED:
        return (_staged(outcome), _redirect(outcome))
    meaning = REASONS.get(outcome.reason, "")
    what = f"{outcome.result} ({outcome.reason}): {meaning}".removesuffix(": ")
    told = (what, *([outcome.detail] if outcome.detail else []))
    return (*told, _consequence(event))


def _staged(outcome: Outcome) -> str:
    took = format_duration(outcome.wait)
    if outcome.result == "hit":
        return f"hit: the cache had it ({took})"
    if outcome.result == "joined":
        return f"joined: another copy of it was under way; waited {took} for that one"
    rate = format_rate(outcome.bytes, outcome.wait)
    return f"copied {format_size(outcome.bytes)} in {took} ({rate})"


def _redirect(outcome: Outcome) -> str:
    return {
        "laid": "redirect laid: the path showed the local copy",
        "kept": "redirect kept: the path showed the local copy already, for another job",
        "none": "no redirect: the job read the original path (`redirect: none`, or it saves its"
        " container there)",
    }.get(outcome.redirect, f"redirect: {outcome.redirect or 'not recorded'}")


def _consequence(event: Event) -> str:
    if event.hook == "epilog":
        return "What it could not release is still there: see `forestage status`."
    if event.outcome.reason == "bad-hint":
        return "The job ran as if the hint were not there."
    if event.outcome.result == "failed":
        return "The job kept its original path, unless the admin's `on_error: drain` stopped it."
    return "The job kept its original path."


def _released(outcome: Outcome, images: dict[str, str]) -> tuple[str, ...]:
    told = ["released the job's lease"]
    if outcome.released:
        told.append(f"took off {count(outcome.released, 'redirect')} that no job needed any more")
    for key in outcome.evicted:
        known = f": {images[key]}" if key in images else ""
        told.append(f"evicted {short(key)}{known}")
    return tuple(told)


def pieces(found: Story, now: float) -> list[Piece]:
    """Pure: what `explain` prints."""
    told: list[Piece] = [Line(_head(found), heading=True)]
    for run in found.runs:
        took = f", {format_duration(run.total)}" if run.total else ""
        told += [Line(""), Line(f"{moment(run.time)}  {run.hook.capitalize()}{took}", heading=True)]
        if run.hook != "epilog":  # it has read the same comment again
            told += [Line(f"hint problem: {problem}", 2) for problem in run.problems]
        for number, one in enumerate(run.told):
            told += [Line("")] * (number > 0) + _request(one)
    told += [Line(f"Problem: {problem}") for problem in found.problems]
    return told + _now(found, now)


def _head(found: Story) -> str:
    if not found.runs:
        return f"Job {found.job}: no event is recorded"
    last = found.runs[-1]
    partition = f", partition {last.partition}" if last.partition else ""
    return f"Job {found.job} of {last.user} on {last.node or 'this node'}{partition}"


def _request(told: Told) -> list[Piece]:
    outcome = told.outcome
    facts = []
    if outcome.asked:
        via = VIAS.get(outcome.via or "", outcome.via or "")
        facts.append(("asked", f"{outcome.asked} ({via})" if via else outcome.asked))
    if outcome.image and outcome.image != outcome.asked:
        facts.append(("image", outcome.image))
    if outcome.key:
        size = f", {format_size(outcome.size)}" if outcome.size else ""
        facts.append(("entry", f"{short(outcome.key)}{size}"))
    facts += [("done" if not number else "", text) for number, text in enumerate(told.sentences)]
    if outcome.wait and outcome.result not in STAGED:
        facts.append(("took", format_duration(outcome.wait)))
    return [Facts(tuple(facts), indent=2)]


def _now(found: Story, now: float) -> list[Piece]:
    if found.lease is None:
        last = found.runs[-1] if found.runs else None
        staged = last and any(one.outcome.result in STAGED for one in last.told)
        if last and last.hook == "prolog" and staged:
            return [
                Line(""),
                Line("Now: no lease, and no Epilog is recorded; the node was restarted?"),
            ]
        return []
    since = f"{moment(found.lease.since)} ({age(now - found.lease.since)})"
    uses = tuple(
        (
            short(one.key),
            f"{one.path or 'an image'} ({'redirected' if one.redirected else 'not redirected'})",
        )
        for one in found.lease.images
    )
    return [Line(""), Line(f"Now: holds a lease since {since}", heading=True), Facts(uses, 2)]
