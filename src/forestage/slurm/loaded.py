"""Whether the Slurm that runs on this node has loaded the companion; for status and metrics.

The companion touches its mark when slurmd or a step loads it (src/spank/forestage.c). So a process
of Slurm's that began after that runs without it: it is built for another release, or its line is
gone from plugstack.conf. What slurm.conf and plugstack.conf say, `forestage check` reads.
"""

import os
import re
from pathlib import Path

from forestage.system import processes

SETTLED = 30.0  # seconds after which a process of Slurm has loaded its plugins
SLACK = 1.0  # seconds; slurmd may load them just before it becomes a daemon
# A job's extern step has nothing to show anybody.
_STEP = re.compile(rb"slurmstepd: \[(\d+\.(?:\d{1,9}|batch|interactive))\]")


def without(proc: Path, loaded: float, now: float) -> str:
    """Which process of Slurm began after the companion was `loaded` last, and so runs without it.

    "" where none does. Times are wall clock, in seconds: a clock that is set after slurmd's start
    may accuse it until the next step. What began just now may be about to load it.
    """
    for process, title in processes.of_root(proc):
        began = find_start(proc, process, now)
        if began is None or now - began < SETTLED or began <= loaded + SLACK:
            continue
        if step := _STEP.match(title):
            return f"step {step[1].decode()} runs without forestage's SPANK plugin"
        if title.partition(b"\0")[0].rpartition(b"/")[2] == b"slurmd":
            return "slurmd has not loaded forestage's SPANK plugin"
    return ""


def find_start(proc: Path, process: Path, now: float) -> float | None:
    """When a process began, by the time since boot that it has in /proc; None if it has ended."""
    try:
        ticks = processes.stat(process).began
        up = float((proc / "uptime").read_bytes().split()[0])
    except OSError:
        return None
    return now - up + ticks / os.sysconf("SC_CLK_TCK")
