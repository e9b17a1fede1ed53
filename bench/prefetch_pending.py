"""A pass of the prefetch host over a long queue, on a slurmctld whose nodes are a cloud's.

No node is ever started: one job holds all of them, and the others, each with an image of its own,
wait. Each round is a `forestage prefetch` as a process of its own; `whole` is from its start to its
end, `cpu` what it and what it has started took of the processors, both in ms. `jobs` and `nodes`:
what slurmctld took for squeue's and sinfo's questions, by sdiag.
"""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster import Cluster, ClusterError
from jobs import CLI, Site
from spec import ALICE, INSIDE_STATE, LOGIN, REPO, ClusterSpec

ROUNDS = 5
WIDEST = 64  # nodes of a job that waits
RPC = re.compile(r"^\s+REQUEST_(JOB|NODE)_INFO\s.*\btotal_time:(\d+)$", re.MULTILINE)


class PendingRound(NamedTuple):
    whole: float
    cpu: float
    jobs: float
    nodes: float


def run_passes(pending: int, nodes: int) -> list[PendingRound]:
    """Raises ClusterError where a pass does not find all these jobs."""
    conf = {
        "Prolog": None,
        "Epilog": None,
        "NodeName": f"n[1-{nodes}] CPUs=8 State=CLOUD",
        "PartitionName": f"all Nodes=n[1-{nodes}] Default=YES State=UP",
        "MaxJobCount": str(pending + 1000),
        "ResumeProgram": "/bin/true",
        "SuspendProgram": "/bin/true",
        "SuspendTime": "36000",
        "ResumeTimeout": "36000",
        "ResumeRate": "0",
        # As with such a queue; this cluster's own is that no job waits longer than it must.
        "SchedulerParameters": "defer,bf_continue,bf_interval=60",
    }
    with Cluster.up(ClusterSpec(nodes=0, slurm_conf=conf)) as cluster:
        Site(cluster).configure(peers={"enabled": True}, prefetch={"host": LOGIN})
        cluster.submit("#!/bin/sh\n", f"--nodes={nodes}", "--exclusive", "--time=10000")
        submit_jobs(cluster, pending, min(nodes, WIDEST))
        measure_pass(cluster, pending)  # reads all programs once; does not count
        return [measure_pass(cluster, pending) for _ in range(ROUNDS)]


def submit_jobs(cluster: Cluster, count: int, widest: int) -> None:
    program = "prefetch_submit"
    source = REPO / f"bench/{program}.c"
    compiler = ["gcc", "-O1", "-o", str(cluster.state / program), str(source), "-lslurm"]
    subprocess.run(compiler, check=True)
    argv = [str(INSIDE_STATE / program), str(count), str(ALICE.uid), str(widest)]
    cluster.run(argv, user="root")


def measure_pass(cluster: Cluster, pending: int) -> PendingRound:
    cluster.run(["sdiag", "--reset"], user="root")
    before, start = read_children_cpu(), time.perf_counter()
    said = cluster.run([CLI, "prefetch", "--node", LOGIN], user="root").stdout
    whole, cpu = time.perf_counter() - start, read_children_cpu() - before
    if f"{pending} pending jobs with an image" not in said:
        raise ClusterError(f"not {pending} jobs: {said}")
    told = dict(RPC.findall(cluster.run(["sdiag"], user="root").stdout))
    return PendingRound(1000 * whole, 1000 * cpu, int(told["JOB"]) / 1000, int(told["NODE"]) / 1000)


def read_children_cpu() -> float:
    """Seconds that this process's children, which have ended, took of them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def format_table(rounds: Sequence[PendingRound]) -> Iterator[str]:
    yield "| | ms | from | to |"
    yield "|:--|--:|--:|--:|"
    for name, values in zip(PendingRound._fields, zip(*rounds, strict=True), strict=True):
        middle = statistics.median(values)
        yield f"| {name} | {middle:.0f} | {min(values):.0f} | {max(values):.0f} |"


def format_summary(rounds: Sequence[PendingRound]) -> str:
    middle = PendingRound(*map(statistics.median, zip(*rounds, strict=True)))
    return f"pass={middle.whole / 1000:.2f} job_info_ms={middle.jobs:.1f}"
