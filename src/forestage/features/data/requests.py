"""A job's data: what its Prolog begins, its steps are shown, and its Epilog ends.

    PATH/               features/data/directory.py a directory, over its own path, once all of it is
    here
    FILE@/mount/point   features/data/squashfs_mount.py   a squashfs file, mounted; the file is
staged as an image
    stage-dir=, @job    features/data/job_dir.py   the job's own directory;
features/data/job_dir_fill.py fills it

Each is a `data_view.DataView`, and may have something to release (features/data/release.py). Only
with the companion: it mounts all this in each task's own namespace.
"""

import codecs
import contextlib
import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from forestage.cache import disk_probe, source_image
from forestage.cache.job_notes import JobData
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, Failed, ForestageError
from forestage.events import WHOLE_RESULTS, RequestOutcome
from forestage.features.contexts import StepPart
from forestage.features.data import data_view, directory_record
from forestage.features.data.data_view import DataView, StagedFile, StepView, ViewContext
from forestage.hooks import leases, request_results, serve
from forestage.hooks.container_binds import ContainerBinds
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm import hints
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import DIRECTORY_VARIABLE, LineFields
from forestage.system import as_user, lock
from forestage.units import make_printable

if TYPE_CHECKING:
    from forestage.features.data.job_dir import JobDirMount

LONGEST_LIST = 64 * 1024  # bytes of the file of stage-list=
READ_TIMEOUT = 5.0  # seconds for it
STAGE_DIR = Request("stage-dir", "hint")


def start_job_data(
    node: Node, job: Job, limit: HookDeadlines, refusal: Declined | None
) -> list[RequestOutcome]:
    """Notes what data the job wants, and begins to bring it. For the Prolog; waits for nothing."""
    asked = job.hints
    if not asked.has_data:
        return []
    try:
        _check_possible(node, job, refusal, limit)
        requests = tuple(
            _with_absolute_path(job, request)
            for request in (*asked.data, *_read_stage_list(job, limit.end))
        )
        noted = JobData(requests, asked.room, asked.ram, restart=job.restart)
        _record_wanted(node, job, limit.end, noted)
    except (ForestageError, OSError) as error:
        _record_refusal(node, job, error, limit.end)
        return _mark_as_data([request_results.make_error_outcome(Request("", "hint"), error)])
    # Once the lease is there: the sweep takes away the directories of jobs that have none.
    made = _make_own_dir(node, job, noted, limit)
    call = _make_view_context(node, job, noted, limit)
    return _mark_as_data([*made, *(_start_request(call, request) for request in requests)])


def show_job_data(node: Node, job: Job, limit: HookDeadlines, refusal: Declined | None) -> StepPart:
    """What the step of a job is shown of its data. Never raises for a request."""
    noted = data_view.read_job_data(node.leases, job.id, job.user.uid)
    hang: Declined | None = None
    try:
        disk_probe.check_writable(node.places, node.cache, limit.end.seconds_left())
    except Declined as error:  # what is mounted from such a disk would hang the tasks
        hang = error
    own, lines, outcomes = _find_own_dir(node, job, noted, hang)
    call = _make_view_context(node, job, noted, limit, own)
    # Whoever serves a mounted file waits for the tasks, and they for what comes before.
    requests = noted.requests
    if off := hang or refusal or (_make_refusal(noted) if noted.off else None):
        requests = _list_filled_requests(own, noted)
        left_out = [request for request in noted.requests if request not in requests]
        outcomes += [_make_error_outcome(request, off) for request in left_out]
    came: dict[Request, RequestOutcome] = {}
    for request in sorted(requests, key=lambda request: request.kind == "mount"):
        found, came[request] = _show_request(call, request)
        lines += found
    outcomes += came.values()
    if any(_is_seed(request) for request in noted.requests):
        from forestage.features.data import job_dir_fill

        lines += job_dir_fill.list_unset_variables(
            own, noted
        )  # of those that are not in there by now
    kept = data_view.drop_nested_directories(data_view.sort_by_depth(lines))
    if own:
        into = [line for line in kept if line == own.line or _is_variable_into_own_dir(node, line)]
        _record_own_dir(node, job, into)
    local = [_find_local_path(node, kept, request, came[request]) for request in requests]
    return StepPart(kept, _mark_as_data(outcomes), tuple(filter(None, local)))


def _list_filled_requests(own: "JobDirMount | None", noted: JobData) -> tuple[Request, ...]:
    """What earlier steps have put into the job's own directory: it is the job's, like that one."""
    if own is None:
        return ()
    from forestage.features.data import job_dir_fill

    return tuple(
        request for request in noted.requests if job_dir_fill.is_filled(own, noted, request)
    )


def _make_refusal(noted: JobData) -> Declined:
    """Pure: why the job's Prolog refused all that it wants."""
    from forestage.events.reasons import collect_failures

    kind = Failed if noted.reason in collect_failures() else Declined
    return kind(noted.reason or "no-mount", noted.refused)


def _find_local_path(
    node: Node, kept: Sequence[LineFields], request: Request, outcome: RequestOutcome
) -> str:
    """Where the step reads the whole of a request from this node's disk; "" where it does not."""
    if outcome.result not in WHOLE_RESULTS:
        return ""
    if request.kind == "mount":
        return request.at
    if request.kind == "fill":
        from forestage.features.data import job_dir_fill

        return f"{node.places.job_dir}/{job_dir_fill.name_in_job_dir(request)}"
    shown = (f"{line[-2]}/" for line in kept if line[0] == "device" and line[3] == "erofs")
    return request.path.rstrip("/") if f"{outcome.image}/".startswith(tuple(shown)) else ""


def _mark_as_data(outcomes: Sequence[RequestOutcome]) -> list[RequestOutcome]:
    """Pure: the outcomes as those of data, whatever module they are from."""
    return [msgspec.structs.replace(outcome, data=True) for outcome in outcomes]


def _with_absolute_path(job: Job, request: Request) -> Request:
    """A request with its path absolute: steps may have another directory than their job."""
    with contextlib.suppress(Declined):  # it gets its own outcome
        return msgspec.structs.replace(
            request, path=source_image.resolve_requested_path(request, job.work_dir)
        )
    return request


def _read_stage_list(job: Job, end: Deadline) -> tuple[Request, ...]:
    """What the job's list names. Raises Declined, as_user.ChildTimeout, OSError."""
    if not job.hints.listed:
        return ()
    # It need not begin as a path does: no reference to a registry can be meant.
    named = Request(os.path.join(".", job.hints.listed), "hint")
    path = source_image.resolve_requested_path(named, job.work_dir)

    def work() -> as_user.ChildResult[bytes]:
        as_user.set_effective_user(job.user)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with io.FileIO(fd) as file:
            return file.read(LONGEST_LIST + 1), []

    try:
        text = as_user.run_in_child(work, bytes, min(READ_TIMEOUT, end.seconds_left()))[0]
    except OSError as error:
        raise source_image.declined_by_open_error(error, path, job.user) from None
    if len(text) > LONGEST_LIST:
        raise Declined("bad-hint", f"stage-list: {path} is longer than {LONGEST_LIST} bytes")
    try:
        paths = split_path_list(text)
    except ValueError as error:
        raise Declined("bad-hint", f"stage-list: {path} {error}") from None
    problems: list[str] = []
    listed = hints.parse_requests(paths, job.node_index, problems)
    data = tuple(dict.fromkeys(request for request in listed if request.is_data))
    if len(data) < len(set(listed)):
        problems.append("it names images, which belong into stage=")
    if len(data) > hints.MAX_HINTED_PATHS:
        problems.append(f"it names {len(data)}, more than {hints.MAX_HINTED_PATHS}")
    if problems:
        raise Declined("bad-hint", f"stage-list: {path}: {'; '.join(problems)}")
    return data


def split_path_list(text: bytes) -> list[str]:
    """Return the lines of a list of paths, without comments. Pure.

    Editors of Windows begin a file with a byte order mark, and some of their programs write UTF-16,
    with or without its mark. Raises ValueError for UTF-16, and for any other NUL byte.
    """
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    # The first character of a list is ASCII: of a path, a comment, or the end of a line.
    if text.startswith(marks) or text[:2].count(0) == 1:
        raise ValueError("is UTF-16; save it as UTF-8")
    if b"\0" in text:
        raise ValueError("holds NUL bytes, so it is no list of paths")
    lines = os.fsdecode(text.removeprefix(codecs.BOM_UTF8)).split("\n")
    return [line for line in map(str.strip, lines) if not line.startswith("#")]


def _is_seed(request: Request) -> bool:
    """Return whether a variable of the job says where it is. Pure."""
    return request.at.startswith("seed:")


def _record_wanted(node: Node, job: Job, end: Deadline, wanted: JobData) -> None:
    """Notes what the job wants, for its steps, and has its Epilog call this feature.

    Raises Failed, OSError.
    """
    leases.save_job_notes(node, job, end.seconds_left(), to_steps=True, data=wanted)
    (node.leases.directory / f"{job.id}.data").touch(0o600)  # the row's mark


def _make_own_dir(
    node: Node, job: Job, noted: JobData, limit: HookDeadlines
) -> list[RequestOutcome]:
    """Makes the job's own directory, where it wants one; notes for its steps why it has none."""
    if noted.room is None:
        return []
    from forestage.features.data import job_dir

    try:
        # An Epilog that could not do its work has left those of an earlier run of the job.
        for left in (node.leases.directory_record_file(job.id), node.leases.over_mark(job.id)):
            left.unlink(missing_ok=True)
        job_dir.make_job_dir(node, job, noted.room, noted.ram, limit.end)
    except (ForestageError, OSError) as error:
        with contextlib.suppress(ForestageError, OSError):
            refused = msgspec.structs.replace(noted, refused=make_printable(str(error)))
            _record_wanted(node, job, limit.end, refused)
        return [request_results.make_error_outcome(STAGE_DIR, error)]
    if not noted.ram:  # the first step makes it
        with contextlib.suppress(ForestageError, OSError):
            _record_own_dir(
                node, job, _own_dir_lines(node, job_dir.prepare_mount_for_step(node, job))
            )
    return []


def _own_dir_lines(node: Node, own: "JobDirMount") -> list[LineFields]:
    return [own.line, ("env", DIRECTORY_VARIABLE, os.fspath(node.places.job_dir))]


def _is_variable_into_own_dir(node: Node, line: LineFields) -> bool:
    """Pure: whether a line sets a variable to a path in the job's own directory."""
    own = os.fspath(node.places.job_dir)
    return line[0] == "env" and len(line) > 2 and f"{line[2]}/".startswith(f"{own}/")


def _record_own_dir(node: Node, job: Job, lines: Sequence[LineFields]) -> None:
    """Notes by what the job's own directory shows in steps that get no answer of a helper's."""
    with contextlib.suppress(ForestageError, OSError):
        text = directory_record.format_record(job.user.uid, lines)
        if directory_record.is_write_needed(node.leases, job.id, text):
            with lock.held(node.cache.space_lock, leases.SHORT_LOCK_TIMEOUT):
                directory_record.write_record(node.leases, job.id, text)


def _find_own_dir(
    node: Node, job: Job, noted: JobData, hang: Declined | None
) -> tuple["JobDirMount | None", list[LineFields], list[RequestOutcome]]:
    """The job's own directory with its lines, or why it has none though it wants one."""
    if noted.room is None:
        return None, [], []
    from forestage.features.data import job_dir

    try:
        if hang:
            raise hang
        if noted.refused:
            raise Declined("job-dir", noted.refused)
        own = job_dir.prepare_mount_for_step(node, job)
    except (ForestageError, OSError) as error:  # the step begins without it
        return (
            None,
            [("env", DIRECTORY_VARIABLE)],
            [request_results.make_error_outcome(STAGE_DIR, error)],
        )
    return own, _own_dir_lines(node, own), []


def _check_possible(node: Node, job: Job, refusal: Declined | None, limit: HookDeadlines) -> None:
    if refusal:
        raise refusal
    if job.hints.off:
        raise Declined("off", "the job says stage=off")
    if not node.config.data.enabled:
        raise Declined("disabled", "`data.enabled: false`")
    if node.config.redirect != "spank":
        raise Declined("no-companion", "data shows in steps only through forestage's SPANK plugin")
    disk_probe.check_writable(node.places, node.cache, limit.end.seconds_left())
    node.cache.prepare(node.config.require_mount)
    node.cache.mark_in_use()


def _record_refusal(node: Node, job: Job, why: Exception, end: Deadline) -> None:
    """Has the steps of a job that gets nothing unset its variables: they may be another job's.

    And say that there are no mounts; of all it wants, where its user asked to be told.
    """
    asked = job.hints
    told = tuple(
        request
        for request in asked.data
        if _is_seed(request) or ((request.kind == "mount" or asked.tell) and not asked.off)
    )
    if asked.room is None and not told:
        return
    text, reason = (
        make_printable(str(why)),
        request_results.make_error_outcome(Request("", "hint"), why).reason,
    )
    refused = JobData(told, asked.room, refused=text, off=True, reason=reason, restart=job.restart)
    with contextlib.suppress(ForestageError, OSError):
        _record_wanted(node, job, end, refused)


def _make_view_context(
    node: Node, job: Job, noted: JobData, limit: HookDeadlines, own: "JobDirMount | None" = None
) -> ViewContext:
    def stage(request: Request, end: Deadline) -> StagedFile:
        # No redirect lies there, so none is in a container's way.
        within = msgspec.structs.replace(limit, end=end)
        (answer,) = serve.serve_requests(node, job, [request], within)
        return StagedFile(answer.outcome, answer.image, answer.socket)

    return ViewContext(
        node=node,
        job=job,
        noted=noted,
        copy_deadline=limit.copy,
        end=limit.end,
        fill_deadline=limit.fill or limit.end,
        progress=limit.on_data_wait,
        stage=stage,
        check_not_bound=ContainerBinds(node.places, job).check_not_below_bind,
        own=own,
    )


def _choose_view(request: Request) -> DataView:
    """The module for this kind of request; most jobs have at most one kind."""
    if request.kind == "directory":
        from forestage.features.data import directory

        return directory
    if request.kind == "mount":
        from forestage.features.data import squashfs_mount

        return squashfs_mount
    from forestage.features.data import job_dir_fill

    return job_dir_fill


def _start_request(call: ViewContext, request: Request) -> RequestOutcome:
    try:
        source_image.resolve_requested_path(request, call.job.work_dir)
        return _choose_view(request).start_in_prolog(call, request)
    except (ForestageError, OSError) as error:
        return _make_error_outcome(request, error)


def _show_request(call: ViewContext, request: Request) -> StepView:
    try:
        source_image.resolve_requested_path(request, call.job.work_dir)
        return _choose_view(request).show_in_step(call, request)
    except (ForestageError, OSError) as error:
        return (), _make_error_outcome(request, error)


def _make_error_outcome(request: Request, error: Exception) -> RequestOutcome:
    named = f"{request.path}@{request.at}" if request.at else request.path
    return request_results.make_error_outcome(msgspec.structs.replace(request, path=named), error)
