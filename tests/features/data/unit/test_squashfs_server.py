"""How much a node serves of mounted files: counted by the names of the sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from forestage.errors import Declined
from forestage.features.data import squashfs_server
from forestage.slurm.job import Job

JOB = Job.from_environ({"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_GID": "1000"})


def names(
    uids: Sequence[int], jobs: Sequence[int], inodes: Sequence[int], steps: int = 1
) -> list[str]:
    return [
        f"{uid}-{job}-{step}-{inode}-4242"
        for uid in uids
        for job in jobs
        for inode in inodes
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("served", "room"),
    [
        ([], True),
        (names([1000], range(17), [5], steps=2), True),  # packed jobs with one environment
        (names([1000], [7], range(16), steps=3), True),  # one job, its batch script and two steps
        (names([1000], [8], range(127)), True),
        (names([1000], [8], range(128)), False),
        (names([1000], range(8, 136), [5]), False),  # the same file in 128 jobs
        (names([1000], [7], range(128)), True),  # this job has this file already
        (names([1001], [8], range(128)), True),
        (names([1001, 1002], [8], range(128)), False),
        (names([1000], [7], [5], steps=255), True),
        (names([1000], [7], [5], steps=256), False),  # each is a process of root's
        (names([1001, 1002], [8], [5], steps=256), False),
    ],
)
def test_limit_of_mounted_squashfs_files_counts_each_file_once_per_job(
    served: list[str], room: bool
) -> None:
    with contextlib.nullcontext() if room else pytest.raises(Declined, match="mounted"):
        squashfs_server.check_server_limits(served, JOB, inode=5)
