"""The file that is a job's own disk: reserved, formatted as ext4, shown as a loop device.

Nobody but root reaches the file, so no user can make a file system that harms the kernel. It has no
journal: what is in it goes with the job, after a crash as well.
"""

import contextlib
import errno
import os
from pathlib import Path

from forestage.cache import allocation
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.system import as_user, loop, mounts, run
from forestage.system.as_user import Found, User
from forestage.system.files import opened
from forestage.units import format_size

KIND = "ext4"
SMALLEST = 16 << 20  # bytes; of less, the file system itself takes too large a part
BYTES_PER_FILE = 16384  # room for each inode: 65,536 files in 1 GiB
FORMATTING = 120.0  # seconds; 200 GiB take 20 ms, a disk that hangs takes for ever

PREZEROED = "assume_storage_prezeroed=1"
"""Without it the kernel writes zeros to all inode tables, 3 GiB of 200, while the job runs. Since
e2fsprogs 1.46.6."""


def within(seconds: float, end: Deadline) -> float:
    """So many seconds, or what is left of the Prolog's time. Raises Declined if none is."""
    left = end.left()
    if not left:
        raise Declined("deadline", "the Prolog's time ended before the directory was made")
    return min(seconds, left)


def reserve(file: Path, size: int) -> None:
    """Makes the file and takes all of its space at once. Raises Declined, OSError."""
    with opened(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        try:
            allocation.allocate(fd, 0, size)
            os.ftruncate(fd, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise Declined("no-room", f"{format_size(size)} are not free any more") from None
        if os.fstat(fd).st_blocks * 512 < size:
            raise Declined("job-dir", f"the file system of {file.parent} reserves no room")


def format_for(file: Path, user: User, point: Path, end: Deadline) -> str:
    """Makes a file system in the file whose root directory is the user's alone; returns its device.

    `point` is any directory, see mounts.open_hidden. Raises Declined once it is `end`, Failed,
    OSError.
    """
    extended = ["nodiscard", "lazy_itable_init=1", f"root_owner={user.uid}:{user.gid}"]
    common = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-i", str(BYTES_PER_FILE)]
    common += ["-O", "^has_journal"]
    for options in ([*extended, PREZEROED], extended):
        argv = [*common, "-E", ",".join(options), os.fspath(file)]
        ran = run.run(argv, timeout=within(FORMATTING, end))
        if ran.code == 0:
            break
    else:
        raise Failed("job-dir", f"no file system in {file}: {ran.explained()}")
    device = loop.attach(file, read_only=False)

    def work() -> Found[None]:
        root = mounts.open_hidden(device, KIND, os.fspath(point))
        # Not all releases of mkfs.ext4 can do this.
        os.fchmod(root, 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir("lost+found", dir_fd=root)
        return None, []

    as_user.call(work, type(None), within(FORMATTING, end))
    return device


def devices(facts: os.stat_result) -> list[loop.Loop]:
    """The devices that show the file of which stat(2) says this: one, if any. Raises Failed."""
    return [device for device in loop.attached() if device.is_of(facts)]
