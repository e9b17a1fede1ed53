"""Reserves the space of a copy before its first byte; a sparse source keeps its holes."""

import contextlib
import errno
import os
from collections.abc import Set
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from forestage.cache.part import ENTRY_BYTES, Part, chunk_count
from forestage.system import file_systems, files, libc

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h
SPARE = 256 * 1024  # bytes: entry.json, and what directories and inodes may take on the way
_ZEROED = 1024 * 1024  # bytes that are read and, if need be, made zeros at once


class ChunkMap(NamedTuple):
    """What is known of a source's holes: numbers of chunks.

    `to_read` are all but those that certainly hold nothing but zeros. `to_reserve` are those for
    which space is taken. In those of `likely_sparse` zeros are likely, and take none.
    """

    to_read: Set[int]
    to_reserve: Set[int]
    likely_sparse: Set[int] = frozenset()


def map_chunks(source: int, size: int, chunk: int, offset: int = 0) -> ChunkMap:
    """Return what an open file's holes mean for its chunks; `offset` as in `list_data_chunks`.

    A hole is left unread only where its file system is this kernel's own. Elsewhere the answer
    decides on space alone, and only of a file that lacks blocks as well: who wrote no bytes must
    not evict what others did. If it was untrue, the copy takes space that was not reserved.
    """
    if file_systems.is_hole_map_true(source):
        data = list_data_chunks(source, size, chunk, offset)
        return ChunkMap(data, data)
    every = set(range(offset // chunk, chunk_count(offset + size, chunk)))
    try:
        blocks = os.fstat(source).st_blocks
    except OSError:  # root may be squashed there, or the server gone: that is for the reads to say
        return ChunkMap(every, every, every)
    if not file_systems.is_probably_sparse(size, blocks):
        return ChunkMap(every, every)
    return ChunkMap(every, list_data_chunks(source, size, chunk, offset), every)


def list_data_chunks(source: int, size: int, chunk: int, offset: int = 0) -> set[int]:
    """Return the chunks that hold any data, as the open file's file system has it.

    The file begins `offset` bytes behind the first chunk's beginning. Of a chunk that has data
    nothing more is asked: a file may have more holes than any time is enough for. Each answer
    brings this to a later chunk, whatever it is: a file system may say that data end where they
    begin.
    """
    found: set[int] = set()
    at = 0
    while at < size:
        try:
            start = max(at, os.lseek(source, at, os.SEEK_DATA))
            if start >= size:
                break
            end = min(size, max(start + 1, os.lseek(source, start, os.SEEK_HOLE)))
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                break
            start, end = at, size  # a file system without SEEK_DATA: no holes are known
        after = chunk_count(offset + end, chunk)
        found.update(range((offset + start) // chunk, after))
        at = after * chunk - offset
    return found


def needed_bytes(size: int, chunk: int, data: Set[int]) -> int:
    """Pure: the bytes that `reserve_part` takes for the image and its map; holes take none."""
    last = chunk_count(size, chunk) - 1
    short = (last + 1) * chunk - size if last in data else 0
    return len(data) * chunk - short + map_bytes(size, chunk)


def map_bytes(size: int, chunk: int) -> int:
    """Pure: the length of the map of an image of `size` bytes."""
    return chunk_count(size, chunk) * ENTRY_BYTES


def reserve_part(part: Part, size: int, chunk: int, data: Set[int]) -> None:
    """Makes the part's files and takes their space at once. Raises OSError (ENOSPC)."""
    with open_part_file(part.image) as fd:
        for _, run in groupby(enumerate(sorted(data)), lambda item: item[1] - item[0]):
            numbers = [number for _, number in run]
            start = numbers[0] * chunk
            allocate_space(fd, start, min(size, (numbers[-1] + 1) * chunk) - start)
        os.ftruncate(fd, size)
    reserve_small_files(part, size, chunk)


def reserve_small_files(part: Part, size: int, chunk: int) -> None:
    """Takes the space of all but the image. Raises OSError (ENOSPC)."""
    with open_part_file(part.map) as fd:
        allocate_space(fd, 0, map_bytes(size, chunk))
        os.ftruncate(fd, map_bytes(size, chunk))
    with open_part_file(part.spare) as fd:
        allocate_space(fd, 0, SPARE)


def open_part_file(path: Path) -> contextlib.AbstractContextManager[int]:
    """One of a part's files, made if need be; what it has stays."""
    return files.open_descriptor(path, os.O_RDWR | os.O_CREAT, 0o600)


def punch_hole(fd: int, start: int, length: int) -> None:
    """Make a hole again of what an earlier copy may have left there. Raises OSError.

    Where the cache's file system has no such call, the bytes become zeros in another way.
    """
    if _fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, start, length):
        return
    for at in range(start, start + length, _ZEROED):
        zeros = bytes(min(_ZEROED, start + length - at))
        if os.pread(fd, len(zeros), at).strip(b"\0"):
            os.pwrite(fd, zeros, at)


def allocate_space(fd: int, start: int, length: int) -> None:
    """Takes the space, the file's size left as it is. Raises OSError; not for want of the call."""
    _fallocate(fd, FALLOC_FL_KEEP_SIZE, start, length)


def _fallocate(fd: int, mode: int, start: int, length: int) -> bool:
    """Return whether the file system has this call. Raises OSError if it failed."""
    try:
        libc.call_libc("fallocate", fd, mode, libc.make_int64(start), libc.make_int64(length))
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    return True
