"""The process that holds the file system of a job's directory while no step has it mounted.

Whoever unmounts a file system last waits until all of it is written. That would be the last task of
each step, which cannot be killed then: for as long as 20 % of a node's memory take to be written,
and Slurm drains nodes whose tasks do not end. So this process has the root directory open, from the
Prolog to the Epilog; what is in the page cache also stays for the job's next step.

    <cache>/jobs/<job>.<restart>/held    locked as long as it lives; its pid

At the end it shuts the file system down first, so that nobody writes what is deleted the next
moment: who still has files open there gets EIO. Then it cuts the file to nothing, as a descriptor
of another job of the user's keeps the device and all its room. Only then: who has the file system
mounted would find other bytes. What is behind a file's end is an error to a loop device, not zeros:
to a mapping, which a shutdown does not stop, it is SIGBUS.
It ends by itself, and does none of this, once the directory is deleted without that. Where the
package was removed meanwhile, no Epilog can end it: then it sees what the Epilog's shell has left
(Leases.over), and removes the device and the directory as well. So all that it needs is imported
before, and open.
One that was killed is missed by nobody but the tasks that then wait.
"""

import contextlib
import fcntl
import os
import signal
from functools import partial
from pathlib import Path

import msgspec

from forestage.system import holder, loop, mounts
from forestage.system.holder import Channel, Life
from forestage.views import job_disk

PROCESS_NAME = "forestage-job"  # in ps(1)
DISK = Life(PROCESS_NAME)
END = 5.0  # seconds for its end; nothing but room depends on it
LOOK = 5.0  # seconds between two looks at whether the directory is deleted
_GOINGDOWN = 0x8004587D  # linux/ext4.h, EXT4_IOC_SHUTDOWN
_NOLOGFLUSH = (2).to_bytes(4, "little")


class JobEnd(msgspec.Struct, frozen=True):
    """The open directories in which a holder sees its job's end, and removes what the job had.

    `leases` has the mark `over`; `jobs` the job's directory `name`, which is `place`.
    """

    leases: int
    over: str
    jobs: int
    name: str
    place: int

    @classmethod
    def open(cls, over: Path, place: Path) -> "JobEnd":
        """Open the directories of this mark and of this job's directory. Raises OSError."""
        above = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (over.parent, place.parent)]
        flags = os.O_RDONLY | os.O_DIRECTORY
        return cls(above[0], over.name, above[1], place.name, os.open(place, flags))

    @property
    def fds(self) -> tuple[int, ...]:
        return self.leases, self.jobs, self.place

    def has_come(self) -> bool:
        """Whether an Epilog without Python has ended the job."""
        try:
            os.stat(self.over, dir_fd=self.leases, follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Delete the job's directory, which holds files alone; the sweep may be faster."""
        names = os.listdir(self.place)  # noqa: PTH208 - a descriptor
        for name in sorted(names, key=lambda name: name != "made.json"):  # it is not whole first
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.place)
        with contextlib.suppress(OSError):
            os.rmdir(self.name, dir_fd=self.jobs)


def start(device: str, place: Path, over: Path, patience: float = holder.START) -> None:
    """Starts the holder of this device's file system; `place` is the job's directory.

    `over` is there once the job has ended without an Epilog's work. Waits up to `patience` seconds
    for it.
    """
    about = f"holder job={place.name}"
    holder.start(DISK, about, partial(_live, device, place, over), patience).close()


def _live(device: str, place: Path, over: Path, prolog: Channel) -> None:
    end = JobEnd.open(over, place)
    held = holder.hold(end.place)
    root = mounts.open_hidden(device, job_disk.KIND, os.fspath(place))
    disk = os.open(place / "disk", os.O_RDWR)
    facts = os.fstat(disk)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    prolog.begin(held, root, disk, *end.fds)
    prolog.close()
    while not signal.sigtimedwait({signal.SIGTERM}, LOOK):
        if not os.fstat(held).st_nlink:
            return
        if end.has_come():
            end.remove()  # first: no step finds what is cut to nothing
            loop.detach(loop.Loop(device, "", facts.st_dev, facts.st_ino))
            break
    fcntl.ioctl(root, _GOINGDOWN, _NOLOGFLUSH)
    os.ftruncate(disk, 0)
