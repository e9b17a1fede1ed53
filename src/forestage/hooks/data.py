"""The data that a job's comment names: what its Prolog begins, its steps see, its Epilog ends.

    PATH/               data/tree.py      a directory, over its own path, once all of it is here
    FILE@/mount/point   data/mounted.py   a squashfs file, mounted; the file is staged as an image
    stage-dir=, @job    data/job_dir.py   the job's own directory; data/fill.py fills it

Only with the companion: it mounts all this in each task's own namespace.
"""

import contextlib
from collections.abc import Sequence

import msgspec

from forestage.cache import image as images
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.data import fill, job_dir, mounted, tree, wanted
from forestage.data.wanted import Fields, Wanted
from forestage.errors import Declined, ForestageError
from forestage.events import Handled
from forestage.hooks import image
from forestage.hooks.image import Wait
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.system import lock


class Shown(msgspec.Struct, frozen=True):
    """What a step gets: lines for the companion, and what became of each request."""

    lines: list[Fields]
    outcomes: list[Handled]


def begin(node: Node, job: Job, limit: Wait, refusal: Declined | None) -> list[Handled]:
    """Notes what data the job wants, and begins to bring it. For the Prolog; waits for nothing."""
    hints = job.hints
    if not hints.has_data:
        return []
    try:
        _must_be_possible(node, job, refusal)
        listed = tree.listed(node, job, hints.listed, limit.end) if hints.listed else ()
        requests = (*hints.data, *listed)
        noted = Wanted(requests, hints.room, hints.ram)
        _note(node, job, noted, limit.end)
    except (ForestageError, OSError) as error:
        return [image.of_error(Request("", "hint"), error)]
    # Once the lease is there: the sweep takes away the directories of jobs that have none.
    made = _make_dir(node, job, hints.room, hints.ram) if hints.room is not None else []
    return [*made, *(_begun(node, job, noted, request, limit) for request in requests)]


def show(node: Node, job: Job, limit: Wait, refusal: Declined | None) -> Shown:
    """What the step of a job is shown of its data. Never raises for a request."""
    noted = wanted.read(node.leases, job.id)
    lines: list[Fields] = []
    outcomes: list[Handled] = []
    if refusal:
        return Shown(lines, outcomes)
    for request in noted.requests:
        found, outcome = _shown(node, job, noted, request, limit)
        lines += found
        outcomes.append(outcome)
    if noted.room is not None:  # what it was filled with is there by now
        lines += _dir_lines(node, job)
    return Shown(lines, outcomes)


def _must_be_possible(node: Node, job: Job, refusal: Declined | None) -> None:
    if refusal:
        raise refusal
    if job.hints.off:
        raise Declined("off", "the job says stage=off")
    if not node.config.data.enabled:
        raise Declined("disabled", "`data.enabled: false`")
    if node.config.redirect != "spank":
        raise Declined("no-companion", "data shows in steps only through forestage's SPANK plugin")
    node.cache.prepare(node.config.require_mount)


def _note(node: Node, job: Job, noted: Wanted, end: Deadline) -> None:
    with lock.held(node.cache.space_lock, end.left()):
        lease = image.lease_of(node, job)
        node.leases.write(msgspec.structs.replace(lease, data=True))
        wanted.note(node.leases, job.id, noted)
        # By this file the companion knows that each step has to ask.
        node.leases.note_hinted(job.id, node.leases.hinted(job.id))


def _make_dir(node: Node, job: Job, size: int, ram: bool) -> list[Handled]:
    try:
        job_dir.make(node, job, size, ram)
    except (ForestageError, OSError) as error:
        return [image.of_error(Request("stage-dir", "hint"), error)]
    return []


def _dir_lines(node: Node, job: Job) -> list[Fields]:
    with contextlib.suppress(ForestageError, OSError):  # the step begins without it
        return job_dir.lines(node, job)
    return []


def _begun(node: Node, job: Job, noted: Wanted, request: Request, limit: Wait) -> Handled:
    try:
        path = images.wanted_path(request, job.work_dir)
        if not request.at:
            return tree.begin(node, job, request, path)
        if request.at.startswith("/"):
            plain = msgspec.structs.replace(request, at="")
            return image.handle(node, job, [plain], limit)[0].outcome
        fill.must_be_possible(noted, request)
    except (ForestageError, OSError) as error:
        return image.of_error(request, error)
    return Handled("started", request=request.path, via="hint")


def _shown(
    node: Node, job: Job, noted: Wanted, request: Request, limit: Wait
) -> tuple[Sequence[Fields], Handled]:
    try:
        path = images.wanted_path(request, job.work_dir)
        if not request.at:
            return tree.show(node, job, request, path, limit.copy)
        if request.at.startswith("/"):
            plain = msgspec.structs.replace(request, at="")
            answer = image.handle(node, job, [plain], limit)[0]
            return mounted.show(node, job, request, path, answer.image, answer.outcome)
        return fill.fill(node, job, noted, request, path, limit.fill or limit.end)
    except (ForestageError, OSError) as error:
        return (), image.of_error(request, error)
