"""One image of a tree of many small files: `forestage pack`.

A virtual environment of 50 000 files costs a shared file system 50 000 opens on each node; as one
squashfs it is one file, which can be staged as any image.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from forestage.clock import Clock
from forestage.errors import Failed, ImageError
from forestage.publish import refuse_replacing, unfinished
from forestage.system import atomic, run
from forestage.system.run import Ran
from forestage.system.terminal import Facts, Line, Piece
from forestage.units import format_duration, format_size

# Level 3: reading is as fast with any, packing far faster than with zstd's default, 15.
OPTIONS = ("-no-recovery", "-noappend", "-no-progress")
LEVEL = ("-Xcompression-level", "3")

# mksquashfs 4.5: a file that it cannot read becomes an empty one, and the exit status is 0.
_LOST = re.compile(r"^(?:Failed to|Could not|Cannot|.*creating empty file).*$", re.M | re.I)
_FACT = re.compile(r"^(Number of inodes|Compression) (\S+)$", re.M)


class Packed(msgspec.Struct, frozen=True):
    """An image that is there. Bytes: `size` of it, `tree` of the files in it; `seconds` it took."""

    path: str
    inodes: int
    tree: int
    size: int
    compression: str
    seconds: float


class Superblock(msgspec.Struct, frozen=True):
    """What `unsquashfs -s` reads at the head of an image."""

    inodes: int
    compression: str


class Counted(msgspec.Struct, frozen=True):
    """What a tree holds: files, directories and links, hard links once; and its files' bytes."""

    inodes: int
    size: int


def argv(folder: Path, image: Path, compression: str) -> list[str]:
    """Pure: the squashfs-tools' command line; "" is their own default, gzip."""
    chosen = ("-comp", compression) if compression else ()
    return ["mksquashfs", str(folder), str(image), *OPTIONS, *chosen, *LEVEL]


def pack(
    folder: Path, image: Path, force: bool, clock: Clock, tell: Callable[[str], None]
) -> Packed:
    """Packs `folder` into `image`, which gets its name when it is whole and on disk.

    Raises ImageError for what cannot be packed there, Failed where the squashfs-tools fail or the
    image is not what the tree was, OSError.
    """
    began = clock.monotonic()
    inside, folder = _places(folder, image)
    refuse_replacing(inside, force)
    tell(f"counting what is in {folder}")
    before = counted(folder)
    with unfinished(inside) as part:
        tell(f"packing {before.inodes} inodes, {format_size(before.size)}")
        _make(folder, part)
        block = proven(run.run(["unsquashfs", "-s", str(part)]), before.inodes)
        size = part.stat().st_size
        atomic.sync(part)
        refuse_replacing(inside, force)
        part.replace(inside)
        atomic.sync_directory(inside.parent)
    took = round(clock.monotonic() - began, 3)
    return Packed(str(inside), block.inodes, before.size, size, block.compression, took)


def _places(folder: Path, image: Path) -> tuple[Path, Path]:
    """Image and folder as absolute paths: programs are run elsewhere. Raises ImageError."""
    if not folder.is_dir():
        raise ImageError(f"{folder} is no directory")
    real = Path(os.path.realpath(folder))
    parent = Path(os.path.realpath(image.parent))
    if parent.is_relative_to(real):
        raise ImageError(f"{image} would be part of itself", "put it outside of the directory")
    return parent / image.name, real


def counted(folder: Path) -> Counted:
    """Looks at all that is below a directory. Raises OSError for what cannot be entered."""
    links: set[tuple[int, int]] = set()
    inodes, size = 1, 0
    for facts in _below(str(folder)):
        if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
            if (facts.st_dev, facts.st_ino) in links:
                continue
            links.add((facts.st_dev, facts.st_ino))
        inodes += 1
        size += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return Counted(inodes, size)


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


def proven(ran: Ran, inodes: int) -> Superblock:
    """Pure: what the image says of itself, if it has as many inodes as the tree. Raises Failed."""
    told = dict(_FACT.findall(ran.out))
    if ran.code != 0 or "Number of inodes" not in told:
        raise Failed("program", ran.explained(), "nothing was packed")
    found = int(told["Number of inodes"])
    if found != inodes:
        what = f"the image has {found} inodes, the directory had {inodes}"
        raise Failed("program", what, "was it changed meanwhile? Nothing was packed")
    return Superblock(found, told.get("Compression", "unknown"))


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
