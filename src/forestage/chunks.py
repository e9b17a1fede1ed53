"""The fast engine: large chunks by several threads, past the page cache where the disks allow it.

Every long call (preadv, pwritev, copy_file_range, sync_file_range, the digest) runs without
Python's global lock, so the threads overlap; what is left under it is microseconds a chunk.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from forestage import digest, reserve, trace
from forestage.errors import Failed
from forestage.part import ENTRY_BYTES, Part, chunk_count, missing_chunks

SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
BLOCK = 4096  # bytes; O_DIRECT wants offsets and lengths to be multiples of the disk's block
READ_TRIES = 3  # a network file system may fail a read once and serve it the next moment

_libc = ctypes.CDLL(None, use_errno=True)


class Truncated(Exception):
    """The source ended before its size said so: it is being changed."""


class Unreadable(Exception):
    """The source gives an error when it is read; `error` is its OSError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Stopped(Exception):
    """The copy was asked to stop; what is in stays in."""


class Tuning(msgspec.Struct, frozen=True):
    """`chunk` in bytes, `bandwidth` in bytes per second or None; memory is threads * chunk."""

    threads: int = 4
    chunk: int = 16 * 1024 * 1024
    direct: bool = True
    digest: bool = True
    bandwidth: int | None = None


class Source(msgspec.Struct, frozen=True):
    """The same file opened twice with the user's rights; `direct` is past the page cache."""

    buffered: int
    direct: int | None
    size: int


class Throttle:
    """Holds all threads together to a number of bytes per second."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.free_at = time.monotonic()
        self.lock = threading.Lock()

    def take(self, size: int, stop: threading.Event) -> None:
        """Returns when `size` more bytes may flow, or the copy is to stop."""
        if self.rate is None:
            return
        with self.lock:
            start = max(self.free_at, time.monotonic())
            self.free_at = start + size / self.rate
        stop.wait(max(0.0, start - time.monotonic()))


def copy(source: Source, part: Part, tuning: Tuning, stop: threading.Event) -> None:
    """Brings every chunk in that the part's map does not have yet.

    Raises Stopped, Truncated, Unreadable, OSError of the part; the map says how far it came.
    """
    run = _Run(source, part, tuning, stop)
    try:
        run.all()
    finally:
        run.close()


def digests(image: Path, size: int, tuning: Tuning) -> bytes:
    """The map that a copy of ours should have. Raises Unreadable, Truncated."""
    fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    source = Source(fd, None, size)
    found = [digest.UNKNOWN] * chunk_count(size, tuning.chunk)

    def take(number: int) -> None:
        want = min(tuning.chunk, size - number * tuning.chunk)
        buffer = memoryview(mmap.mmap(-1, tuning.chunk))
        read_chunk(source, number * tuning.chunk, buffer[:want], buffer)
        found[number] = digest.of_chunk(buffer[:want])

    try:
        if tuning.digest:
            with ThreadPoolExecutor(tuning.threads) as pool:
                list(pool.map(take, range(len(found))))
        return b"".join(found)
    finally:
        os.close(fd)


class _Run:
    """One run of the engine: what its threads share. The map's file is written by offset."""

    def __init__(self, source: Source, part: Part, tuning: Tuning, stop: threading.Event) -> None:
        self.source = source
        self.tuning = tuning
        self.stop = stop
        self.halt = threading.Event()  # a thread failed: the others end as well
        self.errors: list[OSError | Truncated | Unreadable] = []
        self.throttle = Throttle(tuning.bandwidth)
        self.part = part
        self.image = os.open(part.image, os.O_RDWR | os.O_CLOEXEC)
        self.map = os.open(part.map, os.O_RDWR | os.O_CLOEXEC)
        self.past_cache = _direct(part) if tuning.direct else None
        self.in_kernel = not tuning.digest
        self.holes: dict[int, bytes] = {}
        self.data = reserve.data_chunks(source.buffered, source.size, tuning.chunk)
        self.todo = deque(missing_chunks(part.digests(), source.size, tuning.chunk))

    def all(self) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"copy-{number}")
            for number in range(min(self.tuning.threads, len(self.todo)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
        # Anonymous memory is page-aligned, as O_DIRECT wants it. It is left to the collector: an
        # error that is kept keeps slices of it alive, and then it cannot be closed.
        buffer = memoryview(mmap.mmap(-1, self.tuning.chunk))
        try:
            while not (self.stop.is_set() or self.halt.is_set()):
                self._chunk(self.todo.popleft(), buffer)
        except IndexError:
            return  # nothing left to do
        except (OSError, Truncated, Unreadable) as error:
            self.errors.append(error)
            self.halt.set()

    def _chunk(self, number: int, buffer: memoryview) -> None:
        start = number * self.tuning.chunk
        size = min(self.tuning.chunk, self.source.size - start)
        if number not in self.data:
            reserve.punch(self.image, start, size)
            self._note(number, self._of_hole(size, buffer))
            return
        self.throttle.take(size, self.stop)
        if self.in_kernel and self._copied_in_kernel(start, size):
            self._note(number, digest.UNKNOWN)
            return
        read_chunk(self.source, start, buffer[:size], buffer)
        found = digest.of_chunk(buffer[:size]) if self.tuning.digest else digest.UNKNOWN
        self._write(start, buffer[:size])
        self._note(number, found)

    def _of_hole(self, size: int, buffer: memoryview) -> bytes:
        """The digest of so many zeros, taken once for each size that occurs (two at the most)."""
        if not self.tuning.digest:
            return digest.UNKNOWN
        if size not in self.holes:
            buffer[:size] = bytes(size)
            self.holes[size] = digest.of_chunk(buffer[:size])
        return self.holes[size]

    def _note(self, number: int, found: bytes) -> None:
        os.pwrite(self.map, found, number * ENTRY_BYTES)
        trace.point("chunk")

    def _write(self, start: int, data: memoryview) -> None:
        whole = 0
        if self.past_cache is not None:
            whole = len(data) - len(data) % BLOCK
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
                # EIO is for the reading path, which tries again.
                if error.errno == errno.EIO:
                    return False
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                self.in_kernel = False
                return False
            if count == 0:  # the end of the file; some file systems say so for want of the call
                return False
            done += count
        return True


def read_chunk(source: Source, start: int, want: memoryview, buffer: memoryview) -> None:
    """Fills `want`, the head of the page-aligned `buffer`. Raises Truncated, Unreadable.

    What the page cache has is taken from there; the rest comes past it, or is dropped behind.
    """
    done = _from_cache(source, start, want) if source.direct is not None else 0
    tries = 0
    while done < len(want):
        try:
            if source.direct is not None and done % BLOCK == 0:
                rest = buffer[done : -(-len(want) // BLOCK) * BLOCK]
                count = os.preadv(source.direct, [rest], start + done)
            else:
                count = os.preadv(source.buffered, [want[done:]], start + done)
        except OSError as error:
            tries += 1
            if error.errno != errno.EIO or tries == READ_TRIES:
                raise Unreadable(error) from None
            time.sleep(0.1 * tries)
            continue
        if count == 0:
            raise Truncated
        done += count
    with contextlib.suppress(OSError):
        os.posix_fadvise(source.buffered, start, len(want), os.POSIX_FADV_DONTNEED)


def _from_cache(source: Source, start: int, want: memoryview) -> int:
    """Bytes, whole blocks of them, that the page cache had; RWF_NOWAIT never waits for a disk.

    One block is asked for first. A miss makes the kernel read ahead, NOWAIT or not, as far as the
    request goes and its window allows: of whole chunks that was a sixth more than the image.
    """
    count = 0
    try:
        for size in (min(BLOCK, len(want)), len(want)):
            count = os.preadv(source.buffered, [want[:size]], start, os.RWF_NOWAIT)
            if count < size:
                break
    except OSError as error:
        # A fault is for the read that waits, which tries again and tells.
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO):
            raise Unreadable(error) from None
    return count if count == len(want) else count - count % BLOCK


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
