"""Packs a directory of many small files into one squashfs image: `forestage pack`.

A virtual environment of 50 000 files costs a shared file system 50 000 opens on each node; as one
squashfs image it is one file, which can be staged as any other. mksquashfs replaces a file that it
cannot read by an empty one, leaves out what is gone, and ends with 0: so its messages are read. It
keeps within the memory of this process' cgroup: a login session's, or a job's (system/mksquashfs).
"""

import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from forestage.clock import Clock
from forestage.errors import Failed
from forestage.features.prepare import hints
from forestage.features.prepare.publish import MakeImageError, create_striped, replace_when_whole
from forestage.system import forked_child, mksquashfs, run
from forestage.system.run import ProcessResult
from forestage.system.striping import StripeLayout
from forestage.system.terminal import NamedValues, OutputBlock, TextLine
from forestage.units import format_duration, format_size

# Level 3: reading is as fast with any, packing far faster than with zstd's default, 15.
OPTIONS = ("-no-recovery", "-noappend", "-no-progress", "-Xcompression-level", "3")
VERSION_S = 10.0  # seconds for mksquashfs to name its release

_LOST = re.compile(r"^(?:Failed to|Could not|Cannot|.*creating empty file).*$", re.M | re.I)
_FACT = re.compile(r"^(Number of inodes|Compression) (\S+)$", re.M)


class PackResult(msgspec.Struct, frozen=True):
    """A finished image of `size` bytes, of what is in `folder`; `seconds` it took.

    `option` is what a job says to have it over the directory that it was made of; "" where nobody
    asked for that.
    """

    path: str
    folder: str
    inodes: int
    size: int
    compression: str
    seconds: float
    option: str = ""


def format_job_option(folder: Path, image: Path) -> str:
    """Pure: the option by which a job's steps see the image at `folder`; both absolute.

    Raises MakeImageError where no job may have it there.
    """
    word = f"stage={image}@{folder}"
    if refused := hints.list_refusals([word]):
        raise MakeImageError("; ".join(refused), "leave out --here, or name other paths")
    return f"--{word}"


def format_mksquashfs_command(
    folder: Path, image: Path, compression: tuple[str, ...], limits: tuple[str, ...] = ()
) -> list[str]:
    """Pure: the squashfs-tools' command line; without `compression`, their own default, gzip."""
    return ["mksquashfs", str(folder), str(image), *limits, *compression, *OPTIONS]


def list_limit_options(root: Path) -> tuple[str, ...]:
    """Return the options by which mksquashfs keeps within what this process may use.

    `root` is where /proc and /sys are. Raises Failed.
    """
    processors = ("-processors", str(forked_child.count_own_processors()))
    memory = forked_child.find_own_memory_limit(root)
    if memory is None:
        return processors
    version = run.run_program(["mksquashfs", "-version"], timeout=VERSION_S).out
    if not mksquashfs.has_memory_option(version.encode()):
        return processors
    return (*processors, *mksquashfs.format_memory_options(memory))


def _make_error(ran: ProcessResult) -> Failed:
    """Return the error for a program that made no image. Pure."""
    if ran.code != -signal.SIGKILL:
        return Failed("program", ran.format_ending(), "nothing was packed")
    return Failed(
        "program",
        f"{ran.argv[0]} was killed by signal 9: its memory may have run out",
        "nothing was packed; run it where it may use more memory, as in a job with a larger --mem",
    )


def pack_directory(
    folder: Path,
    image: Path,
    force: bool,
    clock: Clock,
    progress: Callable[[str], None],
    layout: StripeLayout | None = None,
    root: Path = Path("/"),
) -> PackResult:
    """Packs `folder` into `image`, which gets its name when it is whole and on disk.

    `layout` is that of its file, where that lies on Lustre. `root` is where /proc and /sys are.

    Raises MakeImageError for what cannot be packed there, Failed where the squashfs-tools fail or
    something of the tree was lost, OSError.
    """
    began = clock.monotonic()
    # Absolute: programs are run elsewhere.
    folder, parent = Path(os.path.realpath(folder)), Path(os.path.realpath(image.parent))
    if not folder.is_dir():
        raise MakeImageError(f"{folder} is no directory")
    if parent.is_relative_to(folder):
        raise MakeImageError(f"{image} would be part of itself", "put it outside of the directory")
    target = parent / image.name
    with replace_when_whole(target, force) as part:
        if layout is not None:
            create_striped(part, layout)  # mksquashfs writes into the file that is there
        progress(f"packing {folder}")
        limits = list_limit_options(root)
        ran = run.run_program(format_mksquashfs_command(folder, part, ("-comp", "zstd"), limits))
        if ran.code != 0 and "is not supported" in ran.err + ran.out:
            ran = run.run_program(format_mksquashfs_command(folder, part, (), limits))
        if lost := _LOST.search(ran.err):
            raise Failed("program", f"mksquashfs: {lost[0]}", "nothing was packed")
        shown = ran if ran.code else run.run_program(["unsquashfs", "-s", str(part)])
        facts: dict[str, str] = dict(_FACT.findall(shown.out))
        if "Number of inodes" not in facts:
            raise _make_error(shown)
        size = part.stat().st_size
    took = round(clock.monotonic() - began, 3)
    compression = facts.get("Compression", "unknown")
    return PackResult(
        str(target), str(folder), int(facts["Number of inodes"]), size, compression, took
    )


def format_output(done: PackResult) -> list[OutputBlock]:
    """Pure: what `pack` prints."""
    facts = (
        ("inodes", str(done.inodes)),
        ("size", f"{format_size(done.size)}, {done.compression}"),
        ("time", format_duration(done.seconds)),
    )
    path, folder = (
        quote(one, safe="/", errors="surrogateescape") for one in (done.path, done.folder)
    )
    use = f'sbatch --comment="stage={path}@{folder}" ...'
    if done.option:
        use = f"srun {shlex.quote(done.option)} ..."
    return [
        TextLine(f"Packed {done.path}", heading=True),
        NamedValues(facts, indent=2),
        TextLine("Jobs see it over its directory with:"),
        TextLine(use, 2, whole=True),
    ]
