"""Reading a source piece by piece: every byte, past the page cache, and no faster than allowed."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.sources.source import ReadableSource, SourceTruncated, SourceUnreadable
from forestage.stage import source_reader
from forestage.stage.source_reader import BLOCK, PIECE, READ_TRIES, RateLimiter

CHUNK = 4 * BLOCK

Patch = pytest.MonkeyPatch
Read = Callable[..., int]
Fake = Callable[[Read, int, list[memoryview], int, int], int]
Replace = Callable[[Fake], None]
Failing = Callable[[int, int], list[int]]


class File:
    """A source with random bytes; `direct` is the same file past the page cache."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.data = b""

    def fill(self, size: int) -> None:
        self.data = os.urandom(size)
        os.pwrite(self.fd, self.data, 0)

    def read(self, direct: bool = False, size: int | None = None) -> bytes:
        source = ReadableSource(
            self.fd, self.direct if direct else None, len(self.data), "/lustre/a"
        )
        pieces = source_reader.read_pieces(
            source, 0, size or source.size, source_reader.allocate_piece_buffer(CHUNK)
        )
        return b"".join(bytes(piece) for _, piece in pieces)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    made = File(tmp_path / "source")
    made.fill(2 * CHUNK + BLOCK + 5)
    yield made
    os.close(made.fd)
    os.close(made.direct)


@pytest.fixture
def preadv(monkeypatch: Patch) -> Replace:
    """Puts a function before preadv(2); it gets the real one as its first argument."""
    real = os.preadv

    def replacing(fake: Fake) -> None:
        def read(fd: int, buffers: list[memoryview], start: int, flags: int = 0) -> int:
            return fake(real, fd, buffers, start, flags)

        monkeypatch.setattr(os, "preadv", read)

    return replacing


@pytest.fixture
def naps(monkeypatch: Patch) -> list[float]:
    """What was slept between tries; nothing is."""
    slept: list[float] = []
    fake = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr(source_reader, "time", fake)
    return slept


@pytest.mark.parametrize("limit", [1000, BLOCK, BLOCK + 1, CHUNK - 1])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_short_reads_of_the_source_are_continued(
    file: File, preadv: Replace, limit: int, direct: bool
) -> None:
    def short(real: Read, fd: int, buffers: list[memoryview], start: int, flags: int) -> int:
        most = limit if fd != file.direct else max(BLOCK, limit // BLOCK * BLOCK)
        return real(fd, [buffers[0][:most]], start, flags)

    preadv(short)
    assert file.read(direct) == file.data


@pytest.mark.parametrize("served", [0, 1, 1000, BLOCK, BLOCK + 1, CHUNK])
def test_bytes_not_in_the_page_cache_are_read_with_direct_io(
    file: File, preadv: Replace, served: int
) -> None:
    def half(real: Read, fd: int, buffers: list[memoryview], start: int, flags: int) -> int:
        if flags == os.RWF_NOWAIT:
            if not served:
                raise OSError(errno.EAGAIN, "not in the cache")
            return real(fd, [buffers[0][:served]], start)
        asked.add(fd)
        return real(fd, buffers, start, flags)

    asked: set[int] = set()
    preadv(half)
    assert file.read(direct=True) == file.data
    assert asked <= {file.direct}


@pytest.mark.parametrize("served", [BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK])
def test_source_blocks_that_were_cached_before_stay_in_the_page_cache(
    file: File, preadv: Replace, monkeypatch: Patch, served: int
) -> None:
    def part(real: Read, fd: int, buffers: list[memoryview], start: int, flags: int) -> int:
        if flags == os.RWF_NOWAIT:
            return real(fd, [buffers[0][:served]], start)
        return real(fd, buffers, start, flags)

    def note(fd: int, start: int, length: int, advice: int) -> None:
        assert (fd, advice) == (file.fd, os.POSIX_FADV_DONTNEED)
        dropped.update(range(start // BLOCK, -(-(start + length) // BLOCK)))

    dropped: set[int] = set()
    monkeypatch.setattr(os, "posix_fadvise", note)
    preadv(part)
    assert file.read(direct=True) == file.data
    kept = served // BLOCK  # of each chunk of four blocks, the last one shorter
    assert dropped == {block for block in range(10) if block % 4 >= kept}


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EIO])
def test_read_without_rwf_nowait_support_succeeds(
    file: File, preadv: Replace, naps: list[float], number: int
) -> None:
    def unable(real: Read, fd: int, buffers: list[memoryview], start: int, flags: int) -> int:
        if flags:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, start)

    preadv(unable)
    assert file.read(direct=True) == file.data


@pytest.fixture
def failures(preadv: Replace) -> Failing:
    """Makes reads fail so many times; the offsets of the failed ones are in the list."""

    def failing(number: int, times: int) -> list[int]:
        failed: list[int] = []

        def fail(real: Read, fd: int, buffers: list[memoryview], start: int, flags: int) -> int:
            if len(failed) < times:
                failed.append(start)
                raise OSError(number, os.strerror(number))
            return real(fd, buffers, start, flags)

        preadv(fail)
        return failed

    return failing


def test_transient_io_error_of_the_source_is_retried(
    file: File, failures: Failing, naps: list[float]
) -> None:
    assert READ_TRIES > 1
    failed = failures(errno.EIO, READ_TRIES - 1)
    assert file.read() == file.data
    assert failed == [0] * (READ_TRIES - 1)
    assert len(naps) == READ_TRIES - 1


def test_io_errors_are_retried_as_long_as_the_read_progresses(
    file: File, preadv: Replace, naps: list[float]
) -> None:
    reads = itertools.count()

    def now_and_then(real: Read, fd: int, buffers: list[memoryview], start: int, flags: int) -> int:
        if next(reads) % 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, [buffers[0][:BLOCK]], start, flags)

    preadv(now_and_then)
    assert file.read() == file.data
    assert len(naps) >= READ_TRIES


@pytest.mark.parametrize(
    ("number", "tries"),
    [(errno.EIO, READ_TRIES), (errno.ESTALE, 1), (errno.EACCES, 1), (errno.ENXIO, 1)],
)
def test_persistent_source_error_is_raised_at_once_or_after_retries(
    file: File, failures: Failing, naps: list[float], number: int, tries: int
) -> None:
    failed = failures(number, 1000)
    with pytest.raises(SourceUnreadable) as caught:
        file.read()
    assert caught.value.error.errno == number
    assert caught.value.reason == ("changed" if number == errno.ESTALE else "source-error")
    assert failed == [0] * tries
    assert len(naps) == tries - 1


def test_source_that_ends_too_early_raises_source_truncated(file: File) -> None:
    os.truncate(file.fd, CHUNK + 1)
    with pytest.raises(SourceTruncated) as caught:
        file.read()
    assert caught.value.reason == "changed"


def test_source_bytes_are_dropped_from_the_page_cache_after_reading(
    file: File, monkeypatch: Patch
) -> None:
    """The node's memory belongs to the jobs."""
    dropped: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments))
    file.read(size=CHUNK + 5)
    assert dropped == [
        (file.fd, 0, CHUNK, os.POSIX_FADV_DONTNEED),
        (file.fd, CHUNK, 5, os.POSIX_FADV_DONTNEED),
    ]


@pytest.mark.parametrize("chunk", [CHUNK, 16 * CHUNK, 2 * PIECE])
def test_read_buffer_is_aligned_to_huge_pages_and_at_most_one_piece(chunk: int) -> None:
    memory = source_reader.allocate_piece_buffer(chunk)
    assert len(memory) == min(chunk, PIECE)
    memory[-1] = 1
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % source_reader.HUGE_PAGE == 0


class Tap:
    """A clock and a stop event in one: waiting moves the clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def throttled(monkeypatch: Patch, rate: int | None) -> tuple[RateLimiter, Tap]:
    tap = Tap()
    monkeypatch.setattr(source_reader, "time", SimpleNamespace(monotonic=tap.monotonic))
    return RateLimiter(rate), tap


def test_rate_limiter_keeps_its_rate_without_a_burst_after_idle_time(monkeypatch: Patch) -> None:
    """After a source that hung, the burst would take the whole bandwidth."""
    throttle, tap = throttled(monkeypatch, 100)
    throttle.acquire(50, tap)  # type: ignore[arg-type]
    tap.now += 60
    moments = []
    for _ in range(3):
        throttle.acquire(50, tap)  # type: ignore[arg-type]
        moments.append(tap.now - 1060)
    assert moments == [0.0, 0.5, 1.0]


def test_rate_limiter_without_a_rate_does_not_wait(monkeypatch: Patch) -> None:
    throttle, tap = throttled(monkeypatch, None)
    for _ in range(3):
        throttle.acquire(1 << 40, tap)  # type: ignore[arg-type]
    assert tap.now == 1000


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 5)), min_size=1, max_size=20),
)
def test_rate_limiter_passes_at_most_rate_times_time_and_one_chunk(
    rate: int, takes: list[tuple[int, float]]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        throttle, tap = throttled(monkeypatch, rate)
        flowed = []
        for size, pause in takes:
            throttle.acquire(size, tap)  # type: ignore[arg-type]
            flowed.append((tap.now, size))
            tap.now += pause
    for first in range(len(flowed)):
        for last in range(first, len(flowed)):
            took = flowed[last][0] - flowed[first][0]
            assert sum(size for _, size in flowed[first:last]) <= rate * took + 1e-6 * rate + 1e-6


class Ticking:
    """A clock that a test moves, in the place of the module's."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    made = Ticking()
    monkeypatch.setattr(source_reader, "time", made)
    return made


def test_rate_meter_counts_the_time_in_which_any_thread_reads(ticking: Ticking) -> None:
    pace = source_reader.RateMeter()
    with pace.measure_read(600):
        ticking.now += 2
        with pace.measure_read(400):
            ticking.now += 3
    ticking.now += 100  # all threads write, or wait for their turn
    with pace.measure_read(1000):
        ticking.now += 5
    assert (pace.bytes, pace.seconds, pace.bytes_per_second(2000)) == (2000, 10.0, 200)


def test_rate_meter_reports_zero_for_a_few_bytes(ticking: Ticking) -> None:
    pace = source_reader.RateMeter()
    assert pace.bytes_per_second(0) == 0
    with pace.measure_read(499):
        ticking.now += 1
    assert (pace.bytes_per_second(998), pace.bytes_per_second(1000)) == (499, 0)
    with pace.measure_read(source_reader.SAMPLE):
        ticking.now += 1
    assert pace.bytes_per_second(1 << 40) == round((499 + source_reader.SAMPLE) / 2)


def test_rate_meter_counts_no_bytes_of_a_failed_read(ticking: Ticking) -> None:
    pace = source_reader.RateMeter()

    def fail() -> None:
        ticking.now += 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), pace.measure_read(1000):
        fail()
    assert (pace.bytes, pace.seconds) == (0, 1.0)


@pytest.mark.parametrize("size", [1, 2, BLOCK, PIECE])
def test_is_zero_finds_any_nonzero_byte(size: int) -> None:
    memory = source_reader.allocate_aligned_memory(size)
    assert source_reader.is_zero(memory)
    for at in {0, size // 2, size - 1}:
        memory[at] = 1
        assert not source_reader.is_zero(memory)
        assert at == 0 or source_reader.is_zero(memory[:at])
        memory[at] = 0
