"""The default engine: large chunks by several threads, past the page cache where disks allow it.

Every long call (preadv, pwritev, sync_file_range, the digest) runs without
Python's global lock, so the threads overlap; what is left under it is microseconds a chunk.

What jobs want comes first (cache/arrival_map.py), and what is behind it; then head, tail and hot
chunks, then the rest, straight through. Without a server each thread copies a chunk of its own.
While one shows the image to jobs, all threads share one chunk, piece by piece: at each piece they
turn to the chunk that a job waits for, and keep away from the source while a job reads it there.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from forestage import trace
from forestage.cache import allocation, digest
from forestage.cache.arrival_map import NOW, PIECE, ArrivalMap
from forestage.cache.part import ENTRY_BYTES, Part, chunk_count, list_missing_chunks
from forestage.errors import CopyStopped, Declined, Failed
from forestage.sources.source import ReadableSource
from forestage.stage import source_reader

SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
SHARED_CHUNK = 64 * 1024 * 1024  # bytes; chunks that threads share are held in memory
MOST_OPEN = 4  # of them at once
PAUSE = 1.0  # seconds; in each one GENTLE read of the copy, however much jobs read
CALM_NS = 150_000_000  # without a job's read of the source, after which the copy reads there again
BETWEEN_NS = 1_000_000_000  # of the same, after which the start of a job counts as over
START_NS = 60_000_000_000  # the longest start: a job that reads on and on must not starve the copy
EARLY = 2.0  # seconds after the copy's own start in which that of its job is expected
GENTLE = 64 * 1024  # bytes of one read while a job starts
TICK = 0.005  # seconds between two looks of a thread that waits

Write = Callable[[int, memoryview], None]  # takes where in the image a piece begins, and the piece

_libc = ctypes.CDLL(None, use_errno=True)


class CopyTuning(msgspec.Struct, frozen=True):
    """`chunk` in bytes, `bandwidth` in bytes a second or None; each thread takes a `PIECE`.

    `through`: a job is about to read through the copy.
    """

    threads: int = 4
    chunk: int = 16 * 1024 * 1024
    bandwidth: int | None = None
    through: bool = False


def order_chunks(missing: Sequence[int], count: int, hot: Sequence[int] = ()) -> list[int]:
    """Pure: these of `count` chunks in the order of the copy."""
    left = set(missing)
    early = [number for number in dict.fromkeys((0, count - 1, *hot)) if number in left]
    left.difference_update(early)
    return [*early, *(number for number in missing if number in left)]


def copy_chunks(
    source: ReadableSource,
    part: Part,
    tuning: CopyTuning,
    stop: threading.Event,
    readers: ArrivalMap | None = None,
) -> source_reader.RateMeter:
    """Brings every chunk in that the part's map does not have yet; returns how fast it was read.

    Raises CopyStopped, SourceTruncated, SourceUnreadable, OSError of the part; the map says how far
    it came.
    """
    run = ChunkCopy(source, part, tuning, stop, readers)
    try:
        run.copy_chunks()
    finally:
        run.close()
    return run.pace


def compute_digests(
    image: Path,
    size: int,
    tuning: CopyTuning,
    numbers: Sequence[int] | None = None,
    path: str = "",
) -> bytes:
    """What the map should say of these chunks of a copy, or all.

    Raises SourceUnreadable, SourceTruncated.
    """
    fd = os.open(image, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    source = ReadableSource(fd, None, size, path or os.fspath(image))
    wanted = range(chunk_count(size, tuning.chunk)) if numbers is None else numbers
    own = threading.local()

    def take(number: int) -> bytes:
        if not hasattr(own, "buffer"):
            own.buffer = source_reader.allocate_piece_buffer(tuning.chunk)
        start = number * tuning.chunk
        running = digest.RunningDigest()
        for _, piece in source_reader.read_pieces(
            source, start, min(tuning.chunk, size - start), own.buffer
        ):
            running.add(piece)
        return running.digest()

    try:
        with ThreadPoolExecutor(tuning.threads) as pool:
            return b"".join(pool.map(take, wanted))
    finally:
        os.close(fd)


class _SharedChunk:
    """A chunk whose pieces several threads read, each to its place; under the run's lock."""

    def __init__(self, number: int, start: int, size: int, memory: memoryview) -> None:
        self.number = number
        self.start = start
        self.size = size
        self.memory = memory
        self.todo = deque(range(0, size, PIECE))
        self.missing = len(self.todo)


class ChunkCopy:
    """One run of the engine: what its threads share. The map's file is written by offset."""

    def __init__(
        self,
        source: ReadableSource,
        part: Part,
        tuning: CopyTuning,
        stop: threading.Event,
        readers: ArrivalMap | None = None,
    ) -> None:
        self.source = source
        self.tuning = tuning
        self.stop = stop
        self.halt = threading.Event()  # a thread failed: the others end as well
        self.errors: list[OSError | Declined] = []
        self.throttle = source_reader.RateLimiter(tuning.bandwidth)
        self.pace = source_reader.RateMeter()
        self.part = part
        self.image = os.open(part.image, os.O_RDWR)
        self.map = os.open(part.map, os.O_RDWR)
        self.past_cache = _open_direct(part)
        self.holes: dict[int, bytes] = {}
        if tuning.through and source.read is None:
            # Between the job's reads and those of several threads read-ahead reads things twice.
            os.posix_fadvise(source.buffered, 0, 0, os.POSIX_FADV_RANDOM)
        self.known = source_reader.map_chunks(source, tuning.chunk)
        self.readers = readers
        self.lock = threading.Lock()
        self.began = time.monotonic()
        self.may_read_at = 0.0  # a job's reads notwithstanding
        self.start_ends = 1 << 62  # on the clock of monotonic_ns(), once one has begun
        self.gentle = threading.Lock()  # of the one thread that reads while a job starts
        self.shared: list[_SharedChunk] = []
        self.spare: list[memoryview] = []  # what shared chunks were in: new memory costs as reading
        self.ahead = -1  # the chunk behind the one that was wanted last
        missing = list_missing_chunks(part.read_digests(), source.size, tuning.chunk)
        count = chunk_count(source.size, tuning.chunk)
        self.hot = part.list_hot_chunks(tuning.chunk)
        self.todo = OrderedDict.fromkeys(order_chunks(missing, count, self.hot))
        for number in set(range(count)).difference(missing) if readers else ():
            self._publish_chunk(number)

    def copy_chunks(self) -> None:
        self.complete_hole_chunks()
        threads = self.tuning.threads
        self.run_threads(
            [self._copy_until_done]
            * (threads if self.is_served() else min(threads, len(self.todo)))
        )

    def complete_hole_chunks(self) -> None:
        """Brings all chunks that are known to hold no data; what is left to do may have some."""
        for number in [number for number in self.todo if number not in self.known.to_read]:
            if self.is_ending():
                return
            del self.todo[number]
            start, size = self.chunk_span(number)
            allocation.punch_hole(self.image, start, size)
            self.mark_complete(number, self._digest_zeros(size))

    def run_threads(self, works: Sequence[Callable[[], None]]) -> None:
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
            raise CopyStopped
        left = list_missing_chunks(self.part.read_digests(), self.source.size, self.tuning.chunk)
        if left:  # a thread that died of something unforeseen
            raise Failed("copy", f"{len(left)} chunks are missing after the copy")

    def close(self) -> None:
        for fd in (self.image, self.map, self.past_cache):
            if fd is not None:
                os.close(fd)

    def is_ending(self) -> bool:
        return self.stop.is_set() or self.halt.is_set()

    def _copy_until_done(self) -> None:
        buffer = source_reader.allocate_piece_buffer(self.tuning.chunk)
        try:
            while not self.is_ending():
                if self._shares_a_chunk():
                    self._copy_piece()
                    continue
                with self.lock:
                    number = self._pop_next(self.readers.list_wanted() if self.readers else ())
                if number is None:
                    return
                self.mark_complete(number, self.read_chunk(number, buffer, self._write_proven))
        except (OSError, Declined) as error:
            self.errors.append(error)
            self.halt.set()

    def _shares_a_chunk(self) -> bool:
        """Whether the threads share a chunk now, rather than have one each."""
        small = self.tuning.chunk <= SHARED_CHUNK
        return bool(self.shared) or (bool(self.todo) and small and self.is_served())

    def is_served(self) -> bool:
        """Whether jobs read the image while it is copied."""
        return self.readers is not None and self.readers.is_served()

    def _pop_next(self, wanted: Sequence[int]) -> int | None:
        """Takes the next chunk off the list, under the lock."""
        # Whoever waits for a chunk will mostly want the next one too.
        number = next((one for one in (*wanted, self.ahead) if one in self.todo), None)
        if number is None:
            return self.todo.popitem(last=False)[0] if self.todo else None
        self.ahead = number + 1
        del self.todo[number]
        return number

    def _copy_piece(self) -> None:
        """Brings a piece of the chunk that is most wanted, or waits a moment."""
        with self.lock:
            at = None
            chunk = self._pick_shared_chunk()
            if chunk is not None and (self.is_urgent(chunk.number) or self._may_read_now()):
                at = chunk.todo.popleft()
        if chunk is None or at is None:
            self.stop.wait(TICK)
            return
        piece = chunk.memory[at : min(at + PIECE, chunk.size)]
        done = 0
        while done < len(piece):
            with self._wait_to_read(len(piece) - done) as most:
                want, rest = piece[done : done + most], chunk.memory[at + done :]
                source_reader.read_piece(self.source, chunk.start + at + done, want, rest)
            done += len(want)
        self._write_proven(chunk.start + at, piece)
        with self.lock:
            chunk.missing -= 1
            whole = not chunk.missing
        if whole:
            self.mark_complete(chunk.number, digest.digest_chunk(chunk.memory[: chunk.size]))
            with self.lock:
                self.shared.remove(chunk)

    def _pick_shared_chunk(self) -> _SharedChunk | None:
        """The chunk to go on with; None: all of them are being read to their end."""
        wanted = self.readers.list_wanted() if self.readers else []
        left = [chunk for chunk in self.shared if chunk.todo]
        left.sort(key=lambda chunk: not self.is_urgent(chunk.number))
        new = next((number for number in wanted if number in self.todo), None)
        jumps = new is not None and self.is_urgent(new)
        if left and not (jumps and not self.is_urgent(left[0].number)):
            return left[0]
        number = self._pop_next(wanted) if len(self.shared) < MOST_OPEN else None
        if number is None:
            return left[0] if left else None
        memory = (
            self.spare.pop()
            if self.spare
            else source_reader.allocate_aligned_memory(self.tuning.chunk)
        )
        self.shared.append(_SharedChunk(number, *self.chunk_span(number), memory))
        return self.shared[-1]

    def is_urgent(self, number: int) -> bool:
        """Whether a job waits for this chunk: then neither `bandwidth` nor reads hold it up."""
        return self.readers is not None and number in self.readers.list_wanted((NOW,))

    def _may_read_now(self) -> bool:
        alone = self._is_job_starting() and self.gentle.locked()
        return not alone and self.throttle.try_acquire(PIECE)

    def _is_job_starting(self) -> bool:
        """Whether a job reads the source here and there, as one does that starts.

        Then one thread copies, little by little: a job's read waits behind all that is under way.
        """
        if self.readers is None or not self._is_source_busy(BETWEEN_NS):
            return False
        now = time.monotonic_ns()
        self.start_ends = min(self.start_ends, now + START_NS)
        return now < self.start_ends and not self.readers.list_wanted((NOW,))

    def _is_source_busy(self, calm_ns: int) -> bool:
        """Whether a job has read the source within so many ns, or is about to start.

        Then what its first read stands behind is under way now. A step that waits for a small image
        reads nothing before that is whole.
        """
        if self.readers is None:
            return False
        if self.readers.has_recent_source_read(time.monotonic_ns(), calm_ns):
            return True
        early = self.tuning.through and time.monotonic() < self.began + EARLY
        return early and self.readers.is_unread() and not self.part.is_waited_for(time.time())

    def _yields_to_job(self) -> bool:
        """Whether a job reads the source, and so the copy does not; but a little it always does."""
        if not self._is_source_busy(CALM_NS):
            return False
        now = time.monotonic()
        if now < self.may_read_at:
            return True
        self.may_read_at = now + PAUSE
        return False

    @contextlib.contextmanager
    def _wait_to_read(self, size: int) -> Iterator[int]:
        """Waits until this thread may read the source; yields how many of `size` bytes.

        Raises CopyStopped.
        """
        with contextlib.ExitStack() as during:
            gentle = self._is_job_starting()
            if gentle:
                during.enter_context(self.gentle)
                while self._is_job_starting() and self._yields_to_job() and not self.is_ending():
                    self.stop.wait(TICK)
            if (
                self.is_ending()
            ):  # a chunk of a slow source takes long, and somebody may want the place
                raise CopyStopped
            if not gentle:
                during.enter_context(self.pace.measure_read(size))
            yield min(size, GENTLE) if gentle else size

    def chunk_span(self, number: int) -> tuple[int, int]:
        """Where a chunk begins, and how long it is."""
        start = number * self.tuning.chunk
        return start, min(self.tuning.chunk, self.source.size - start)

    def read_chunk(self, number: int, buffer: memoryview, write: Write) -> bytes:
        """Brings a chunk from the source; its digest."""
        start, size = self.chunk_span(number)
        if not self.is_urgent(number):
            self.throttle.acquire(size, self.stop)
        running = digest.RunningDigest()
        for at, piece in source_reader.read_pieces(
            self.source, start, size, buffer, self._wait_to_read
        ):
            running.add(piece)
            write(at, piece)
        return running.digest()

    def _digest_zeros(self, size: int) -> bytes:
        """The digest of so many zeros, taken once for each size that occurs (two at the most)."""
        if size not in self.holes:
            # Private memory that is only read is one page of zeros, however long.
            zeros = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.holes[size] = digest.digest_chunk(memoryview(zeros))
        return self.holes[size]

    def mark_complete(self, number: int, found: bytes) -> None:
        """From now on the chunk is in."""
        os.pwrite(self.map, found, number * ENTRY_BYTES)
        self._publish_chunk(number)
        trace.reach_point("chunk")

    def _publish_chunk(self, number: int) -> None:
        """Tells the readers that the bytes of a chunk are right."""
        if self.readers is not None:
            self.readers.mark_arrived(*self.chunk_span(number))
            self.readers.clear_wanted(number)

    def clear_arrived(self, number: int) -> None:
        """Tells the readers that the bytes of a chunk may change from now on."""
        if self.readers is not None:
            self.readers.clear_arrived(number)

    def _write_proven(self, start: int, data: memoryview) -> None:
        """Writes what came from the source itself: jobs may read it at once."""
        self.write_piece(start, data)
        if self.readers is not None:
            self.readers.mark_arrived(start, len(data))

    def write_piece(self, start: int, data: memoryview) -> None:
        """Writes a piece; zeros where holes are likely become one."""
        if start // self.tuning.chunk in self.known.likely_sparse and source_reader.is_zero(data):
            allocation.punch_hole(self.image, start, len(data))
            return
        whole = 0
        if self.past_cache is not None:
            whole = len(data) - len(data) % source_reader.BLOCK
            _write_all(self.past_cache, start, data[:whole])
        if whole < len(data):
            _write_all(self.image, start + whole, data[whole:])
            # Begun now, so that the fsync at the end finds little left to do.
            _libc.sync_file_range(
                self.image, ctypes.c_int64(start), ctypes.c_int64(len(data)), SYNC_FILE_RANGE_WRITE
            )


def _write_all(fd: int, start: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwritev(fd, [data[done:]], start + done)


def _open_direct(part: Part) -> int | None:
    """The image opened past the page cache, where the cache's file system can do that."""
    try:
        return os.open(part.image, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
