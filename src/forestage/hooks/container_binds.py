"""Directories that the job's container binds: no redirect may lie below one (slurm/enroot.py).

Such a container would not start. So the path stays as it is, and the image is not copied for a job
that could not use the copy. Where it cannot be told what the container binds, that counts as all. A
Prolog does not see the job's environment: it goes by what a login has, and the record of what the
steps are shown (cache/step_record.py) says so. Where a redirect serves the whole node, what
containers of other jobs bind is not known; `forestage check` finds what the site has all of them
bind.

What a program of enroot's hooks.d binds by itself cannot be told at all (docs/faq.md).
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from forestage.cache import step_record
from forestage.cache.source_image import PATH_MAX
from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.paths import NodePaths
from forestage.slurm import enroot
from forestage.slurm.enroot import EnrootSetup, FstabBind, JobVariables
from forestage.slurm.job import Job
from forestage.sources import opening
from forestage.system import as_user, lock
from forestage.system.lock_ranges import USER_FILES
from forestage.system.mounts import is_below
from forestage.system.tree import RecordingTree

SAVE_PATH_TIMEOUT = 5.0  # seconds for where a job saves to
USER_FILES_TIMEOUT = (
    15.0  # seconds for the user's own files where no hook sets a limit: they may be far away
)
MAX_FSTAB_BYTES = 64 * 1024  # of all fstabs of a user's
MAX_FSTABS = 100  # of those
MAX_DIRECTORY_NAMES = 1000  # of all that lies beside them


class _BindLookupResult(msgspec.Struct, frozen=True):
    """What the look as the user found: directories with who binds them, or why that is unknown.

    `file_stamps` are those of the user's files that were looked at; `variables` those that counted;
    both are empty where one of them is no text.
    """

    home: str
    bound: tuple[tuple[str, str], ...]
    doubt: str
    file_stamps: dict[str, tuple[int, int, int, int]]
    variables: dict[str, str | None]


class _PendingLookup(NamedTuple):
    """What was read of the node's own files, and the child that reads the user's.

    In the memory `path_memory` it leaves what it asks for now; `home` is the user's, if that is
    known; `since` is when it began, on the monotonic clock.
    """

    files: RecordingTree
    site: EnrootSetup
    child: as_user.ChildProcess
    path_memory: int
    home: str
    since: float


class ContainerBinds:
    """What the containers of a job bind; looked up once.

    `end` limits that: a job waits for its home directory as well. `decision_lines` are lines for
    the record of what its steps are shown, empty where there can be none. As a context it looks
    while others do something else.
    """

    def __init__(self, places: NodePaths, job: Job, end: Deadline | None = None) -> None:
        self._places, self._job, self._end = places, job, end
        self._pending: _PendingLookup | None = None
        self._found: _BindLookupResult | None = None
        self.decision_lines: tuple[str, ...] = ()

    def __enter__(self) -> "ContainerBinds":
        self._pending = self._start_lookup()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pending:
            self._pending.child.kill()
            os.close(self._pending.path_memory)

    def check_not_below_bind(self, path: str, image_binds: Sequence[str] = ()) -> None:
        """Raises Declined (below-bind) where the container binds what this path lies below.

        `path` is resolved. `image_binds` is what the image's fstab binds, variables as they are
        written.
        """
        found = self._found = self._found or self._finish_lookup()
        bound = found.bound + (self._list_image_binds(found, image_binds) if image_binds else ())
        for who, directory in bound:
            if enroot.is_bind_above(directory, path):
                unknown = enroot.UNKNOWN in directory
                what = "what may be above it" if unknown else directory
                raise Declined(
                    "below-bind",
                    f"the container binds {what} ({who}), and would not start with a redirect below"
                    " it (rbind, as of --container-mounts, binds what is mounted below, too)",
                )
        if found.doubt:
            raise Declined("below-bind", f"the container may bind what is above it: {found.doubt}")

    @property
    def _seconds_left(self) -> float:
        return self._end.seconds_left() if self._end else USER_FILES_TIMEOUT

    def _start_lookup(self) -> "_PendingLookup":
        """Reads what is the node's here, and what is the user's in a child, as that user."""
        files = RecordingTree(self._places.root)
        site = enroot.read_enroot_setup(files, self._job.path)
        binds = [*enroot.list_site_binds(files, site)]
        job = self._job
        home = (job.variables or {}).get("HOME") or job.home or job.user.home or ""
        spot = os.memfd_create("spot")

        def work() -> as_user.ChildResult[_BindLookupResult]:
            return self._read_as_user(site, binds, spot), []

        since = time.monotonic()
        return _PendingLookup(files, site, as_user.ChildProcess(work, (spot,)), spot, home, since)

    def _finish_lookup(self) -> _BindLookupResult:
        looking, self._pending = self._pending or self._start_lookup(), None
        hang = opening.find_server_hang(self._places, looking.home) if looking.home else ""
        try:
            found, line = looking.child.wait_for_reply(
                _BindLookupResult, 0.0 if hang else self._seconds_left
            )
        except as_user.ChildTimeout:
            return _make_unknown_binds(hang or self._report_hang(looking))
        except (Declined, OSError) as error:  # it never fails a job
            return _make_unknown_binds(str(error))
        finally:
            os.close(looking.path_memory)
        line.close()
        files = looking.files
        ours = {
            os.fspath(files.host_path(path)): facts for path, facts in files.file_stamps.items()
        }
        if found.variables:
            program = looking.site.program
            self.decision_lines = step_record.format_bind_lines(
                program, ours, found.file_stamps, found.variables
            )
        return found

    def _report_hang(self, looking: _PendingLookup) -> str:
        """What the child waits for, and for how long already; who looks next is to know it."""
        path = os.fsdecode(os.pread(looking.path_memory, PATH_MAX, 0).partition(b"\0")[0])
        if not path:
            return "earlier looks at this user's files still hang"
        opening.start_server_probe(self._places, path)
        home = looking.home.rstrip("/")
        if home and is_below(path, home):
            path = f"the home directory {home}"
        return f"{path} did not answer for {time.monotonic() - looking.since:.1f} s"

    def _read_as_user(
        self, site: EnrootSetup, binds: Sequence[FstabBind], spot: int
    ) -> _BindLookupResult:
        """In a child: what the user's files add, and where all of it leads."""
        job, files = self._job, RecordingTree()

        def at(path: str) -> None:
            os.pwrite(spot, os.fsencode(path)[:PATH_MAX] + b"\0", 0)

        self._acquire_user_slot()
        home = (
            (job.variables or {}).get("HOME") or job.home or as_user.find_home_directory(job.user)
        )
        as_user.set_effective_user(job.user)
        variables = _make_variables(job, home)
        variables.get("HOME")  # counts in any case
        own = enroot.find_user_folder(site.settings, variables, home)
        # pyxis keeps the second from enroot; one that the job runs by itself goes by it.
        folders = {own, variables.get("ENROOT_SYSCONF_PATH") or site.sysconf} - {site.sysconf}
        doubt = ""
        for folder in sorted(folders):
            at(os.path.join(job.work_dir, folder))
            found, why = _read_folder_binds(files, os.path.join(job.work_dir, folder))
            binds = (*binds, *found)
            doubt = doubt or why
        bound = [(f"{one.file}:{one.line}", one.source) for one in binds]
        bound = [(who, variables.expand(source)) for who, source in bound]
        wants_home = job.mounts_home
        if wants_home is None:
            wants_home = enroot.is_true_setting(site.settings.get("ENROOT_MOUNT_HOME", ""))
        if wants_home:
            bound += [("--container-mount-home", home)]
        return _drop_undecodable(
            _BindLookupResult(
                home, _resolve_links(bound, at), doubt, files.file_stamps, variables.queried
            )
        )

    def _acquire_user_slot(self) -> None:
        """In a child, as root: where as many of the user's hang as may, it waits for one."""
        with contextlib.suppress(OSError):  # /run is full, or this is no root
            place = USER_FILES.first_byte(self._job.user.uid) + os.getpid() % USER_FILES.width
            lock.lock_byte(self._places.mounting, place, is_blocking=True)

    def _list_image_binds(
        self, found: _BindLookupResult, image_binds: Sequence[str]
    ) -> tuple[tuple[str, str], ...]:
        """What the image's own fstab binds; in a child, where the paths lead is asked for."""
        variables = _make_variables(self._job, found.home)
        bound = [("the image's /etc/fstab", variables.expand(source)) for source in image_binds]

        def work() -> as_user.ChildResult[_BindLookupResult]:
            self._acquire_user_slot()
            as_user.set_effective_user(self._job.user)
            return _drop_undecodable(_BindLookupResult("", _resolve_links(bound), "", {}, {})), []

        try:
            return as_user.run_in_child(work, _BindLookupResult, self._seconds_left)[0].bound
        except (Declined, OSError):
            return (("the image's /etc/fstab", enroot.UNKNOWN),)


def _make_variables(job: Job, home: str) -> JobVariables:
    """The job's variables: all of a step's, what a login has in a Prolog."""
    if job.variables is not None:
        return JobVariables(job.variables, all_known=True)
    user, number = job.user.name, str(job.id)
    known = {"HOME": home, "USER": user, "LOGNAME": user, "SLURM_JOB_USER": user}
    known |= {"SLURM_JOB_ID": number, "SLURM_JOBID": number, "SLURM_JOB_UID": str(job.user.uid)}
    return JobVariables({name: value for name, value in known.items() if value}, all_known=False)


def _read_folder_binds(files: RecordingTree, folder: str) -> tuple[list[FstabBind], str]:
    """What the fstabs of a user's folder bind, and why that may not be all. As the user."""
    if enroot.UNKNOWN in folder:
        return [], "enroot.conf has a shell word for ENROOT_CONFIG_PATH"
    # Most users have none, and where their home is slow each look takes seconds.
    files.record_path(folder)
    if not any(files.file_stamps[folder]):
        return [], ""
    mounts, hooks = f"{folder}/mounts.d", f"{folder}/hooks.d"
    binds: list[FstabBind] = []
    left = MAX_FSTAB_BYTES
    listed, listed_hooks = (
        files.list_names(one, MAX_DIRECTORY_NAMES + 1) for one in (mounts, hooks)
    )
    if max(len(listed), len(listed_hooks)) > MAX_DIRECTORY_NAMES:
        return binds, f"{folder} is too large"
    names = [name for name in listed if name.endswith(".fstab")]
    for name in names[:MAX_FSTABS]:
        text = files.read_text_or_none(f"{mounts}/{name}", left + 1)
        if text is None:
            return binds, f"{mounts}/{name} cannot be read"
        left -= len(text.encode(errors="replace"))
        binds += [FstabBind(f"{mounts}/{name}", *one) for one in enroot.list_plain_binds(text)]
    if left < 0 or len(names) > MAX_FSTABS:
        return binds, f"{mounts} is too large"
    programs = [name for name in listed_hooks if name.endswith(".sh")]
    for place in (mounts, hooks):
        if any(files.file_stamps[place]) and not os.access(place, os.R_OK, effective_ids=True):
            return binds, f"{place} cannot be read"
    return binds, f"{hooks}/{programs[0]} may bind anything" if programs else ""


def _make_unknown_binds(why: str) -> _BindLookupResult:
    """Pure: that it cannot be told what the container binds."""
    return _BindLookupResult(
        "", (), f"the configuration of the user's enroot cannot be read: {why}", {}, {}
    )


def _resolve_links(
    bound: Iterable[tuple[str, str]], report_path: Callable[[str], None] = lambda path: None
) -> tuple[tuple[str, str], ...]:
    """The directories as they are written, and without links: images are known by the latter."""

    def both() -> Iterator[tuple[str, str]]:
        for who, directory in bound:
            yield who, directory
            if directory.startswith("/") and enroot.UNKNOWN not in directory:
                report_path(directory)
                yield who, as_user.resolve_links(directory)

    return tuple(dict.fromkeys(both()))


def _drop_undecodable(found: _BindLookupResult) -> _BindLookupResult:
    """Leaves out what is no text: an image below such a name is in no lease."""
    counted = (*found.file_stamps, *found.variables, *map(str, found.variables.values()))
    told = all(_replace_undecodable(one) == one for one in counted)
    return msgspec.structs.replace(
        found,
        home=_replace_undecodable(found.home),
        bound=tuple(
            (_replace_undecodable(who), _replace_undecodable(directory))
            for who, directory in found.bound
        ),
        doubt=_replace_undecodable(found.doubt),
        file_stamps=found.file_stamps if told else {},
        variables=found.variables if told else {},
    )


def _replace_undecodable(text: str) -> str:
    return os.fsencode(text).decode(errors="replace")
