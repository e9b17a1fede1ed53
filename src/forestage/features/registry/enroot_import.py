"""One `enroot import`, as the user and within bounds: what it is at, and how it ended.

enroot says on stderr what it begins, a line each (docker.sh, 4.1); of mksquashfs the size of its
file tells more. It is niced, makes no file above `max_size`, takes the processors that this process
may use, and has mksquashfs keep within the memory of its cgroup (system/mksquashfs).
"""

import contextlib
import os
import re
import resource
import select
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.features.registry import environment
from forestage.features.registry.environment import EnrootSettings
from forestage.features.registry.store import make_full_error
from forestage.features.registry.worker_messages import shorten_text
from forestage.system import forked_child, mksquashfs, pid_namespace, run
from forestage.units import format_duration, format_size, is_number

NICE = 10
PAUSE = 0.02  # seconds between looks whether all have ended
TIDY = 10.0  # seconds in which temporary files may be deleted; less than parent_pipe.GRACE
OWN_TIDY = 6.0  # seconds of these for enroot itself
REMOVE = ("rm", "--one-file-system", "-rf", "--")
ASKED = 10.0  # seconds for mksquashfs to say its release
LAST = 4096  # bytes of what enroot says last
TOLD = 3  # lines of that, for the user
MOST_LAYERS = 10_000  # files of enroot's cache that are counted

DOWNLOADS, WRITES = "downloads", "writes the image"
_STAGES = (
    (re.compile(rb"Downloading (\d{1,5}) missing layers"), DOWNLOADS + " {} layers"),
    (re.compile(rb"Found all layers in cache"), "has all layers"),
    (re.compile(rb"Extracting image layers"), "unpacks the layers"),
    (re.compile(rb"Converting whiteouts"), "unpacks the layers"),
    (re.compile(rb"Creating squashfs"), WRITES),
)
_FULL = re.compile(rb"No space left on device|Disk quota exceeded", re.IGNORECASE)
_LARGE = re.compile(rb"File too large|File size limit exceeded", re.IGNORECASE)


class ImportFolders(msgspec.Struct, frozen=True):
    """Where an import writes: the user's part of the store, enroot's own files, its layers."""

    store: str
    temporary: str
    layers: str


class EnrootImport:
    """A running import of `uri` to `part`, which must not be there yet."""

    def __init__(
        self, uri: str, part: Path, settings: EnrootSettings, clock: Clock, is_apart: bool = False
    ) -> None:
        """`is_apart` as in the order. Raises Failed where enroot is missing."""
        self.part, self.clock, self.is_apart = part, clock, is_apart
        self.stage = "asks the registry"
        self._last = b""
        self._since, self._wall = clock.monotonic(), clock.wall()
        self._folders = ImportFolders(
            os.fspath(part.parent),
            environment.temporary_folder(settings.variables),
            environment.enroot_folder(settings.variables, "CACHE"),
        )
        memory = forked_child.find_own_memory_limit()
        if memory is not None and not mksquashfs.has_memory_option(
            _read_mksquashfs_version(settings)
        ):
            memory = None
        self._variables = make_enroot_environment(settings, memory)
        self._temp = _make_folder(self._variables)
        if self._temp:
            self._variables["ENROOT_TEMP_PATH"] = self._temp
        argv = ("enroot", "import", "--output", os.fspath(part), "--", uri)
        self._program = run.start_in_current_session(argv, self._variables)

    def is_running_after(self, timeout: float) -> bool:
        """Whether it goes on, after so many seconds at most."""
        poll = select.poll()
        poll.register(self._program.out, select.POLLIN)
        if poll.poll(timeout * 1000):
            self._read_stderr()
        return self._program.exit_code is None

    def kill(self, is_signalled: bool = False) -> None:
        """Ends it and all that it started, if this process is apart, or leads a session.

        enroot first deletes what it has unpacked so far, which may be many GiB. Its first process
        dies of SIGTERM at once: a subshell has the trap (docker::import of docker.sh). Slurm may
        have sent that SIGTERM (`is_signalled`): bash that runs its trap for one dies of a second.
        What enroot leaves all the same, as it was killed or took too long, goes afterwards.
        """
        end = Deadline.after(TIDY, self.clock)
        grace = 0.0 if self._program.exit_code == 0 else OWN_TIDY
        is_signalled = is_signalled or self._program.exit_code == -signal.SIGTERM
        if self.is_apart:
            self._end_others(grace, is_signalled)
        elif os.getsid(0) == os.getpid():
            run.kill_session(os.getpid(), os.getpid(), grace, is_signalled)
        self._program.wait(1.0)
        if self._temp:
            _delete_folder(self._temp, self._variables, end)

    def _end_others(self, grace: float, is_signalled: bool) -> None:
        """Ends all in the PID namespace but this process and the init."""
        if grace and not is_signalled:
            pid_namespace.signal_other_processes(signal.SIGTERM)
        end = Deadline.after(grace, self.clock)
        # The first process counts until its `code` was asked for; the init reaps the others.
        while end.seconds_left() and (
            self._program.exit_code is None or pid_namespace.has_other_processes()
        ):
            self.clock.sleep(PAUSE)
        pid_namespace.signal_other_processes(signal.SIGKILL)

    def format_progress(self) -> str:
        """What it is at, for the user."""
        took = format_duration(self.clock.monotonic() - self._since)
        return f"enroot {self.stage}{self._format_size()} ({took})"

    def check_success(self) -> None:
        """Raises Declined: store-full, enroot-full, too-large, import-failed."""
        self._read_stderr()
        if not self._program.exit_code:
            return
        raise classify_failure(self._program.exit_code, self._last, self.stage, self._folders)

    def _read_stderr(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._program.out, 1 << 16):
                self._last = (self._last + data)[-LAST:]
                self.stage = find_stage(data) or self.stage

    def _format_size(self) -> str:
        with contextlib.suppress(OSError):
            return f", {format_size(os.lstat(self.part).st_size)}"
        if self.stage.startswith(DOWNLOADS):
            return f", {format_size(self._count_downloaded_bytes())}"
        return ""

    def _count_downloaded_bytes(self) -> int:
        """Bytes of layers that came since the import began; enroot compresses them anew."""
        size = 0
        with contextlib.suppress(OSError), os.scandir(self._folders.layers) as found:
            for _, one in zip(range(MOST_LAYERS), found, strict=False):
                facts = one.stat(follow_symlinks=False)
                size += facts.st_size if facts.st_mtime >= self._wall else 0
        return size


def limit_process(max_size: int | None) -> None:
    """Has this process and what it starts be nice, and make no file above `max_size` bytes."""
    os.nice(NICE)
    if max_size is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = max_size if hard == resource.RLIM_INFINITY else min(max_size, hard)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def make_enroot_environment(settings: EnrootSettings, memory: int | None) -> dict[str, str]:
    """enroot's environment. The image's name says `squash_options`, which do not change here."""
    found = {**settings.variables, "LC_ALL": "C"}
    processors = forked_child.count_own_processors()
    wanted = found.get("ENROOT_MAX_PROCESSORS", "")
    few = is_number(wanted) and 0 < int(wanted) < processors
    found["ENROOT_MAX_PROCESSORS"] = wanted if few else str(processors)
    options = settings.squash_options
    if memory is not None and "-mem" not in options:
        options = " ".join((options, *mksquashfs.format_memory_options(memory)))
    found["ENROOT_SQUASH_OPTIONS"] = options
    return found


def _make_folder(variables: Mapping[str, str]) -> str:
    """Return a new folder for enroot's temporary files alone; "" if there can be none."""
    above = environment.temporary_folder(variables)
    path = os.path.join(above, f"enroot.{os.urandom(8).hex()}")  # as enroot's own are named
    try:
        os.mkdir(path, 0o700)  # noqa: PTH102 - a text, as enroot's variables are
    except OSError:
        return ""  # enroot says why
    return path


def _delete_folder(folder: str, variables: Mapping[str, str], end: Deadline) -> None:
    """Deletes a folder, with all that is in it, until the deadline. Best effort."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # noqa: PTH106
    # As common::rmall of enroot: an image has directories that its user may not write to.
    for argv in (REMOVE, ("chmod", "-f", "-R", "u+rwX", "--"), REMOVE):
        if os.path.lexists(folder):
            run.run_as_current_user((*argv, folder), variables, end.seconds_left(), 1 << 16)


def _read_mksquashfs_version(settings: EnrootSettings) -> bytes:
    if not run.find_program("mksquashfs"):
        return b""
    return run.run_as_current_user(
        ("mksquashfs", "-version"), settings.variables, ASKED, 1 << 16
    ).out


def find_stage(said: bytes) -> str:
    """Pure: the last stage that enroot named; "" for none."""
    for line in reversed(said.splitlines()):
        for pattern, words in _STAGES:
            if match := pattern.search(line):
                return words.format(*(group.decode() for group in match.groups()))
    return ""


def classify_failure(code: int, said: bytes, stage: str, folders: ImportFolders) -> Declined:
    """Pure: what an import that failed comes to; `said` is the end of its stderr."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    last = shorten_text(" / ".join(lines[-TOLD:]))
    if _FULL.search(said):
        return _classify_full_disk(said, stage, folders, last)
    if _LARGE.search(said):
        return Declined("too-large", f"enroot makes a file that is larger than allowed: {last}")
    end = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return Declined("import-failed", f"enroot import {end}: {last}")


def _classify_full_disk(said: bytes, stage: str, folders: ImportFolders, last: str) -> Declined:
    """Pure: which folder has no room: one that the message names, else what the stage writes to."""
    full_lines = b"\n".join(line for line in said.splitlines() if _FULL.search(line))
    named = [
        folder
        for folder in (folders.store, folders.temporary, folders.layers)
        if os.fsencode(folder) + b"/" in full_lines
    ]
    by_stage = folders.store if stage == WRITES else folders.temporary
    by_stage = folders.layers if stage.startswith(DOWNLOADS) else by_stage
    folder = max(named, key=len, default=by_stage)  # one may lie below another
    if folder == folders.store:
        return make_full_error(last)
    whose = "temporary files" if folder == folders.temporary else "layers"
    return Declined("enroot-full", f"the disk for enroot's {whose}, {folder}, is full: {last}")
