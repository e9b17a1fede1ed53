"""The file that is a job's own disk: reserved, formatted as ext4, shown as a loop device.

Nobody but root reaches the file, so no user can make a file system that harms the kernel. It has no
journal: what is in it goes with the job, after a crash as well.

A process holds the file system while no step has it mounted. Whoever unmounts a file system last
waits until all of it is written. That would be the last task of each step, which cannot be killed
then: for as long as 20 % of a node's memory take to be written, and Slurm drains nodes whose tasks
do not end. So the process has the root directory open, from the Prolog to the Epilog; what is in
the page cache also stays for the job's next step.

    <cache>/jobs/<job>.<restart>/held    locked as long as it lives; its pid

At the end it shuts the file system down first, so that nobody writes what is deleted the next
moment: who still has files open there gets EIO. Then it cuts the file to nothing, as a descriptor
of another job of the user's keeps the device and all its room. Only then: who has the file system
mounted would find other bytes. What is behind a file's end is an error to a loop device, not zeros:
to a mapping, which a shutdown does not stop, it is SIGBUS.
It ends by itself, and does none of this, once the directory is deleted without that. Where the
package was removed meanwhile, no Epilog can end it: then it sees what the Epilog's shell has left
(LeaseDirectory.over_mark), and removes the device and the directory as well. So all that it needs
is imported before, and open.
One that was killed is missed by nobody but the tasks that then wait.
"""

import contextlib
import errno
import fcntl
import os
import signal
from functools import partial
from pathlib import Path

import msgspec

from forestage.cache import allocation
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.system import as_user, daemon, loop, mounts, run
from forestage.system.as_user import ChildResult, User
from forestage.system.daemon import DaemonSpec, StartChannel
from forestage.system.files import open_descriptor
from forestage.units import format_size

KIND = "ext4"
SMALLEST = 16 << 20  # bytes; of less, the file system itself takes too large a part
BYTES_PER_FILE = 16384  # room for each inode: 65,536 files in 1 GiB
FORMATTING = 120.0  # seconds; 200 GiB take 20 ms, a disk that hangs takes for ever
PROCESS_NAME = "forestage-job"  # in ps(1)
DISK_HOLDER_SPEC = DaemonSpec(PROCESS_NAME)
END = 5.0  # seconds for the end of that process; nothing but room depends on it
LOOK = 5.0  # seconds between two looks at whether the directory is deleted
_GOINGDOWN = 0x8004587D  # linux/ext4.h, EXT4_IOC_SHUTDOWN
_NOLOGFLUSH = (2).to_bytes(4, "little")

PREZEROED = "assume_storage_prezeroed=1"
"""Without it the kernel writes zeros to all inode tables, 3 GiB of 200, while the job runs. Since
e2fsprogs 1.46.6."""


def limit_to_deadline(seconds: float, end: Deadline) -> float:
    """So many seconds, or what is left of the Prolog's time. Raises Declined if none is."""
    left = end.seconds_left()
    if not left:
        raise Declined("deadline", "the Prolog's time ended before the directory was made")
    return min(seconds, left)


def reserve_file(file: Path, size: int) -> None:
    """Makes the file and takes all of its space at once. Raises Declined, OSError."""
    with open_descriptor(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        try:
            allocation.allocate_space(fd, 0, size)
            os.ftruncate(fd, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise Declined("no-room", f"{format_size(size)} are not free any more") from None
        if os.fstat(fd).st_blocks * 512 < size:
            raise Declined("job-dir", f"the file system of {file.parent} reserves no room")


def format_ext4(file: Path, user: User, point: Path, end: Deadline) -> str:
    """Makes a file system in the file whose root directory is the user's alone; returns its device.

    `point` is any directory, see mounts.open_hidden_mount. Raises Declined once it is `end`,
    Failed, OSError.
    """
    extended = ["nodiscard", "lazy_itable_init=1", f"root_owner={user.uid}:{user.gid}"]
    common = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-i", str(BYTES_PER_FILE)]
    common += ["-O", "^has_journal"]
    for options in ([*extended, PREZEROED], extended):
        argv = [*common, "-E", ",".join(options), os.fspath(file)]
        ran = run.run_program(argv, timeout=limit_to_deadline(FORMATTING, end))
        if ran.code == 0:
            break
    else:
        raise Failed("job-dir", f"no file system in {file}: {ran.format_ending()}")
    device = loop.attach_file(file, read_only=False)

    def work() -> ChildResult[None]:
        root = mounts.open_hidden_mount(device, KIND, os.fspath(point))
        # Not all releases of mkfs.ext4 can do this.
        os.fchmod(root, 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir("lost+found", dir_fd=root)
        return None, []

    as_user.run_in_child(work, type(None), limit_to_deadline(FORMATTING, end))
    return device


def list_devices(facts: os.stat_result) -> list[loop.LoopDevice]:
    """The devices that show the file of which stat(2) says this: one, if any. Raises Failed."""
    return [device for device in loop.list_attached_devices() if device.is_backed_by(facts)]


class JobEndWatch(msgspec.Struct, frozen=True):
    """The open directories in which a holder sees its job's end, and removes what the job had.

    `leases` has the mark `over_name`; `jobs` the job's directory `name`, which is `directory`.
    """

    leases: int
    over_name: str
    jobs: int
    name: str
    directory: int

    @classmethod
    def open_directories(cls, over: Path, place: Path) -> "JobEndWatch":
        """Open the directories of this mark and of this job's directory. Raises OSError."""
        above = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (over.parent, place.parent)]
        flags = os.O_RDONLY | os.O_DIRECTORY
        return cls(above[0], over.name, above[1], place.name, os.open(place, flags))

    @property
    def fds(self) -> tuple[int, ...]:
        return self.leases, self.jobs, self.directory

    def has_job_ended(self) -> bool:
        """Whether an Epilog without Python has ended the job."""
        try:
            os.stat(self.over_name, dir_fd=self.leases, follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove_directory(self) -> None:
        """Delete the job's directory, which holds files alone; the sweep may be faster."""
        names = os.listdir(self.directory)  # noqa: PTH208 - a descriptor
        for name in sorted(names, key=lambda name: name != "made.json"):  # it is not whole first
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.directory)
        with contextlib.suppress(OSError):
            os.rmdir(self.name, dir_fd=self.jobs)


def start_holder(device: str, directory: Path, over: Path, patience: float = daemon.START) -> None:
    """Starts the process that holds this device's file system; `directory` is the job's directory.

    `over` is there once the job has ended without an Epilog's work. Waits up to `patience` seconds
    for it.
    """
    about = f"holder job={directory.name}"
    daemon.start_daemon(
        DISK_HOLDER_SPEC, about, partial(_run_holder, device, directory, over), patience
    ).close()


def _run_holder(device: str, directory: Path, over: Path, prolog: StartChannel) -> None:
    end = JobEndWatch.open_directories(over, directory)
    held = daemon.lock_pid_file(end.directory)
    root = mounts.open_hidden_mount(device, KIND, os.fspath(directory))
    disk = os.open(directory / "disk", os.O_RDWR)
    facts = os.fstat(disk)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    prolog.release_hook(held, root, disk, *end.fds)
    prolog.close()
    while not signal.sigtimedwait({signal.SIGTERM}, LOOK):
        if not os.fstat(held).st_nlink:
            return
        if end.has_job_ended():
            end.remove_directory()  # first: no step finds what is cut to nothing
            loop.detach_device(loop.LoopDevice(device, "", facts.st_dev, facts.st_ino))
            break
    fcntl.ioctl(root, _GOINGDOWN, _NOLOGFLUSH)
    os.ftruncate(disk, 0)
