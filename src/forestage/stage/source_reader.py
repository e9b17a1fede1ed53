"""Reads an open file piece by piece: buffers, retries, the page cache, and the rate limit.

Pieces lie in huge pages: of a piece in pages of 4 KiB a disk gets requests of 1 MiB at most, for
want of entries in its lists. With them, copies between loop devices took a quarter less time.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from forestage.cache import allocation
from forestage.cache.allocation import ChunkMap
from forestage.cache.part import chunk_count
from forestage.sources.source import ReadableSource, SourceTruncated, SourceUnreadable

BLOCK = 4096  # bytes; O_DIRECT wants offsets and lengths to be multiples of the disk's block
READ_TRIES = 3  # a network file system may fail a read once and serve it the next moment
PIECE = 4 * 1024 * 1024
"""Bytes. Small enough for reading and writing to overlap early, large enough for a disk's queue."""

SAMPLE = 32 * 1024 * 1024  # bytes, or half of the image, that show how fast its source is
HUGE_PAGE = 2 * 1024 * 1024  # bytes, on the machines that GPUs are put into

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def allocate_piece_buffer(chunk: int) -> memoryview:
    """Memory for the pieces of a chunk of so many bytes, one at a time."""
    return allocate_aligned_memory(min(chunk, PIECE))


def allocate_aligned_memory(size: int) -> memoryview:
    """Page-aligned memory, as O_DIRECT wants it.

    Freed by the collector: an error that is kept keeps slices of it alive, and then it cannot be
    closed.
    """
    # Private: shared memory gets no huge pages. The kernel aligns for them since 6.7 only.
    mapped = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % HUGE_PAGE
    return memoryview(mapped)[start : start + size]


class RateLimiter:
    """Holds all threads together to a number of bytes per second."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.free_at = time.monotonic()
        self.lock = threading.Lock()

    def acquire(self, size: int, stop: threading.Event) -> None:
        """Returns when `size` more bytes may flow, or the copy is to stop."""
        if self.rate is None:
            return
        with self.lock:
            start = max(self.free_at, time.monotonic())
            self.free_at = start + size / self.rate
        stop.wait(max(0.0, start - time.monotonic()))

    def try_acquire(self, size: int) -> bool:
        """Whether `size` more bytes may flow at once; then they count."""
        now = time.monotonic()
        with self.lock:
            if self.rate is None:
                return True
            if now < self.free_at:
                return False
            self.free_at = now + size / self.rate
        return True


class RateMeter:
    """How fast a source gave what was read of it at full speed, by however many threads at once.

    `seconds` are those in which some thread was reading.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._threads = 0
        self._since = 0.0

    @contextlib.contextmanager
    def measure_read(self, size: int) -> Iterator[None]:
        """Around one read of `size` bytes; an error counts for nothing but its time."""
        with self._lock:
            if not self._threads:
                self._since = time.monotonic()
            self._threads += 1
        try:
            yield
            with self._lock:
                self.bytes += size
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self.seconds += time.monotonic() - self._since

    def bytes_per_second(self, size: int) -> float:
        """Bytes per second; 0 where too little of an image of `size` bytes was read so."""
        counts = self.seconds > 0 and self.bytes >= min(SAMPLE, size / 2)
        return round(self.bytes / self.seconds) if counts else 0.0


def read_pieces(
    source: ReadableSource,
    start: int,
    size: int,
    buffer: memoryview,
    wait_to_read: Callable[[int], AbstractContextManager[int]] = contextlib.nullcontext,
) -> Iterator[tuple[int, memoryview]]:
    """Reads a chunk through the buffer: where each piece begins in the file, and the piece.

    Each is read within `wait_to_read`, which gets the bytes that are wanted and says how many it
    may have.
    """
    at, end = start, start + size
    while at < end:
        with wait_to_read(min(len(buffer), end - at)) as most:
            piece = buffer[:most]
            read_piece(source, at, piece, buffer)
        yield at, piece
        at += len(piece)


def read_piece(source: ReadableSource, start: int, want: memoryview, buffer: memoryview) -> None:
    """Fills `want`, the head of the page-aligned `buffer`.

    Raises SourceTruncated, SourceUnreadable.
    What the page cache has is taken from there, and stays there for those who brought it in. The
    rest comes past it, or is dropped behind.
    """
    if source.read is not None:
        source.read(start, want)
        return
    cached = _read_from_page_cache(source, start, want) if source.direct is not None else 0
    if cached == len(want):
        return
    done = cached
    tries = 0
    while done < len(want):
        try:
            if source.direct is not None and done % BLOCK == 0:
                blocks = buffer[done : -(-len(want) // BLOCK) * BLOCK]
                count = os.preadv(source.direct, [blocks], start + done)
            else:
                count = os.preadv(source.buffered, [want[done:]], start + done)
        except OSError as error:
            tries += 1
            if error.errno != errno.EIO or tries == READ_TRIES:
                raise SourceUnreadable(source.path, error) from None
            time.sleep(0.1 * tries)
            continue
        if count == 0:
            raise SourceTruncated(source.path)
        done += count
        tries = 0
    with contextlib.suppress(OSError):
        rest = len(want) - cached
        os.posix_fadvise(source.buffered, start + cached, rest, os.POSIX_FADV_DONTNEED)


def map_chunks(source: ReadableSource, chunk: int) -> ChunkMap:
    """Return what is known of a source's holes."""
    if source.map_chunks is not None:
        return source.map_chunks(chunk)
    if source.read is not None:  # no file, so no holes
        every = set(range(chunk_count(source.size, chunk)))
        return ChunkMap(every, every)
    return allocation.map_chunks(source.buffered, source.size, chunk)


def is_zero(data: memoryview) -> bool:
    """Return whether all bytes of writable memory are 0; the first that is not ends the look."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(data))
    # Each byte is what the one before is, and the first is 0.
    return data[0] == 0 and _libc.memcmp(first, first + 1, len(data) - 1) == 0


def _read_from_page_cache(source: ReadableSource, start: int, want: memoryview) -> int:
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
        # A fault is left to the read that waits, which tries again and raises it.
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO):
            raise SourceUnreadable(source.path, error) from None
    return count if count == len(want) else count - count % BLOCK
