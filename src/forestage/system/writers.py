"""Whether some process of this node has a file open for writing, as far as that can be told.

A read lease (fcntl(2), F_SETLEASE) is refused while anybody has the file open for writing, has it
mapped shared and writable, or is in a write(2), with the descriptor closed or not: 6 µs. It is
given back at once: while it is held, who opens the file to write waits, or gets EAGAIN with
O_NONBLOCK. What it means that it is granted:

    ext4, xfs, btrfs, tmpfs    nobody writes (`is_lease_conclusive`), but a call that holds a page
                               (decision 47)
    overlayfs                  … but through the directory below, or a mapping without a descriptor
    FUSE, Lustre, BeeGFS, …    nobody of this node by this mount; of other nodes it says nothing
    NFS, SMB                   they grant it by the server's leave, or never: it says nothing

Where it says nothing, the descriptors of all processes are read. These show neither a mapping whose
descriptor was closed, nor one in a message (SCM_RIGHTS), nor a path of another mount namespace.
"""

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from forestage.system import file_systems, processes
from forestage.system.file_systems import BTRFS, CIFS, EXT4, NFS, SMB, SMB2, TMPFS, XFS
from forestage.system.files import open_descriptor

LOOK = 0.25  # seconds of a hook for the descriptors of all processes: some 50 000 of them
SCAN = 10.0  # … of a copy, for which nobody waits

_PROVING = frozenset((EXT4, XFS, BTRFS, TMPFS))
_BY_LEAVE = frozenset((NFS, CIFS, SMB2, SMB))
ENABLED = Path("/proc/sys/fs/leases-enable")


def has_writer_by_lease(fd: int) -> bool | None:
    """Whether an open file has a writer; None where a lease says nothing of that.

    As root, or as the file's owner. False is a proof only where `is_lease_conclusive` says so.
    """
    try:
        # A writer that comes meanwhile waits until the lease is given back, and its holder gets
        # this signal, in place of SIGIO, which would end it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        is_refused = error.errno == errno.EAGAIN
        return (
            True if is_refused and file_systems.read_file_system_type(fd) not in _BY_LEAVE else None
        )
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_lease_conclusive(fd: int) -> bool:
    """Whether what a lease says of files of this open one's file system is all there is to say."""
    with contextlib.suppress(OSError):  # hidden: then leases are as the kernel has them
        if ENABLED.read_text().strip() == "0":
            return False
    return file_systems.read_file_system_type(fd) in _PROVING


def find_open_for_writing(path: str, seconds: float) -> str:
    """What processes of this node have open for writing at a path or below it; "" for nothing.

    Nothing as well where the look takes longer than so many seconds.
    """
    until = time.monotonic() + seconds
    below = path.rstrip("/") + "/"
    for pid in processes.list_pids():
        with contextlib.suppress(OSError):  # it has ended
            for found, number in _list_open_files(pid):
                is_there = found == path or found.startswith(below)
                if is_there and _read_open_flags(pid, number) & os.O_ACCMODE != os.O_RDONLY:
                    return found
        if time.monotonic() > until:
            break
    return ""


def has_writer(fd: int, path: str) -> bool:
    """Whether somebody writes to the open file at `path`, for a hook, which has little time.

    In a child of its own. As root, or as the file's owner.
    """
    found = has_writer_by_lease(fd)
    return bool(find_open_for_writing(path, LOOK)) if found is None else found


def _list_open_files(pid: int) -> Iterator[tuple[str, str]]:
    with open_descriptor(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY) as folder:
        for number in os.listdir(folder):  # noqa: PTH208
            with contextlib.suppress(OSError):  # closed
                yield os.readlink(number, dir_fd=folder), number


def _read_open_flags(pid: int, number: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "flags":
                return int(value, 8)
    return os.O_RDONLY
