"""Loop devices: files of the cache as disks, so that a step can mount them. Root only.

By ioctl(2), not by losetup(8): that asks every device of the machine for its file, and hangs where
one of them lies on a dead file server. A device is used by its number, which is another file's once
it is free. So whoever lets go of one, or mounts it, compares its file on a descriptor of the
device: while that is open nobody else gets the number. Mounts of one device share one file system
in the kernel, and so one page cache, wherever they are. loop(4), linux/loop.h.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.errors import Failed
from forestage.system.files import open_descriptor

OURS = ("/image", "/disk")
"""The last of the paths of files that are attached; no other device is asked for its file."""

DELETED = " (deleted)"  # what the kernel adds to the path of a file without a name
CONTROL = "/dev/loop-control"
TRIES = 64  # others take free devices at the same moment
_SET_FD, _CLR_FD, _SET_STATUS, _GET_STATUS = 0x4C00, 0x4C01, 0x4C04, 0x4C05
_SET_DIRECT_IO, _CONFIGURE, _GET_FREE = 0x4C08, 0x4C0A, 0x4C82
_READ_ONLY, _AUTOCLEAR, _DIRECT_IO = 1, 4, 16
_INFO = struct.Struct("=5Q4I64s64s32s2Q")  # struct loop_info64
_FLAGS = 8  # its place among the fields


class LoopDevice(msgspec.Struct, frozen=True):
    """A device in use: its file's path as the kernel has it, st_dev and inode."""

    name: str
    file: str
    disk: int
    inode: int

    def is_backed_by(self, facts: os.stat_result) -> bool:
        """Whether it shows the file of which stat(2) says this."""
        return (self.disk, self.inode) == (facts.st_dev, facts.st_ino)

    def is_on_file_system(self, facts: os.stat_result) -> bool:
        """Whether its file lies on the file system of which stat(2) says this."""
        return self.disk == facts.st_dev

    def is_below_cache(self, real: str) -> bool:
        """Whether its file is two folders below this directory, by its path.

        Of a mount that is gone with its container the kernel has the path from that mount's root.
        """
        top = os.path.normpath(f"{self.file}/../../..").rstrip("/")
        return f"{real}/".endswith(f"{top}/")

    @property
    def is_file_deleted(self) -> bool:
        """Whether its file has no name any more."""
        return self.file.endswith(DELETED)


def attach_file(file: Path, read_only: bool) -> str:
    """Returns the device that shows this file; the one that does already, if there is one.

    Past the page cache, where the file's disk can: the mounted file system has one of its own.
    Raises Failed, OSError.
    """
    with open_descriptor(file, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_NOFOLLOW) as fd:
        facts = os.fstat(fd)
        for one in list_attached_devices():
            if one.is_backed_by(facts) and _disable_autoclear(one):
                return one.name
        for _ in range(TRIES):
            with _open_free_device(file) as (name, device):
                if _try_configure(device, fd, read_only):
                    return name
    raise Failed("loop", f"no loop device for {file}")


def format_file_id(facts: os.stat_result) -> str:
    """Pure: how the companion knows the file of a device, of which stat(2) says this."""
    return f"{facts.st_dev}:{facts.st_ino}"


def detach_device(one: LoopDevice) -> None:
    """Lets go of a device, if it still shows that file. Raises OSError.

    What is mounted stays so until its last unmount.
    """
    with contextlib.suppress(FileNotFoundError), open_descriptor(one.name, os.O_RDONLY) as device:
        if _is_backed_by(device, one):
            with contextlib.suppress(OSError):  # ENXIO: it went with its last mount
                fcntl.ioctl(device, _CLR_FD)


def list_attached_devices() -> list[LoopDevice]:
    """The devices in use of this machine whose files may be ours. Raises OSError."""
    found = []
    for directory in Path("/sys/block").glob("loop*"):
        try:
            path = os.fsdecode((directory / "loop/backing_file").read_bytes().removesuffix(b"\n"))
        except OSError:  # it is free
            continue
        if path.removesuffix(DELETED).endswith(OURS):
            name = f"/dev/{directory.name}"
            with contextlib.suppress(OSError), _open_device(name, os.O_RDONLY) as device:
                info = _read_status(device)
                found.append(LoopDevice(name, path, info[0], info[1]))
    return found


def _read_status(device: int) -> tuple[int, ...]:
    """The fields of the device's struct loop_info64. Raises OSError (ENXIO: it is free)."""
    buffer = bytearray(_INFO.size)
    fcntl.ioctl(device, _GET_STATUS, buffer)
    fields: tuple[int, ...] = _INFO.unpack(buffer)
    return fields


def _is_backed_by(device: int, one: LoopDevice) -> bool:
    try:
        return _read_status(device)[:2] == (one.disk, one.inode)
    except OSError:
        return False


def _disable_autoclear(one: LoopDevice) -> bool:
    """Has a device that somebody let go of stay after its last unmount; whether it is there."""
    with contextlib.suppress(OSError), open_descriptor(one.name, os.O_RDONLY) as device:
        fields = list(_read_status(device))
        if fields[:2] != [one.disk, one.inode]:
            return False
        if fields[_FLAGS] & _AUTOCLEAR:
            fields[_FLAGS] &= ~_AUTOCLEAR
            fcntl.ioctl(device, _SET_STATUS, _INFO.pack(*fields))
        return True
    return False


@contextlib.contextmanager
def _open_free_device(file: Path) -> Iterator[tuple[str, int]]:
    """Opens a device that is free this moment. Raises Failed: a container's node may have none."""
    with contextlib.ExitStack() as place:
        try:
            control = place.enter_context(open_descriptor(CONTROL, os.O_RDWR))
            name = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
            device = place.enter_context(_open_device(name, os.O_RDWR))
        except OSError as error:
            raise Failed("loop", f"no loop device for {file}: {error}") from error
        yield name, device


@contextlib.contextmanager
def _open_device(name: str, flags: int) -> Iterator[int]:
    """A device; a container's own /dev has only those that were there when it began. OSError."""
    if not Path(name).exists():
        number = Path("/sys/block", Path(name).name, "dev").read_text()
        major, minor = map(int, number.split(":"))
        with contextlib.suppress(FileExistsError):
            os.mknod(name, stat.S_IFBLK | 0o600, os.makedev(major, minor))
    with open_descriptor(name, flags) as device:
        yield device


def _try_configure(device: int, fd: int, read_only: bool) -> bool:
    """Whether this free device shows the file now; somebody else may have been faster."""
    plain = _READ_ONLY if read_only else 0
    for flags in (plain | _DIRECT_IO, plain):
        info = _INFO.pack(*(0,) * _FLAGS, flags, b"", b"", b"", 0, 0)
        try:
            fcntl.ioctl(device, _CONFIGURE, struct.pack("=II", fd, 0) + info + bytes(64))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            if error.errno not in (errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return True
    # Linux before 5.8 has no LOOP_CONFIGURE.
    try:
        fcntl.ioctl(device, _SET_FD, fd)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    with contextlib.suppress(OSError):
        fcntl.ioctl(device, _SET_DIRECT_IO, 1)
    return True
