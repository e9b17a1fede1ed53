"""What is there of a window: its copier, and the bytes that it takes, as anybody can see them."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path


def processes(folder: Path) -> dict[int, int]:
    """Those that copy below the folder, copiers and what copies for them, and their parents."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if len(words) > 4 and words[3].endswith(b"forestage_window.py"):
                state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
                if folder in Path(os.fsdecode(words[4])).parents and state != "Z":
                    found[pid] = int(parent)
    return found


def copiers(folder: Path) -> list[int]:
    found = processes(folder)
    return [pid for pid, parent in found.items() if parent not in found]


def wait_for_end(pid: int, seconds: float = 240) -> None:
    """Also of a process that is nobody's child here; a copier may linger for a minute."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], seconds)[0], f"{pid} has not ended"
    finally:
        os.close(fd)


def usage(folder: Path) -> int:
    """Bytes on the disk of all files below it, with those that are unlinked and still open."""
    found: dict[int, int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                seen = os.lstat(f"{directory}/{name}")
                if seen.st_size and name not in ("lock", "log", "socket"):
                    found[seen.st_ino] = seen.st_blocks * 512
    for fds in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for fd in fds.iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(fd)
                    if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
                        seen = os.stat(fd)
                        found[seen.st_ino] = seen.st_blocks * 512
    return sum(found.values())
