"""Processes that read a tree's small files as its user, one for each processor.

A small file costs Python more than the file system: threads of one process would take turns (see
features/data/user_threads). Each process has memory that it shares with the copy, and fills it with
the
files of one request after the other.
"""

import contextlib
import errno
import mmap
import os
import queue
import select
import signal
import socket
from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

from forestage.errors import Declined, Failed
from forestage.features.data.manifest import ManifestEntry
from forestage.features.data.user_threads import UserThreadPool, set_thread_user
from forestage.sources import source
from forestage.sources.source import SourceTruncated, SourceUnreadable
from forestage.system import forked_child
from forestage.system.as_user import User
from forestage.units import make_printable

MAX_PROCESSES = 4  # processes; an engine has so many threads, each with a request
MAX_REQUEST_BYTES = 4 * 1024 * 1024  # bytes of the files of one request
MAX_REQUEST_PIECES = 1024  # files of one request: IOV_MAX, as their memory is filled by one call
ANSWER = 64 * 1024  # bytes of the longest
ENDS = 1.0  # seconds for the end of a killed process; one that the kernel holds is left behind

Problem = Literal["", "changed", "written", "truncated", "unreadable"]


class OpenDirectory(msgspec.Struct, frozen=True):
    """An open directory: its descriptor, the resolved path, the device it must lie on, its user."""

    root: int
    path: str
    disk: int
    user: User

    def format_path(self, file: ManifestEntry) -> str:
        """Return a file's path, for messages. Pure."""
        return make_printable(os.path.join(self.path, os.fsdecode(file.path)))


class FilePiece(msgspec.Struct, frozen=True, array_like=True):
    """So many bytes of a file, from `offset` on."""

    file: ManifestEntry
    offset: int
    length: int


class ReadResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of a request: all of it, or what was wrong with which of its pieces."""

    problem: Problem = ""
    number: int = 0
    error: int = 0  # errno, of what is unreadable


def open_unchanged(tree: OpenDirectory, file: ManifestEntry) -> int:
    """Opens a file for this thread's ids. Raises OSError, Declined.

    Declined is for one that is not what it was, or that somebody writes to.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.ExitStack() as undo:
        fd = os.open(file.path, flags, dir_fd=tree.root)
        undo.callback(os.close, fd)
        facts = os.fstat(fd)
        seen = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        # A file system that a user mounts there for a moment says what inode and times it likes.
        if seen != (tree.disk, file.inode, file.size, file.mtime_ns, file.ctime_ns):
            raise source.declined_as_changed(tree.format_path(file))
        source.check_no_writer(fd, tree.format_path(file))
        undo.pop_all()
    return fd


def read_file_into(
    tree: OpenDirectory, file: ManifestEntry, fd: int, offset: int, want: memoryview
) -> None:
    """Fills `want` from an open file of the tree. Raises OSError, Declined, SourceTruncated."""
    done = 0
    while done < len(want):
        count = os.preadv(fd, [want[done:]], offset + done)
        if count == 0:
            raise SourceTruncated(tree.format_path(file))
        done += count
    # A write that has begun before the bytes were read, and has not ended, has the file open.
    source.check_no_writer(fd, tree.format_path(file))
    os.posix_fadvise(fd, offset, len(want), os.POSIX_FADV_DONTNEED)


class FileReaderPool:
    """The processes, for as many threads of this one. To be made while it has one thread."""

    def __init__(self, tree: OpenDirectory) -> None:
        self.tree = tree
        self.processes = [
            _ReaderProcess(tree) for _ in range(min(MAX_PROCESSES, len(os.sched_getaffinity(0))))
        ]
        self._free: queue.SimpleQueue[_ReaderProcess] = queue.SimpleQueue()
        for one in self.processes:
            self._free.put(one)

    def read_pieces(self, pieces: Sequence[FilePiece], want: Sequence[memoryview]) -> None:
        """Fills the memory of each of the pieces; together they have MAX_REQUEST_BYTES at most.

        There are MAX_REQUEST_PIECES of them at most. Raises Declined, SourceTruncated,
        SourceUnreadable, Failed.
        """
        reader = self._free.get()
        try:
            answer = reader.read_pieces(pieces, want)
        finally:
            self._free.put(reader)
        if answer.problem:
            raise _make_error(self.tree.format_path(pieces[answer.number].file), answer)

    def close(self) -> None:
        """Ends the processes; none of them reads any more."""
        for one in self.processes:
            one.close()


class _ReaderProcess:
    """One of the processes, as its parent has it."""

    def __init__(self, tree: OpenDirectory) -> None:
        self.memory = os.memfd_create("files")
        os.truncate(self.memory, MAX_REQUEST_BYTES)
        life = partial(_run_reader, tree=tree, memory=self.memory)
        self.pid, self.line = forked_child.fork_with_socket(life, lambda *_: None)

    def read_pieces(self, pieces: Sequence[FilePiece], want: Sequence[memoryview]) -> ReadResult:
        """Has the process read, and takes what it has read. Raises Failed where it has died."""
        request = msgspec.msgpack.encode(pieces)
        os.pwrite(self.memory, request, MAX_REQUEST_BYTES)
        try:
            self.line.send(b"%d" % len(request))
            said = self.line.recv(ANSWER)
        except OSError:
            said = b""
        if not said:
            self.line.close()  # what it may still say is no answer to a later request
            raise Failed("helper", "a process that reads the files of a directory died")
        answer = msgspec.msgpack.decode(said, type=ReadResult)
        # What is not filled holds whatever was in that memory before.
        if not answer.problem and os.preadv(self.memory, want, 0) != sum(map(len, want)):
            raise Failed(
                "helper", "what a process has read of a directory's files is not all there"
            )
        return answer

    def close(self) -> None:
        self.line.close()
        os.close(self.memory)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)  # it may be in a read that hangs
            process = os.pidfd_open(self.pid)
            select.select([process], [], [], ENDS)
            os.close(process)
            os.waitpid(self.pid, os.WNOHANG)


def _run_reader(line: socket.socket, tree: OpenDirectory, memory: int) -> None:
    """All that such a process does, until its parent closes the line, or has ended."""
    forked_child.close_descriptors_except({line.fileno(), tree.root, memory})
    set_thread_user(tree.user)
    team = UserThreadPool(tree.user)
    with mmap.mmap(memory, MAX_REQUEST_BYTES) as mapped, memoryview(mapped) as room:
        while said := line.recv(32):
            request = os.pread(memory, int(said), MAX_REQUEST_BYTES)
            pieces = msgspec.msgpack.decode(request, type=list[FilePiece])
            line.send(msgspec.msgpack.encode(_read_into_memory(tree, team, pieces, room)))


def _read_into_memory(
    tree: OpenDirectory, team: UserThreadPool, pieces: Sequence[FilePiece], room: memoryview
) -> ReadResult:
    ends, end = [], 0
    for piece in pieces:
        end += piece.length
        ends.append(end)

    def read(number: int) -> ReadResult:
        piece = pieces[number]
        want = room[ends[number] - piece.length : ends[number]]
        try:
            fd = open_unchanged(tree, piece.file)
            try:
                read_file_into(tree, piece.file, fd, piece.offset, want)
            finally:
                os.close(fd)
        except OSError as error:
            return ReadResult("unreadable", number, error.errno or errno.EIO)
        except SourceTruncated:
            return ReadResult("truncated", number)
        except Declined as error:
            return ReadResult("written" if error.reason == "written" else "changed", number)
        return _READ

    answers = team.map_items(range(len(pieces)), read)
    return next((answer for answer in answers if answer.problem), _READ)


_READ = ReadResult()


def _make_error(name: str, answer: ReadResult) -> Declined:
    if answer.problem == "truncated":
        return SourceTruncated(name)
    if answer.problem == "written":
        return source.declined_as_written(name)
    if answer.problem == "changed":
        return source.declined_as_changed(name)
    return SourceUnreadable(name, OSError(answer.error, os.strerror(answer.error)))
