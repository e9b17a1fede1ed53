"""A job's data: what its Prolog begins, its steps are shown, and its Epilog ends.

    PATH/               views/directory.py a directory, over its own path, once all of it is here
    FILE@/mount/point   views/mounted.py   a squashfs file, mounted; the file is staged as an image
    stage-dir=, @job    views/job_dir.py   the job's own directory; views/fill.py fills it

Only with the companion: it mounts all this in each task's own namespace.
"""

import contextlib
import io
import os
import pwd
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from forestage.cache import disk, image
from forestage.cache.node import Node
from forestage.cache.said import Wanted
from forestage.clock import Deadline
from forestage.errors import Declined, Failed, ForestageError
from forestage.events import WHOLE, Handled
from forestage.events.reasons import FAILURES
from forestage.hooks import answers, leases, serve
from forestage.hooks.answers import Answer
from forestage.hooks.container_binds import Binds
from forestage.hooks.limit import Limit
from forestage.slurm import hints
from forestage.slurm.hints import Kind, Request
from forestage.slurm.job import Job
from forestage.slurm.lines import Fields
from forestage.sources import opening
from forestage.system import as_user, lock
from forestage.units import printable
from forestage.views import wanted

if TYPE_CHECKING:
    from forestage.views.job_dir import Own

LONGEST_LIST = 64 * 1024  # bytes of the file of stage-list=
LOOK = 5.0  # seconds for it, and for where the job works
STAGE_DIR = Request("stage-dir", "hint")

ForStep = tuple[Sequence[Fields], Handled]
"""What a request comes to in a step: lines for the companion, and the outcome."""


class Shown(msgspec.Struct, frozen=True):
    """What a step gets: lines for the companion, what became of each request, and the paths, in the
    comment's order, at which all of it is read from this node."""

    lines: list[Fields]
    outcomes: list[Handled]
    local: tuple[str, ...] = ()


def begin(node: Node, job: Job, limit: Limit, refusal: Declined | None) -> list[Handled]:
    """Notes what data the job wants, and begins to bring it. For the Prolog; waits for nothing."""
    asked = job.hints
    if not asked.has_data:
        return []
    try:
        _must_be_possible(node, job, refusal, limit)
        requests = tuple(_absolute(job, one) for one in (*asked.data, *_listed(job, limit.end)))
        noted = Wanted(requests, asked.room, asked.ram, restart=job.restart)
        _note(node, job, noted, limit.end)
    except (ForestageError, OSError) as error:
        _note_refused(node, job, error, limit.end)
        return _as_data([answers.of_error(Request("", "hint"), error)])
    # Once the lease is there: the sweep takes away the directories of jobs that have none.
    made = _made(node, job, noted, limit)
    call = _Call(node, job, noted, limit, Binds(node.places.root, job))
    return _as_data([*made, *(_begun(call, one) for one in requests)])


def show(node: Node, job: Job, limit: Limit, refusal: Declined | None) -> Shown:
    """What the step of a job is shown of its data. Never raises for a request."""
    noted = wanted.read(node.leases, job.id)
    try:
        # What is mounted from such a disk would hang the tasks.
        disk.must_take(node.places, node.cache, limit.end.left())
    except Declined as hang:
        return _as_refused(noted, hang)
    own, lines, outcomes = _own_dir(node, job, noted)
    call = _Call(node, job, noted, limit, Binds(node.places.root, job), own)
    # Whoever serves a mounted file waits for the tasks, and they for what comes before.
    off = refusal or (_refused(noted) if noted.off else None)
    if off:
        outcomes += [_of_error(one, off) for one in noted.requests]
    requests = () if off else noted.requests
    came: dict[Request, Handled] = {}
    for request in sorted(requests, key=lambda one: one.kind == "mount"):
        found, came[request] = _shown(call, request)
        lines += found
    outcomes += came.values()
    if any(one.is_seed for one in noted.requests):
        from forestage.views import fill

        lines += fill.unset(own, noted)  # of those that are not in there by now
    kept = wanted.disentangled(wanted.in_order(lines))
    local = [_local(node, kept, request, came[request]) for request in requests]
    return Shown(kept, _as_data(outcomes), tuple(filter(None, local)))


def _refused(noted: Wanted) -> Declined:
    """Pure: why the job's Prolog refused all that it wants."""
    kind = Failed if noted.reason in FAILURES else Declined
    return kind(noted.reason or "no-mount", noted.refused)


def _local(node: Node, kept: Sequence[Fields], request: Request, outcome: Handled) -> str:
    """Where the step reads the whole of a request from this node's disk; "" where it does not."""
    if outcome.result not in WHOLE:
        return ""
    if request.kind == "mount":
        return request.at
    if request.kind == "fill":
        from forestage.views import fill

        return f"{node.places.job_dir}/{fill.name_of(request)}"
    shown = (f"{line[-2]}/" for line in kept if line[0] == "device" and line[3] == "erofs")
    return request.path.rstrip("/") if f"{outcome.image}/".startswith(tuple(shown)) else ""


def _as_refused(noted: Wanted, why: Declined) -> Shown:
    """Pure: nothing is shown; what the job's variables named is not there."""
    requests = [*noted.requests, *([STAGE_DIR] if noted.room is not None else [])]
    lines: list[Fields] = [("env", "FORESTAGE_DIR")] if noted.room is not None else []
    if any(one.is_seed for one in noted.requests):
        from forestage.views import fill

        lines += fill.unset(None, noted)
    return Shown(lines, _as_data([_of_error(one, why) for one in requests]))


def _as_data(outcomes: Sequence[Handled]) -> list[Handled]:
    """Pure: the outcomes as those of data, whatever module they are from."""
    return [msgspec.structs.replace(one, data=True) for one in outcomes]


def _absolute(job: Job, request: Request) -> Request:
    """A request with its path absolute: steps may have another directory than their job."""
    with contextlib.suppress(Declined):  # it gets its own outcome
        return msgspec.structs.replace(request, path=image.wanted_path(request, job.work_dir))
    return request


def _listed(job: Job, end: Deadline) -> tuple[Request, ...]:
    """What the job's list names. Raises Declined, as_user.TooSlow, OSError."""
    if not job.hints.listed:
        return ()
    # It need not begin as a path does: no reference to a registry can be meant.
    named = Request(os.path.join(".", job.hints.listed), "hint")
    path = image.wanted_path(named, job.work_dir)

    def work() -> as_user.Found[bytes]:
        as_user.become(job.user)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with io.FileIO(fd) as file:
            return file.read(LONGEST_LIST + 1), []

    try:
        text = as_user.call(work, bytes, min(LOOK, end.left()))[0]
    except OSError as error:
        raise image.declined_by(error, path) from None
    if len(text) > LONGEST_LIST:
        raise Declined("bad-hint", f"stage-list: {path} is longer than {LONGEST_LIST} bytes")
    lines = [line.strip() for line in os.fsdecode(text).split("\n")]
    problems: list[str] = []
    wanted = hints.requests([one for one in lines if not one.startswith("#")], job.rank, problems)
    data = tuple(dict.fromkeys(one for one in wanted if one.is_data))
    if len(data) < len(set(wanted)):
        problems.append("it names images, which belong into stage=")
    if len(data) > hints.MAX_HINTED:
        problems.append(f"it names {len(data)}, more than {hints.MAX_HINTED}")
    if problems:
        raise Declined("bad-hint", f"stage-list: {path}: {'; '.join(problems)}")
    return data


def _made(node: Node, job: Job, noted: Wanted, limit: Limit) -> list[Handled]:
    """Makes the job's own directory, where it wants one; notes for its steps why it has none."""
    if noted.room is None:
        return []
    from forestage.views import job_dir

    try:
        job_dir.make(node, job, noted.room, noted.ram, limit.end)
    except (ForestageError, OSError) as error:
        with contextlib.suppress(ForestageError, OSError):
            refused = msgspec.structs.replace(noted, refused=printable(str(error)))
            _note(node, job, refused, limit.end)
        return [answers.of_error(STAGE_DIR, error)]
    return []


def _own_dir(
    node: Node, job: Job, noted: Wanted
) -> tuple["Own | None", list[Fields], list[Handled]]:
    """The job's own directory with its lines, or why it has none though it wants one."""
    if noted.room is None:
        return None, [], []
    from forestage.views import job_dir

    try:
        if noted.refused:
            raise Declined("job-dir", noted.refused)
        own = job_dir.shown(node, job)
    except (ForestageError, OSError) as error:  # the step begins without it
        return None, [("env", "FORESTAGE_DIR")], [answers.of_error(STAGE_DIR, error)]
    return own, [own.line, ("env", "FORESTAGE_DIR", os.fspath(node.places.job_dir))], []


def _must_be_possible(node: Node, job: Job, refusal: Declined | None, limit: Limit) -> None:
    if refusal:
        raise refusal
    if job.hints.off:
        raise Declined("off", "the job says stage=off")
    if not node.config.data.enabled:
        raise Declined("disabled", "`data.enabled: false`")
    if node.config.redirect != "spank":
        raise Declined("no-companion", "data shows in steps only through forestage's SPANK plugin")
    disk.must_take(node.places, node.cache, limit.end.left())
    node.cache.prepare(node.config.require_mount)


def _note(node: Node, job: Job, noted: Wanted, end: Deadline) -> None:
    with lock.held_if_writable(node.cache.space_lock, end.left()):
        node.leases.say(leases.of_job(node, job), data=noted)
        # By this file the companion knows that each step has to ask.
        node.leases.note_hinted(job.id, node.leases.hinted(job.id))


def _note_refused(node: Node, job: Job, why: Exception, end: Deadline) -> None:
    """Has the steps of a job that gets nothing unset its variables: they may be another job's.

    And say that there are no mounts; of all it wants, where its user asked to be told.
    """
    asked = job.hints
    told = tuple(
        one
        for one in asked.data
        if one.is_seed or ((one.kind == "mount" or asked.tell) and not asked.off)
    )
    if asked.room is None and not told:
        return
    text, reason = printable(str(why)), answers.of_error(Request("", "hint"), why).reason
    refused = Wanted(told, asked.room, refused=text, off=True, reason=reason, restart=job.restart)
    with contextlib.suppress(ForestageError, OSError):
        _note(node, job, refused, end)


class _Call(msgspec.Struct, frozen=True):
    """What the requests of one call share; `own` is the job's directory, which a step is shown."""

    node: Node
    job: Job
    noted: Wanted
    limit: Limit
    bound: Binds
    own: "Own | None" = None


class _View(Protocol):
    """One kind of request. Both raise ForestageError, OSError; `path` is absolute."""

    def begin(self, call: _Call, request: Request, path: str) -> Handled:
        """What a Prolog does for it, which waits for nothing."""

    def show(self, call: _Call, request: Request, path: str) -> ForStep:
        """What a step is shown of it."""


class _Directory:
    def begin(self, call: _Call, request: Request, path: str) -> Handled:
        from forestage.views import directory

        return directory.begin(call.node, call.job, request, path)

    def show(self, call: _Call, request: Request, path: str) -> ForStep:
        from forestage.views import directory

        node, job, limit = call.node, call.job, call.limit
        lines, outcome = directory.show(
            node, job, request, path, limit.copy, limit.end, limit.progress
        )
        for line in lines:
            _must_not_be_in(job, line[-2], _some_time(node, limit))
            call.bound.must_not_hold(line[-2])
        return lines, outcome


class _Mount:
    def begin(self, call: _Call, request: Request, path: str) -> Handled:
        from forestage.views import mounted

        # Nothing is copied for what will not be mounted; the step looks closer.
        mounted.must_be_allowed(request.at, ())
        return self._staged(call, request, call.limit).outcome

    def show(self, call: _Call, request: Request, path: str) -> ForStep:
        from forestage.views import mounted

        node, job = call.node, call.job
        limit = msgspec.structs.replace(call.limit, end=_some_time(node, call.limit))
        place = mounted.place(node, job, request.at, limit.end)
        _keep_clear_of_binds(call.bound, place.path)
        answer = self._staged(call, request, limit)
        staged = mounted.Staged(answer.outcome, answer.image, answer.socket)
        return mounted.show(node, job, request, path, place, staged, limit.end)

    def _staged(self, call: _Call, request: Request, limit: Limit) -> Answer:
        """The file, as an image. No redirect lies there, so none is in a container's way."""
        return serve.serve(call.node, call.job, [request], limit)[0]


class _Fill:
    def begin(self, call: _Call, request: Request, path: str) -> Handled:
        from forestage.views import fill

        fill.must_be_possible(call.noted, request)
        return Handled("started", request=printable(request.path), via="hint")

    def show(self, call: _Call, request: Request, path: str) -> ForStep:
        from forestage.views import fill

        until = call.limit.fill or call.limit.end
        return fill.fill(
            call.node, call.job, call.noted, request, call.own, path, until, call.limit.progress
        )


VIEWS: Mapping[Kind, _View] = {"directory": _Directory(), "mount": _Mount(), "fill": _Fill()}
"""By the kind of a request: all that Prolog and step know of it."""


def _begun(call: _Call, request: Request) -> Handled:
    try:
        path = image.wanted_path(request, call.job.work_dir)
        return VIEWS[request.kind].begin(call, request, path)
    except (ForestageError, OSError) as error:
        return _of_error(request, error)


def _shown(call: _Call, request: Request) -> ForStep:
    try:
        path = image.wanted_path(request, call.job.work_dir)
        return VIEWS[request.kind].show(call, request, path)
    except (ForestageError, OSError) as error:
        return (), _of_error(request, error)


def _some_time(node: Node, limit: Limit) -> Deadline:
    """What is left to the step, and enough after a long wait for what came before."""
    return Deadline.after(max(limit.end.left(), opening.HOOK_TIMEOUT), node.clock)


def _must_not_be_in(job: Job, directory: str, end: Deadline) -> None:
    """Raises Declined where the job works in the directory: it would become read-only.

    Wherever links lead: the directory is resolved. Raises as_user.TooSlow.
    """

    def work() -> as_user.Found[list[bytes]]:  # they need not be text
        home = job.home
        with contextlib.suppress(KeyError):
            home = home or pwd.getpwuid(job.user.uid).pw_dir
        as_user.become(job.user)
        own = [one for one in (home, job.work_dir) if one.startswith("/")]
        return [*map(os.fsencode, (*own, *map(os.path.realpath, own)))], []

    found, _ = as_user.call(work, list[bytes], min(LOOK, end.left()))
    for own in map(os.fsdecode, found):
        if f"{own}/".startswith(f"{directory}/"):
            raise Declined("no-mount", f"{directory} holds the job's own directory {own}")


def _keep_clear_of_binds(bound: Binds, path: str) -> None:
    """Raises Declined where the job's container would not start with a mount there."""
    try:
        bound.must_not_hold(path)
    except Declined as why:  # of an image nobody needs to hear it, as its path shows the same bytes
        raise Declined("no-mount", f"{path}: {why}") from None


def _of_error(request: Request, error: Exception) -> Handled:
    named = f"{request.path}@{request.at}" if request.at else request.path
    return answers.of_error(msgspec.structs.replace(request, path=named), error)
