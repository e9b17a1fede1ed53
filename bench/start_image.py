"""The image that bench/start starts, and the program that stands for a container's start in it.

What a starting container reads of an image mounted with squashfuse is some per cent of it: the
tables at its end, and then small files, hopping. Here that is a shell that reads files of one block
each, in no order.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import images

MIB = 1 << 20
BLOCK = 128 << 10  # bytes; mksquashfs' default, and so enroot's
PROGRAM = ["/bin/sh", "/opt/start"]
FOLDER = 64  # files in each


@dataclass(frozen=True)
class StartImage:
    """An image of `size` bytes; PROGRAM in it prints `answer`."""

    size: int
    answer: str


def make_image(file: Path, mib: int, share: float, work: Path) -> StartImage:
    """Makes an image with `mib` MiB of small files, of which PROGRAM reads a share.

    Their tree is in `work` for a while.
    """
    tree = work / "tree"
    images.make_tree(tree, ("sh", "cat", "cksum"))
    files = dict(_make_files(mib * MIB // BLOCK))
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    read = random.Random(0).sample(list(files), max(1, int(len(files) * share)))
    (tree / "opt/start").write_text(f"cd /\ncat {' '.join(read)} | cksum\n")
    content = b"".join(files[name] for name in read)
    sums = subprocess.run(["cksum"], input=content, capture_output=True, check=True).stdout
    images.pack(tree, file, f"{BLOCK}")
    shutil.rmtree(tree)
    return StartImage(file.stat().st_size, sums.decode().split()[0])


def _make_files(count: int) -> Iterator[tuple[str, memoryview]]:
    # As in images.write_padding: no two are equal, and none compresses.
    text = memoryview(random.Random(1).randbytes(BLOCK + 64 * count))
    for number in range(count):
        yield f"opt/{number // FOLDER}/{number}", text[64 * number : 64 * number + BLOCK]
