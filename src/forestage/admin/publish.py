"""Copies an image into a shared directory, striped over all OSTs on Lustre: `forestage publish`.

Lustre fixes a file's layout when the file is made, so only a copy can be striped otherwise. The
copy gets its name when it was read back, compared and synced: nobody reads half of it.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from forestage.cache.digest import Running
from forestage.clock import Clock
from forestage.errors import Failed, ImageError
from forestage.stage import reading
from forestage.stage.source import Source, Truncated, Unreadable
from forestage.system import atomic, run
from forestage.system import tree as tree
from forestage.system.terminal import Facts, Line, Piece
from forestage.system.tree import Files
from forestage.units import format_duration, format_rate, format_size

PROGRESS_EVERY = 1 << 30  # bytes
TIMEOUT = 60.0  # seconds for lfs to make an empty file


class Layout(msgspec.Struct, frozen=True):
    """A Lustre layout: over how many OSTs (-1: all), in stripes of which size, as lfs takes it."""

    stripes: int = -1
    size: str = "1M"


class Published(msgspec.Struct, frozen=True):
    """A finished copy. `digest` is XXH3-128 of its bytes; `seconds` include reading it back.

    `striped`: it has the layout that was asked for; else `filesystem` is not Lustre.
    """

    path: str
    size: int
    digest: str
    seconds: float
    filesystem: str
    striped: bool
    layout: Layout


def setstripe(layout: Layout, path: Path) -> list[str]:
    """Pure: one component up to the end of the file (lfs-setstripe(1): -E), as `check` advises."""
    words = ["lfs", "setstripe", "-E", "-1", "-c", str(layout.stripes), "-S", layout.size]
    return [*words, str(path)]


def publish(
    source: Path,
    folder: Path,
    layout: Layout,
    force: bool,
    files: Files,
    clock: Clock,
    progress: Callable[[str], None],
) -> Published:
    """Copies `source` into `folder` under its own name, as the calling user.

    Raises ImageError for what cannot be published, Failed where lfs fails or what is read back is
    not what was written, OSError.
    """
    began = clock.monotonic()
    target = folder / source.name
    if not folder.is_dir():
        raise ImageError(f"{folder} is no directory")
    refuse_replacing(target, force)
    under = tree.under(files.filesystems(), os.path.realpath(folder))
    kind = under.kind if under else "unknown"
    with _opened(source) as (fd, facts), unfinished(target) as part:
        out = _made(part, layout if kind == "lustre" else None)
        try:
            written = _copied(fd, out, facts, progress)
            _read_back(out, written, facts.st_size, progress)
            os.fchmod(out, stat.S_IMODE(facts.st_mode) & 0o777)
            os.fsync(out)
        finally:
            os.close(out)
        refuse_replacing(target, force)
        part.replace(target)
        atomic.sync_directory(folder)
    took = round(clock.monotonic() - began, 3)
    return Published(
        str(target), facts.st_size, written.hex(), took, kind, kind == "lustre", layout
    )


def refuse_replacing(target: Path, force: bool) -> None:
    """Raises ImageError where something has the name already."""
    if target.is_dir():
        raise ImageError(f"{target} is a directory")
    if not force and (target.exists() or target.is_symlink()):
        raise ImageError(f"{target} is there already", "--force replaces it at once")


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A name beside the target for what is not finished yet; nothing of that name stays."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[tuple[int, os.stat_result]]:
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not wait
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise ImageError(f"{source} is no regular file")
        yield fd, facts
    finally:
        os.close(fd)


def _made(part: Path, layout: Layout | None) -> int:
    """Makes the empty file, with this layout if any, and opens it."""
    if layout is None:
        return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    ran = run.run(setstripe(layout, part), timeout=TIMEOUT)
    if ran.code != 0:
        raise Failed("program", ran.explained(), "nothing was published")
    return os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def _pieces(fd: int, size: int, what: str, progress: Callable[[str], None]) -> Iterator[memoryview]:
    """The open file, piece by piece. Raises Truncated, OSError."""
    source = Source(fd, None, size)
    try:
        for at, piece in reading.pieces(source, 0, size, reading.buffer(max(1, size))):
            if at % PROGRESS_EVERY == 0:
                progress(f"{what} {format_size(at)} of {format_size(size)}")
            yield piece
    except Unreadable as unreadable:
        raise unreadable.error from None


def _copied(fd: int, out: int, before: os.stat_result, progress: Callable[[str], None]) -> bytes:
    """Copies the open file; returns the digest of what was read. Raises ImageError, OSError."""
    total = Running()
    with contextlib.suppress(Truncated):  # then its size has changed, too
        for piece in _pieces(fd, before.st_size, "copied", progress):
            total.add(piece)
            while piece:
                piece = piece[os.write(out, piece) :]
    after = os.fstat(fd)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ImageError(
            "the image was written to while it was copied", "try again when it is done"
        )
    return total.digest()


def _read_back(out: int, written: bytes, size: int, progress: Callable[[str], None]) -> None:
    """Compares what is on the servers, not what this node still has in memory of it."""
    os.fsync(out)
    os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
    total = Running()
    with contextlib.suppress(Truncated):
        for piece in _pieces(out, size, "verified", progress):
            total.add(piece)
    if os.fstat(out).st_size != size or total.digest() != written:
        raise Failed("io", "what is read back is not what was written", "nothing was published")


def pieces(done: Published) -> list[Piece]:
    """Pure: what `publish` prints."""
    osts = "all OSTs" if done.layout.stripes == -1 else f"{done.layout.stripes} OSTs"
    layout = f"{osts}, in stripes of {done.layout.size}"
    if not done.striped:
        layout = f"not striped: {done.filesystem} is not Lustre, so this is a plain copy"
    rate = format_rate(done.size, done.seconds)
    return [
        Line(f"Published {done.path}", heading=True),
        Facts(
            (
                ("size", format_size(done.size)),
                ("layout", layout),
                ("checksum", f"{done.digest} (XXH3-128), read back"),
                ("time", f"{format_duration(done.seconds)} ({rate}, verified)"),
            ),
            indent=2,
        ),
    ]
