"""The tmpfs that is a job's directory in memory, and the process that holds it.

    <cache>/jobs/<job>.<restart>/held    locked as long as the holder lives; its pid
                                 mount   where it listens, see system/daemon.py
                                 lock.ram  held by the step that starts it

The job's first step on the node has it made: a Prolog knows nothing of the job's memory. The kernel
charges each page to the cgroup that writes it first, so what is in there counts in the job's
memory. The holder itself writes nothing, and is in no cgroup of the job's: the directory stays
between steps. With its end, and that of the last task, all of it is gone.

Where the holder was killed, the job's further steps have no directory: an empty one would not be
what the steps before have left.
"""

import os
from functools import partial
from pathlib import Path

from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.features.data import job_disk
from forestage.system import daemon, forked_child, lock, mounts
from forestage.system.as_user import User
from forestage.system.daemon import (
    OOM_EXEMPT,
    DaemonSpec,
    StartChannel,
    StartReport,
    TaskConnections,
)
from forestage.units import format_size

MOUNT = "/run/mount"  # in the hidden namespace
BYTES_PER_FILE = 16384  # as on a disk: the kernel's memory for a file is the job's too
LOOK = 5.0  # seconds between two looks at whether the directory is deleted
RAM_HOLDER_SPEC = DaemonSpec(job_disk.PROCESS_NAME, oom_score_adj=OOM_EXEMPT)


def ensure_tmpfs_holder(
    directory: Path, over: Path, user: User, size: int, step: int, end: Deadline
) -> Path:
    """Returns the socket of the tmpfs's holder, which the first step of a job starts.

    `over` is as in job_disk.py. `step` is the pid of the step's manager, in whose job's memory it
    has to fit. Raises Declined, lock.LockTimeout, OSError.
    """
    with lock.held(directory / "lock.ram", end.seconds_left()):
        held = directory / "held"
        if not held.exists():
            if forked_child.is_in_job_namespace():  # it would end with the step
                why = "the step is in its job's own PID or user namespace"
                raise Declined("job-dir", f"none in memory: {why}")
            _check_memory_limit(size, step)
            live = partial(_run_holder, directory, over, user, size)
            with daemon.start_daemon(
                RAM_HOLDER_SPEC, f"holder job={directory.name}", live
            ) as channel:
                channel.wait_until_ready(daemon.START, "job-dir")
        elif lock.is_free(held):
            raise Declined("job-dir", "its files in memory are gone: who held them was killed")
    return directory / "mount"


def open_root(name: Path) -> int:
    """A descriptor of the root directory of what is held there. Raises Declined, OSError."""
    clone = daemon.fetch_mount_clone(name, "job-dir")
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=clone)
    finally:
        os.close(clone)


def _check_memory_limit(size: int, step: int) -> None:
    """Raises Declined where the job may not have so much memory.

    Where Slurm limits none, nobody but the job keeps it from taking all: half of what is available.
    """
    limit = forked_child.read_job_memory_limit(step)
    if limit is None:
        most, whose = _read_available_bytes() // 2, "half of what this node has available"
    else:
        most, whose = limit, "this job's memory"
    if size > most:
        raise Declined(
            "too-large",
            f"stage-dir= asks for {format_size(size)} in memory; {whose} is {format_size(most)}",
            "ask for more memory with --mem, or leave out `,ram`",
        )


def _read_available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("MemAvailable:")]
    return int(line.split()[1]) << 10


def _run_holder(directory: Path, over: Path, user: User, size: int, hook: StartChannel) -> None:
    """The whole life of the holder: SIGTERM ends it, and so does its own look.

    It gives clones to those who ask, until the job's directory is deleted, or has to be.
    """
    end = job_disk.JobEndWatch.open_directories(over, directory)
    listener = daemon.listen_for_clients(directory / "mount")
    hook.release_hook(*end.fds, listener.fileno())
    mounts.enter_empty_namespace()
    Path(MOUNT).mkdir(mode=0o700)
    owner = f"mode=0700,uid={user.uid},gid={user.gid}"
    options = f"size={size},nr_inodes={size // BYTES_PER_FILE},{owner}"
    mounts.mount("forestage", MOUNT, mounts.MS_NOSUID | mounts.MS_NODEV, "tmpfs", options)
    # Last: where it is there, so was the file system. By descriptor: the disk is not in here.
    held = daemon.lock_pid_file(end.directory)
    hook.send(StartReport("ready"))
    hook.close()
    guests = TaskConnections(
        listener, lambda task, asked: daemon.send_mount_clone(task, asked, MOUNT)
    )
    while os.fstat(held).st_nlink:
        if end.has_job_ended():
            end.remove_directory()
            return
        guests.serve_for(LOOK)
