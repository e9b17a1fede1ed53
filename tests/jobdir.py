"""A node whose NVMe is a real file system, and jobs that have directories of their own on it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

import node as nodes
from forestage.cache.layout import DiskUsage
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_config
from forestage.errors import Declined
from forestage.events import RequestOutcome
from forestage.features.contexts import StepPart
from forestage.features.data import job_dir
from forestage.features.data import requests as data
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.job import Job
from forestage.stage.copy_wait import ProgressCallback, ignore_progress
from forestage.system import daemon, loop, mounts
from forestage.system.as_user import User
from node import ALICE

MIB = 1 << 20


MANAGER = {"FORESTAGE_MANAGER": str(os.getppid())}  # as if it had started us


class Dirs:
    """What Prologs, steps and Epilogs do with directories of jobs; the companion is played."""

    def __init__(self, node: nodes.Node) -> None:
        self.node = node
        self.source = node.shared / "data"
        self.source.mkdir()

    @property
    def on(self) -> Node:
        settings = load_config(self.node.places.etc, self.node.places.config_memo)
        return Node.from_config(settings.for_partition("batch"), self.node.places, Clock())

    def job(self, job: int, comment: str, user: User = ALICE, **more: str) -> Job:
        return Job.from_environ(self.node.environ(job, user=user, comment=comment) | MANAGER | more)

    def prolog(
        self,
        job: int,
        comment: str,
        user: User = ALICE,
        restart: int | None = None,
        seconds: float = 60.0,
    ) -> list[RequestOutcome]:
        """The outcomes of what went wrong, or was begun."""
        more = {} if restart is None else {"SLURM_RESTART_COUNT": str(restart)}
        asked = self.job(job, comment, user, **more)
        return data.start_job_data(
            self.on, asked, HookDeadlines.from_seconds(Clock(), seconds, None), None
        )

    def step(
        self,
        job: int,
        user: User = ALICE,
        fill: float = 240.0,
        progress: ProgressCallback = ignore_progress,
        refusal: Declined | None = None,
    ) -> StepPart:
        asked = self.job(job, "", user, SLURM_STEP_ID="0")
        limit = HookDeadlines.from_seconds(Clock(), 60.0, None)
        until = type(limit.end).after(fill, Clock())
        limit = msgspec.structs.replace(limit, fill=until, on_data_wait=progress)
        return data.show_job_data(self.on, asked, limit, refusal)

    @contextlib.contextmanager
    def seen(self, job: int, user: User = ALICE, kept: bool = False) -> Iterator[Path]:
        """The directory as a task of the job sees it; `kept` where something is open in it then."""
        line = job_dir.prepare_mount_for_step(self.on, self.job(job, "", user)).line
        target = line[-2]
        if line[0] == "served":
            assert line[2:] == (target, "root")
            clone, point = (
                daemon.fetch_mount_clone(Path(line[1]), "job-dir"),
                os.open(target, os.O_PATH),
            )
            mounts.attach_mount(clone, point)
            os.close(clone)
            os.close(point)
        else:
            _, device, _, kind, *rest = line
            assert (kind, rest) == ("ext4", ["rw", target, "root"])
            mounts.mount(device, target, mounts.MS_NOSUID | mounts.MS_NODEV, kind)
        try:
            yield Path(target)
        finally:
            # The holder may have the clone that it has sent open for a moment longer.
            mounts.umount(target, mounts.MNT_DETACH if kept or line[0] == "served" else 0)

    def taken(self) -> DiskUsage:
        return job_dir.measure_disk_usage(self.node.cache)

    def devices(self) -> list[str]:
        facts = self.node.nvme.stat()
        return [one.name for one in loop.list_attached_devices() if one.is_on_file_system(facts)]


def as_alice(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a shell's words as the job's user."""
    return subprocess.run(
        ["sh", "-c", script],
        user=ALICE.uid,
        group=ALICE.gid,
        extra_groups=[],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def made(node: nodes.Node, file: Path, size: str = "512M") -> Iterator[Dirs]:
    """The NVMe of `node` is an ext4 in `file` meanwhile; its loop devices go with it."""
    subprocess.run(["truncate", "-s", size, file], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", file], check=True)
    subprocess.run(["mount", "-o", "loop", file, node.nvme], check=True)
    node.configure(redirect="spank", require_mount=False, data={"job_dir": "80%"})
    dirs = Dirs(node)
    try:
        yield dirs
    finally:
        for job in {place.name.partition(".")[0] for place in node.cache.jobs.glob("*")}:
            job_dir.remove_job_dirs(node.cache, int(job))
        for one in loop.list_attached_devices():
            if one.is_on_file_system(dirs.node.nvme.stat()):
                loop.detach_device(one)
