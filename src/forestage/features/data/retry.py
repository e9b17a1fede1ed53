"""When a directory is tried again that held a file which was open for writing.

A database or a log in it may be so for ever, and that shows only when the copy gets to the file: by
then much of it has been read, for each job that names the directory.

    <cache>/locks/<hash of its path>.written    why it had no copy; its mtime: when
"""

import contextlib
import os
from pathlib import Path

from forestage.cache.layout import Cache
from forestage.errors import Declined
from forestage.system import files
from forestage.system.sha256 import sha256
from forestage.units import format_duration

AGAIN = 600.0  # seconds
SUFFIX = ".written"


def record_refusal(cache: Cache, path: str, why: str, now: float) -> None:
    """Notes, at `now` (seconds since the epoch), why this directory has no copy. Best effort."""
    file = _note_path(cache, path)
    with contextlib.suppress(OSError):  # it only spares the file server some reads
        files.overwrite_file(file, os.fsencode(why))
        os.utime(file, (now, now))


def check_retry_due(cache: Cache, path: str, now: float) -> None:
    """Raises Declined while this directory is not tried again."""
    file = _note_path(cache, path)
    try:
        ago = abs(now - file.stat().st_mtime)
        why = os.fsdecode(files.read_file(file))
    except OSError:
        return
    if ago < AGAIN:
        left = format_duration(AGAIN - ago)
        raise Declined("written", f"{why}; {path} is not tried again for {left}")


def delete_old_notes(cache: Cache, now: float) -> None:
    """Deletes what says nothing any more. Raises OSError."""
    for file in cache.locks.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if abs(now - file.stat().st_mtime) >= AGAIN:
                file.unlink()


def _note_path(cache: Cache, path: str) -> Path:
    return cache.locks / f"{sha256(os.fsencode(path))[:32]}{SUFFIX}"
