"""A rolling window over a data set that is larger than the local disk: files are copied ahead.

    for path in window(paths, room="400GiB", ahead=4): ...

yields local paths in the given order. One process for each job, node and name, the copier, makes
the copies for all loaders of the job; at any trouble a path is yielded as it was given. One file,
standard library only, for Python 3.8 and later on Linux: it can be imported in any container.

The directory of a window, 0700 and its user's, has the copier's socket and lock, and a folder of
each copier with its copies: N-NAME, or N.part while it is written. The copier holds the lock
(flock), and so do the processes that copy for it; who gets the lock when nobody answers at the
socket starts a copier. Consumers hold the folder shared, so that the next copier, after one that
was killed, does not delete what they may be about to open. Both sides speak JSON lines. A
connection is a consumer, and its end the consumer's: whatever ends a process, the kernel closes it.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import errno
import fcntl
import functools
import hashlib
import heapq
import json
import logging
import os
import pickle
import re
import resource
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
)

__version__ = "0.1.0"
__all__ = ["Stats", "Window", "window"]

PROTOCOL = 1  # in the directory's name: two versions in two containers have two copiers
ANSWER_TIMEOUT_S = 20.0  # seconds for an answer, or a sign of life; and for a copier to start
HEARTBEAT_S = 2.0  # seconds between the copier's signs of life
BACK_OFF_S = 60.0  # seconds without the copier after it failed; doubled each time
LINGER_S = 60.0  # seconds that a copier without consumers keeps its files, for the next epoch
MAX_COPIES = 4  # at once; one that a consumer waits for comes on top
BLOCK_BYTES = 4096  # bytes; what a file takes is rounded up to these
CHUNK_BYTES = 16 << 20  # bytes
IN_USE = -1  # the distance of a file that a consumer was given and may open

LOG = logging.getLogger(__name__)  # where nobody sets it up, to stderr

JsonObject = Dict[str, Any]
FetchFunction = Callable[[str, str], object]


class CopyUnavailable(Exception):
    """Why a path is read where it is. It never reaches the user's code."""


COPY_ERRORS = (CopyUnavailable, OSError, subprocess.SubprocessError, ValueError, KeyError)


def parse_size(size: int | str) -> int:
    """Reads 4096, "400GiB" or "1.5T"; units are of 1024. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([KMGTP]?)(?:I?B)?", str(size).upper())
    if not match:
        raise ValueError(f"a size such as 400GiB was expected, not {size!r}")
    return int(float(match[1]) * 1024 ** " KMGTP".index(match[2] or " "))


def round_up_to_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def identity_from_stat(found: os.stat_result) -> list[int]:
    """What changes with a file's bytes. No inode: object stores mounted by FUSE make them up."""
    return [found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def is_tmpfs_mount(path: str) -> bool:
    """Whether a tmpfs is mounted at this very path."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        types = {line.split(" ")[1]: line.split(" ")[2] for line in mounts}  # the last one shows
    return types.get(os.path.abspath(path)) == "tmpfs"


def find_window_directory(directory: str | None, name: str, environ: Mapping[str, str]) -> str:
    """The directory of a window. Raises CopyUnavailable where none belongs to the job."""
    job = re.sub(r"[^0-9A-Za-z_-]", "", environ.get("SLURM_JOB_ID", ""))
    if directory is None:
        directory = environ.get("FORESTAGE_DIR") or (environ.get("TMPDIR") if job else None)
    if not directory:
        raise CopyUnavailable(
            "the job has no directory of its own ($FORESTAGE_DIR; or give directory=)"
        )
    owner = f"job-{job}" if job else f"user-{os.geteuid()}"
    digest = hashlib.sha256(f"{PROTOCOL} {name}".encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(os.path.abspath(directory), f"forestage-window-{owner}", digest[:12])


def format_memory_warning(where: str, directory: str | None, environ: Mapping[str, str]) -> str:
    """The line for a user who asked for memory and whose job has no directory there, or ""."""
    job_directory = environ.get("FORESTAGE_DIR")
    # No name in /dev/shm: what a killed job leaves there stays, in memory that no job accounts for.
    if where != "ram" or directory is not None or (job_directory and is_tmpfs_mount(job_directory)):
        return ""
    return (
        "forestage-window: the job has no directory in memory, so the copies are on the disk"
        ' (ask for one with --comment="stage-dir=SIZE,ram")'
    )


# The consumers' side


@dataclass
class Stats:
    """What a window has given in this process so far."""

    local: int = 0  # paths of local copies
    shared: int = 0  # paths as they were given
    stalls: int = 0  # paths that were not there when they were asked for
    stalled: float = 0.0  # seconds until these were there, or were given as they are
    copied: int = 0  # bytes that the copier has copied, for all its consumers
    busy: float = 0.0  # seconds in which it copied
    trouble: str = ""  # why the last shared one was not local

    @property
    def rate(self) -> float:
        """Bytes a second, of the copier, while it copied."""
        return self.copied / self.busy if self.busy else 0.0


class Window:
    """Paths, yielded as local copies, in their order; each iteration is an epoch.

    room      bytes that the copies take at most, or "400GiB"; for all windows of this name together
    ahead     so many paths are copied ahead of each consumer
    keep      a path stays until its consumer is so many further
    name      windows of one job and node with the same name share copier, copies and room
    where     "ram": warn (logging) where the job's directory is not in memory
    directory instead of the job's, which is $FORESTAGE_DIR, else $TMPDIR in a Slurm job
    fetch     fetch(source, target) makes the copy, in a process of its own: a function of a module
    size      bytes that a fetched file takes at most, where stat(source) does not say it
    wrap      near the end, copy the first paths again, for the next epoch

    Raises TypeError or ValueError for these; no trouble with copies raises anything.
    """

    def __init__(
        self,
        paths: Iterable[str | bytes | os.PathLike[str]],
        room: int | str,
        *,
        ahead: int = 4,
        keep: int = 1,
        name: str = "window",
        where: str = "disk",
        directory: str | os.PathLike[str] | None = None,
        fetch: FetchFunction | None = None,
        size: int | str | None = None,
        wrap: bool = True,
    ) -> None:
        if isinstance(paths, (str, bytes, os.PathLike)):
            raise TypeError("paths must be a list of paths, not one path")
        if where not in ("disk", "ram"):
            raise ValueError(f'where must be "disk" or "ram", not {where!r}')
        if ahead < 0 or keep < 1:
            raise ValueError(f"ahead={ahead} must be 0 or more, keep={keep} must be 1 or more")
        self.paths = tuple(os.fsdecode(path) for path in paths)
        self.stats = Stats()
        self._where, self._name = where, name
        self._directory = None if directory is None else os.fsdecode(directory)
        self._settings: JsonObject = {
            "room": parse_size(room),
            "ahead": ahead,
            "keep": keep,
            "wrap": wrap,
            "fetch": None if fetch is None else _serialize_fetch(fetch),
            "size": None if size is None else parse_size(size),
        }
        self._connection: _CopierConnection | None = None
        self.keep_copier()

    def keep_copier(self) -> None:
        """Keeps the copier while this object lives, even if only other processes iterate."""
        try:
            self._connection = self.connect(())
        except COPY_ERRORS as error:
            self.stats.trouble = str(error)
        _windows.add(self)

    def connect(self, paths: Iterable[str]) -> _CopierConnection:
        directory = find_window_directory(self._directory, self._name, os.environ)
        warning = format_memory_warning(self._where, self._directory, os.environ)
        sources = [_normalize_source(path, self._settings["fetch"]) for path in paths]
        tries_left = 20
        while True:
            try:
                return _CopierConnection(directory, self._settings, sources, warning)
            except ConnectionError:
                # A copier that ends, or was killed, can be connected to until all of it is gone.
                tries_left -= 1
                if not tries_left:
                    raise
                time.sleep(0.05)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[str]:
        iteration = _WindowIteration(self)
        try:
            for index, path in enumerate(self.paths):
                yield iteration.find_readable_path(index, path)
        finally:
            iteration.close()

    def local(self) -> dict[str, str]:
        """Returns the local copy of each of the paths that has one now.

        Copies go when room is needed: opening one may raise FileNotFoundError, except for the
        last `keep` paths that an iteration has yielded. Empty at any trouble.
        """
        try:
            with contextlib.closing(self.connect(())) as connection:
                local_copies = connection.send_request({"list": True})["local"]
        except COPY_ERRORS as error:
            self.stats.trouble = str(error)
            return {}
        sources = ((path, _normalize_source(path, self._settings["fetch"])) for path in self.paths)
        return {path: local_copies[source] for path, source in sources if source in local_copies}

    def close(self) -> None:
        """Ends the copier, and deletes its files, if nobody else is its consumer."""
        if self._connection is None or self._connection.is_closed:  # by a fork
            return
        for _ in range(2):  # if it was killed, another one deletes what it left
            try:
                self._connection.send_request({"bye": True})
                break
            except COPY_ERRORS:
                self._connection.close()
                with contextlib.suppress(*COPY_ERRORS):
                    self._connection = self.connect(())
        self._connection.close()
        self._connection = None

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> JsonObject:
        return {**self.__dict__, "stats": Stats(), "_connection": None}

    def __setstate__(self, state: JsonObject) -> None:
        self.__dict__.update(state)
        self.keep_copier()


window = Window


def _normalize_source(path: str, fetch: object) -> str:
    return path if fetch and "://" in path else os.path.abspath(path)


def _serialize_fetch(fetch: FetchFunction) -> JsonObject:
    """What another process needs to call it. Raises ValueError if that is impossible."""
    try:
        pickled = pickle.dumps(fetch, protocol=4)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"fetch must be a function of a module ({error})") from None
    if b"__main__" in pickled:
        raise ValueError("fetch runs in another process: put it into a module, not the script")
    encoded = base64.b64encode(pickled).decode()
    return {"pickle": encoded, "path": sys.path, "cwd": os.getcwd()}


class _WindowIteration:
    """One iteration: asks for each path, and begins anew with another copier if one is lost."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.connection: _CopierConnection | None = None
        # Their folders are held until what they gave is done with.
        self.lost_connections: list[_CopierConnection] = []
        self.release_index = 0
        self.retry_time = 0.0
        self.back_off_s = BACK_OFF_S

    def find_readable_path(self, index: int, path: str) -> str:
        """Returns where to read `path` from, number `index`."""
        if index >= self.release_index:
            self._close_lost_connections()
        stats, start = self.window.stats, time.monotonic()
        try:
            reply = self._ask_copier(index, self._read_identity(path))
        except COPY_ERRORS as error:
            reply = {"why": str(error)}
        if reply.get("waited"):
            stats.stalls += 1
            stats.stalled += time.monotonic() - start
        stats.copied, stats.busy = reply.get("copied", stats.copied), reply.get("busy", stats.busy)
        local: str | None = reply.get("path")
        if local is None:
            stats.shared += 1
            stats.trouble = reply["why"]
            return path
        stats.local += 1
        return local

    def _read_identity(self, path: str) -> list[int] | None:
        """What this process sees at the path: its mounts may not be those of the copier."""
        try:
            return identity_from_stat(os.stat(path))
        except OSError:
            if self.window._settings["fetch"]:
                return None
            raise

    def _ask_copier(self, index: int, identity: list[int] | None) -> JsonObject:
        if self.connection is not None and self.connection.is_closed:  # by a fork
            self._drop_connection(index)
        for is_last_try in (False, True):
            try:
                if self.connection is None:
                    self._connect()
                assert self.connection  # for mypy
                reply = self.connection.send_request({"at": index, "seen": identity})
                if "path" in reply and os.stat(reply["path"]).st_size != reply["size"]:
                    raise CopyUnavailable("the local copy is not whole")
                return reply
            except (CopierUnavailable, socket.timeout):
                self._drop_connection(index, back_off=True)
                raise
            except COPY_ERRORS:
                # A copier that has just ended, or was killed: the next one is asked, once.
                self._drop_connection(index, back_off=is_last_try)
                if is_last_try:
                    raise
        raise AssertionError

    def _connect(self) -> None:
        if time.monotonic() < self.retry_time:
            raise CopyUnavailable(self.window.stats.trouble)
        try:
            self.connection = self.window.connect(self.window.paths)
        except COPY_ERRORS as error:
            raise CopierUnavailable(str(error)) from error
        if self.lost_connections:  # with the copier that the window kept
            self.window.keep_copier()

    def _drop_connection(self, index: int, back_off: bool = False) -> None:
        if self.connection is not None:
            self.connection.disconnect()
            self.lost_connections.append(self.connection)
            self.connection = None
            self.release_index = index - 1 + self.window._settings["keep"]
        if back_off and time.monotonic() >= self.retry_time:
            self.retry_time = time.monotonic() + self.back_off_s
            self.back_off_s *= 2

    def _close_lost_connections(self) -> None:
        for connection in self.lost_connections:
            connection.close()
        self.lost_connections.clear()

    def close(self) -> None:
        self._close_lost_connections()
        if self.connection is not None:
            self.connection.close()


class CopierUnavailable(CopyUnavailable):
    """No copier can be had now."""


class _CopierConnection:
    """One consumer's connection to its copier, which it starts where there is none."""

    def __init__(
        self, directory: str, settings: JsonObject, sources: list[str], warning: str
    ) -> None:
        self.folder_fd = -1
        self.socket = _connect_copier(directory, warning)
        self.lines = self.socket.makefile("rb")
        _connections.add(self)
        self.socket.sendall(_encode_line(settings) + _encode_line(sources))
        folder = self._read_reply()["folder"]
        if sources:
            self.folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self.folder_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def is_closed(self) -> bool:
        return self.lines.closed

    def send_request(self, message: JsonObject) -> JsonObject:
        self.socket.sendall(_encode_line(message))
        reply = self._read_reply()
        while "beat" in reply:
            reply = self._read_reply()
        return reply

    def _read_reply(self) -> JsonObject:
        line = self.lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the copier has ended")
        reply: JsonObject = json.loads(line)
        return reply

    def disconnect(self) -> None:
        self.lines.close()
        self.socket.close()

    def close(self) -> None:
        self.disconnect()
        if self.folder_fd >= 0:
            os.close(self.folder_fd)
            self.folder_fd = -1

    def __del__(self) -> None:
        if hasattr(self, "lines"):
            self.close()


def _encode_line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


_connections: weakref.WeakSet[_CopierConnection] = weakref.WeakSet()
_windows: weakref.WeakSet[Window] = weakref.WeakSet()


def _close_connections() -> None:
    """In a forked child: its parent is the consumer, and must be seen to end."""
    for connection in list(_connections):
        connection.close()


def _close_windows() -> None:
    for each in list(_windows):
        each.close()


os.register_at_fork(after_in_child=_close_connections)
atexit.register(_close_windows)  # not in workers of multiprocessing: they end without it


def _ensure_private_directory(path: str) -> None:
    """Makes the directory. Raises CopyUnavailable if what is there is not the user's alone."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_private or status.st_mode & 0o077:
        raise CopyUnavailable(f"{path} is not a directory of this user alone")


def _connect_copier(directory: str, warning: str) -> socket.socket:
    """A connection to the window's copier. Raises CopyUnavailable or OSError.

    The process that starts the copier writes the warning: one line for all loaders of a node.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        with contextlib.ExitStack() as unless_connected:
            connection = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(ANSWER_TIMEOUT_S)
            with contextlib.suppress(FileNotFoundError):  # it went with the last copier
                _ensure_private_directory(os.path.dirname(directory))
                _ensure_private_directory(directory)
                with _open_short_path(directory) as short_path:
                    try:
                        connection.connect(f"{short_path}/socket")
                        unless_connected.pop_all()
                        return connection
                    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                        if _start_copier(directory, short_path) and warning:
                            LOG.warning(warning)
        job_directory = os.path.dirname(os.path.dirname(directory))
        if not os.path.isdir(job_directory):  # it does not come back, so nobody waits for that
            raise CopyUnavailable(f"{job_directory} is gone")
        if time.monotonic() > deadline:
            raise CopyUnavailable("no copier answers")


@contextlib.contextmanager
def _open_short_path(directory: str) -> Iterator[str]:
    """A name for it that fits a socket's address (107 bytes)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _start_copier(directory: str, short_path: str) -> bool:
    """Starts one, which listens when this returns, unless somebody else does, or one is ending.

    Returns whether it was started here.
    """
    lock_fd = os.open(f"{short_path}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
            return False
        if os.fstat(lock_fd).st_nlink == 0:  # it went with the last copier
            return False
        # The lock goes over to it: nobody else can come between.
        result = subprocess.run(  # noqa: S603 - this very file
            [sys.executable, "-I", "-S", os.path.abspath(__file__), directory, str(lock_fd)],
            pass_fds=[lock_fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            output = result.stdout.decode(errors="replace").strip().splitlines()[-1:]
            raise CopyUnavailable(f"no copier: {''.join(output)}")
        return True
    finally:
        os.close(lock_fd)


# The copier


class _SourceFile:
    """A file that some consumer has in its list."""

    __slots__ = (
        "copy_bytes",
        "copy_path",
        "failure",
        "fetch",
        "identity",
        "is_stale",
        "limit_bytes",
        "name",
        "size_bytes",
        "source",
    )

    def __init__(self, source: str) -> None:
        self.source = source
        self.name = re.sub(r"[^\w.+=@-]", "_", source.rsplit("/", 1)[-1], flags=re.ASCII)[-200:]
        self.copy_path: str | None = None  # of the copy, once it is whole
        self.copy_bytes = 0  # bytes of the copy
        self.size_bytes: int | None = None  # bytes that it takes, once known
        self.identity: list[int] | None = None
        self.failure: str | None = None  # why; forgotten once a consumer was told
        self.is_stale = False  # the source is another one now: the copy goes once nobody uses it
        self.fetch: JsonObject | None = None
        self.limit_bytes: int | None = None  # bytes; for a source that stat does not know


class _FileList:
    """A list of files; consumers with the same list have the same one."""

    def __init__(self, files: list[_SourceFile]) -> None:
        self.files = files
        self.index_by_file = {file: index for index, file in reversed(list(enumerate(files)))}


class _ConsumerPosition(NamedTuple):
    """Where a consumer is in its order; -1 before it has asked for anything."""

    file_list: _FileList
    file_index: int
    is_waiting: bool  # for the file at `file_index`
    ahead: int
    keep: int
    wrap: bool


def list_near_files(positions: Iterable[_ConsumerPosition]) -> dict[_SourceFile, int]:
    """How soon each file is needed that some consumer has, waits for (0) or will have `ahead`."""
    distances: dict[_SourceFile, int] = {}
    for file_list, position, is_waiting, ahead, keep, wrap in positions:
        files = file_list.files
        for index in range(max(0, position - keep + 1), position + (not is_waiting)):
            distances[files[index]] = IN_USE
        for distance in range(not is_waiting, min(ahead, len(files) - 1) + 1):
            index = position + distance
            if index < len(files) or wrap:
                file = files[index % len(files)]
                distances[file] = min(distance, distances.get(file, distance))
    return distances


def find_next_use(file: _SourceFile, positions: Iterable[_ConsumerPosition]) -> float:
    """In how many files it is needed again: of copies in the way, that with the most goes."""
    soonest = float("inf")
    for file_list, position, _, _, _, wrap in positions:
        index = file_list.index_by_file.get(file)
        if index is not None and (index > position or wrap):
            soonest = min(
                soonest, (index - position) % len(file_list.files) or len(file_list.files)
            )
    return soonest


class _ConsumerConnection:
    """The copier's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received, self.unsent = bytearray(), b""
        self.settings: JsonObject = {}
        self.file_list: _FileList | None = None
        self.index, self.is_waiting, self.has_waited = -1, False, False
        self.identity: list[int] | None = None

    def find_position(self) -> _ConsumerPosition:
        assert self.file_list  # who asks has said its list
        settings = self.settings
        return _ConsumerPosition(
            self.file_list,
            self.index,
            self.is_waiting,
            settings["ahead"],
            settings["keep"],
            settings["wrap"],
        )

    def read_lines(self) -> Iterator[bytes]:
        """The whole lines that have come. Raises CopyUnavailable at the connection's end."""
        with contextlib.suppress(BlockingIOError):
            start = len(self.received)
            data = self.socket.recv(1 << 20)
            if not data:
                raise CopyUnavailable("it has ended")
            self.received += data
            while (end := self.received.find(b"\n", start)) >= 0:
                line = bytes(self.received[:end])
                del self.received[: end + 1]
                start = 0
                yield line

    def send(self, message: JsonObject) -> None:
        self.unsent += _encode_line(message)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent[: 1 << 20]) :]


class _CopyProcess:
    """A process that makes one copy; it dies with the copier, whose end of `go_fd` then closes."""

    def __init__(self, file: _SourceFile, part_path: str, lock_fd: int) -> None:
        self.file, self.part_path = file, part_path
        self.reserved_bytes: int | None = None  # bytes, once it was told to go
        child_go_fd, self.go_fd = os.pipe()
        self.report_fd, child_report_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _run_copy(file, part_path, lock_fd, child_go_fd, child_report_fd)
            finally:
                os._exit(1)
        os.close(child_go_fd)
        os.close(child_report_fd)

    def stop(self) -> None:
        """Whatever it is doing, nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # before it has a group of its own
        os.close(self.go_fd)
        os.close(self.report_fd)
        os.waitpid(self.pid, 0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.part_path)


class _WindowCopier:
    """Copies what the consumers need next, and evicts what is needed last."""

    def __init__(self, directory: str, lock_fd: int) -> None:
        self.directory, self.lock_fd = directory, lock_fd
        # A folder of its own: no path ever means other bytes.
        self.folder = f"{directory}/{os.urandom(4).hex()}"
        with _open_short_path(directory) as short_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{short_path}/socket")
            self.leftovers = _find_leftovers(directory)
            os.mkdir(self.folder, 0o700)
            _check_open_detection(self.folder)
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(f"{short_path}/socket")
        self.listener.listen(4096)
        self.listener.setblocking(False)
        self.room_bytes = sys.maxsize
        self.used_bytes = sum(self.leftovers.values())  # bytes: copies, parts, unlinked, leftovers
        self.unlinked_files: dict[int, int] = {}  # open descriptor: bytes
        self.files: dict[str, _SourceFile] = {}
        self.copied_files: dict[_SourceFile, None] = {}
        self.file_lists: weakref.WeakValueDictionary[bytes, _FileList] = (
            weakref.WeakValueDictionary()
        )
        self.consumers: list[_ConsumerConnection] = []
        self.copies: dict[_SourceFile, _CopyProcess] = {}
        self.near_files: dict[_SourceFile, int] = {}
        self.eviction_queue: list[_SourceFile] = []  # needed last of all, the very last at the end
        self.copies_started = self.copied_bytes = 0
        self.busy_s = 0.0
        self.is_short_of_room = False
        self.linger_s = LINGER_S
        self.leaving_consumer: _ConsumerConnection | None = None

    def run(self) -> None:
        """Returns when it has had no consumers for a while."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept_consumer)
        signal.signal(signal.SIGTERM, self._stop_lingering)
        now = last_heartbeat = alone_since = time.monotonic()
        while self.consumers or self.leftovers or now < alone_since + self.linger_s:
            self._reclaim_room()
            self._start_copies()
            self._answer_consumers()
            is_copying = any(copy.reserved_bytes is not None for copy in self.copies.values())
            for key, _ in self.selector.select(0.1 if self.is_short_of_room else HEARTBEAT_S / 2):
                key.data()
            before, now = now, time.monotonic()
            self.busy_s += is_copying * (now - before)
            if self.consumers:
                alone_since = now
            if now > last_heartbeat + HEARTBEAT_S:
                last_heartbeat = now
                self._send_heartbeats()

    def _stop_lingering(self, *_: object) -> None:
        """On SIGTERM: the job will end, but its processes may still read."""
        self.linger_s = 0.0

    def delete_window_files(self) -> None:
        """Deletes all that is there, and only then lets the lock go."""
        os.unlink(f"{self.directory}/socket")
        for copy in self.copies.values():
            copy.stop()
        shutil.rmtree(self.folder)
        for name in ("log", "lock"):
            os.unlink(f"{self.directory}/{name}")
        for directory in (self.directory, os.path.dirname(self.directory)):
            with contextlib.suppress(OSError):  # another window's is not empty
                os.rmdir(directory)
        if self.leaving_consumer:
            self.leaving_consumer.send({"bye": True})

    # Consumers

    def _accept_consumer(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            consumer = _ConsumerConnection(connection)
            self.consumers.append(consumer)
            self.selector.register(
                connection, selectors.EVENT_READ, lambda: self._read_consumer(consumer)
            )

    def _read_consumer(self, consumer: _ConsumerConnection) -> None:
        try:
            for line in consumer.read_lines():
                self._handle_line(consumer, line)
            if consumer is not self.leaving_consumer:
                self._send_message(consumer)
        except COPY_ERRORS:
            self._remove_consumer(consumer)

    def _remove_consumer(self, consumer: _ConsumerConnection) -> None:
        self.selector.unregister(consumer.socket)
        consumer.socket.close()
        self.consumers.remove(consumer)

    def _send_message(
        self, consumer: _ConsumerConnection, message: JsonObject | None = None
    ) -> None:
        """Raises OSError if the consumer has gone."""
        if message:
            consumer.send(message)
        else:
            consumer.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if consumer.unsent else 0)
        self.selector.modify(consumer.socket, events, lambda: self._read_consumer(consumer))

    def _send_heartbeats(self) -> None:
        for consumer in list(self.consumers):
            if consumer.is_waiting and not consumer.unsent:
                try:
                    self._send_message(consumer, {"beat": True})
                except OSError:
                    self._remove_consumer(consumer)

    def _handle_line(self, consumer: _ConsumerConnection, line: bytes) -> None:
        """Raises ValueError or KeyError for what no consumer says."""
        if consumer.file_list is None and consumer.settings:
            consumer.file_list = self._find_file_list(line, consumer.settings)
            self._send_message(consumer, {"folder": self.folder})
            return
        message = json.loads(line)
        if not consumer.settings:
            consumer.settings = message
            # Never above what any of the consumers gave.
            self.room_bytes = min(self.room_bytes, message["room"])
        elif "at" in message:
            if not consumer.file_list or not 0 <= message["at"] < len(consumer.file_list.files):
                raise ValueError
            consumer.index, consumer.identity = message["at"], message["seen"]
            consumer.is_waiting, consumer.has_waited = True, False
        elif "list" in message:
            local_copies = {
                file.source: file.copy_path for file in self.copied_files if not file.is_stale
            }
            self._send_message(consumer, {"local": local_copies})
        elif "bye" in message:
            self._dismiss_consumer(consumer)

    def _dismiss_consumer(self, consumer: _ConsumerConnection) -> None:
        """If it was the last one it is told when all is deleted."""
        if len(self.consumers) > 1:
            self._send_message(consumer, {"bye": True})
            return
        self.linger_s = 0.0
        self.selector.unregister(consumer.socket)
        self.consumers.remove(consumer)
        self.leaving_consumer = consumer

    def _find_file_list(self, line: bytes, settings: JsonObject) -> _FileList:
        digest = hashlib.sha256(line).digest()
        file_list = self.file_lists.get(digest)
        if file_list is None:
            files = []
            for source in json.loads(line):
                file = self.files.get(source) or self.files.setdefault(source, _SourceFile(source))
                file.fetch, file.limit_bytes = settings["fetch"], settings["size"]
                files.append(file)
            file_list = self.file_lists[digest] = _FileList(files)
        return file_list

    def _answer_consumers(self) -> None:
        answered_files = []
        for consumer in [one for one in self.consumers if one.is_waiting]:
            file = consumer.find_position().file_list.files[consumer.index]
            reply = self._find_reply(file, consumer.identity)
            if reply is None:
                consumer.has_waited = True
                continue
            answered_files.append(file)
            consumer.is_waiting = False
            statistics = {
                "waited": consumer.has_waited,
                "copied": self.copied_bytes,
                "busy": self.busy_s,
            }
            try:
                self._send_message(consumer, {**reply, **statistics})
            except OSError:
                self._remove_consumer(consumer)
        for file in answered_files:
            file.failure = None

    def _find_reply(self, file: _SourceFile, identity: list[int] | None) -> JsonObject | None:
        """Where to read it, or None as long as that is not known."""
        if file.copy_path is None:
            return None if file.failure is None else {"why": file.failure}
        if file.is_stale or file.identity != identity:
            file.is_stale = True
            return {"why": "the source has changed since it was copied"}
        return {"path": file.copy_path, "size": file.copy_bytes}

    # Room

    def _list_positions(self) -> list[_ConsumerPosition]:
        return [
            one.find_position() for one in self.consumers if one.file_list and one.file_list.files
        ]

    def _reclaim_room(self) -> None:
        """Unlinked files that nobody has open any more, and what dead copiers left, make room."""
        for fd in [fd for fd in self.unlinked_files if not _is_open_elsewhere(fd)]:
            os.close(fd)
            self.used_bytes -= self.unlinked_files.pop(fd)
        for folder in [folder for folder in self.leftovers if _delete_unless_used(folder)]:
            self.used_bytes -= self.leftovers.pop(folder)

    def _make_room(self, size_bytes: int, distance: int) -> bool:
        """Evicts, unless that would not be enough. What was copied ahead goes only for a file that
        is waited for (distance 0): else consumers would take it from each other, again and again.
        """
        unlinked_bytes = sum(self.unlinked_files.values())
        kept_bytes = sum(
            file.size_bytes or 0
            for file, near_distance in self.near_files.items()
            if file.copy_path and (distance or near_distance <= 0)
        )
        evictable_bytes = sum(file.size_bytes or 0 for file in self.copied_files) - kept_bytes
        if self.used_bytes - unlinked_bytes - evictable_bytes + size_bytes > self.room_bytes:
            return False
        while self.used_bytes - sum(self.unlinked_files.values()) + size_bytes > self.room_bytes:
            self._evict_file(self._choose_victim())
        self.is_short_of_room = self.used_bytes + size_bytes > self.room_bytes
        return not self.is_short_of_room

    def _choose_victim(self) -> _SourceFile:
        while True:
            if not self.eviction_queue:
                far_files = [file for file in self.copied_files if file not in self.near_files]
                if not far_files:
                    near_files = [file for file in self.near_files if file.copy_path]
                    return max(near_files, key=lambda file: self.near_files[file])
                positions = self._list_positions()
                # Some of many at once: to look at all of them for each would take too long.
                key = functools.partial(find_next_use, positions=positions)
                self.eviction_queue = heapq.nlargest(
                    max(1, len(far_files) // 16), far_files, key=key
                )[::-1]
            file = self.eviction_queue.pop()
            if file.copy_path and file not in self.near_files:
                return file

    def _evict_file(self, file: _SourceFile) -> None:
        """Unlinks a copy. Who has it open keeps it, and as long as that it takes its room."""
        assert file.copy_path
        assert file.size_bytes is not None
        path, file.copy_path, file.is_stale = file.copy_path, None, False
        del self.copied_files[file]
        try:
            self.unlinked_files[os.open(path, os.O_RDONLY)] = file.size_bytes
            os.unlink(path)
        except FileNotFoundError:  # somebody else has deleted it
            self.used_bytes -= file.size_bytes
        self._reclaim_room()

    # Copies

    def _start_copies(self) -> None:
        self.near_files = list_near_files(self._list_positions())
        self.is_short_of_room = bool(self.leftovers)
        for file in [file for file in self.copied_files if file.is_stale]:
            if self.near_files.get(file) != IN_USE:
                self._evict_file(file)
        for file in sorted(self.near_files, key=lambda one: self.near_files[one]):
            distance = self.near_files[file]
            if distance == IN_USE or file.copy_path or file.failure or file in self.copies:
                continue
            if distance and len(self.copies) >= MAX_COPIES:
                break
            if file.size_bytes is not None and not self._has_room(file, file.size_bytes, distance):
                if distance:
                    break
                continue
            self.copies_started += 1
            copy = self.copies[file] = _CopyProcess(
                file, f"{self.folder}/{self.copies_started}.part", self.lock_fd
            )
            self.selector.register(
                copy.report_fd, selectors.EVENT_READ, lambda c=copy: self._read_report(c)
            )

    def _has_room(self, file: _SourceFile, size_bytes: int, distance: int) -> bool:
        """Whether it can be copied now; what is waited for and does not fit has failed."""
        if size_bytes > self.room_bytes:
            file.failure = f"larger than the room: {size_bytes} bytes"
        elif self._make_room(size_bytes, distance):
            return True
        elif distance == 0:
            file.failure = "no room: consumers use all of it"
        return False

    def _read_report(self, copy: _CopyProcess) -> None:
        file = copy.file
        text = os.read(copy.report_fd, 1 << 16).decode(errors="replace")
        # One line at a time: after its size it waits for an answer.
        report: JsonObject = (
            json.loads(text) if text.endswith("\n") else {"failed": "the copy was killed"}
        )
        if "size" in report:
            file.size_bytes, file.identity = round_up_to_blocks(report["size"]), report["identity"]
            self.near_files = list_near_files(self._list_positions())
            distance = self.near_files.get(file, IN_USE)
            if distance != IN_USE and self._has_room(file, file.size_bytes, distance):
                copy.reserved_bytes = file.size_bytes
                self.used_bytes += file.size_bytes
                os.write(copy.go_fd, b"g")
                return
        else:
            file.failure = report.get("failed")
        if "done" in report:
            file.copy_path = f"{copy.part_path[:-5]}-{file.name}"
            os.rename(copy.part_path, file.copy_path)
            file.copy_bytes, file.size_bytes = report["done"], round_up_to_blocks(report["done"])
            self.used_bytes += file.size_bytes
            self.copied_bytes += file.copy_bytes
            self.copied_files[file] = None
        self.selector.unregister(copy.report_fd)
        copy.stop()
        self.used_bytes -= copy.reserved_bytes or 0
        del self.copies[file]


def _find_leftovers(directory: str) -> dict[str, int]:
    """Folders of copiers that were killed, and their bytes; what nobody holds is deleted."""
    found = {}
    for entry in list(os.scandir(directory)):
        if entry.is_dir(follow_symlinks=False) and not _delete_unless_used(entry.path):
            found[entry.path] = sum(
                round_up_to_blocks(x.stat().st_size) for x in os.scandir(entry.path)
            )
    return found


def _delete_unless_used(folder: str) -> bool:
    """Deletes it, unless a consumer of its copier still holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_open_elsewhere(fd: int) -> bool:
    """Whether anybody else has the file open or mapped: then the kernel grants no lease on it."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _check_open_detection(folder: str) -> None:
    """Raises OSError where the file system cannot tell who has a file open."""
    fd = os.open(f"{folder}/probe", os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)
    sees_none = not _is_open_elsewhere(fd)
    other_fd = os.open(f"{folder}/probe", os.O_RDONLY)
    sees_other = _is_open_elsewhere(fd)
    for each in (fd, other_fd):
        os.close(each)
    os.unlink(f"{folder}/probe")
    if not sees_none or not sees_other:
        raise OSError(errno.ENOTSUP, "the file system does not tell who has a file open", folder)


# In the process that makes a copy


def _run_copy(file: _SourceFile, part_path: str, lock_fd: int, go_fd: int, report_fd: int) -> None:
    """Says size and identity, waits for `go_fd`, copies, says how that ended."""
    # In particular the consumers' connections: they must end with the copier.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (lock_fd, go_fd, report_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
    os.setpgid(0, 0)  # so that what a fetch has started dies with it
    try:
        copied_bytes = (
            _run_fetch(file, part_path, lock_fd, go_fd, report_fd)
            if file.fetch
            else _copy_source(file, part_path, go_fd, report_fd)
        )
        os.write(report_fd, _encode_line({"done": copied_bytes}))
    except OSError as error:
        os.write(report_fd, _encode_line({"failed": str(error)[:4000]}))


def _wait_for_go(go_fd: int, report_fd: int, size_bytes: int, identity: list[int] | None) -> None:
    os.write(report_fd, _encode_line({"size": size_bytes, "identity": identity}))
    if os.read(go_fd, 1) != b"g":
        os._exit(0)
    threading.Thread(target=_exit_with_copier, args=[go_fd], daemon=True).start()


def _exit_with_copier(go_fd: int) -> None:
    os.read(go_fd, 1)
    os.killpg(0, signal.SIGKILL)


def _copy_source(file: _SourceFile, part_path: str, go_fd: int, report_fd: int) -> int:
    source_fd = os.open(file.source, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO does not hold it up
    before = os.fstat(source_fd)
    if not stat.S_ISREG(before.st_mode):
        raise OSError(f"{file.source} is no regular file")
    size_bytes = before.st_size
    _wait_for_go(go_fd, report_fd, size_bytes, identity_from_stat(before))
    target_fd = os.open(part_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    if size_bytes:
        os.posix_fallocate(target_fd, 0, size_bytes)  # a full disk says so now
    os.posix_fadvise(source_fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    copied_bytes = 0
    while copied_bytes < size_bytes:
        count = min(size_bytes - copied_bytes, CHUNK_BYTES)
        try:
            sent_bytes = os.sendfile(target_fd, source_fd, copied_bytes, count)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            sent_bytes = os.write(target_fd, os.pread(source_fd, count, copied_bytes))
        if sent_bytes == 0:
            break
        copied_bytes += sent_bytes
    os.posix_fadvise(source_fd, 0, 0, os.POSIX_FADV_DONTNEED)  # it is here now
    if copied_bytes < size_bytes or not identity_from_stat(before) == identity_from_stat(
        os.fstat(source_fd)
    ) == identity_from_stat(os.stat(file.source)):
        raise OSError(f"{file.source} was changed while it was copied")
    return size_bytes


FETCH_SCRIPT = """
import base64, json, os, pickle, sys, threading
said = json.load(sys.stdin)

def exit_with_copier():
    os.read(said["go"], 1)
    os.killpg(0, 9)

threading.Thread(target=exit_with_copier, daemon=True).start()
os.chdir(said["cwd"])
sys.path[:] = said["path"]
pickle.loads(base64.b64decode(said["pickle"]))(said["source"], said["target"])
"""


def _run_fetch(file: _SourceFile, part_path: str, lock_fd: int, go_fd: int, report_fd: int) -> int:
    """By the user's function, in a new interpreter; no file of it gets larger than was said."""
    assert file.fetch
    identity = None
    with contextlib.suppress(OSError):
        status = os.stat(file.source)
        identity = identity_from_stat(status)
    limit_bytes = file.limit_bytes
    if limit_bytes is None and identity:
        limit_bytes = identity[1]
    if limit_bytes is None:
        raise OSError(f"the size of {file.source} is not known (give size=)")
    _wait_for_go(go_fd, report_fd, limit_bytes, identity)
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    result = subprocess.run(  # noqa: S603 - what the user gave, as the user
        [sys.executable, "-c", FETCH_SCRIPT],
        input=_encode_line({**file.fetch, "source": file.source, "target": part_path, "go": go_fd}),
        pass_fds=[go_fd, lock_fd],  # no other copier begins as long as it lives
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if result.returncode:
        error_lines = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise OSError(f"fetch has failed: {''.join(error_lines) or result.returncode}")
    size_bytes = os.lstat(part_path).st_size
    if size_bytes > limit_bytes or (
        identity and identity != identity_from_stat(os.stat(file.source))
    ):
        raise OSError(f"{file.source} was changed while it was fetched")
    return size_bytes


def run_copier(directory: str, lock_fd: int) -> None:
    """Run the copier of the window in `directory` until it ends; `lock_fd` holds its lock."""
    os.set_inheritable(lock_fd, False)
    os.umask(0o077)
    os.chdir("/")
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGIO):
        signal.signal(name, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        copier = _WindowCopier(directory, lock_fd)
    except OSError as error:
        sys.exit(str(error))
    if os.fork():
        os._exit(0)  # who started it may go on: the socket is there
    log = os.open(f"{directory}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, target in ((null, 0), (null, 1), (log, 2)):
        os.dup2(fd, target)
    try:
        copier.run()
    finally:
        copier.delete_window_files()


if __name__ == "__main__":
    run_copier(sys.argv[1], int(sys.argv[2]))
