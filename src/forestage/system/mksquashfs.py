"""What mksquashfs is told of the node: how much memory and how many processors it may take. Pure.

By default it takes a quarter of the machine's memory, whatever its cgroup has, and the kernel would
kill it.
"""

import re

MIN_MEMORY = 64 << 20  # bytes; mksquashfs takes no less


def has_memory_option(version: bytes) -> bool:
    """Return whether the mksquashfs of this `-version` knows -mem.

    Some earlier ones know it and are left out: one that does not would make no image at all.
    """
    match = re.search(rb"version (\d{1,3})\.(\d{1,3})", version)
    return match is not None and (int(match[1]), int(match[2])) >= (4, 4)


def format_memory_options(limit: int) -> tuple[str, ...]:
    """Return what keeps it within a cgroup of `limit` bytes: its inodes and buffers come on top."""
    return ("-mem", f"{max(MIN_MEMORY, limit // 4) >> 20}M")
