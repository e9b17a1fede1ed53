"""The memory that chunks pass through on their way, a piece at a time.

Huge pages: of a piece in pages of 4 KiB a disk gets requests of 1 MiB at most, for want of entries
in its lists. With them, copies between loop devices took a quarter less time.
"""

import contextlib
import ctypes
import mmap

PIECE = 4 * 1024 * 1024
"""Bytes. Small enough for reading and writing to overlap early, large enough for a disk's queue."""

HUGE_PAGE = 2 * 1024 * 1024  # bytes, on the machines that GPUs are put into


def piece(chunk: int) -> memoryview:
    """Page-aligned memory for the pieces of a chunk of so many bytes, as O_DIRECT wants it.

    Freed by the collector: an error that is kept keeps slices of it alive, and then it cannot be
    closed.
    """
    size = min(chunk, PIECE)
    # Private: shared memory gets no huge pages. The kernel aligns for them since 6.7 only.
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    return memoryview(memory)[start : start + size]
