"""A write(2) that is under way for as long as a test likes.

What it writes lies in memory that is mapped from farfs, which does not answer: the kernel has noted
the write's times by then, and waits for its bytes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from far import Far

from node import until

BLOCK = 4096

# Past the page cache: then the file's other blocks can be read meanwhile, on each file system.
_WRITER = """
import mmap, os, sys
block, path, offset = sys.argv[1:]
mapped = mmap.mmap(os.open(block, os.O_RDONLY), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)
os.pwrite(os.open(path, os.O_RDWR | os.O_DIRECT), mapped, int(offset))
"""


class Parked:
    """Writes the first block of `data` to wherever it is told, once."""

    def __init__(self, far: Far, data: bytes) -> None:
        self._far = far
        self._block = far.put("block", data[:BLOCK])
        self._writers: list[subprocess.Popen[bytes]] = []

    def begin(self, path: Path, offset: int) -> None:
        """Returns once the write has begun and waits."""
        reads = self._far.calls()["read"]
        self._far.hang_reads()
        argv = [sys.executable, "-Ic", _WRITER, self._block, path, str(offset)]
        self._writers.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))
        until(lambda: self._far.calls()["read"] > reads, "the write to begin")

    def land(self) -> None:
        """Returns once it has ended, if this process has begun it."""
        self._far.answer()
        while self._writers:
            assert self._writers.pop().wait() == 0
