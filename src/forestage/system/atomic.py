"""Writes small files that are there whole or not at all, also after a power cut."""

import contextlib
import os
import tempfile
from pathlib import Path


def write(path: Path, data: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Replaces `path`: a temporary file beside it, fsync, rename, fsync of the directory.

    `owner` is (uid, gid), which only root can set; without it the file is the caller's.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with contextlib.ExitStack() as undo:
        undo.callback(Path(name).unlink, missing_ok=True)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.replace(name, path)
        undo.pop_all()
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames and new names inside `path` durable."""
    sync(path, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """Makes a file's bytes durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
