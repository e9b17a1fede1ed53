"""An image that is read through on a test's node: its keeper, servers, readers, and its copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from forestage.cache import source_image
from forestage.cache.arrival_map import ArrivalMap
from forestage.cache.layout import Entry
from forestage.cache.node import Node as Here
from forestage.cache.source_image import AccessRights, SourceImage
from forestage.clock import Clock
from forestage.config import Config
from forestage.slurm.hints import JobHints
from forestage.slurm.job import Job
from forestage.sources.source import OpenImage
from forestage.stage.task import CopyTask
from forestage.system import mounts
from forestage.system.as_user import User
from forestage.units import SizeOrShare
from forestage.views.through import keeper
from forestage.views.through.keeper import PROCESS_NAME, SERVER_NAME
from node import ALICE, Node, children_left, comm, end_keepers, until

MIB = 1024 * 1024
SYS_MOVE_MOUNT, EMPTY_PATHS = 429, 0x4 | 0x40
THREADS = 22  # of a server that is at work
SIZE = 8 * MIB - 4321  # the last piece is short, and ends within a block
BLOCK = 128 * 1024  # no read-ahead of the kernel's goes beyond such a one by itself

Shown = Callable[..., "Through"]
"""The fixture `shown`: (path, at, lay) of a Through."""

_libc = ctypes.CDLL(None, use_errno=True)


def here(node: Node) -> Here:
    room = {"max_size": SizeOrShare(share=1.0), "min_free": SizeOrShare()}
    given = {"cache": "/mnt/nvme/forestage", "sources": (str(node.shared),), **room}
    return Here.from_config(Config(**given, chunk_size=MIB), node.places, Clock())


def opened(path: Path, user: User = ALICE) -> OpenImage:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    facts = os.fstat(fd)
    access = AccessRights(
        facts.st_uid, facts.st_gid, facts.st_mode & 0o7777, source_image.read_acl(fd)
    )
    return OpenImage(
        SourceImage(source_image.identity_from_stat(facts, str(path)), access), user, fd
    )


def task(here: Here, opened: OpenImage, **keys: object) -> CopyTask:
    """What job 7 asks for, with further keys of the configuration."""
    job = Job(7, opened.user, "n1", "batch", "/", requests=(), saves=None, hints=JobHints())
    config = msgspec.structs.replace(here.config, **keys)
    return CopyTask(msgspec.structs.replace(here, config=config), job, opened)


class Through:
    """What a step does: has the image's keeper started, fetches a mount, lays it over the path."""

    def __init__(self, node: Node, path: Path, at: Path | None = None, user: User = ALICE) -> None:
        self.node, self.path, self.at = here(node), path, at or path
        self.opened = opened(path, user)
        self.image = self.opened.image
        self.spot = node.places.through / self.image.key
        node.cache.prepare(require_mount=False)
        self.laid = 0
        self.start()

    def start(self) -> None:
        self.sock = keeper.start_keeper(task(self.node, self.opened))
        self.pid = next(state.pid for spot, state in self.living() if spot == self.spot)

    def living(self) -> list[tuple[Path, keeper.KeeperState]]:
        return keeper.list_keepers(self.node.places.through)

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.connect(os.fspath(self.sock))
        return made

    def clone(self) -> int:
        with self.connect() as line:
            line.send(b"mount")
            said, (fd,), _, _ = socket.recv_fds(line, 64, 1)
        assert said == b"ok"
        return fd

    def lay(self) -> Path:
        """Lays the file over the path, or `at`; whoever opens that from now on reads through."""
        fd, target = self.clone(), os.open(self.at, os.O_PATH)
        assert _libc.syscall(SYS_MOVE_MOUNT, fd, b"", target, b"", EMPTY_PATHS) == 0
        os.close(fd)
        os.close(target)
        self.laid += 1
        return self.at

    def take_off(self) -> None:
        mounts.umount(str(self.at))
        self.laid -= 1

    def server(self, besides: int = 0) -> int:
        """The server that answers; waits for one that is not `besides`."""

        def found() -> int:
            for pid in servers_of(self.pid):
                if pid != besides and _threads(pid) >= THREADS:
                    return pid
            return 0

        return until(found, "a server")

    def kill_server(self) -> None:
        pid = self.server()
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in servers_of(self.pid), "a server's end")

    def kill_keeper(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not comm(self.pid) or self.pid not in children_left(), "a keeper's end")

    def turns(self, number: int) -> None:
        """Waits until the keeper has looked at everything so often."""
        for _ in range(number):
            before = (self.spot / "state").stat().st_mtime_ns
            until(lambda: (self.spot / "state").stat().st_mtime_ns != before, "a keeper's turn")  # noqa: B023

    def close(self) -> None:
        """Takes off what is laid and ends what still lives."""
        while self.laid:
            self.take_off()
        end_keepers()
        with contextlib.suppress(OSError):  # its file server has died before
            self.opened.close()

    def ended(self) -> None:
        """Waits until neither keeper nor server is left."""

        def over() -> bool:
            return not any(comm(pid) in (PROCESS_NAME, SERVER_NAME) for pid in children_left())

        until(over, "keeper and server to end")


class Copy:
    """Plays the stager of an image: brings pieces into a part, tells servers, publishes it."""

    def __init__(self, through: Through, data: bytes) -> None:
        self.cache, self.image, self.data = through.node.cache, through.image, data
        self.part = self.cache.part(self.image.key)
        self.part.directory.mkdir(parents=True, exist_ok=True)
        with self.part.image.open("wb") as file:
            file.truncate(len(data))
        self._spot = through.spot
        self.follow()

    def follow(self) -> None:
        """Begins anew to tell servers, of what now is the part's image."""
        inode = self.part.image.stat().st_ino
        self.readers = ArrivalMap(self._spot, len(self.data), MIB, inode)

    def bring(self, start: int, length: int, data: bytes | None = None) -> None:
        """Brings a range; `data` in place of the source's bytes shows who reads them."""
        data = self.data[start : start + length] if data is None else data
        with self.part.image.open("r+b") as file:
            file.seek(start)
            file.write(data)
        self.readers.mark_arrived(start, length)

    def bring_marked(self) -> bytes:
        """Brings all of it, but with other bytes than the source's; these bytes."""
        wrong = bytes(byte ^ 0xFF for byte in self.data)
        self.bring(0, len(wrong), wrong)
        return wrong

    def publish(self) -> None:
        entry = Entry(self.image.key, self.image.identity, self.image.access, 0.0, "chunks")
        self.cache.publish(entry)

    def drop(self) -> None:
        self.cache.drop_part(self.image.key)


class Reader:
    """A process that reads at random and compares until it is told to stop."""

    def __init__(self, path: Path, data: bytes, seed: int = 1) -> None:
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self.pid = os.fork()
        if self.pid == 0:
            code = 2
            try:
                code = self._live(path, data, random.Random(seed))
            finally:
                os._exit(code)

    def _live(self, path: Path, data: bytes, dice: random.Random) -> int:
        fd = os.open(path, os.O_RDONLY)
        while not self._shared[0]:
            size = dice.choice((100, 4096, BLOCK, MIB))
            start = dice.randrange(len(data))
            if os.pread(fd, size, start) != data[start : start + size]:
                return 1
            if dice.random() < 0.2:
                forget_pages(fd)
            self._shared[8:16] = (self.count + 1).to_bytes(8, "little")
        return 0

    @property
    def count(self) -> int:
        """Reads so far."""
        return int.from_bytes(self._shared[8:16], "little")

    def stop(self) -> None:
        """Stops it; all that it read must have been right."""
        self._shared[0] = 1

        assert exit_code(self.pid) == 0


@contextlib.contextmanager
def reading(path: Path, data: bytes, number: int) -> Iterator[list[Reader]]:
    """That many readers, all of which must end well."""
    readers = [Reader(path, data, seed) for seed in range(number)]
    try:
        yield readers
    except BaseException:
        for reader in readers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(reader.pid, signal.SIGKILL)
        raise
    for reader in readers:
        reader.stop()


class Aside:
    """A process of the test's that does one thing, which may hang; `code` is how it ended."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                work()
                code = 0
            except OSError as error:
                code = error.errno or 1
            finally:
                os._exit(code)

    def ended(self) -> int:
        """Waits for its end; its exit code, negative for a signal."""
        return exit_code(self.pid)

    def kill(self) -> int:
        os.kill(self.pid, signal.SIGKILL)
        return self.ended()

    def waits(self) -> bool:
        """Whether it sleeps in the kernel by now."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "DS"


def direct(path: Path, data: bytes, number: int = 0) -> None:
    """Reads all from piece `number` on, past the page cache: this very process waits."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, MIB)
    for turn in range(8):
        start = (turn + number) % 8 * MIB
        count = os.preadv(fd, [buffer], start)
        assert buffer[:count] == data[start : start + MIB]


def forget_pages(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_fresh(path: Path, start: int = 0, size: int = -1) -> bytes:
    """What the server says, past the page cache. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        forget_pages(fd)
        return os.pread(fd, os.fstat(fd).st_size if size < 0 else size, start)
    finally:
        os.close(fd)


def shows(path: Path, data: bytes, start: int = 0) -> bool:
    """Whether these bytes are read there, asked in a process that may hang."""

    def work() -> None:
        assert read_fresh(path, start, len(data)) == data

    aside = Aside(work)
    try:
        return aside.ended() == 0
    except AssertionError:
        os.kill(aside.pid, signal.SIGKILL)
        raise


def servers_of(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in children if comm(int(child)) == SERVER_NAME]


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def exit_code(pid: int) -> int:
    """Waits for a child's end; negative for a signal."""
    ended: list[int] = []

    def over() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        ended.append(status)
        return found == pid

    until(over, "a process to end")
    return os.waitstatus_to_exitcode(ended[-1])
