"""What the prefetch host asks Slurm: the jobs that wait, how many there are, and the partitions."""

import re

from forestage.errors import SlurmError
from forestage.slurm.slurm_client import SlurmClient

MAX_BYTES = 64 << 20  # that squeue may write about all jobs that wait


def query_pending_jobs(slurm: SlurmClient, nonce: str) -> str:
    """Return what squeue lists of all jobs that wait, the next one first.

    It is for `queue_lines.parse_queue`. What a user has written stands behind `nonce`, which nobody
    can know before, nor meanwhile: it is in a variable, as who lists processes sees the command
    line. Raises SlurmError, Failed.
    """
    # Without widths, which cut a field off or fill it up. Of the times only epochs can be read.
    fields = (
        *(f"JobArrayID:0|{nonce}<", "UserID:0|", "NumNodes:0|", "Partition:0|", "Reason:0|"),
        *("EligibleTime:0|", f"admin_comment:0|{nonce}>", "Comment:0"),
    )
    words = ("--noheader", "--local", "--all", "--noconvert", "--states=PENDING", "--sort=-p,i")
    variables = {"SQUEUE_FORMAT2": ",".join(fields), "SLURM_TIME_FORMAT": "%s"}
    return slurm.query("squeue", *words, variables=variables, most=MAX_BYTES)


def query_partitions(slurm: SlurmClient) -> dict[str, tuple[int, str]]:
    """Return how many nodes each partition has, and which, in brackets. Raises SlurmError."""
    listed = slurm.query("sinfo", "--noheader", "--local", "--all", "--format=%R|%D|%N")
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, count, nodes = line.split("|")
        before, names = found.get(name, (0, ""))
        found[name] = (before + int(count), f"{names},{nodes}".strip(","))
    return found


def count_pending_jobs(slurm: SlurmClient) -> int:
    """Return how many jobs wait, as slurmctld counts them each half minute. Raises SlurmError."""
    listed = slurm.query("sdiag")
    count = re.search(r"^Jobs pending:\s+([0-9]+)$", listed, re.ASCII | re.MULTILINE)
    if count is None:
        raise SlurmError(f"sdiag counts no pending jobs: {listed[:200]!r}")
    return int(count[1])
