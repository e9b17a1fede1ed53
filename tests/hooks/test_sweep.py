"""The sweep with real redirects, and beside hooks: it takes the dead, and nothing that lives."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from forestage.cache.lease import EntryUse
from forestage.cache.node import Node as Here
from forestage.clock import Clock
from forestage.commands import sweep
from forestage.commands.sweep import SweepReport
from forestage.config import Config
from forestage.slurm.slurm_client import JobState, SlurmClient
from forestage.system import lock
from node import BOB, HANGS, Node, content, until

_fork = multiprocessing.get_context("fork")


class Running(SlurmClient):
    """Knows those jobs that have a file here; as Slurm, from before the Prolog to after the Epilog.

    No step runs on this machine, so everything hangs on the answers.
    """

    def list_jobs_with_steps(self) -> frozenset[int]:
        return frozenset()

    def has_node(self, node: str) -> bool:
        return node == "n1"

    def find_job(self, job: int) -> JobState | None:
        return JobState("RUNNING", "n1") if (self.proc / str(job)).exists() else None


@pytest.fixture
def running(node: Node) -> Running:
    folder = node.places.root / "running"
    folder.mkdir(parents=True)
    return Running("", "", folder)


def here(node: Node) -> Here:
    config = Config(cache="/mnt/nvme/forestage")
    return Here.from_config(config, node.places, Clock())


def swept(node: Node, slurm: SlurmClient) -> SweepReport:
    done = sweep.run_sweep(here(node), slurm, False, lambda text: None)
    assert (done.doubt, done.problems) == ("", ())
    return done


def test_sweep_unmounts_redirects_that_no_running_job_needs(node: Node, running: Running) -> None:
    path, other, stray = (
        node.put("alice/a.sqsh"),
        node.put("bob/b.sqsh", content(2), BOB),
        node.put("alice/c.sqsh", content(3)),
    )
    node.prolog(6, other, user=BOB)
    node.prolog(7, path)
    node.prolog(8, other, user=BOB)
    node.prolog(9, stray)
    node.leases.drop_lease(9)  # as a hook leaves it that was killed
    (running.proc / "8").touch()
    done = swept(node, running)
    # With the first lease goes the stray one; the second job's is needed by the third.
    assert [(one.job, one.redirects) for one in done.released] == [(6, 1), (7, 1)]
    assert node.shows_source(path)
    assert node.shows_source(stray)
    assert node.shows_entry(other, node.identity(other).key)
    assert node.binds() == {str(other): node.identity(other).key}


def test_epilog_after_the_sweep_released_its_job_exits_0(node: Node, running: Running) -> None:
    path = node.staged(7)
    swept(node, running)
    assert node.epilog(7).code == 0
    assert node.prolog(7, path).said == ("hit", "")


@pytest.mark.parametrize("redirect", ["bind", "spank", "none"])
def test_requeued_job_that_begins_while_slurm_answers_keeps_its_lease(
    node: Node, running: Running, redirect: str
) -> None:
    """The lease of its former run is there still, and its Prolog goes on with that."""
    path = node.put("alice/a.sqsh")
    node.configure(redirect=redirect)
    node.prolog(7, path)

    class Slow(Running):
        def find_job(self, job: int) -> JobState | None:
            answer = super().find_job(job)
            before = node.leases.find_version(7)
            # The kernel's clock ticks in milliseconds, and a real Slurm takes some.
            until(lambda: node.prolog(7, path) and node.leases.find_version(7) != before, "a tick")
            return answer

    assert swept(node, Slow("", "", running.proc)).released == ()
    lease = node.held(7)
    assert [use.key for use in lease.uses] == [node.identity(path).key]


def _sweep_until(node: Node, slurm: SlurmClient, stop: Path) -> None:
    while not stop.exists():
        with contextlib.suppress(lock.LockTimeout):
            swept(node, slurm)


ROUNDS = 20


@pytest.mark.parametrize("seed", [2])
def test_sweeps_during_hooks_never_release_running_jobs(
    node: Node, running: Running, seed: int
) -> None:
    dice = random.Random(seed)
    paths = [node.put(f"alice/{name}.sqsh", content(number)) for number, name in enumerate("ab")]
    keys = {path: node.identity(path).key for path in paths}
    stop = node.places.root / "stop"
    sweepers = [_fork.Process(target=_sweep_until, args=(node, running, stop)) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    has: dict[int, Path] = {}
    for _ in range(ROUNDS):
        job = dice.randrange(1, 5)
        flag = running.proc / str(job)
        if job not in has:  # perhaps with the lease of its former run
            flag.touch()
            has[job] = dice.choice(paths)
            ran = node.prolog(job, has[job])
            assert ran.code == 0
            assert ran.outcome.result in ("hit", "copied"), ran
        elif dice.random() < 0.5:
            assert node.epilog(job).said == ("released", "")
            flag.unlink()
            del has[job]
        else:  # its Epilog never runs
            flag.unlink()
            del has[job]
        for other, path in has.items():
            lease = node.held(other)
            assert EntryUse(keys[path], str(path)) in lease.uses
            assert node.shows_entry(path, keys[path])
    stop.touch()
    for sweeper in sweepers:
        sweeper.join(HANGS)
        assert sweeper.exitcode == 0
    for flag in running.proc.iterdir():
        flag.unlink()
    swept(node, running)
    assert (node.leases.list_jobs(), node.binds(), node.parts()) == ((), {}, [])
    assert all(node.shows_source(path) for path in paths)


def test_sweep_removes_lock_files_of_evicted_images(node: Node, running: Running) -> None:
    """Each version of each image leaves one."""
    for job in range(1, 6):
        node.staged(job, data=content(job))
        node.epilog(job)
    kept = sorted(node.entries())[0]
    for key in node.entries() - {kept}:
        node.cache.evict_entry(key)
    assert len(list(node.cache.locks.glob("*.lock"))) == 6
    swept(node, running)
    names = {file.name for file in node.cache.locks.iterdir()}
    assert names == {"space.lock", "entries.sum", f"{kept}.lock"}


def test_lease_contains_the_nodes_name_in_slurm(node: Node) -> None:
    """Slurm's name for it, by which a job that was requeued to another one is recognised."""
    path = node.staged(7)
    node.prolog(8, path, comment="stage=off")
    for job in (7, 8):
        lease = node.held(job)
        assert lease.node == "n1"


@pytest.mark.parametrize(
    ("named", "runs", "age", "left"),
    [
        ("n1", False, 7200, False),
        ("n1", True, 7200, True),  # it may have steps with images yet
        ("n1", False, 60, True),  # its Prolog has just noted them
        ("other", False, 7200, True),  # that Slurm is another cluster's
    ],
)
def test_sweep_deletes_the_old_node_list_of_a_job_that_slurm_calls_over(
    node: Node, running: Running, named: str, runs: bool, age: float, left: bool
) -> None:
    """Its Epilog never came: slurmd was killed with the job."""
    nodes = node.places.leases / "7.nodes"
    nodes.parent.mkdir(parents=True)
    nodes.write_text("n[1-2]\n65534 0")
    old = time.time() - age
    os.utime(nodes, (old, old))
    if runs:
        (running.proc / "7").touch()
    swept(node, running._replace(node=named))
    assert nodes.exists() is left


def test_sweep_keeps_node_lists_if_slurm_does_not_answer(node: Node, running: Running) -> None:
    nodes = node.places.leases / "7.nodes"
    nodes.parent.mkdir(parents=True)
    nodes.write_text("n[1-2]\n65534 0")
    os.utime(nodes, (1, 1))
    silent = SlurmClient(str(running.proc), proc=running.proc, node="n1")  # has no scontrol
    done = sweep.run_sweep(here(node), silent, False, lambda text: None)
    assert ("scontrol" in done.doubt, done.problems, nodes.exists()) == (True, (), True)
