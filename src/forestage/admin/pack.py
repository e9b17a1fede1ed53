"""Packs a directory of many small files into one squashfs image: `forestage pack`.

A virtual environment of 50 000 files costs a shared file system 50 000 opens on each node; as one
squashfs image it is one file, which can be staged as any other. mksquashfs replaces a file that it
cannot read by an empty one and ends with 0, so its messages are read, and its inodes counted.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from forestage.admin.publish import refuse_replacing, unfinished
from forestage.clock import Clock
from forestage.errors import Failed, ImageError
from forestage.system import atomic, run
from forestage.system.run import Ran
from forestage.system.terminal import Facts, Line, Piece
from forestage.units import format_duration, format_size

# Level 3: reading is as fast with any, packing far faster than with zstd's default, 15.
OPTIONS = ("-no-recovery", "-noappend", "-no-progress")
LEVEL = ("-Xcompression-level", "3")

_LOST = re.compile(r"^(?:Failed to|Could not|Cannot|.*creating empty file).*$", re.M | re.I)
_FACT = re.compile(r"^(Number of inodes|Compression) (\S+)$", re.M)


class Packed(msgspec.Struct, frozen=True):
    """A finished image. Bytes: `size` of it, `tree` of the files in it; `seconds` it took."""

    path: str
    inodes: int
    tree: int
    size: int
    compression: str
    seconds: float


class Tree(msgspec.Struct, frozen=True):
    """What a directory holds: inodes, hard links once; and its files' bytes."""

    inodes: int
    size: int


def argv(folder: Path, image: Path, compression: str) -> list[str]:
    """Pure: the squashfs-tools' command line; "" is their own default, gzip."""
    chosen = ("-comp", compression) if compression else ()
    return ["mksquashfs", str(folder), str(image), *OPTIONS, *chosen, *LEVEL]


def pack(
    folder: Path, image: Path, force: bool, clock: Clock, progress: Callable[[str], None]
) -> Packed:
    """Packs `folder` into `image`, which gets its name when it is whole and on disk.

    Raises ImageError for what cannot be packed there, Failed where the squashfs-tools fail or the
    image is not what the tree was, OSError.
    """
    began = clock.monotonic()
    folder, target = Path(os.path.realpath(folder)), _target(folder, image)
    refuse_replacing(target, force)
    progress(f"counting what is in {folder}")
    before = counted(folder)
    with unfinished(target) as part:
        progress(f"packing {before.inodes} inodes, {format_size(before.size)}")
        _make(folder, part)
        compression = verified(run.run(["unsquashfs", "-s", str(part)]), before.inodes)
        size = part.stat().st_size
        atomic.sync(part)
        refuse_replacing(target, force)
        part.replace(target)
        atomic.sync_directory(target.parent)
    took = round(clock.monotonic() - began, 3)
    return Packed(str(target), before.inodes, before.size, size, compression, took)


def _target(folder: Path, image: Path) -> Path:
    """The image's absolute path: programs are run elsewhere. Raises ImageError."""
    if not folder.is_dir():
        raise ImageError(f"{folder} is no directory")
    parent = Path(os.path.realpath(image.parent))
    if parent.is_relative_to(folder):
        raise ImageError(f"{image} would be part of itself", "put it outside of the directory")
    return parent / image.name


def counted(folder: Path) -> Tree:
    """Counts what is below a directory. Raises OSError for what cannot be entered."""
    links: set[tuple[int, int]] = set()
    inodes, size = 1, 0
    for facts in _below(str(folder)):
        if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
            if (facts.st_dev, facts.st_ino) in links:
                continue
            links.add((facts.st_dev, facts.st_ino))
        inodes += 1
        size += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return Tree(inodes, size)


def _below(folder: str) -> Iterator[os.stat_result]:
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for one in found:
                if one.is_dir(follow_symlinks=False):
                    waiting.append(one.path)
                yield one.stat(follow_symlinks=False)


def _make(folder: Path, part: Path) -> None:
    """Raises Failed, also where something of the tree was lost."""
    ran = run.run(argv(folder, part, "zstd"))
    if ran.code != 0 and "is not supported" in ran.err + ran.out:
        ran = run.run(argv(folder, part, ""))
    if lost := _LOST.search(ran.err):
        raise Failed("program", f"mksquashfs: {lost[0]}", "nothing was packed")
    if ran.code != 0:
        raise Failed("program", ran.explained(), "nothing was packed")


def verified(ran: Ran, inodes: int) -> str:
    """Pure: the image's compression, if it has as many inodes as the tree. Raises Failed."""
    facts: dict[str, str] = dict(_FACT.findall(ran.out))
    if ran.code != 0 or "Number of inodes" not in facts:
        raise Failed("program", ran.explained(), "nothing was packed")
    found = int(facts["Number of inodes"])
    if found != inodes:
        what = f"the image has {found} inodes, the directory had {inodes}"
        raise Failed("program", what, "was it changed meanwhile? Nothing was packed")
    return facts.get("Compression", "unknown")


def pieces(done: Packed) -> list[Piece]:
    """Pure: what `pack` prints."""
    share = f", {100 * done.size / done.tree:.0f}% of" if done.tree else " of"
    return [
        Line(f"Packed {done.path}", heading=True),
        Facts(
            (
                ("inodes", str(done.inodes)),
                ("size", f"{format_size(done.size)}{share} {format_size(done.tree)}"),
                ("compression", done.compression),
                ("time", format_duration(done.seconds)),
            ),
            indent=2,
        ),
    ]
