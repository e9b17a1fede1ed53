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
It ends by itself, and does none of this, once the directory is deleted without that.
One that was killed is missed by nobody but the tasks that then wait.
"""

import fcntl
import os
import signal
from functools import partial
from pathlib import Path

from forestage.system import holder, mounts
from forestage.system.files import opened
from forestage.system.holder import Channel, Life
from forestage.views import job_disk

PROCESS_NAME = "forestage-job"  # in ps(1)
DISK = Life(PROCESS_NAME)
END = 5.0  # seconds for its end; nothing but room depends on it
LOOK = 5.0  # seconds between two looks at whether the directory is deleted
_GOINGDOWN = 0x8004587D  # linux/ext4.h, EXT4_IOC_SHUTDOWN
_NOLOGFLUSH = (2).to_bytes(4, "little")


def start(device: str, place: Path, patience: float = holder.START) -> None:
    """Starts the holder of this device's file system; `place` is the job's directory.

    Waits up to `patience` seconds for it.
    """
    about = f"holder job={place.name}"
    holder.start(DISK, about, partial(_live, device, place), patience).close()


def _live(device: str, place: Path, prolog: Channel) -> None:
    with opened(place, os.O_RDONLY | os.O_DIRECTORY) as directory:
        held = holder.hold(directory)
    root = mounts.open_hidden(device, job_disk.KIND, os.fspath(place))
    disk = os.open(place / "disk", os.O_RDWR)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    prolog.begin(held, root, disk)
    prolog.close()
    while not signal.sigtimedwait({signal.SIGTERM}, LOOK):
        if not os.fstat(held).st_nlink:
            return
    fcntl.ioctl(root, _GOINGDOWN, _NOLOGFLUSH)
    os.ftruncate(disk, 0)
