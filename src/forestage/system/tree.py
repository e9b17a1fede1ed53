"""A node's file system tree as `check` reads it: below a root, bounded, and never failing."""

import os
import stat
from pathlib import Path

import msgspec

from forestage.system import mounts, run
from forestage.system.files import opened

LONGEST = 16 << 20  # bytes; pyxis.so has some 100 KiB

NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
    *("orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs", "wekafsio"),
}

_QUOTAS = {"quota", "usrquota", "usrjquota", "grpquota", "grpjquota"}  # ext4 and xfs in mountinfo


class Filesystem(msgspec.Struct, frozen=True):
    """A mount: where, of which kind, from what, on which device (major:minor).

    `quotas`: its users or groups have such (mount(8)), whether or not there is a limit for one.
    """

    point: str
    kind: str
    source: str
    device: str
    read_only: bool = False
    quotas: bool = False

    @property
    def network(self) -> bool:
        # Whatever a user space file system is, it is no disk of this node.
        return self.kind in NETWORK or self.kind.startswith("fuse.")


class Files(msgspec.Struct, frozen=True):
    """A node's file system tree; tests have one of their own below `root`."""

    root: Path = Path("/")

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def real(self, path: str) -> str:
        """Where a path of the node leads, links followed."""
        found = os.path.realpath(self.at(path))
        top = os.path.realpath(self.root).rstrip("/")
        return (found[len(top) :] or "/") if found.startswith(f"{top}/") else found

    def data(self, path: str, most: int = LONGEST) -> bytes | None:
        """What a regular file begins with; None where it cannot be read."""
        try:
            with opened(self.at(path), os.O_RDONLY | os.O_NONBLOCK) as fd:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return None
                with open(fd, "rb", closefd=False) as file:
                    return file.read(most)
        except OSError:
            return None

    def text(self, path: str, most: int = LONGEST) -> str | None:
        """Returns up to `most` bytes of a file as text; None where it cannot be read."""
        data = self.data(path, most)
        return None if data is None else data.decode(errors="replace")

    def number(self, path: str) -> int | None:
        """Of a file of /proc or /sys that holds one."""
        text = (self.text(path) or "").strip()
        return int(text) if text.isascii() and text.isdigit() else None

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; nothing where it cannot be read."""
        try:
            return sorted(os.listdir(self.at(path)))  # noqa: PTH208 - names are what is wanted
        except OSError:
            return []

    def mode(self, path: str) -> int | None:
        """Of what a path leads to; None where that is nothing."""
        try:
            return self.at(path).stat().st_mode
        except OSError:
            return None

    def disk(self, path: str) -> os.statvfs_result | None:
        """The file system that a path lies on, or would; None where it cannot be asked."""
        place = self.at(self.real(path))
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            return os.statvfs(place)
        except OSError:
            return None

    def program(self, name: str) -> str:
        """Where a program of the system lies, as run.py looks for it; "" where it is missing."""
        for folder in run.PATH.split(":"):
            mode = self.mode(f"{folder}/{name}")
            if mode is not None and stat.S_ISREG(mode) and mode & 0o111:
                return f"{folder}/{name}"
        return ""

    def filesystems(self) -> tuple[Filesystem, ...]:
        return listed(os.fsdecode(self.data("/proc/self/mountinfo") or b""))


def listed(mountinfo: str) -> tuple[Filesystem, ...]:
    """Pure: all mounts, oldest first (proc(5): the fields behind the dash)."""
    lines = [line for line in mountinfo.split("\n") if line]
    found = []
    for mount, line in zip(mounts.listed(mountinfo), lines, strict=True):
        kind, source, of_disk, *_ = [*line.partition(" - ")[2].split(" "), "", "", ""]
        # A disk with errors goes read-only in the last field alone (errors=remount-ro).
        options = {*line.split(" ")[5].split(","), *of_disk.split(",")}
        read_only = not options.isdisjoint(("ro", "emergency_ro"))
        quotas = any(one.partition("=")[0] in _QUOTAS for one in options)
        found.append(Filesystem(mount.point, kind, source, mount.device, read_only, quotas))
    return tuple(found)


def under(filesystems: tuple[Filesystem, ...], path: str) -> Filesystem | None:
    """Pure: the one that a resolved path lies on; the newest of those at the same place."""
    above = [one for one in filesystems if f"{path}/".startswith(f"{one.point.rstrip('/')}/")]
    return sorted(above, key=lambda one: len(one.point))[-1] if above else None
