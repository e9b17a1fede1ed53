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
from pathlib import Path

from forestage.clock import Clock
from forestage.errors import Declined
from forestage.registry import environment
from forestage.registry.environment import Settings
from forestage.registry.messages import short
from forestage.registry.store import full
from forestage.system import apart, child, mksquashfs, run
from forestage.units import format_duration, format_size, is_number

NICE = 10
TIDY = 10.0  # seconds in which enroot may delete its temporary files; less than asker.GRACE
ASKED = 10.0  # seconds for mksquashfs to say its release
LAST = 4096  # bytes of what enroot says last
TOLD = 3  # lines of that, for the user
MOST_LAYERS = 10_000  # files of enroot's cache that are counted

_STAGES = (
    (re.compile(rb"Downloading (\d{1,5}) missing layers"), "downloads {} layers"),
    (re.compile(rb"Found all layers in cache"), "has all layers"),
    (re.compile(rb"Extracting image layers"), "unpacks the layers"),
    (re.compile(rb"Converting whiteouts"), "unpacks the layers"),
    (re.compile(rb"Creating squashfs"), "writes the image"),
)
_FULL = re.compile(rb"No space left on device|Disk quota exceeded", re.IGNORECASE)
_LARGE = re.compile(rb"File too large|File size limit exceeded", re.IGNORECASE)


class Import:
    """A running import of `uri` to `part`, which must not be there yet."""

    def __init__(
        self, uri: str, part: Path, settings: Settings, clock: Clock, is_apart: bool = False
    ) -> None:
        """`is_apart` as in the order. Raises Failed where enroot is missing."""
        self.part, self.clock, self.is_apart = part, clock, is_apart
        self.stage = "asks the registry"
        self._last = b""
        self._since, self._wall = clock.monotonic(), clock.wall()
        self._layers = environment.folder(settings.variables, "CACHE")
        argv = ("enroot", "import", "--output", os.fspath(part), "--", uri)
        memory = child.own_memory_limit()
        if memory is not None and not mksquashfs.takes_memory(_version(settings)):
            memory = None
        self._program = run.start_here(argv, variables(settings, memory))

    def runs(self, timeout: float) -> bool:
        """Whether it goes on, after so many seconds at most."""
        poll = select.poll()
        poll.register(self._program.out, select.POLLIN)
        if poll.poll(timeout * 1000):
            self._read()
        return self._program.code is None

    def kill(self) -> None:
        """Ends it and all that it started, if this process is apart, or leads a session.

        A running enroot first deletes what it has unpacked so far, which may be many GiB: its shell
        does so for SIGTERM.
        """
        grace = TIDY if self._program.code is None else 0.0
        if self.is_apart:
            if grace:
                apart.signal_others(signal.SIGTERM)
                self._program.wait(grace)
            apart.signal_others(signal.SIGKILL)
        elif os.getsid(0) == os.getpid():
            run.end_session(os.getpid(), spare=os.getpid(), grace=grace)
        self._program.wait(1.0)

    def progress(self) -> str:
        """What it is at, for the user."""
        took = format_duration(self.clock.monotonic() - self._since)
        return f"enroot {self.stage}{self._size()} ({took})"

    def must_have_succeeded(self) -> None:
        """Raises Declined: store-full, too-large, import-failed."""
        self._read()
        if not self._program.code:
            return
        raise failure(self._program.code, self._last)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._program.out, 1 << 16):
                self._last = (self._last + data)[-LAST:]
                self.stage = stage_of(data) or self.stage

    def _size(self) -> str:
        with contextlib.suppress(OSError):
            return f", {format_size(os.lstat(self.part).st_size)}"
        if self.stage.startswith("downloads"):
            return f", {format_size(self._downloaded())}"
        return ""

    def _downloaded(self) -> int:
        """Bytes of layers that came since the import began; enroot compresses them anew."""
        size = 0
        with contextlib.suppress(OSError), os.scandir(self._layers) as found:
            for _, one in zip(range(MOST_LAYERS), found, strict=False):
                facts = one.stat(follow_symlinks=False)
                size += facts.st_size if facts.st_mtime >= self._wall else 0
        return size


def bound(max_size: int | None) -> None:
    """Has this process and what it starts be nice, and make no file above `max_size` bytes."""
    os.nice(NICE)
    if max_size is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = max_size if hard == resource.RLIM_INFINITY else min(max_size, hard)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def variables(settings: Settings, memory: int | None) -> dict[str, str]:
    """enroot's environment. The image's name says `squash_options`, which do not change here."""
    found = {**settings.variables, "LC_ALL": "C"}
    processors = child.own_processors()
    wanted = found.get("ENROOT_MAX_PROCESSORS", "")
    few = is_number(wanted) and 0 < int(wanted) < processors
    found["ENROOT_MAX_PROCESSORS"] = wanted if few else str(processors)
    options = settings.squash_options
    if memory is not None and "-mem" not in options:
        options = " ".join((options, *mksquashfs.memory_options(memory)))
    found["ENROOT_SQUASH_OPTIONS"] = options
    return found


def _version(settings: Settings) -> bytes:
    if not run.which("mksquashfs"):
        return b""
    return run.run_here(("mksquashfs", "-version"), settings.variables, ASKED, 1 << 16).out


def stage_of(said: bytes) -> str:
    """Pure: the last stage that enroot named; "" for none."""
    for line in reversed(said.splitlines()):
        for pattern, words in _STAGES:
            if match := pattern.search(line):
                return words.format(*(group.decode() for group in match.groups()))
    return ""


def failure(code: int, said: bytes) -> Declined:
    """Pure: what an import that failed comes to; `said` is the end of its stderr."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    last = short(" / ".join(lines[-TOLD:]))
    if _FULL.search(said):
        return full(last)
    if _LARGE.search(said):
        return Declined("too-large", f"enroot makes a file that is larger than allowed: {last}")
    end = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return Declined("import-failed", f"enroot import {end}: {last}")
