"""Reserves the space of a copy before its first byte; a sparse source keeps its holes."""

import contextlib
import errno
import os
from itertools import groupby
from pathlib import Path

from forestage.cache.part import ENTRY_BYTES, Part, chunk_count
from forestage.system import files, libc

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h
SPARE = 256 * 1024  # bytes: entry.json, and what directories and inodes may take on the way


def data_chunks(source: int, size: int, chunk: int, begins: int = 0) -> set[int]:
    """The numbers of the chunks that hold any data; the others are holes of a sparse file.

    The open file `begins` so far behind the first chunk's beginning. Of a chunk that has data
    nothing more is asked: a file may have more holes than any time is enough for.
    """
    found: set[int] = set()
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
            end = min(size, os.lseek(source, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                break
            start, end = at, size  # a file system without SEEK_DATA: no holes are known
        after = chunk_count(begins + end, chunk)
        found.update(range((begins + start) // chunk, after))
        at = after * chunk - begins
    return found


def needed(size: int, chunk: int, data: set[int]) -> int:
    """Pure: the bytes that `reserve` takes for the image and its map; holes take none."""
    last = chunk_count(size, chunk) - 1
    short = (last + 1) * chunk - size if last in data else 0
    return len(data) * chunk - short + map_bytes(size, chunk)


def map_bytes(size: int, chunk: int) -> int:
    """Pure: the length of the map of an image of `size` bytes."""
    return chunk_count(size, chunk) * ENTRY_BYTES


def reserve(part: Part, size: int, chunk: int, data: set[int]) -> None:
    """Makes the part's files and takes their space at once. Raises OSError (ENOSPC)."""
    with opened(part.image) as fd:
        for _, run in groupby(enumerate(sorted(data)), lambda item: item[1] - item[0]):
            numbers = [number for _, number in run]
            start = numbers[0] * chunk
            allocate(fd, start, min(size, (numbers[-1] + 1) * chunk) - start)
        os.ftruncate(fd, size)
    reserve_small(part, size, chunk)


def reserve_small(part: Part, size: int, chunk: int) -> None:
    """Takes the space of all but the image. Raises OSError (ENOSPC)."""
    with opened(part.map) as fd:
        allocate(fd, 0, map_bytes(size, chunk))
        os.ftruncate(fd, map_bytes(size, chunk))
    with opened(part.spare) as fd:
        allocate(fd, 0, SPARE)


def opened(path: Path) -> contextlib.AbstractContextManager[int]:
    """One of a part's files, made if need be; what it has stays."""
    return files.opened(path, os.O_RDWR | os.O_CREAT, 0o600)


def punch(fd: int, start: int, length: int) -> None:
    """Makes a hole again of what an earlier copy may have left there. Raises OSError."""
    _fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, start, length)


def allocate(fd: int, start: int, length: int) -> None:
    """Takes the space, the file's size left as it is. Raises OSError; not for want of the call."""
    _fallocate(fd, FALLOC_FL_KEEP_SIZE, start, length)


def _fallocate(fd: int, mode: int, start: int, length: int) -> None:
    try:
        libc.call("fallocate", fd, mode, libc.wide(start), libc.wide(length))
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
