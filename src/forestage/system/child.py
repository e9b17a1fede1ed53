"""What a forked process must let go of before it may outlive, or outhang, its parent."""

import contextlib
import os
from pathlib import Path


def let_go(keep: set[int]) -> None:
    """Drops what the child would hold for as long as it lives, all descriptors but `keep`.

    That is the hook's stdout and stderr (slurmd waits until all who hold them are gone) and every
    lock (flock(2) belongs to the open file, so a copy of the descriptor keeps it).
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def leave_job(root: Path = Path("/")) -> None:
    """Goes from a job's cgroups, if this process is in such, to the roots of their hierarchies.

    What a step's helper starts is in the step's. There it would be killed with the step (cgroup
    v2), keep the job's directories from going (v1), and have the job pay for the page cache that it
    fills. slurmstepd, and all it starts, is also the last that the kernel kills for want of memory.
    """
    cgroups = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "/job_" not in path:  # Slurm's name for it, in both versions
            continue
        name = controllers.removeprefix("name=")
        for top in (cgroups / name,) if name else (cgroups, cgroups / "unified"):
            with contextlib.suppress(OSError):
                (top / "cgroup.procs").write_text("0")
    with contextlib.suppress(OSError):
        (root / "proc/self/oom_score_adj").write_text("0")
