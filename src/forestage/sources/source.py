"""What is copied: which bytes are meant, and whether they are still the same.

`Source` is all that a copy asks of what it copies, `SourceFinder` how a hook finds one. What a copy
has to know besides is here as well: when a change must show in a file's times, and who writes to
it. Hooks must not pay for what only a copy needs, so nothing here imports the engines.
"""

import contextlib
import errno
import functools
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

import msgspec

from forestage.cache import allocation, source_image
from forestage.cache.allocation import ChunkMap
from forestage.cache.node import Node
from forestage.cache.source_image import FileIdentity, SourceImage
from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.system import as_user, files, writers
from forestage.system.as_user import User
from forestage.units import make_printable

STAGER_TIMEOUT = 60.0  # seconds; nobody waits for the stager's own checks

# A file server's clock may tick in seconds: a change within the same tick leaves the identity as it
# is. So a copy starts only when the source's last change is a full tick old.
COARSE_TICK_NS = 2_000_000_000
FINE_TICK_NS = 20_000_000
# Its clock and ours may differ. By no more than this: what munge makes is good for five minutes,
# so a node whose clock is further off runs no jobs (munged(8), --max-ttl).
SKEW_NS = 300_000_000_000


class ReadableSource(msgspec.Struct, frozen=True):
    """An open source as the engines read it; `direct` is the same file past the page cache.

    Of a directory `buffered` has no bytes: `read` fills memory with what begins at an offset, and
    `map_chunks` says of its chunks, of so many bytes each, what is known of holes. The first
    `local_bytes` bytes are what this node has made itself: no other node is asked for them.
    """

    buffered: int
    direct: int | None
    size: int  # bytes
    path: str = ""  # for messages only
    read: Callable[[int, memoryview], None] | None = None
    local_bytes: int = 0
    map_chunks: Callable[[int], ChunkMap] | None = None


class Source(Protocol):
    """Which bytes are meant: a file (sources/file), a directory (features/data/directory_source).

    All that a copy asks of what it copies. Whoever adds a kind of source brings one of these.
    """

    is_read_through: ClassVar[bool]
    """Whether jobs may read through its copy, while that is made."""

    def open(self) -> ReadableSource:
        """Returns it as the engines read it, once a further change would show. Raises Declined."""

    def check_unchanged(self) -> None:
        """Raises Declined unless all of it is what it was, and nobody writes to it."""


class SourceTruncated(Declined):
    """The source ended before its size said so: it is being changed."""

    def __init__(self, path: str) -> None:
        detail = f"{path} was changed while it was copied: it ends before its size says so"
        super().__init__("changed", detail)


class SourceUnreadable(Declined):
    """The source gives an error when it is read; `error` is its OSError. No fault of the node."""

    def __init__(self, path: str, error: OSError) -> None:
        if error.errno == errno.ESTALE:  # the file server has another file under this name
            super().__init__("changed", f"{path} was changed while it was copied")
        else:
            super().__init__("source-error", f"{path} cannot be read: {error}")
        self.error = error


class OpenImage(msgspec.Struct, frozen=True):
    """An image and its source, opened with the user's rights; the caller closes it.

    A hook holds the source only as `descriptor_socket`, a socket in which the descriptor waits
    (as_user.run_in_child_with_socket): a close(2) that hangs with the file server must not hang the
    hook. The stager receives it as `fd`. `other_source` is a source that is no file; then `fd` is
    -1, or what that one needs open.
    """

    image: SourceImage
    user: User
    fd: int
    descriptor_socket: socket.socket | None = None
    other_source: Source | None = None

    @property
    def is_read_through(self) -> bool:
        """Whether jobs may read through its copy, while that is made."""
        return self.other_source is None or self.other_source.is_read_through

    def with_descriptor(self) -> "OpenImage":
        """Returns the same with the source as a descriptor of this process."""
        if self.descriptor_socket is None:
            return self
        fd = as_user.receive_descriptors(self.descriptor_socket)[0]
        return OpenImage(self.image, self.user, fd, other_source=self.other_source)

    def close(self) -> None:
        if self.descriptor_socket is not None:
            self.descriptor_socket.close()
        elif self.fd >= 0:
            os.close(self.fd)


class SourceFinder(Protocol):
    """How the source of one kind of request is found. For hooks, stateless."""

    def path(self, job: Job, request: Request) -> str:
        """Pure: the absolute path that the request names. Raises Declined where it names none."""

    def open(
        self, node: Node, job: Job, path: str, end: Deadline
    ) -> AbstractContextManager[OpenImage]:
        """Opens what lies there as the job's user. Raises Declined, Failed, OSError."""


def seconds_to_settle(wanted: SourceImage, now: float) -> float:
    """Pure: seconds to wait until a further change of the source must show in its times.

    A full tick from now on, unless the last change is long past: waiting for the rest of a tick
    would trust that the server's clock is ours.
    """
    # A user can set mtime, to full seconds as well. What they cannot set shows how fine the clock
    # is.
    ctime = wanted.identity.ctime_ns
    tick = FINE_TICK_NS if ctime % 1_000_000_000 else COARSE_TICK_NS
    age = int(now * 1_000_000_000) - max(ctime, wanted.identity.mtime_ns)
    return tick / 1_000_000_000 if age < tick + SKEW_NS else 0.0


def open_source(opened: OpenImage) -> ReadableSource:
    """The source as the engines want it: past the page cache as well, where that is a gain.

    Raises Declined where it is no longer what was opened at, SourceUnreadable,
    as_user.ChildTimeout.
    """
    size = opened.image.size
    # Once for the whole copy: each question may be one for the file server.
    chunks = functools.cache(functools.partial(allocation.map_chunks, opened.fd, size))
    direct = _recheck_source(opened, past_cache=True)
    return ReadableSource(opened.fd, direct, size, opened.image.path, map_chunks=chunks)


def check_no_writer(fd: int, path: str) -> None:
    """Raises Declined where a process of this node has the open file open for writing.

    A write(2) sets the file's times when it begins. Its bytes come when the kernel has read them
    from the writer's memory, which may be whenever the writer likes: to nobody's eyes the file is
    then another. So this is asked once the times are known, and settled: a write that is under way
    then still has the file open, and one that begins later changes them.
    """
    if writers.has_writer_by_lease(fd):
        raise declined_as_written(path)


def check_no_writer_below(fd: int, path: str) -> None:
    """Raises Declined where a process has what lies at or below a path open for writing.

    `fd` is open in its file system. Where leases prove that nobody has, nothing is looked at.
    Raises SourceUnreadable where that file system is gone.
    """
    try:
        proven = writers.is_lease_conclusive(fd)
    except OSError as error:
        raise SourceUnreadable(path, error) from None
    if not proven:
        found = writers.find_open_for_writing(path, writers.SCAN)
        if found:
            raise declined_as_written(make_printable(found))


def declined_as_written(path: str) -> Declined:
    """Pure: a process of this node has the file open for writing."""
    return Declined("written", f"{path} is open for writing on this node")


def check_same_file(opened: OpenImage) -> None:
    """Looks at the open file once more.

    Raises Declined if it is another, SourceUnreadable, ChildTimeout.
    """
    _recheck_source(opened)


def _recheck_source(opened: OpenImage, past_cache: bool = False) -> int | None:
    """Looks at the open file once more, and opens it past the page cache where that is a gain.

    As the user again: root may be squashed on the shared file system. In one child, as each takes
    milliseconds. None also where the file system has no such way. Raises Declined if it is
    another file, SourceUnreadable, as_user.ChildTimeout.
    """

    def work() -> as_user.ChildResult[FileIdentity]:
        as_user.set_effective_user(opened.user)
        facts = files.read_fresh_stat(opened.fd, os.fstat(opened.fd).st_dev)
        # Major 0 is no block device: what a network file system does past its cache is its affair.
        wanted = past_cache and os.major(facts.st_dev) != 0
        return source_image.identity_from_stat(facts, opened.image.path), _open_direct(
            opened.fd
        ) if wanted else []

    try:
        found, line = as_user.run_in_child_with_socket(
            work, FileIdentity, STAGER_TIMEOUT, keep=(opened.fd,)
        )
    except OSError as error:
        raise SourceUnreadable(opened.image.path, error) from None
    if found != opened.image.identity:
        line.close()
        raise declined_as_changed(
            opened.image.path, explain_difference(opened.image.identity, found)
        )
    return next(iter(as_user.receive_descriptors(line)), None)


def _open_direct(fd: int) -> list[int]:
    """A descriptor of the file past the page cache; none where its file system has no such way."""
    with contextlib.suppress(OSError):
        return [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)]
    return []


def declined_as_changed(path: str, how: str = "") -> Declined:
    """Pure: the source is no longer the file that was asked for; `how` where that helps."""
    return Declined("changed", f"{path} was changed while it was copied" + (how and f": {how}"))


def explain_difference(was: FileIdentity, now: FileIdentity) -> str:
    """Pure: what an admin must know of a file that seems changed each time; else nothing."""
    if msgspec.structs.replace(now, inode=was.inode) == was:
        return "only its inode number is another, as if its file system gave a new one at each look"
    return ""
