"""The engine `chunks`: all bytes of the source, a map that is true at any moment, little memory."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forestage import trace
from forestage.cache import allocation, digest
from forestage.cache.part import Part, list_missing_chunks
from forestage.errors import CopyStopped, Failed
from forestage.sources.source import ReadableSource, SourceTruncated, SourceUnreadable
from forestage.stage import chunks, source_reader
from forestage.stage.chunks import CopyTuning
from forestage.stage.source_reader import BLOCK, PIECE, RateLimiter
from forestage.system import file_systems

CHUNK = 4 * BLOCK
TUNING = CopyTuning(threads=3, chunk=CHUNK)
QUIET = CopyTuning(threads=1, chunk=CHUNK)
SIZES = [
    1,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    CHUNK + BLOCK,
    7 * CHUNK - BLOCK - 1,
    7 * CHUNK,
    7 * CHUNK + 5,
]

Patch = pytest.MonkeyPatch


class Pair:
    """A source file and the part that it is copied to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "source"
        self.part = Part(folder / "part")
        self.part.directory.mkdir()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.direct: int | None = None

    def fill(self, data: bytes) -> None:
        os.truncate(self.fd, 0)
        os.pwrite(self.fd, data, 0)

    def random(self, size: int) -> bytes:
        data = os.urandom(size)
        self.fill(data)
        return data

    def past_cache(self) -> None:
        self.direct = os.open(self.path, os.O_RDONLY | os.O_DIRECT)

    @property
    def source(self) -> ReadableSource:
        return ReadableSource(self.fd, self.direct, os.fstat(self.fd).st_size)

    def reserve(self, size: int | None = None) -> None:
        found = allocation.list_data_chunks(self.fd, size or self.source.size, CHUNK)
        allocation.reserve_part(self.part, size or self.source.size, CHUNK, found)

    def copy(
        self,
        tuning: CopyTuning = TUNING,
        stop: threading.Event | None = None,
        source: ReadableSource | None = None,
    ) -> None:
        chunks.copy_chunks(source or self.source, self.part, tuning, stop or threading.Event())

    @property
    def copied(self) -> bytes:
        return self.part.image.read_bytes()

    def close(self) -> None:
        os.close(self.fd)
        if self.direct is not None:
            os.close(self.direct)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_trace_listener(monkeypatch: Patch) -> None:
    monkeypatch.setattr(trace, "listener", None)


def each(data: bytes) -> list[bytes]:
    return [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]


def map_of(data: bytes) -> bytes:
    return b"".join(map(digest.digest_chunk, each(data)))


def write_cached(monkeypatch: Patch) -> None:
    """Have copies written through the page cache, as on a disk without direct I/O."""
    monkeypatch.setattr(chunks, "_open_direct", lambda part: None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_copy_of_a_file_of_any_size_near_block_and_chunk_borders_is_identical(
    pair: Pair, monkeypatch: Patch, size: int, direct: bool
) -> None:
    data = pair.random(size)
    if direct:
        pair.past_cache()
    else:
        write_cached(monkeypatch)
    pair.reserve()
    pair.copy()
    assert pair.copied == data
    assert pair.part.read_digests() == map_of(data)


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=40,
)
@given(
    st.binary(min_size=1, max_size=3 * BLOCK),
    st.integers(0, 5 * CHUNK),
    st.booleans(),
    st.integers(1, 9),
)
def test_any_file_is_copied_identically_with_any_threads_and_chunk_size(
    pair: Pair, tail: bytes, hole: int, direct: bool, threads: int
) -> None:
    os.truncate(pair.fd, 0)
    os.pwrite(pair.fd, tail, hole)
    pair.part.map.unlink(missing_ok=True)
    pair.part.image.unlink(missing_ok=True)
    pair.reserve()
    with pytest.MonkeyPatch.context() as patch:
        if not direct:
            write_cached(patch)
        pair.copy(CopyTuning(threads=threads, chunk=CHUNK))
    assert pair.copied == bytes(hole) + tail
    assert not list_missing_chunks(pair.part.read_digests(), hole + len(tail), CHUNK)


@pytest.fixture
def reads(monkeypatch: Patch) -> list[int]:
    """Where each piece that is read begins."""
    starts: list[int] = []
    real = source_reader.read_piece

    def noting(source: ReadableSource, start: int, want: memoryview, buffer: memoryview) -> None:
        starts.append(start)
        real(source, start, want, buffer)

    monkeypatch.setattr(source_reader, "read_piece", noting)
    return starts


def test_holes_of_the_source_are_not_read_and_take_no_space(pair: Pair, reads: list[int]) -> None:
    size = 100 * CHUNK + 5
    os.truncate(pair.fd, size)
    os.pwrite(pair.fd, b"middle", 50 * CHUNK - 3)
    pair.reserve()
    pair.copy()
    data = pair.path.read_bytes()
    assert pair.copied == data
    assert pair.part.read_digests() == map_of(data)
    assert pair.part.allocated_bytes() <= 2 * CHUNK + BLOCK
    assert sorted(reads) == [49 * CHUNK, 50 * CHUNK]


FUSE = 0x65735546  # linux/magic.h


@pytest.mark.parametrize("holes_of", ["all", "none", "the right ones"])
def test_holes_of_a_fuse_source_are_read_and_their_zeros_take_no_space(
    pair: Pair, reads: list[int], monkeypatch: Patch, holes_of: str
) -> None:
    size = 100 * CHUNK + 5
    os.truncate(pair.fd, size)
    for start in (50 * CHUNK - 3, 99 * CHUNK):
        os.pwrite(pair.fd, b"middle", start)
    said = {"all": set[int](), "none": set(range(101)), "the right ones": {49, 50, 99}}[holes_of]
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda _: FUSE)
    monkeypatch.setattr(allocation, "list_data_chunks", lambda *_: said)
    pair.reserve()
    pair.part.image.write_bytes(b"\xff" * size)  # what is left of another copy
    pair.copy()
    data = pair.path.read_bytes()
    assert pair.copied == data
    assert pair.part.read_digests() == map_of(data)
    assert pair.part.allocated_bytes() < 5 * CHUNK
    assert {start // CHUNK for start in reads} == set(range(101))


def test_file_without_holes_is_not_scanned_for_zeros(pair: Pair, monkeypatch: Patch) -> None:
    pair.random(3 * CHUNK)
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda _: FUSE)
    monkeypatch.setattr(source_reader, "is_zero", lambda _: pytest.fail("looked through"))
    pair.reserve()
    pair.copy()
    assert pair.copied == pair.path.read_bytes()


def test_hole_of_the_source_overwrites_leftover_bytes_of_the_part(pair: Pair) -> None:
    """Bytes that the map does not know may be in a part; whatever they are, they are not ours."""
    os.truncate(pair.fd, 2 * CHUNK)
    pair.reserve()
    pair.part.image.write_bytes(b"\xff" * 2 * CHUNK)
    pair.copy()
    assert pair.copied == bytes(2 * CHUNK)


Read = Callable[..., int]


@pytest.mark.parametrize("cut", [0, BLOCK, CHUNK, CHUNK + 1, 2 * CHUNK - 1])
def test_copy_of_a_source_truncated_meanwhile_raises_and_leaves_a_true_map(
    pair: Pair, monkeypatch: Patch, cut: int
) -> None:
    pair.random(2 * CHUNK)
    pair.reserve()
    monkeypatch.setattr(allocation, "list_data_chunks", lambda *_: {0, 1})
    whole = pair.source
    os.truncate(pair.fd, cut)
    with pytest.raises(SourceTruncated):
        pair.copy(QUIET, source=whole)
    assert list_missing_chunks(pair.part.read_digests(), 2 * CHUNK, CHUNK) == list(
        range(cut // CHUNK, 2)
    )


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EROFS])
def test_file_system_without_direct_writes_is_written_through_the_page_cache(
    pair: Pair, monkeypatch: Patch, number: int
) -> None:
    """So is tmpfs before 6.6; any other error is one."""
    real = os.open

    def opens(path: str, flags: int, mode: int = 0o777, **where: int | None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, mode, **where)

    data = pair.random(2 * CHUNK + BLOCK + 5)
    pair.reserve()
    monkeypatch.setattr(os, "open", opens)
    if number == errno.EINVAL:
        pair.copy()
        assert pair.copied == data
    else:
        with pytest.raises(OSError, match="Read-only"):
            pair.copy()


@pytest.mark.parametrize("direct", [True, False])
def test_only_whole_blocks_are_written_with_direct_io(
    pair: Pair, monkeypatch: Patch, direct: bool
) -> None:
    """A disk refuses the rest, and would have to be told the file's real end."""
    written: list[tuple[bool, int, int]] = []
    real = os.pwritev

    def noting(fd: int, buffers: list[memoryview], start: int) -> int:
        past_cache = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        written.append((past_cache, start, len(buffers[0])))
        return real(fd, buffers, start)

    data = pair.random(CHUNK + 2 * BLOCK + 5)
    pair.reserve()
    monkeypatch.setattr(os, "pwritev", noting)
    if not direct:
        write_cached(monkeypatch)
    pair.copy(QUIET)
    whole, tail = (True, CHUNK, 2 * BLOCK), (False, CHUNK + 2 * BLOCK, 5)
    last = [whole, tail] if direct else [(False, CHUNK, 2 * BLOCK + 5)]
    assert written == [(direct, 0, CHUNK), *last]
    assert pair.copied == data


def test_short_writes_of_the_copy_are_continued(pair: Pair, monkeypatch: Patch) -> None:
    write_cached(monkeypatch)
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, start: real(fd, [buffers[0][:1000]], start)
    )
    data = pair.random(2 * CHUNK + 5)
    pair.reserve()
    pair.copy(QUIET)
    assert pair.copied == data


def test_resumed_copy_reads_only_what_is_missing(pair: Pair, reads: list[int]) -> None:
    data = pair.random(5 * CHUNK + 5)
    pair.reserve()
    mark = b"\1" * 16
    with pair.part.map.open("r+b") as file:
        for number in (0, 2, 5):
            file.seek(number * 16)
            file.write(mark)
    pair.copy(QUIET)
    assert reads == [CHUNK, 3 * CHUNK, 4 * CHUNK]
    there = each(pair.copied)
    for number, one in enumerate(each(data)):
        assert there[number] == (bytes(len(one)) if number in (0, 2, 5) else one)
    sums = digest.split_map(pair.part.read_digests())
    assert [number for number, one in enumerate(sums) if one == mark] == [0, 2, 5]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stopped_copy_leaves_a_true_map_and_is_resumed(
    pair: Pair, monkeypatch: Patch, after: int
) -> None:
    data = pair.random(6 * CHUNK + 5)
    pair.reserve()
    stop = threading.Event()
    if not after:
        stop.set()
    seen: list[str] = []

    def listen(name: str) -> None:
        seen.append(name)
        if len(seen) == after:
            stop.set()

    monkeypatch.setattr(trace, "listener", listen)
    with pytest.raises(CopyStopped):
        pair.copy(QUIET, stop)
    missing = list_missing_chunks(pair.part.read_digests(), len(data), CHUNK)
    copied = [0, 6, 1][:after]  # head, tail, then straight through
    assert missing == [number for number in range(7) if number not in copied]
    there, sums = each(pair.copied), digest.split_map(pair.part.read_digests())
    for number in copied:
        assert there[number] == each(data)[number]
        assert sums[number] == digest.digest_chunk(there[number])
    pair.copy(QUIET)
    assert pair.copied == data
    assert pair.part.read_digests() == map_of(data)


def test_chunk_is_entered_in_the_map_only_after_its_bytes_are_written(
    pair: Pair, monkeypatch: Patch
) -> None:
    data = pair.random(4 * CHUNK + 5)
    pair.reserve()
    seen: list[int] = []

    def listen(_: str) -> None:
        for number, one in enumerate(digest.split_map(pair.part.read_digests())):
            if any(one):
                seen.append(number)
                assert each(pair.copied)[number] == each(data)[number]

    monkeypatch.setattr(trace, "listener", listen)
    pair.copy(QUIET)
    assert seen == [n for done in range(1, 6) for n in sorted([0, 4, 1, 2, 3][:done])]


def test_error_of_one_copy_thread_stops_the_other_threads(pair: Pair, monkeypatch: Patch) -> None:
    pair.random(50 * CHUNK)
    pair.reserve()
    run = chunks.ChunkCopy(
        pair.source, pair.part, msgspec.structs.replace(TUNING, threads=2), threading.Event()
    )
    starts: list[int] = []
    both = threading.Barrier(2)

    def first_fails(_: ReadableSource, start: int, *__: memoryview) -> None:
        starts.append(start)
        both.wait(600)
        if start == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert run.halt.wait(600)

    monkeypatch.setattr(source_reader, "read_piece", first_fails)
    with pytest.raises(OSError, match="No space left"):
        run.copy_chunks()
    run.close()
    assert sorted(starts) == [0, 49 * CHUNK]
    assert list_missing_chunks(pair.part.read_digests(), 50 * CHUNK, CHUNK) == list(range(49))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [MemoryError, IndexError, RuntimeError])
def test_copy_fails_if_a_thread_dies_of_an_unexpected_exception(
    pair: Pair, monkeypatch: Patch, error: type[Exception]
) -> None:
    def die(*_: object) -> None:
        raise error

    pair.random(3 * CHUNK)
    pair.reserve()
    monkeypatch.setattr(source_reader, "read_piece", die)
    with pytest.raises(Failed) as caught:
        pair.copy()
    assert caught.value.reason == "copy"


def test_copy_leaks_no_descriptor_on_success_or_error(pair: Pair, monkeypatch: Patch) -> None:
    pair.random(2 * CHUNK)
    pair.reserve()

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    gc.collect()  # what earlier tests left open must not be closed in between
    before = sorted(os.listdir("/proc/self/fd"))
    pair.copy()
    pair.part.map.write_bytes(bytes(32))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        with pytest.raises(SourceUnreadable):
            pair.copy()
    chunks.compute_digests(pair.part.image, 2 * CHUNK, TUNING)
    with pytest.raises(SourceTruncated):
        chunks.compute_digests(pair.part.image, 3 * CHUNK, TUNING)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("threads", "size", "wanted"), [(3, 9, 3), (8, 2, 2), (1, 9, 1)])
def test_copy_allocates_one_buffer_per_thread_at_most(
    pair: Pair, monkeypatch: Patch, threads: int, size: int, wanted: int
) -> None:
    pair.random(size * CHUNK)
    pair.reserve()
    made: list[int] = []
    real = source_reader.allocate_piece_buffer

    def noting(chunk: int) -> memoryview:
        made.append(chunk)
        return real(chunk)

    monkeypatch.setattr(source_reader, "allocate_piece_buffer", noting)
    pair.copy(CopyTuning(threads=threads, chunk=CHUNK))
    assert made == [CHUNK] * wanted


@pytest.mark.parametrize("rest", [0, 1, BLOCK, PIECE + 1])
def test_chunk_copied_in_several_pieces_has_the_right_bytes_and_digest(
    pair: Pair, rest: int
) -> None:
    data = pair.random(PIECE * 2 + rest)
    tuning = CopyTuning(threads=2, chunk=PIECE * 2)
    allocation.reserve_part(
        pair.part,
        len(data),
        tuning.chunk,
        allocation.list_data_chunks(pair.fd, len(data), tuning.chunk),
    )
    pair.copy(tuning)
    assert pair.copied == data
    sums = [
        digest.digest_chunk(data[at : at + tuning.chunk])
        for at in range(0, len(data), tuning.chunk)
    ]
    assert digest.split_map(pair.part.read_digests()) == sums
    assert chunks.compute_digests(pair.part.image, len(data), tuning) == b"".join(sums)


BIG = 8 << 20


@pytest.mark.parametrize("size", [BIG + 5, 0], ids=["data", "hole"])
def test_copy_holds_no_whole_chunk_in_python_memory(pair: Pair, size: int) -> None:
    """The buffers are mapped and do not count."""
    os.pwrite(pair.fd, b"x" * size, 0)
    os.truncate(pair.fd, 2 * BIG)
    allocation.reserve_part(
        pair.part, 2 * BIG, BIG, allocation.list_data_chunks(pair.fd, 2 * BIG, BIG)
    )
    tracemalloc.start()
    try:
        pair.copy(CopyTuning(threads=1, chunk=BIG))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < BIG // 4


def test_bandwidth_limit_applies_to_every_chunk(pair: Pair, monkeypatch: Patch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(RateLimiter, "acquire", lambda self, size, stop: taken.append(size))
    pair.random(2 * CHUNK + 5)
    pair.reserve()
    pair.copy(msgspec.structs.replace(QUIET, bandwidth=1))
    assert taken == [CHUNK, 5, CHUNK]


@pytest.mark.parametrize("size", SIZES)
def test_computed_digests_of_a_file_equal_the_map_of_its_copy(pair: Pair, size: int) -> None:
    data = pair.random(size)
    assert chunks.compute_digests(pair.path, size, TUNING) == map_of(data)
