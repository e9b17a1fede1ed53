"""A node's file system tree: read below a root, bounded, and never failing."""

import functools
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from forestage.system import as_user, mounts
from forestage.system.files import open_descriptor
from forestage.system.mounts import MountInfo
from forestage.units import is_number

LONGEST = 16 << 20  # bytes; pyxis.so has some 100 KiB
MOST = 1 << 20  # names of a directory
HANGS = 5.0  # seconds for a path; a file server that takes longer makes jobs wait as well
AT_ONCE = 16  # children
# slurmd starts its hooks without a PATH.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class RootedTree(msgspec.Struct, frozen=True):
    """A node's file system tree; tests have one of their own below `root`."""

    root: Path = Path("/")

    def host_path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def resolve_path(self, path: str) -> str:
        """Where a path of the node leads, links followed."""
        found = os.path.realpath(self.host_path(path))
        top = os.path.realpath(self.root).rstrip("/")
        return (found[len(top) :] or "/") if found.startswith(f"{top}/") else found

    def resolve_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Where paths lead that may lie on a shared file system; as they are where that hangs.

        In children, which may hang.
        """
        wanted = list(dict.fromkeys(paths))
        works = [functools.partial(self.resolve_path, path) for path in wanted]
        found = as_user.run_each_in_child(works, str, HANGS, HANGS, AT_ONCE)
        return {path: real or path for path, real in zip(wanted, found, strict=True)}

    def read_bytes_or_none(self, path: str, most: int = LONGEST) -> bytes | None:
        """What a regular file begins with; None where it cannot be read."""
        try:
            with open_descriptor(self.host_path(path), os.O_RDONLY | os.O_NONBLOCK) as fd:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return None
                with open(fd, "rb", closefd=False) as file:
                    return file.read(most)
        except OSError:
            return None

    def read_text_or_none(self, path: str, most: int = LONGEST) -> str | None:
        """Returns up to `most` bytes of a file as text; None where it cannot be read."""
        data = self.read_bytes_or_none(path, most)
        return None if data is None else data.decode(errors="replace")

    def read_number_or_none(self, path: str) -> int | None:
        """Of a file of /proc or /sys that holds one."""
        text = (self.read_text_or_none(path) or "").strip()
        return int(text) if is_number(text) else None

    def list_names(self, path: str, most: int = MOST) -> list[str]:
        """Up to so many of what a directory holds, sorted; nothing where it cannot be read."""
        try:
            with os.scandir(self.host_path(path)) as found:
                return sorted(one.name for one in itertools.islice(found, most))
        except OSError:
            return []

    def find_mode(self, path: str) -> int | None:
        """Of what a path leads to; None where that is nothing."""
        try:
            return self.host_path(path).stat().st_mode
        except OSError:
            return None

    def find_statvfs(self, path: str) -> os.statvfs_result | None:
        """The file system that a path lies on, or would; None where it cannot be asked."""
        place = self.host_path(self.resolve_path(path))
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            return os.statvfs(place)
        except OSError:
            return None

    def find_program(self, name: str) -> str:
        """Where a program of the system lies, as run.py looks for it; "" where it is missing."""
        return next(self.list_programs(name), "")

    def list_programs(self, name: str, path: str = PATH) -> Iterator[str]:
        """All programs of that name on a PATH, in its order."""
        for folder in path.split(":"):
            if folder.startswith("/") and self.is_executable(f"{folder}/{name}"):
                yield f"{folder}/{name}"

    def is_executable(self, path: str) -> bool:
        """Whether a program lies there that can be executed."""
        mode = self.find_mode(path) or 0
        return stat.S_ISREG(mode) and bool(mode & 0o111)

    def list_mounts(self) -> list[MountInfo]:
        """Those of the node; none where its /proc cannot be read."""
        return mounts.parse_mountinfo(
            os.fsdecode(self.read_bytes_or_none("/proc/self/mountinfo") or b"")
        )

    def find_mount(self, path: str) -> MountInfo | None:
        """The mount that a resolved path lies on; None where none is known."""
        return mounts.find_mount_of_path(self.list_mounts(), path)


class RecordingTree(RootedTree, frozen=True):
    """Such a tree that notes what was read of it.

    `file_stamps` has inode, size, mtime and ctime (ns) of each path, from before it was read; zeros
    for what is not there.
    """

    file_stamps: dict[str, tuple[int, int, int, int]] = msgspec.field(default_factory=dict)

    def read_bytes_or_none(self, path: str, most: int = LONGEST) -> bytes | None:
        self.record_path(path)
        return RootedTree.read_bytes_or_none(self, path, most)

    def list_names(self, path: str, most: int = MOST) -> list[str]:
        self.record_path(path)
        return RootedTree.list_names(self, path, most)

    def record_path(self, path: str) -> None:
        """Note what changes with this path, if that is not noted yet."""
        try:
            found = self.host_path(path).stat()
        except OSError:
            self.file_stamps.setdefault(path, (0, 0, 0, 0))
        else:
            times = found.st_mtime_ns, found.st_ctime_ns
            self.file_stamps.setdefault(path, (found.st_ino, found.st_size, *times))
