"""Copies an image into a shared directory, striped over all OSTs on Lustre: `forestage publish`.

Lustre fixes a file's layout when the file is made, so only a copy can be striped otherwise. The
copy gets its name when it was synced, read back and compared: nobody reads half of it.
"""

import contextlib
import filecmp
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from forestage.clock import Clock
from forestage.errors import Failed, ForestageError
from forestage.system import records, run
from forestage.system.files import open_descriptor
from forestage.system.striping import StripeLayout, format_setstripe_command
from forestage.system.terminal import NamedValues, OutputBlock, TextLine
from forestage.system.tree import RootedTree
from forestage.units import format_duration, format_rate, format_size

TIMEOUT = 60.0  # seconds for lfs to make an empty file


class MakeImageError(ForestageError):
    """No image can be made of this, or none can be put there."""


class PublishResult(msgspec.Struct, frozen=True):
    """A finished copy; `seconds` include reading it back.

    `striped`: it has the layout that was asked for; else `filesystem` is not Lustre.
    """

    path: str
    size: int
    seconds: float
    filesystem: str
    striped: bool
    layout: StripeLayout


def publish_image(
    source: Path,
    folder: Path,
    layout: StripeLayout,
    force: bool,
    files: RootedTree,
    clock: Clock,
    progress: Callable[[str], None],
) -> PublishResult:
    """Copies `source` into `folder` under its own name, as the calling user.

    Raises MakeImageError for what cannot be published, Failed where lfs fails or what is read back
    is not what the source has, OSError.
    """
    began = clock.monotonic()
    if not source.is_file():
        raise MakeImageError(f"{source} is no regular file")
    if not folder.is_dir():
        raise MakeImageError(f"{folder} is no directory")
    kind = read_file_system_type(folder, files)
    target = folder / source.name
    with (
        replace_when_whole(target, force) as part,
        _create_file(part, layout if kind == "lustre" else None) as fd,
    ):
        # By the descriptor: who owns the folder may put a link in the name's place meanwhile.
        copy = Path(f"/proc/self/fd/{fd}")
        before = source.stat()
        progress(f"copying {source}")
        shutil.copyfile(source, copy)
        progress(f"comparing {part} with {source}")
        # What is on the servers is read next, not what this node still has in memory of it.
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        same = filecmp.cmp(source, copy, shallow=False)
        if not same or source.stat().st_mtime_ns != before.st_mtime_ns:
            what = "what is read back is not what the image has"
            raise Failed("io", what, "was it written to meanwhile? Nothing was published")
        os.fchmod(fd, before.st_mode & 0o777)
        if not os.path.samestat(part.lstat(), os.fstat(fd)):
            raise MakeImageError(f"somebody put another file in the place of {part}")
        size = os.fstat(fd).st_size
    took = round(clock.monotonic() - began, 3)
    return PublishResult(str(target), size, took, kind, kind == "lustre", layout)


def read_file_system_type(folder: Path, files: RootedTree) -> str:
    """The kind of file system that a directory lies on."""
    under = files.find_mount(os.path.realpath(folder))
    return under.kind if under else "unknown"


@contextlib.contextmanager
def replace_when_whole(target: Path, force: bool) -> Iterator[Path]:
    """A name beside the target, renamed to the target's at the end; nothing of that name stays.

    Raises MakeImageError where something has the target's name already, before and after the work.
    """
    _check_may_replace(target, force)
    part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
    try:
        yield part
        records.sync_file(part)
        _check_may_replace(target, force)
        part.replace(target)
        records.sync_directory(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _check_may_replace(target: Path, force: bool) -> None:
    if target.is_dir():
        raise MakeImageError(f"{target} is a directory")
    if not force and (target.exists() or target.is_symlink()):
        raise MakeImageError(f"{target} is there already", "--force replaces it at once")


@contextlib.contextmanager
def _create_file(part: Path, layout: StripeLayout | None) -> Iterator[int]:
    """Makes the empty file, with the layout if any, for its owner only; yields it open."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    if layout is None:
        flags |= os.O_CREAT | os.O_EXCL
    else:
        create_striped(part, layout)
    with open_descriptor(part, flags, 0o600) as fd:
        os.fchmod(fd, 0o600)  # others may read it once it has the source's mode
        yield fd


def create_striped(part: Path, layout: StripeLayout) -> None:
    """Makes the empty file, on Lustre. Raises Failed, OSError."""
    ran = run.run_program(format_setstripe_command(layout, part), timeout=TIMEOUT)
    if ran.code != 0:
        raise Failed("program", ran.format_ending(), "nothing was published")


def format_output(done: PublishResult) -> list[OutputBlock]:
    """Pure: what `publish` prints."""
    osts = "all OSTs" if done.layout.stripes == -1 else f"{done.layout.stripes} OSTs"
    layout = f"{osts}, in stripes of {done.layout.size}"
    if not done.striped:
        layout = f"not striped: {done.filesystem} is not Lustre, so this is a plain copy"
    rate = format_rate(done.size, done.seconds)
    facts = (
        ("size", format_size(done.size)),
        ("layout", layout),
        ("time", f"{format_duration(done.seconds)} ({rate}, read back and compared)"),
    )
    return [TextLine(f"Published {done.path}", heading=True), NamedValues(facts, indent=2)]
