"""The default engine: large chunks by several threads, past the page cache where disks allow it.

Every long call (preadv, pwritev, copy_file_range, sync_file_range, the digest) runs without
Python's global lock, so the threads overlap; what is left under it is microseconds a chunk.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from forestage import trace
from forestage.cache import digest, space
from forestage.cache.part import ENTRY_BYTES, Part, chunk_count, missing_chunks
from forestage.errors import Declined, Failed, Stopped
from forestage.stage import reading
from forestage.stage.source import Source

SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

Write = Callable[[int, memoryview], None]  # takes where in the image a piece begins, and the piece

_libc = ctypes.CDLL(None, use_errno=True)


class Tuning(msgspec.Struct, frozen=True):
    """`chunk` in bytes, `bandwidth` in bytes a second or None; each thread takes a `PIECE`."""

    threads: int = 4
    chunk: int = 16 * 1024 * 1024
    direct: bool = True
    digest: bool = True
    bandwidth: int | None = None


def copy(source: Source, part: Part, tuning: Tuning, stop: threading.Event) -> None:
    """Brings every chunk in that the part's map does not have yet.

    Raises Stopped, Truncated, Unreadable, OSError of the part; the map says how far it came.
    """
    run = Run(source, part, tuning, stop)
    try:
        run.all()
    finally:
        run.close()


def digests(
    image: Path,
    size: int,
    tuning: Tuning,
    numbers: Sequence[int] | None = None,
    path: str = "",
) -> bytes:
    """What the map should say of these chunks of a copy, or all. Raises Unreadable, Truncated."""
    fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    source = Source(fd, None, size, path or os.fspath(image))
    wanted = range(chunk_count(size, tuning.chunk)) if numbers is None else numbers
    own = threading.local()

    def take(number: int) -> bytes:
        if not hasattr(own, "buffer"):
            own.buffer = reading.buffer(tuning.chunk)
        start = number * tuning.chunk
        running = digest.Running()
        for _, piece in reading.pieces(source, start, min(tuning.chunk, size - start), own.buffer):
            running.add(piece)
        return running.digest()

    try:
        if not tuning.digest:
            return digest.UNKNOWN * len(wanted)
        with ThreadPoolExecutor(tuning.threads) as pool:
            return b"".join(pool.map(take, wanted))
    finally:
        os.close(fd)


class Run:
    """One run of the engine: what its threads share. The map's file is written by offset."""

    def __init__(self, source: Source, part: Part, tuning: Tuning, stop: threading.Event) -> None:
        self.source = source
        self.tuning = tuning
        self.stop = stop
        self.halt = threading.Event()  # a thread failed: the others end as well
        self.errors: list[OSError | Declined] = []
        self.throttle = reading.Throttle(tuning.bandwidth)
        self.part = part
        self.image = os.open(part.image, os.O_RDWR | os.O_CLOEXEC)
        self.map = os.open(part.map, os.O_RDWR | os.O_CLOEXEC)
        self.past_cache = _direct(part) if tuning.direct else None
        self.in_kernel = not tuning.digest
        self.holes: dict[int, bytes] = {}
        self.data = space.data_chunks(source.buffered, source.size, tuning.chunk)
        self.todo = deque(missing_chunks(part.digests(), source.size, tuning.chunk))

    def all(self) -> None:
        self.join([self._work] * min(self.tuning.threads, len(self.todo)))

    def join(self, works: Sequence[Callable[[], None]]) -> None:
        """Does all this at once, and sees to it that nothing is missing afterwards."""
        threads = [threading.Thread(target=do, name=f"copy-{n}") for n, do in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            # Not for ever in one wait: CPython may sleep through a signal that comes just before.
            while thread.is_alive():
                thread.join(0.5)
        if self.errors:
            raise self.errors[0]
        if self.stop.is_set():
            raise Stopped
        left = missing_chunks(self.part.digests(), self.source.size, self.tuning.chunk)
        if left:  # a thread that died of something unforeseen
            raise Failed("copy", f"{len(left)} chunks are missing after the copy")

    def close(self) -> None:
        for fd in (self.image, self.map, self.past_cache):
            if fd is not None:
                os.close(fd)

    def _work(self) -> None:
        buffer = reading.buffer(self.tuning.chunk)
        try:
            while not (self.stop.is_set() or self.halt.is_set()):
                number = self.todo.popleft()
                self.note(number, self.take(number, buffer, self.write))
        except IndexError:
            return  # nothing left to do
        except (OSError, Declined) as error:
            self.errors.append(error)
            self.halt.set()

    def span(self, number: int) -> tuple[int, int]:
        """Where a chunk begins, and how long it is."""
        start = number * self.tuning.chunk
        return start, min(self.tuning.chunk, self.source.size - start)

    def take(self, number: int, buffer: memoryview, write: Write) -> bytes:
        """Brings a chunk from the source; its digest."""
        start, size = self.span(number)
        if number not in self.data:
            space.punch(self.image, start, size)
            return self._of_hole(size)
        self.throttle.take(size, self.stop)
        if self.in_kernel and self._copied_in_kernel(start, size):
            return digest.UNKNOWN
        running = digest.Running() if self.tuning.digest else None
        for at, piece in reading.pieces(self.source, start, size, buffer):
            if running:
                running.add(piece)
            write(at, piece)
        return running.digest() if running else digest.UNKNOWN

    def _of_hole(self, size: int) -> bytes:
        """The digest of so many zeros, taken once for each size that occurs (two at the most)."""
        if not self.tuning.digest:
            return digest.UNKNOWN
        if size not in self.holes:
            # Private memory that is only read is one page of zeros, however long.
            zeros = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.holes[size] = digest.of_chunk(memoryview(zeros))
        return self.holes[size]

    def note(self, number: int, found: bytes) -> None:
        """From now on the chunk is in."""
        os.pwrite(self.map, found, number * ENTRY_BYTES)
        trace.point("chunk")

    def write(self, start: int, data: memoryview) -> None:
        whole = 0
        if self.past_cache is not None:
            whole = len(data) - len(data) % reading.BLOCK
            _write_all(self.past_cache, start, data[:whole])
        if whole < len(data):
            _write_all(self.image, start + whole, data[whole:])
            # Begun now, so that the fsync at the end finds little left to do.
            _libc.sync_file_range(
                self.image, ctypes.c_int64(start), ctypes.c_int64(len(data)), SYNC_FILE_RANGE_WRITE
            )

    def _copied_in_kernel(self, start: int, size: int) -> bool:
        """copy_file_range(2): a reflink or a server-side copy where both sides can."""
        done = 0
        while done < size:
            try:
                count = os.copy_file_range(
                    self.source.buffered, self.image, size - done, start + done, start + done
                )
            except OSError as error:
                # Whatever it is, the reading path tries again, and raises what is a fault: file
                # systems refuse this call with EXDEV, EOPNOTSUPP, EPERM, ENOENT (CIFS) and others.
                self.in_kernel = error.errno == errno.EIO
                return False
            if count == 0:  # the end of the file; some file systems say so for want of the call
                return False
            done += count
        return True


def _write_all(fd: int, start: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwritev(fd, [data[done:]], start + done)


def _direct(part: Part) -> int | None:
    """The image opened past the page cache, where the cache's file system can do that."""
    try:
        return os.open(part.image, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
