"""Is an image spread over all servers, and whole? `forestage publish` copies it so.

A file's layout on Lustre is made when the file is made, so a copy with another layout is the only
way to spread one. It gets its name when it is there, proven and on disk: nobody reads half of it.
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
from forestage.system import atomic, run
from forestage.system import tree as tree
from forestage.system.terminal import Facts, Line, Piece
from forestage.system.tree import Files
from forestage.units import format_duration, format_rate, format_size

PIECE = 16 << 20  # bytes read at once
TOLD = 1 << 30  # bytes between two words about the progress
TIMEOUT = 60.0  # seconds for lfs to make an empty file


class Layout(msgspec.Struct, frozen=True):
    """Lustre's: over how many OSTs (-1: all), in pieces of which size, as lfs takes it."""

    stripes: int = -1
    size: str = "1M"


class Published(msgspec.Struct, frozen=True):
    """A copy that is there. `digest` is XXH3-128 of its bytes; `seconds` it took, proof included.

    `striped`: it has the layout that was asked for; else `filesystem` is no Lustre.
    """

    path: str
    size: int
    digest: str
    seconds: float
    filesystem: str
    striped: bool
    layout: Layout


def setstripe(layout: Layout, path: Path) -> list[str]:
    """Pure: one component to the end of the file (lfs-setstripe(1): -E), as `check` says it."""
    words = ["lfs", "setstripe", "-E", "-1", "-c", str(layout.stripes), "-S", layout.size]
    return [*words, str(path)]


def publish(
    source: Path,
    folder: Path,
    layout: Layout,
    force: bool,
    files: Files,
    clock: Clock,
    tell: Callable[[str], None],
) -> Published:
    """Copies `source` into `folder` under its own name, as who calls.

    Raises ImageError for what cannot be published, Failed where lfs fails or the copy is not what
    was read, OSError.
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
            written = _copied(fd, out, facts.st_size, tell)
            _refuse_changed(source, fd, facts)
            _prove(out, written, facts.st_size, tell)
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
    """A name beside the target for what is not whole yet; nothing of that name stays."""
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
    """The empty file, open; the layout, if any, is given to it as it is made."""
    if layout is None:
        return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    ran = run.run(setstripe(layout, part), timeout=TIMEOUT)
    if ran.code != 0:
        raise Failed("program", ran.explained(), "nothing was published")
    return os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def _pieces(fd: int, size: int, what: str, tell: Callable[[str], None]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE, max(1, size))))
    done = 0
    while got := os.preadv(fd, [buffer], done):
        if done % TOLD < got:
            tell(f"{what} {format_size(done)} of {format_size(size)}")
        yield buffer[:got]
        done += got


def _copied(fd: int, out: int, size: int, tell: Callable[[str], None]) -> bytes:
    """Copies all there is; the digest of what was read."""
    total = Running()
    for piece in _pieces(fd, size, "copied", tell):
        total.add(piece)
        while piece:
            piece = piece[os.write(out, piece) :]
    return total.digest()


def _refuse_changed(source: Path, fd: int, before: os.stat_result) -> None:
    after = os.fstat(fd)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ImageError(
            f"{source} was written to while it was copied", "try again when it is done"
        )


def _prove(out: int, written: bytes, size: int, tell: Callable[[str], None]) -> None:
    """Reads back what is on the servers, not what this node still has in memory of it."""
    os.fsync(out)
    os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
    total = Running()
    for piece in _pieces(out, size, "verified", tell):
        total.add(piece)
    if os.fstat(out).st_size != size or total.digest() != written:
        raise Failed("io", "what is read back is not what was written", "nothing was published")


def pieces(done: Published) -> list[Piece]:
    """Pure: what `publish` prints."""
    spread = "all OSTs" if done.layout.stripes == -1 else f"{done.layout.stripes} OSTs"
    layout = f"{spread}, in pieces of {done.layout.size}"
    if not done.striped:
        layout = f"not striped: {done.filesystem} is no Lustre, so this is a plain copy"
    rate = format_rate(done.size, done.seconds)
    return [
        Line(f"Published {done.path}", heading=True),
        Facts(
            (
                ("size", format_size(done.size)),
                ("layout", layout),
                ("digest", f"{done.digest} (XXH3-128), read back"),
                ("time", f"{format_duration(done.seconds)} ({rate}, verified)"),
            ),
            indent=2,
        ),
    ]
