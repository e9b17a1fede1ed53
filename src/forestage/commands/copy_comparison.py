"""Finds the chunks of a copy that differ from its source or from their checksums.

Several threads, each with one piece of memory. The copy is read by a reader of its own
(`_DirectCopyReader`): unlike the one that copies (chunks.py), it must not be served from the page
cache, nor drop what running jobs have there.
"""

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from forestage.cache import digest
from forestage.cache.part import chunk_count
from forestage.sources.source import ReadableSource, SourceTruncated, SourceUnreadable
from forestage.stage import source_reader
from forestage.stage.source_reader import BLOCK, RateLimiter

PROGRESS_INTERVAL = 0.2  # seconds

CompareProgress = Callable[[int, int], None]
"""Called now and then with the bytes compared so far, and those to compare in all."""


class SourceReadError(Exception):
    """The source could not be read to its end; nothing is known about the copy."""


class ComparisonResult(msgspec.Struct, frozen=True):
    """`bad`: numbers of the bad chunks, in order; `detail`: why one of them could not be read."""

    bad: tuple[int, ...] = ()
    detail: str = ""


ExpectedDigest = Callable[[int, memoryview, int], bytes]
"""The digest of so many bytes from an offset on; may use the memory."""


def make_source_digests(fd: int, size: int, bandwidth: int | None) -> ExpectedDigest:
    """The digests of the source's own bytes. Raises SourceReadError; `bandwidth` is per second."""
    source, throttle, never = (
        ReadableSource(fd, None, size),
        RateLimiter(bandwidth),
        threading.Event(),
    )

    def expected(start: int, buffer: memoryview, want: int) -> bytes:
        throttle.acquire(want, never)
        running = digest.RunningDigest()
        try:
            for _, piece in source_reader.read_pieces(source, start, want, buffer):
                running.add(piece)
        except SourceUnreadable as unreadable:
            raise SourceReadError(unreadable.error.strerror) from None
        except SourceTruncated:
            raise SourceReadError("it ends too early") from None
        return running.digest()

    return expected


def make_recorded_digests(known: Sequence[bytes], chunk: int) -> ExpectedDigest:
    """The digests that were taken while the chunks were copied, in their order."""

    def expected(start: int, buffer: memoryview, want: int) -> bytes:
        return known[start // chunk]

    return expected


class _DirectCopyReader:
    """The copy, opened past the page cache where that can be."""

    def __init__(self, fd: int) -> None:
        self.buffered = fd
        try:
            self.direct: int | None = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = None

    def read_pieces(self, start: int, buffer: memoryview, want: int) -> Iterator[memoryview]:
        """Reads `want` bytes through the buffer. Raises SourceTruncated, OSError."""
        for at in range(start, start + want, len(buffer)):
            length = min(len(buffer), start + want - at)
            self.read_piece(at, buffer, length)
            yield buffer[:length]

    def read_piece(self, start: int, buffer: memoryview, want: int) -> None:
        """Fills the head of the page-aligned `buffer`. Raises SourceTruncated, OSError."""
        done = 0
        while done < want:
            fd, end = self.buffered, want
            if self.direct is not None and done % BLOCK == 0:
                fd, end = self.direct, -(-want // BLOCK) * BLOCK
            count = os.preadv(fd, [buffer[done:end]], start + done)
            if count == 0:
                raise SourceTruncated("the copy")
            done += count

    def close(self) -> None:
        if self.direct is not None:
            os.close(self.direct)


def compare_copy(
    fd: int,
    size: int,
    chunk: int,
    threads: int,
    expected: ExpectedDigest,
    on_progress: CompareProgress,
    rate: int | None = None,
) -> ComparisonResult:
    """Compares all of the open copy, at `rate` bytes per second.

    Raises SourceReadError, OSError.
    """
    copy = _DirectCopyReader(fd)
    try:
        return _Comparison(copy, size, chunk, expected, RateLimiter(rate)).compare_in_threads(
            threads, on_progress
        )
    finally:
        copy.close()


class _Comparison:
    """What the threads of one comparison share."""

    def __init__(
        self,
        copy: _DirectCopyReader,
        size: int,
        chunk: int,
        expected: ExpectedDigest,
        throttle: RateLimiter,
    ) -> None:
        self.throttle = throttle
        self.copy = copy
        self.size = size
        self.chunk = chunk
        self.expected = expected
        self.todo = deque(range(chunk_count(size, chunk)))
        self.bad_chunks: dict[int, str] = {}
        self.done_chunks: list[int] = []
        self.failed: SourceReadError | None = None

    def compare_in_threads(self, threads: int, done: CompareProgress) -> ComparisonResult:
        # Daemons: where a source hangs for ever, ^C must still end the program.
        workers = [
            threading.Thread(target=self._compare_chunks, name=f"compare-{number}", daemon=True)
            for number in range(min(threads, len(self.todo)))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(PROGRESS_INTERVAL)
                done(min(self.size, len(self.done_chunks) * self.chunk), self.size)
        if self.failed is not None:
            raise self.failed
        if len(self.done_chunks) < chunk_count(self.size, self.chunk):
            raise OSError(errno.EIO, "a thread that compares has died")
        details = (self.bad_chunks[number] for number in sorted(self.bad_chunks))
        return ComparisonResult(tuple(sorted(self.bad_chunks)), next(filter(None, details), ""))

    def _compare_chunks(self) -> None:
        buffer = source_reader.allocate_piece_buffer(self.chunk)
        while self.failed is None:
            try:
                number = self.todo.popleft()
            except IndexError:
                return
            try:
                self._compare_chunk(number, buffer)
            except SourceReadError as failed:
                self.failed = failed
            self.done_chunks.append(number)

    def _compare_chunk(self, number: int, buffer: memoryview) -> None:
        start = number * self.chunk
        want = min(self.chunk, self.size - start)
        running = digest.RunningDigest()
        self.throttle.acquire(want, threading.Event())
        try:
            for piece in self.copy.read_pieces(start, buffer, want):
                running.add(piece)
        except SourceTruncated:
            self.bad_chunks[number] = "the copy is too short"
            return
        except OSError as error:
            self.bad_chunks[number] = f"the copy cannot be read: {error.strerror}"
            return
        if self.expected(start, buffer, want) != running.digest():
            self.bad_chunks[number] = ""
