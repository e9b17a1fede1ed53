"""Space of a part: reserved before the first byte or refused at once, and none for holes."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forestage.cache import allocation
from forestage.cache.part import ENTRY_BYTES, Part
from forestage.system import file_systems, libc

CHUNK = 64 * 1024
BLOCK = 4096


@pytest.mark.parametrize(
    ("data", "size", "found"),
    [
        ([], 4 * CHUNK, set()),
        ([0], 4 * CHUNK, {0}),
        ([2 * CHUNK], 4 * CHUNK, {2}),
        ([0, 4 * CHUNK - BLOCK], 4 * CHUNK, {0, 3}),
        # One block on each side of a border, and a short last chunk.
        ([CHUNK - BLOCK, CHUNK], 4 * CHUNK, {0, 1}),
        ([3 * CHUNK], 3 * CHUNK + 5, {3}),
        ([], 5, set()),
    ],
)
def test_chunks_with_data_are_listed_and_holes_are_not(
    source: int, data: list[int], size: int, found: set[int]
) -> None:
    os.truncate(source, size)
    for start in data:
        os.pwrite(source, b"x" * min(BLOCK, size - start), start)
    assert allocation.list_data_chunks(source, size, CHUNK) == found


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=50,
)
@given(st.sets(st.integers(0, 40)), st.integers(1, 42 * BLOCK), st.integers(1, 20 * BLOCK))
def test_chunk_with_a_byte_is_never_taken_for_a_hole(
    source: int, blocks: set[int], size: int, chunk: int
) -> None:
    os.truncate(source, 0)
    os.truncate(source, size)
    written = {block * BLOCK for block in blocks if block * BLOCK < size}
    for start in written:
        os.pwrite(source, b"x", start)
    found = allocation.list_data_chunks(source, size, chunk)
    assert {start // chunk for start in written} <= found
    assert found <= set(range(-(-size // chunk)))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_without_seek_hole_counts_all_chunks_as_data(
    source: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    os.truncate(source, 3 * CHUNK + 1)

    def unable(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "lseek", unable)
    assert allocation.list_data_chunks(source, 3 * CHUNK + 1, CHUNK) == {0, 1, 2, 3}


def test_data_chunks_of_a_file_that_begins_within_a_chunk_are_numbered_from_that_chunk(
    source: int,
) -> None:
    os.truncate(source, 4 * CHUNK)
    os.pwrite(source, b"x" * 2 * BLOCK, 2 * CHUNK - BLOCK)
    assert allocation.list_data_chunks(source, 4 * CHUNK, CHUNK) == {1, 2}
    assert allocation.list_data_chunks(source, 4 * CHUNK, CHUNK, 10 * CHUNK - BLOCK) == {11}
    assert allocation.list_data_chunks(source, 4 * CHUNK, CHUNK, 10 * CHUNK) == {11, 12}


def test_listing_data_chunks_takes_two_lseeks_per_chunk_however_many_holes(
    source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(source, 4 * CHUNK)
    for start in range(0, 4 * CHUNK, 2 * BLOCK):
        os.pwrite(source, b"x" * BLOCK, start)
    asked, real = [], os.lseek

    def lseek(fd: int, at: int, how: int) -> int:
        asked.append(at)
        return real(fd, at, how)

    monkeypatch.setattr(os, "lseek", lseek)
    assert allocation.list_data_chunks(source, 4 * CHUNK, CHUNK) == {0, 1, 2, 3}
    assert len(asked) == 2 * 4


Lie = Callable[[int, int], int]
LIES: dict[str, Lie] = {
    "no data": lambda at, how: -1 if how == os.SEEK_DATA else at,
    "shifted": lambda at, how: at + 20 * BLOCK if how == os.SEEK_DATA else 1 << 40,
    "the same": lambda at, how: at,
    "back": lambda at, how: 0,
    "beyond the end": lambda at, how: 1 << 40,
}


def lie(monkeypatch: pytest.MonkeyPatch, answer: Lie) -> None:
    """Has a file system that is not this kernel's own answer so where data and holes are."""

    def lseek(_: int, at: int, how: int) -> int:
        found = answer(at, how)
        if found < 0:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return found

    monkeypatch.setattr(file_systems, "read_file_system_type", lambda _: 0x65735546)
    monkeypatch.setattr(os, "lseek", lseek)


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
@pytest.mark.parametrize("begins", [0, BLOCK, 10 * CHUNK - BLOCK])
def test_listing_data_chunks_ends_whatever_lseek_answers(
    source: int, monkeypatch: pytest.MonkeyPatch, answer: Lie, begins: int
) -> None:
    lie(monkeypatch, answer)
    first, last = begins // CHUNK, (begins + 40 * CHUNK) // CHUNK
    assert allocation.list_data_chunks(source, 40 * CHUNK, CHUNK, begins) <= set(
        range(first, last + 1)
    )


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
@pytest.mark.parametrize("begins", [0, 10 * CHUNK - BLOCK])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_holes_of_an_untrusted_file_system_save_space_but_are_read(
    source: int, monkeypatch: pytest.MonkeyPatch, answer: Lie, begins: int, is_sparse: bool
) -> None:
    size = 4 * CHUNK
    os.truncate(source, size)
    os.pwrite(source, b"x" * (BLOCK if is_sparse else size), 0)
    lie(monkeypatch, answer)
    every = set(range(begins // CHUNK, (begins + size - 1) // CHUNK + 1))
    found = allocation.map_chunks(source, size, CHUNK, begins)
    said = allocation.list_data_chunks(source, size, CHUNK, begins)
    assert found.to_read == every
    assert found.to_reserve == (said if is_sparse else every)
    assert found.likely_sparse == (every if is_sparse else set())


def test_holes_of_the_kernels_own_file_systems_are_neither_read_nor_reserved(source: int) -> None:
    os.truncate(source, 4 * CHUNK)
    os.pwrite(source, b"x", 2 * CHUNK)
    assert allocation.map_chunks(source, 4 * CHUNK, CHUNK) == ({2}, {2}, set())


@pytest.mark.parametrize("has_call", [True, False])
def test_punched_hole_reads_as_zeros_even_if_the_disk_cannot_punch(
    part: Part, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    size = 40 * CHUNK + 5
    part.image.write_bytes(b"x" * size)
    if not has_call:
        monkeypatch.setattr(libc, "call_libc", Kernel(errno.EOPNOTSUPP))
    with allocation.open_part_file(part.image) as fd:
        allocation.punch_hole(fd, CHUNK, size - CHUNK)
    assert part.image.read_bytes() == b"x" * CHUNK + bytes(size - CHUNK)


def test_reserved_part_has_full_size_allocated_space_and_an_empty_map(part: Part) -> None:
    allocation.reserve_part(part, 3 * CHUNK + 5, CHUNK, {0, 1, 2, 3})
    assert part.image.stat().st_size == 3 * CHUNK + 5
    assert part.allocated_bytes() >= 3 * CHUNK + 5
    assert part.read_digests() == bytes(4 * 16)
    assert {path.stat().st_mode & 0o777 for path in (part.image, part.map)} == {0o600}


def test_reserving_a_part_allocates_only_the_chunks_with_data(part: Part) -> None:
    size = 1000 * CHUNK
    allocation.reserve_part(part, size, CHUNK, {1, 2, 500})
    assert part.image.stat().st_size == size
    assert 3 * CHUNK <= part.allocated_bytes() < 4 * CHUNK
    fd = os.open(part.image, os.O_RDONLY)
    assert allocation.list_data_chunks(fd, size, CHUNK) <= {1, 2, 500}
    os.close(fd)


def test_second_reserve_keeps_bytes_and_map_of_the_part(part: Part) -> None:
    allocation.reserve_part(part, 2 * CHUNK, CHUNK, {0, 1})
    with part.image.open("r+b") as file:
        file.write(b"first")
    with part.map.open("r+b") as file:
        file.write(b"\1" * 16)
    before = part.image.stat().st_ino
    allocation.reserve_part(part, 2 * CHUNK, CHUNK, {0, 1})
    assert part.image.read_bytes() == b"first".ljust(2 * CHUNK, b"\0")
    assert part.read_digests() == b"\1" * 16 + bytes(16)
    assert part.image.stat().st_ino == before


class Kernel:
    """fallocate(2) that fails with a number; notes what was asked for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[tuple[int, int, int]] = []

    def __call__(
        self, name: str, fd: int, mode: int, start: ctypes.c_int64, length: ctypes.c_int64
    ) -> int:
        assert name == "fallocate"
        self.asked.append((mode, start.value, length.value))
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_reserve_on_a_full_or_failing_disk_raises_at_the_first_call(
    part: Part, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kernel = Kernel(number)
    monkeypatch.setattr(libc, "call_libc", kernel)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        allocation.reserve_part(part, 9 * CHUNK, CHUNK, {0, 2})
    assert caught.value.errno == number
    assert len(kernel.asked) == 1


def test_file_system_without_fallocate_gets_a_part_of_full_size(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libc, "call_libc", Kernel(errno.EOPNOTSUPP))
    allocation.reserve_part(part, 2 * CHUNK, CHUNK, {0, 1})
    assert part.image.stat().st_size == 2 * CHUNK


def test_neighbouring_chunks_are_reserved_in_one_call_and_not_beyond_the_end_of_file(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One extent for each run: a file in thousands of pieces is read slowly."""
    kernel = Kernel(0)
    monkeypatch.setattr(libc, "call_libc", kernel)
    allocation.reserve_part(part, 6 * CHUNK + 7, CHUNK, {5, 0, 1, 2, 6})
    keep = allocation.FALLOC_FL_KEEP_SIZE
    runs = [(keep, 0, 3 * CHUNK), (keep, 5 * CHUNK, CHUNK + 7)]
    small = [(keep, 0, 7 * ENTRY_BYTES), (keep, 0, allocation.SPARE)]
    assert kernel.asked == runs + small


@pytest.mark.parametrize(
    ("size", "data", "needed"),
    [
        (3 * CHUNK, {0, 1, 2}, 3 * CHUNK + 48),
        (3 * CHUNK, {1}, CHUNK + 48),
        (2 * CHUNK + 5, {2}, 5 + 48),
        (2 * CHUNK + 5, {0}, CHUNK + 48),
        (1000 * CHUNK, set(), 16_000),
    ],
)
def test_needed_bytes_equal_what_reserve_part_allocates(
    part: Part, size: int, data: set[int], needed: int
) -> None:
    assert allocation.needed_bytes(size, CHUNK, data) == needed
    allocation.reserve_part(part, size, CHUNK, data)
    assert needed <= part.allocated_bytes() < needed + 3 * BLOCK
