"""What a node's Prolog does for a directory, until its copy is there: for bench/data.

Usage: data_once.py DIRECTORY NODE NODELIST UID. As root, on a node of a test cluster.
"""

from __future__ import annotations

import sys
import time

from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_config
from forestage.features.data import data_view
from forestage.features.data import requests as data
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.paths import NodePaths
from forestage.slurm.job import Job

LONGEST = 400.0  # seconds


class LaterClock(Clock):
    """An hour later: of what has just changed, a copy waits until it is settled."""

    def wall(self) -> float:
        return super().wall() + 3600


def main(directory: str, node_name: str, nodelist: str, uid: str) -> int:
    places = NodePaths()
    config = load_config(places.etc).for_partition("all")
    node = Node.from_config(config, places, LaterClock())
    environ = {
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_USER": "alice",
        "SLURM_JOB_UID": uid,
        "SLURM_JOB_GID": uid,
        "SLURM_JOB_PARTITION": "all",
        "SLURM_JOB_WORK_DIR": "/shared/alice",
        "SLURM_JOB_NODELIST": nodelist,
        "SLURMD_NODENAME": node_name,
        "SLURM_JOB_COMMENT": f"stage={directory}/",
    }
    job = Job.from_environ(environ)
    (outcome,) = data.start_job_data(
        node, job, HookDeadlines.from_seconds(Clock(), 600.0, None), None
    )
    state, end = outcome.result, time.monotonic() + LONGEST
    while state in ("started", "looking", "copying") and time.monotonic() < end:
        time.sleep(0.05)
        found = data_view.read_job_data(node.leases, 1).trees.get(f"{directory}/")
        state = found.state if found else "looking"
    print(state, outcome, data_view.read_job_data(node.leases, 1).trees)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
