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
PATIENCE = 20.0  # seconds for an answer, or a sign of life; and for a copier to start
BEAT = 2.0  # seconds between the copier's signs of life
BACK_OFF = 60.0  # seconds without the copier after it failed; doubled each time
LINGER = 60.0  # seconds that a copier without consumers keeps its files, for the next epoch
COPIES = 4  # at once; one that a consumer waits for comes on top
BLOCK = 4096  # bytes; what a file takes is rounded up to these
CHUNK = 16 << 20  # bytes
HELD = -1  # the distance of a file that a consumer was given and may open

LOG = logging.getLogger(__name__)  # where nobody sets it up, to stderr

Json = Dict[str, Any]
Fetch = Callable[[str, str], object]


class Trouble(Exception):
    """Why a path is read where it is. It never reaches the user's code."""


TROUBLES = (Trouble, OSError, subprocess.SubprocessError, ValueError, KeyError)


def bytes_of(size: int | str) -> int:
    """Reads 4096, "400GiB" or "1.5T"; units are of 1024. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([KMGTP]?)(?:I?B)?", str(size).upper())
    if not found:
        raise ValueError(f"a size such as 400GiB was expected, not {size!r}")
    return int(float(found[1]) * 1024 ** " KMGTP".index(found[2] or " "))


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def identity(found: os.stat_result) -> list[int]:
    """What changes with a file's bytes. No inode: object stores mounted by FUSE make them up."""
    return [found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def in_ram(path: str) -> bool:
    """Whether a tmpfs is mounted at this very path."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        kinds = {line.split(" ")[1]: line.split(" ")[2] for line in mounts}  # the last one shows
    return kinds.get(os.path.abspath(path)) == "tmpfs"


def directory_of(directory: str | None, name: str, environ: Mapping[str, str]) -> str:
    """The directory of a window. Raises Trouble where none belongs to the job."""
    job = re.sub(r"[^0-9A-Za-z_-]", "", environ.get("SLURM_JOB_ID", ""))
    if directory is None:
        directory = environ.get("FORESTAGE_DIR") or (environ.get("TMPDIR") if job else None)
    if not directory:
        raise Trouble("the job has no directory of its own ($FORESTAGE_DIR; or give directory=)")
    whose = f"job-{job}" if job else f"user-{os.geteuid()}"
    digest = hashlib.sha256(f"{PROTOCOL} {name}".encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(os.path.abspath(directory), f"forestage-window-{whose}", digest[:12])


def warning_of(where: str, directory: str | None, environ: Mapping[str, str]) -> str:
    """The line for a user who asked for memory and whose job has no directory there, or ""."""
    own = environ.get("FORESTAGE_DIR")
    # No name in /dev/shm: what a killed job leaves there stays, in memory that no job accounts for.
    if where != "ram" or directory is not None or (own and in_ram(own)):
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
        fetch: Fetch | None = None,
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
        self._hello: Json = {
            "room": bytes_of(room),
            "ahead": ahead,
            "keep": keep,
            "wrap": wrap,
            "fetch": None if fetch is None else _portable(fetch),
            "size": None if size is None else bytes_of(size),
        }
        self._link: _Link | None = None
        self.open()

    def open(self) -> None:
        """Keeps the copier while this object lives, even if only other processes iterate."""
        try:
            self._link = self.link(())
        except TROUBLES as error:
            self.stats.trouble = str(error)
        _windows.add(self)

    def link(self, paths: Iterable[str]) -> _Link:
        place = directory_of(self._directory, self._name, os.environ)
        warning = warning_of(self._where, self._directory, os.environ)
        sources = [_source(path, self._hello["fetch"]) for path in paths]
        tries = 20
        while True:
            try:
                return _Link(place, self._hello, sources, warning)
            except ConnectionError:
                # A copier that ends, or was killed, can be connected to until all of it is gone.
                tries -= 1
                if not tries:
                    raise
                time.sleep(0.05)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[str]:
        walk = _Walk(self)
        try:
            for at, path in enumerate(self.paths):
                yield walk.step(at, path)
        finally:
            walk.close()

    def local(self) -> dict[str, str]:
        """Returns the local copy of each of the paths that has one now.

        Copies go when room is needed: opening one may raise FileNotFoundError, except for the
        last `keep` paths that an iteration has yielded. Empty at any trouble.
        """
        try:
            with contextlib.closing(self.link(())) as link:
                there = link.ask({"list": True})["local"]
        except TROUBLES as error:
            self.stats.trouble = str(error)
            return {}
        sources = ((path, _source(path, self._hello["fetch"])) for path in self.paths)
        return {path: there[source] for path, source in sources if source in there}

    def close(self) -> None:
        """Ends the copier, and deletes its files, if nobody else is its consumer."""
        if self._link is None or self._link.closed:  # by a fork
            return
        for _ in range(2):  # if it was killed, another one deletes what it left
            try:
                self._link.ask({"bye": True})
                break
            except TROUBLES:
                self._link.close()
                with contextlib.suppress(*TROUBLES):
                    self._link = self.link(())
        self._link.close()
        self._link = None

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> Json:
        return {**self.__dict__, "stats": Stats(), "_link": None}

    def __setstate__(self, state: Json) -> None:
        self.__dict__.update(state)
        self.open()


window = Window


def _source(path: str, fetch: object) -> str:
    return path if fetch and "://" in path else os.path.abspath(path)


def _portable(fetch: Fetch) -> Json:
    """What another process needs to call it. Raises ValueError if that is impossible."""
    try:
        pickled = pickle.dumps(fetch, protocol=4)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"fetch must be a function of a module ({error})") from None
    if b"__main__" in pickled:
        raise ValueError("fetch runs in another process: put it into a module, not the script")
    encoded = base64.b64encode(pickled).decode()
    return {"pickle": encoded, "path": sys.path, "cwd": os.getcwd()}


class _Walk:
    """One iteration: asks for each path, and begins anew with another copier if one is lost."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.link: _Link | None = None
        self.lost: list[_Link] = []  # their folders are held until what they gave is done with
        self.release_at = 0
        self.not_before = 0.0
        self.back_off = BACK_OFF

    def step(self, at: int, path: str) -> str:
        """Returns where to read `path` from, number `at`."""
        if at >= self.release_at:
            self._release()
        stats, start = self.window.stats, time.monotonic()
        try:
            reply = self._answer(at, self._seen(path))
        except TROUBLES as error:
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

    def _seen(self, path: str) -> list[int] | None:
        """What this process sees at the path: its mounts may not be those of the copier."""
        try:
            return identity(os.stat(path))
        except OSError:
            if self.window._hello["fetch"]:
                return None
            raise

    def _answer(self, at: int, seen: list[int] | None) -> Json:
        if self.link is not None and self.link.closed:  # by a fork
            self._lose(at)
        for last in (False, True):
            try:
                if self.link is None:
                    self._connect()
                assert self.link  # for mypy
                reply = self.link.ask({"at": at, "seen": seen})
                if "path" in reply and os.stat(reply["path"]).st_size != reply["size"]:
                    raise Trouble("the local copy is not whole")
                return reply
            except (Refused, socket.timeout):
                self._lose(at, wait=True)
                raise
            except TROUBLES:
                # A copier that has just ended, or was killed: the next one is asked, once.
                self._lose(at, wait=last)
                if last:
                    raise
        raise AssertionError

    def _connect(self) -> None:
        if time.monotonic() < self.not_before:
            raise Trouble(self.window.stats.trouble)
        try:
            self.link = self.window.link(self.window.paths)
        except TROUBLES as error:
            raise Refused(str(error)) from error
        if self.lost:  # with the copier that the window kept
            self.window.open()

    def _lose(self, at: int, wait: bool = False) -> None:
        if self.link is not None:
            self.link.hang_up()
            self.lost.append(self.link)
            self.link = None
            self.release_at = at - 1 + self.window._hello["keep"]
        if wait and time.monotonic() >= self.not_before:
            self.not_before = time.monotonic() + self.back_off
            self.back_off *= 2

    def _release(self) -> None:
        for link in self.lost:
            link.close()
        self.lost.clear()

    def close(self) -> None:
        self._release()
        if self.link is not None:
            self.link.close()


class Refused(Trouble):
    """No copier can be had now."""


class _Link:
    """One consumer's connection to its copier, which it starts where there is none."""

    def __init__(self, place: str, hello: Json, sources: list[str], warning: str) -> None:
        self.folder = -1
        self.socket = _connected(place, warning)
        self.lines = self.socket.makefile("rb")
        _links.add(self)
        self.socket.sendall(_line(hello) + _line(sources))
        folder = self._reply()["folder"]
        if sources:
            self.folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self.folder, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def closed(self) -> bool:
        return self.lines.closed

    def ask(self, message: Json) -> Json:
        self.socket.sendall(_line(message))
        reply = self._reply()
        while "beat" in reply:
            reply = self._reply()
        return reply

    def _reply(self) -> Json:
        line = self.lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the copier has ended")
        reply: Json = json.loads(line)
        return reply

    def hang_up(self) -> None:
        self.lines.close()
        self.socket.close()

    def close(self) -> None:
        self.hang_up()
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1

    def __del__(self) -> None:
        if hasattr(self, "lines"):
            self.close()


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


_links: weakref.WeakSet[_Link] = weakref.WeakSet()
_windows: weakref.WeakSet[Window] = weakref.WeakSet()


def _close_links() -> None:
    """In a forked child: its parent is the consumer, and must be seen to end."""
    for link in list(_links):
        link.close()


def _close_windows() -> None:
    for each in list(_windows):
        each.close()


os.register_at_fork(after_in_child=_close_links)
atexit.register(_close_windows)  # not in workers of multiprocessing: they end without it


def _own(path: str) -> None:
    """Makes the directory. Raises Trouble if what is there is not the user's alone."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not mine or found.st_mode & 0o077:
        raise Trouble(f"{path} is not a directory of this user alone")


def _connected(place: str, warning: str) -> socket.socket:
    """A connection to the window's copier. Raises Trouble or OSError.

    The process that starts the copier writes the warning: one line for all loaders of a node.
    """
    until = time.monotonic() + PATIENCE
    while True:
        with contextlib.ExitStack() as unless_connected:
            connection = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(PATIENCE)
            with contextlib.suppress(FileNotFoundError):  # it went with the last copier
                _own(os.path.dirname(place))
                _own(place)
                with _short(place) as short:
                    try:
                        connection.connect(f"{short}/socket")
                        unless_connected.pop_all()
                        return connection
                    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                        if _start_copier(place, short) and warning:
                            LOG.warning(warning)
        job = os.path.dirname(os.path.dirname(place))
        if not os.path.isdir(job):  # it does not come back, so nobody waits for that
            raise Trouble(f"{job} is gone")
        if time.monotonic() > until:
            raise Trouble("no copier answers")


@contextlib.contextmanager
def _short(directory: str) -> Iterator[str]:
    """A name for it that fits a socket's address (107 bytes)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _start_copier(place: str, short: str) -> bool:
    """Starts one, which listens when this returns, unless somebody else does, or one is ending.

    Returns whether it was started here.
    """
    lock = os.open(f"{short}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
            return False
        if os.fstat(lock).st_nlink == 0:  # it went with the last copier
            return False
        # The lock goes over to it: nobody else can come between.
        ran = subprocess.run(  # noqa: S603 - this very file
            [sys.executable, "-I", "-S", os.path.abspath(__file__), place, str(lock)],
            pass_fds=[lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=PATIENCE,
            check=False,
        )
        if ran.returncode:
            said = ran.stdout.decode(errors="replace").strip().splitlines()[-1:]
            raise Trouble(f"no copier: {''.join(said)}")
        return True
    finally:
        os.close(lock)


# The copier


class _File:
    """A file that some consumer has in its list."""

    __slots__ = (
        "failed",
        "fetch",
        "identity",
        "length",
        "limit",
        "name",
        "path",
        "size",
        "source",
        "stale",
    )

    def __init__(self, source: str) -> None:
        self.source = source
        self.name = re.sub(r"[^\w.+=@-]", "_", source.rsplit("/", 1)[-1], flags=re.ASCII)[-200:]
        self.path: str | None = None  # of the copy, once it is whole
        self.length = 0  # bytes of the copy
        self.size: int | None = None  # bytes that it takes, once known
        self.identity: list[int] | None = None
        self.failed: str | None = None  # why; forgotten once a consumer was told
        self.stale = False  # the source is another one now: the copy goes once nobody uses it
        self.fetch: Json | None = None
        self.limit: int | None = None  # bytes; for a source that stat does not know


class _Order:
    """A list of files; consumers with the same list have the same one."""

    def __init__(self, files: list[_File]) -> None:
        self.files = files
        self.index = {file: at for at, file in reversed(list(enumerate(files)))}


class _Position(NamedTuple):
    """Where a consumer is in its order; -1 before it has asked for anything."""

    order: _Order
    at: int
    waits: bool  # for the file at `at`
    ahead: int
    keep: int
    wrap: bool


def near(positions: Iterable[_Position]) -> dict[_File, int]:
    """How soon each file is needed that some consumer has, waits for (0) or will have `ahead`."""
    found: dict[_File, int] = {}
    for order, at, waits, ahead, keep, wrap in positions:
        files = order.files
        for place in range(max(0, at - keep + 1), at + (not waits)):
            found[files[place]] = HELD
        for distance in range(not waits, min(ahead, len(files) - 1) + 1):
            place = at + distance
            if place < len(files) or wrap:
                file = files[place % len(files)]
                found[file] = min(distance, found.get(file, distance))
    return found


def furthest(file: _File, positions: Iterable[_Position]) -> float:
    """In how many files it is needed again: of copies in the way, that with the most goes."""
    soonest = float("inf")
    for order, at, _, _, _, wrap in positions:
        index = order.index.get(file)
        if index is not None and (index > at or wrap):
            soonest = min(soonest, (index - at) % len(order.files) or len(order.files))
    return soonest


class _Consumer:
    """The copier's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received, self.unsent = bytearray(), b""
        self.hello: Json = {}
        self.order: _Order | None = None
        self.at, self.waits, self.waited, self.leaving = -1, False, False, False
        self.seen: list[int] | None = None

    def position(self) -> _Position:
        assert self.order  # who asks has said its list
        hello = self.hello
        return _Position(
            self.order, self.at, self.waits, hello["ahead"], hello["keep"], hello["wrap"]
        )

    def lines(self) -> Iterator[bytes]:
        """The whole lines that have come. Raises Trouble at the connection's end."""
        with contextlib.suppress(BlockingIOError):
            start = len(self.received)
            data = self.socket.recv(1 << 20)
            if not data:
                raise Trouble("it has ended")
            self.received += data
            while (end := self.received.find(b"\n", start)) >= 0:
                line = bytes(self.received[:end])
                del self.received[: end + 1]
                start = 0
                yield line

    def send(self, message: Json) -> None:
        self.unsent += _line(message)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent[: 1 << 20]) :]


class _Copy:
    """A process that makes one copy; it dies with the copier, whose end of `go` then closes."""

    def __init__(self, file: _File, part: str, lock: int) -> None:
        self.file, self.part = file, part
        self.reserved: int | None = None  # bytes, once it was told to go
        theirs_go, self.go = os.pipe()
        self.says, theirs_says = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _make_copy(file, part, lock, theirs_go, theirs_says)
            finally:
                os._exit(1)
        os.close(theirs_go)
        os.close(theirs_says)

    def end(self) -> None:
        """Whatever it is doing, nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # before it has a group of its own
        os.close(self.go)
        os.close(self.says)
        os.waitpid(self.pid, 0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.part)


class _Copier:
    """Copies what the consumers need next, and evicts what is needed last."""

    def __init__(self, place: str, lock: int) -> None:
        self.place, self.lock = place, lock
        self.folder = f"{place}/{os.urandom(4).hex()}"  # its own: no path ever means other bytes
        with _short(place) as short:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{short}/socket")
            self.leftovers = _leftovers(place)
            os.mkdir(self.folder, 0o700)
            _must_see_opens(self.folder)
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(f"{short}/socket")
        self.listener.listen(4096)
        self.listener.setblocking(False)
        self.room = sys.maxsize
        self.used = sum(self.leftovers.values())  # bytes: copies, parts, unlinked, leftovers
        self.unlinked: dict[int, int] = {}  # open descriptor: bytes
        self.files: dict[str, _File] = {}
        self.present: dict[_File, None] = {}
        self.orders: weakref.WeakValueDictionary[bytes, _Order] = weakref.WeakValueDictionary()
        self.consumers: list[_Consumer] = []
        self.copies: dict[_File, _Copy] = {}
        self.near: dict[_File, int] = {}
        self.last: list[_File] = []  # needed last of all, the very last at the end
        self.made = self.copied = 0
        self.busy = 0.0
        self.short_of_room = False
        self.linger = LINGER
        self.leaving: _Consumer | None = None

    def run(self) -> None:
        """Returns when it has had no consumers for a while."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        signal.signal(signal.SIGTERM, self._hurry)
        now = beaten = alone_since = time.monotonic()
        while self.consumers or self.leftovers or now < alone_since + self.linger:
            self._free()
            self._schedule()
            self._answer()
            copying = any(copy.reserved is not None for copy in self.copies.values())
            for key, _ in self.selector.select(0.1 if self.short_of_room else BEAT / 2):
                key.data()
            before, now = now, time.monotonic()
            self.busy += copying * (now - before)
            if self.consumers:
                alone_since = now
            if now > beaten + BEAT:
                beaten = now
                self._beat()

    def _hurry(self, *_: object) -> None:
        """On SIGTERM: the job will end, but its processes may still read."""
        self.linger = 0.0

    def end(self) -> None:
        """Deletes all that is there, and only then lets the lock go."""
        os.unlink(f"{self.place}/socket")
        for copy in self.copies.values():
            copy.end()
        shutil.rmtree(self.folder)
        for name in ("log", "lock"):
            os.unlink(f"{self.place}/{name}")
        for directory in (self.place, os.path.dirname(self.place)):
            with contextlib.suppress(OSError):  # another window's is not empty
                os.rmdir(directory)
        if self.leaving:
            self.leaving.send({"bye": True})

    # Consumers

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            consumer = _Consumer(connection)
            self.consumers.append(consumer)
            self.selector.register(connection, selectors.EVENT_READ, lambda: self._hear(consumer))

    def _hear(self, consumer: _Consumer) -> None:
        try:
            for line in consumer.lines():
                self._obey(consumer, line)
            if consumer is not self.leaving:
                self._send(consumer)
        except TROUBLES:
            self._forget(consumer)

    def _forget(self, consumer: _Consumer) -> None:
        self.selector.unregister(consumer.socket)
        consumer.socket.close()
        self.consumers.remove(consumer)

    def _send(self, consumer: _Consumer, message: Json | None = None) -> None:
        """Raises OSError if the consumer has gone."""
        if message:
            consumer.send(message)
        else:
            consumer.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if consumer.unsent else 0)
        self.selector.modify(consumer.socket, events, lambda: self._hear(consumer))

    def _beat(self) -> None:
        for consumer in list(self.consumers):
            if consumer.waits and not consumer.unsent:
                try:
                    self._send(consumer, {"beat": True})
                except OSError:
                    self._forget(consumer)

    def _obey(self, consumer: _Consumer, line: bytes) -> None:
        """Raises ValueError or KeyError for what no consumer says."""
        if consumer.order is None and consumer.hello:
            consumer.order = self._order(line, consumer.hello)
            self._send(consumer, {"folder": self.folder})
            return
        message = json.loads(line)
        if not consumer.hello:
            consumer.hello = message
            self.room = min(self.room, message["room"])  # never above what any of them gave
        elif "at" in message:
            if not consumer.order or not 0 <= message["at"] < len(consumer.order.files):
                raise ValueError
            consumer.at, consumer.seen = message["at"], message["seen"]
            consumer.waits, consumer.waited = True, False
        elif "list" in message:
            there = {file.source: file.path for file in self.present if not file.stale}
            self._send(consumer, {"local": there})
        elif "bye" in message:
            self._leave(consumer)

    def _leave(self, consumer: _Consumer) -> None:
        """If it was the last one it is told when all is deleted."""
        if len(self.consumers) > 1:
            self._send(consumer, {"bye": True})
            return
        self.linger = 0.0
        self.selector.unregister(consumer.socket)
        self.consumers.remove(consumer)
        self.leaving = consumer

    def _order(self, line: bytes, hello: Json) -> _Order:
        digest = hashlib.sha256(line).digest()
        order = self.orders.get(digest)
        if order is None:
            files = []
            for source in json.loads(line):
                file = self.files.get(source) or self.files.setdefault(source, _File(source))
                file.fetch, file.limit = hello["fetch"], hello["size"]
                files.append(file)
            order = self.orders[digest] = _Order(files)
        return order

    def _answer(self) -> None:
        told = []
        for consumer in [one for one in self.consumers if one.waits]:
            file = consumer.position().order.files[consumer.at]
            reply = self._reply(file, consumer.seen)
            if reply is None:
                consumer.waited = True
                continue
            told.append(file)
            consumer.waits = False
            more = {"waited": consumer.waited, "copied": self.copied, "busy": self.busy}
            try:
                self._send(consumer, {**reply, **more})
            except OSError:
                self._forget(consumer)
        for file in told:
            file.failed = None

    def _reply(self, file: _File, seen: list[int] | None) -> Json | None:
        """Where to read it, or None as long as that is not known."""
        if file.path is None:
            return None if file.failed is None else {"why": file.failed}
        if file.stale or file.identity != seen:
            file.stale = True
            return {"why": "the source has changed since it was copied"}
        return {"path": file.path, "size": file.length}

    # Room

    def _positions(self) -> list[_Position]:
        return [one.position() for one in self.consumers if one.order and one.order.files]

    def _free(self) -> None:
        """Unlinked files that nobody has open any more, and what dead copiers left, make room."""
        for fd in [fd for fd in self.unlinked if not _open_elsewhere(fd)]:
            os.close(fd)
            self.used -= self.unlinked.pop(fd)
        for folder in [folder for folder in self.leftovers if _deleted(folder)]:
            self.used -= self.leftovers.pop(folder)

    def _make_room(self, size: int, distance: int) -> bool:
        """Evicts, unless that would not be enough. What was copied ahead goes only for a file that
        is waited for (distance 0): else consumers would take it from each other, again and again.
        """
        going = sum(self.unlinked.values())
        stays = sum(
            file.size or 0
            for file, soon in self.near.items()
            if file.path and (distance or soon <= 0)
        )
        evictable = sum(file.size or 0 for file in self.present) - stays
        if self.used - going - evictable + size > self.room:
            return False
        while self.used - sum(self.unlinked.values()) + size > self.room:
            self._evict(self._victim())
        self.short_of_room = self.used + size > self.room
        return not self.short_of_room

    def _victim(self) -> _File:
        while True:
            if not self.last:
                far = [file for file in self.present if file not in self.near]
                if not far:
                    close = [file for file in self.near if file.path]
                    return max(close, key=lambda file: self.near[file])
                positions = self._positions()
                # Some of many at once: to look at all of them for each would take too long.
                key = functools.partial(furthest, positions=positions)
                self.last = heapq.nlargest(max(1, len(far) // 16), far, key=key)[::-1]
            file = self.last.pop()
            if file.path and file not in self.near:
                return file

    def _evict(self, file: _File) -> None:
        """Unlinks a copy. Who has it open keeps it, and as long as that it takes its room."""
        assert file.path
        assert file.size is not None
        path, file.path, file.stale = file.path, None, False
        del self.present[file]
        try:
            self.unlinked[os.open(path, os.O_RDONLY)] = file.size
            os.unlink(path)
        except FileNotFoundError:  # somebody else has deleted it
            self.used -= file.size
        self._free()

    # Copies

    def _schedule(self) -> None:
        self.near = near(self._positions())
        self.short_of_room = bool(self.leftovers)
        for file in [file for file in self.present if file.stale]:
            if self.near.get(file) != HELD:
                self._evict(file)
        for file in sorted(self.near, key=lambda one: self.near[one]):
            distance = self.near[file]
            if distance == HELD or file.path or file.failed or file in self.copies:
                continue
            if distance and len(self.copies) >= COPIES:
                break
            if file.size is not None and not self._fits(file, file.size, distance):
                if distance:
                    break
                continue
            self.made += 1
            copy = self.copies[file] = _Copy(file, f"{self.folder}/{self.made}.part", self.lock)
            self.selector.register(copy.says, selectors.EVENT_READ, lambda c=copy: self._listen(c))

    def _fits(self, file: _File, size: int, distance: int) -> bool:
        """Whether it can be copied now; what is waited for and does not fit has failed."""
        if size > self.room:
            file.failed = f"larger than the room: {size} bytes"
        elif self._make_room(size, distance):
            return True
        elif distance == 0:
            file.failed = "no room: consumers use all of it"
        return False

    def _listen(self, copy: _Copy) -> None:
        file = copy.file
        said = os.read(copy.says, 1 << 16).decode(errors="replace")
        # One line at a time: after its size it waits for an answer.
        report: Json = (
            json.loads(said) if said.endswith("\n") else {"failed": "the copy was killed"}
        )
        if "size" in report:
            file.size, file.identity = rounded(report["size"]), report["identity"]
            self.near = near(self._positions())
            distance = self.near.get(file, HELD)
            if distance != HELD and self._fits(file, file.size, distance):
                copy.reserved = file.size
                self.used += file.size
                os.write(copy.go, b"g")
                return
        else:
            file.failed = report.get("failed")
        if "done" in report:
            file.path = f"{copy.part[:-5]}-{file.name}"
            os.rename(copy.part, file.path)
            file.length, file.size = report["done"], rounded(report["done"])
            self.used += file.size
            self.copied += file.length
            self.present[file] = None
        self.selector.unregister(copy.says)
        copy.end()
        self.used -= copy.reserved or 0
        del self.copies[file]


def _leftovers(place: str) -> dict[str, int]:
    """Folders of copiers that were killed, and their bytes; what nobody holds is deleted."""
    found = {}
    for entry in list(os.scandir(place)):
        if entry.is_dir(follow_symlinks=False) and not _deleted(entry.path):
            found[entry.path] = sum(rounded(x.stat().st_size) for x in os.scandir(entry.path))
    return found


def _deleted(folder: str) -> bool:
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


def _open_elsewhere(fd: int) -> bool:
    """Whether anybody else has the file open or mapped: then the kernel grants no lease on it."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _must_see_opens(folder: str) -> None:
    """Raises OSError where the file system cannot tell who has a file open."""
    fd = os.open(f"{folder}/probe", os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)
    alone = not _open_elsewhere(fd)
    other = os.open(f"{folder}/probe", os.O_RDONLY)
    shared = _open_elsewhere(fd)
    for each in (fd, other):
        os.close(each)
    os.unlink(f"{folder}/probe")
    if not alone or not shared:
        raise OSError(errno.ENOTSUP, "the file system does not tell who has a file open", folder)


# In the process that makes a copy


def _make_copy(file: _File, part: str, lock: int, go: int, says: int) -> None:
    """Says size and identity, waits for `go`, copies, says how that ended."""
    # In particular the consumers' connections: they must end with the copier.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (lock, go, says):
            with contextlib.suppress(OSError):
                os.close(fd)
    os.setpgid(0, 0)  # so that what a fetch has started dies with it
    try:
        done = _fetched(file, part, lock, go, says) if file.fetch else _copied(file, part, go, says)
        os.write(says, _line({"done": done}))
    except OSError as error:
        os.write(says, _line({"failed": str(error)[:4000]}))


def _told_to_go(go: int, says: int, size: int, seen: list[int] | None) -> None:
    os.write(says, _line({"size": size, "identity": seen}))
    if os.read(go, 1) != b"g":
        os._exit(0)
    threading.Thread(target=_die_with_the_copier, args=[go], daemon=True).start()


def _die_with_the_copier(go: int) -> None:
    os.read(go, 1)
    os.killpg(0, signal.SIGKILL)


def _copied(file: _File, part: str, go: int, says: int) -> int:
    source = os.open(file.source, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO does not hold it up
    before = os.fstat(source)
    if not stat.S_ISREG(before.st_mode):
        raise OSError(f"{file.source} is no regular file")
    size = before.st_size
    _told_to_go(go, says, size, identity(before))
    target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    if size:
        os.posix_fallocate(target, 0, size)  # a full disk says so now
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    done = 0
    while done < size:
        count = min(size - done, CHUNK)
        try:
            sent = os.sendfile(target, source, done, count)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            sent = os.write(target, os.pread(source, count, done))
        if sent == 0:
            break
        done += sent
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)  # it is here now
    if done < size or not identity(before) == identity(os.fstat(source)) == identity(
        os.stat(file.source)
    ):
        raise OSError(f"{file.source} was changed while it was copied")
    return size


FETCH = """
import base64, json, os, pickle, sys, threading
said = json.load(sys.stdin)

def die_with_the_copier():
    os.read(said["go"], 1)
    os.killpg(0, 9)

threading.Thread(target=die_with_the_copier, daemon=True).start()
os.chdir(said["cwd"])
sys.path[:] = said["path"]
pickle.loads(base64.b64decode(said["pickle"]))(said["source"], said["target"])
"""


def _fetched(file: _File, part: str, lock: int, go: int, says: int) -> int:
    """By the user's function, in a new interpreter; no file of it gets larger than was said."""
    assert file.fetch
    seen = None
    with contextlib.suppress(OSError):
        found = os.stat(file.source)
        seen = identity(found)
    limit = file.limit
    if limit is None and seen:
        limit = seen[1]
    if limit is None:
        raise OSError(f"the size of {file.source} is not known (give size=)")
    _told_to_go(go, says, limit, seen)
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    ran = subprocess.run(  # noqa: S603 - what the user gave, as the user
        [sys.executable, "-c", FETCH],
        input=_line({**file.fetch, "source": file.source, "target": part, "go": go}),
        pass_fds=[go, lock],  # no other copier begins as long as it lives
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise OSError(f"fetch has failed: {''.join(said) or ran.returncode}")
    size = os.lstat(part).st_size
    if size > limit or (seen and seen != identity(os.stat(file.source))):
        raise OSError(f"{file.source} was changed while it was fetched")
    return size


def main(place: str, lock: int) -> None:
    """The copier of the window in `place`; `lock` is its lock, held. Returns when it has ended."""
    os.set_inheritable(lock, False)
    os.umask(0o077)
    os.chdir("/")
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGIO):
        signal.signal(name, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        copier = _Copier(place, lock)
    except OSError as error:
        sys.exit(str(error))
    if os.fork():
        os._exit(0)  # who started it may go on: the socket is there
    log = os.open(f"{place}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, target in ((null, 0), (null, 1), (log, 2)):
        os.dup2(fd, target)
    try:
        copier.run()
    finally:
        copier.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
