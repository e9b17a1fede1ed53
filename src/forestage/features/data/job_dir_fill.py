"""Fills a job's own directory: the trees, archives and files that its comment has put there.

By the first step that starts on the node, which waits; others that start meanwhile wait as well.
It appears by one rename, whole. What could not be put there is not tried again by each further
step: the job has one line that says why.

    stage=DIR@job          DIR, writable, at /forestage/job/DIR
    stage=X.tar.gz@job     what the archive holds, at /forestage/job/X
    stage=FILE@job         a copy of it, at /forestage/job/FILE
    stage=DIR@seed:NAME    DIR, writable, at /forestage/job/seed/NAME; NAME is set to that path
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from forestage.cache.job_notes import JobData
from forestage.cache.source_image import declined_by_open_error
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.events import RequestOutcome
from forestage.features.data import copy_in, job_dir
from forestage.features.data.data_view import StepView, ViewContext
from forestage.features.data.job_dir import JobDirectory, JobDirMount
from forestage.slurm.hints import Request
from forestage.slurm.step_protocol import LineFields
from forestage.system import as_user, files, forked_child, lock, records, run
from forestage.system.as_user import ChildResult, User
from forestage.units import format_duration, make_printable, quote_value

SEED = "seed:"
FILE = "file"  # in a draft
LAST = 3.0  # seconds, once the time is over, to delete what is not whole; as many to say so

_ARCHIVE = re.compile(r"\.(tar(\.[a-z0-9]{1,4})?|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}", re.ASCII)
_OTHERS = {"PATH", "HOME", "SHELL", "USER", "LOGNAME", "IFS", "ENV", "TMPDIR"}
_OTHERS_BEGIN = ("LD_", "SLURM", "SPANK_", "ENROOT_", "PYXIS_", "PYTHON", "BASH_", "FORESTAGE_")


class FillResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """How it ended: with `bytes` in the directory, or for a `reason` without.

    `again`: another step may try it again.
    """

    bytes: int = 0
    reason: str = ""
    detail: str = ""
    again: bool = False


class _FillTask(msgspec.Struct, frozen=True):
    """What the process that does the work is to do; `name` is where, below the directory.

    `step` is the step's manager, in whose cgroups it works.
    """

    own: JobDirMount
    number: int
    user: User
    path: str
    name: str
    until: Deadline
    step: int

    @property
    def job_directory(self) -> JobDirectory:
        return self.own.job_directory

    @property
    def draft_name(self) -> str:
        """The name that it has in the job's directory until it is whole."""
        return f".forestage-{self.number}"

    @property
    def removal_prefix(self) -> str:
        """Begins the names of what is deleted of it."""
        return f"{self.draft_name}."


class _CopyMethod(msgspec.Struct, frozen=True):
    """What puts something into the draft, and where in it that is then; "" for all of it."""

    copy: Callable[[], int]
    result_path: str = ""


def is_seed_variable(name: str) -> bool:
    """Pure: whether a job may have this variable set to the path of its seed."""
    own = name not in _OTHERS and not name.startswith(_OTHERS_BEGIN)
    return bool(_VARIABLE.fullmatch(name)) and own


def name_in_job_dir(request: Request) -> str:
    """Pure: where a request shows, below the job's directory. Raises Declined."""
    if request.at.startswith(SEED):
        variable = request.at.removeprefix(SEED)
        if not is_seed_variable(variable):
            raise Declined(
                "bad-hint", f"{quote_value(variable)} is no variable that a seed may set"
            )
        return f"seed/{variable}"
    name = os.path.basename(request.path.rstrip("/"))
    if not request.path.endswith("/"):
        name = _ARCHIVE.sub("", name)
    if name in ("", ".", "..", "seed") or name.startswith(".forestage-"):
        raise Declined(
            "bad-hint", f"{make_printable(request.path)} has no name for the job's directory"
        )
    return name


def check_request_name(noted: JobData, request: Request) -> str:
    """Return where a request shows (`name_in_job_dir`), if nothing else has that name. Pure.

    Raises Declined, also if the job has no directory.
    """
    if noted.room is None:
        raise Declined(
            "job-dir",
            f"@{request.at} needs a directory of the job's own",
            "add stage-dir=SIZE to the comment",
        )
    name = name_in_job_dir(request)
    if name in _list_names(noted.requests[: noted.requests.index(request)]):
        raise Declined("bad-hint", f"another stage= has the name {make_printable(name)} already")
    return name


def _list_names(requests: Sequence[Request]) -> set[str]:
    """Pure: the names that these take in the job's directory."""
    names = set()
    for request in requests:
        with contextlib.suppress(Declined):
            if request.at and not request.at.startswith("/"):
                names.add(name_in_job_dir(request))
    return names


def start_in_prolog(call: ViewContext, request: Request) -> RequestOutcome:
    """What a Prolog does: the job's first step does the rest. Raises Declined."""
    check_request_name(call.noted, request)
    return RequestOutcome("started", request=make_printable(request.path), via="hint")


def show_in_step(call: ViewContext, request: Request) -> StepView:
    """Puts what a step's job asked for into its own directory, if no step before has done so.

    Raises Declined, Failed, OSError.
    """
    node, job, noted, own = call.node, call.job, call.noted, call.own
    start = node.clock.monotonic()
    name = check_request_name(noted, request)
    if own is None:
        raise Declined("job-dir", "the job has no directory of its own on this node")
    number = noted.requests.index(request)
    known = _find_result(own.job_directory, number)
    found = known
    if found is None:
        order = _FillTask(
            own, number, job.user, request.path, name, call.fill_deadline, job.manager
        )
        found = _run_copier(order, lambda: call.progress(partial(_format_progress, order, start)))
    if found.reason:
        raise Declined(found.reason, found.detail)
    target = f"{node.places.job_dir}/{name}"
    handled = RequestOutcome(
        "hit" if known else "copied",
        request=make_printable(f"{request.path}@{request.at}"),
        via="hint",
        image=make_printable(request.path),
        size=found.bytes,
        wait=round(node.clock.monotonic() - start, 4),
    )
    return [("env", name.removeprefix("seed/"), target)] if "/" in name else [], handled


def list_unset_variables(own: JobDirMount | None, noted: JobData) -> list[LineFields]:
    """The variables of seeds that are not in this directory: those of another node are no use."""
    names: dict[str, bool] = {}
    for number, request in enumerate(noted.requests):
        if not request.at.startswith(SEED) or not is_seed_variable(request.at.removeprefix(SEED)):
            continue
        name = request.at.removeprefix(SEED)
        names[name] = names.get(name, False) or (own is not None and _is_filled_whole(own, number))
    return [("env", name) for name, is_there in names.items() if not is_there]


def is_filled(own: JobDirMount, noted: JobData, request: Request) -> bool:
    """Whether the directory holds what this request asks for, from an earlier step."""
    return request.kind == "fill" and _is_filled_whole(own, noted.requests.index(request))


def _is_filled_whole(own: JobDirMount, number: int) -> bool:
    known = _find_result(own.job_directory, number)
    return known is not None and not known.reason


def _find_result(place: JobDirectory, number: int) -> FillResult | None:
    with contextlib.suppress(OSError, records.DamagedRecord):
        return records.load(place.result_file(number), FillResult)
    return None


def _format_progress(order: _FillTask, start: float) -> str:
    """For a user who waits: what for, and for how long already."""
    took = format_duration(order.until.clock.monotonic() - start)
    return (
        f"waiting for {make_printable(order.path)}, which is put into the job's directory ({took})"
    )


def _run_copier(order: _FillTask, idle: Callable[[], None]) -> FillResult:
    """Has it done by a process of the user's; notes what came of it. Raises Declined, OSError."""
    work = partial(_fill_once, order)
    try:
        # Once: memory that did not suffice in the job's cgroup would not suffice again.
        found, line = as_user.run_in_child_with_socket(
            work, FillResult, order.until.seconds_left() + 2 * LAST, on_idle=idle, tries=1
        )
    except as_user.ChildTimeout as slow:
        found = _find_result(order.job_directory, order.number) or FillResult(
            0, slow.reason, str(slow)
        )
        records.write(order.job_directory.result_file(order.number), msgspec.json.encode(found))
        raise
    except (
        as_user.ChildKilled,
        Failed,
    ):  # in the job's cgroup: killed for want of memory, or by the user
        with contextlib.suppress(Failed, Declined, OSError):  # in memory it still takes some
            as_user.run_in_child(partial(_remove_draft, order), type(None), 2 * LAST)
        raise Declined("not-put", f"{make_printable(order.path)}: its copier was killed") from None
    line.close()
    if not found.again:
        records.write(order.job_directory.result_file(order.number), msgspec.json.encode(found))
    return found


def _fill_once(order: _FillTask) -> ChildResult[FillResult]:
    """All that this process is for."""
    with contextlib.suppress(OSError):  # it has ended
        forked_child.join_slurm_cgroups(os.getpid(), order.step)
    try:
        # Held by this process: the hook that waits for it may be killed.
        with lock.held(order.job_directory.lock_file(order.number), order.until.seconds_left()):
            return _find_result(order.job_directory, order.number) or _fill_now(order), []
    except lock.LockTimeout:
        what = "another step copies it, and takes longer than this one may wait"
        return FillResult(0, "deadline", f"{make_printable(order.path)}: {what}", again=True), []


def _remove_draft(order: _FillTask) -> ChildResult[None]:
    """Removes what a killed process left, if no other step has begun anew."""
    with lock.held(order.job_directory.lock_file(order.number), 0):
        root = job_dir.open_root(order.own)
        as_user.set_effective_user(order.user)
        until = Deadline.after(LAST, order.until.clock)
        files.remove_tree(root, order.draft_name, order.removal_prefix, partial(_check_time, until))
    return None, []


def _fill_now(order: _FillTask) -> FillResult:
    copy_in.preload_modules()
    try:
        root = job_dir.open_root(order.own)
        with as_user.with_effective_user(order.user):
            if _exists_below(order.name, root):  # the hook that waited for it was killed then
                return FillResult()
            try:
                source = os.open(order.path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError as error:
                raise declined_by_open_error(
                    error, make_printable(order.path), order.user
                ) from None
        way = _choose_method(
            order, source
        )  # as root: a program that it starts is apart (run.start_filter)
        with as_user.with_effective_user(order.user):
            _make_draft(order, root)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            draft = os.open(order.draft_name, flags, dir_fd=root)
        copy_in.confine(draft, order.user)
        return _copy_and_rename(order, way, root)
    except Declined as declined:
        return FillResult(0, declined.reason, str(declined))
    except OSError as error:
        return _explain_error(order, error)


def _make_draft(order: _FillTask, root: int) -> None:
    """An empty directory, in place of what a killed process left."""
    for name in os.listdir(root):
        if name.startswith(order.draft_name):
            files.remove_tree(root, name, order.removal_prefix)
    os.mkdir(order.draft_name, 0o700, dir_fd=root)
    if "/" in order.name:
        with contextlib.suppress(FileExistsError):
            os.mkdir("seed", 0o700, dir_fd=root)


def _choose_method(order: _FillTask, source: int) -> _CopyMethod:
    """How to put the open source there. Raises Declined, OSError."""
    still = partial(_check_time, order.until)
    kind = os.fstat(source).st_mode
    if stat.S_ISDIR(kind):
        return _CopyMethod(partial(copy_in.copy_tree, source, still))
    if order.name.startswith("seed/") or not stat.S_ISREG(kind):
        raise copy_in.CopyInError(
            f"{make_printable(order.path)} is no directory, and no file that can be put there"
        )
    if not _ARCHIVE.search(order.path):
        return _CopyMethod(partial(copy_in.copy_file, source, FILE, still), f"/{FILE}")
    packed = copy_in.find_compression(source)
    if packed != "zstd":
        return _CopyMethod(partial(copy_in.unpack_archive, source, packed, still))
    filtering = run.start_filter(order.user, ["zstd", "-dcq"], source)
    return _CopyMethod(partial(_unpack_filtered, filtering, still))


def _unpack_filtered(filtering: run.FilterProcess, still: copy_in.TimeCheck) -> int:
    size = copy_in.unpack_archive(filtering.out, "", still)
    if filtering.wait() != 0:
        raise copy_in.CopyInError("the archive is damaged: zstd cannot read all of it")
    return size


def _copy_and_rename(order: _FillTask, way: _CopyMethod, root: int) -> FillResult:
    """Does the work as the user, below the draft; gives it its name once it is whole."""
    try:
        size = way.copy()
        ready = order.draft_name + way.result_path
        os.rename(ready, order.name, src_dir_fd=root, dst_dir_fd=root)
        if way.result_path:
            os.rmdir(order.draft_name, dir_fd=root)
        return FillResult(size)
    except Declined as declined:
        found = FillResult(0, declined.reason, f"{make_printable(order.path)}: {declined}")
    except OSError as error:
        found = _explain_error(order, error)
    # Where even that takes too long, the rest goes with the job.
    with contextlib.suppress(Declined, OSError):
        until = Deadline.after(LAST, order.until.clock)
        files.remove_tree(root, order.draft_name, order.removal_prefix, partial(_check_time, until))
    return found


def _check_time(until: Deadline) -> None:
    """Raises Declined once the time is over."""
    if not until.seconds_left():
        raise Declined("deadline", "it takes longer than the step may wait", "copy it in the job")


def _explain_error(order: _FillTask, error: OSError) -> FillResult:
    """Pure: what an error of reading or writing means."""
    path = make_printable(order.path)
    if error.errno == errno.ENOSPC:
        return FillResult(
            reason="job-dir-full", detail=f"{path} does not fit into what is left of it"
        )
    name = error.filename if isinstance(error.filename, str) else ""
    at = f" ({make_printable(name)})" if name else ""
    return FillResult(0, "not-put", f"{path}{at}: {error.strerror or error}")


def _exists_below(name: str, root: int) -> bool:
    try:
        os.stat(name, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
