"""The sweep beside read-through files: it ends keepers that hang, and no other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
from fault import source_bytes

from forestage.commands import sweep
from forestage.commands.sweep import SweepReport
from forestage.slurm.slurm_client import SlurmClient
from forestage.views.through import keeper_cleanup
from forestage.views.through.keeper import PROCESS_NAME
from node import BOB, Later, Node, until
from through import Aside, Copy, Shown, Through, direct, read_fresh


def swept(through: Through, dry_run: bool = False, seconds: float = 100.0) -> SweepReport:
    """A sweep after a while in which nobody but the keepers that live has done anything."""
    node = msgspec.structs.replace(through.node, clock=Later(seconds))
    done = sweep.run_sweep(node, SlurmClient("", "", Path("/proc")), dry_run, lambda text: None)
    assert done.problems == ()
    return done


def test_sweep_kills_a_stopped_keeper_and_its_server_still_answers(shown: Shown) -> None:
    through = shown()
    os.kill(through.pid, signal.SIGSTOP)
    assert swept(through, dry_run=True).keepers == (through.image.key,)
    assert swept(through).keepers == (through.image.key,)
    until(lambda: not through.living(), "the keeper's end")
    assert read_fresh(through.path) == source_bytes()


@pytest.mark.parametrize("step", [-3600.0, -40 * 86400.0])
def test_sweep_kills_a_stopped_keeper_though_the_clock_was_set_back(
    shown: Shown, step: float
) -> None:
    through = shown()
    assert swept(through, seconds=step).keepers == ()
    os.kill(through.pid, signal.SIGSTOP)
    assert swept(through, seconds=step).keepers == (through.image.key,)
    until(lambda: not through.living(), "the keeper's end")


def test_sweep_aborts_a_fuse_connection_without_a_running_server(shown: Shown) -> None:
    through = shown()
    pid = through.server()
    os.kill(through.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGSTOP)
    reader = Aside(lambda: direct(through.path, source_bytes()))
    until(reader.waits, "a reader to hang")
    assert swept(through).keepers == (through.image.key,)
    assert reader.ended() != 0
    through.ended()  # also the server, which is stopped still


def test_sweep_keeps_a_healthy_keeper_though_the_clock_was_set_forward(shown: Shown) -> None:
    through = shown()
    assert swept(through).keepers == ()
    assert through.living()
    through.lay()


def test_kill_keeper_kills_no_other_process_with_the_keepers_pid(shown: Shown) -> None:
    through = shown()
    ((spot, state),) = through.living()
    other = Aside(signal.pause)
    keeper_cleanup.kill_keeper(
        keeper_cleanup.LivingKeeper(spot, msgspec.structs.replace(state, pid=other.pid), 0.0)
    )
    until(lambda: not through.living(), "the keeper's end")
    assert read_fresh(through.path) == source_bytes()
    os.kill(other.pid, signal.SIGTERM)
    assert other.ended() == -signal.SIGTERM


def test_users_process_that_imitates_a_keeper_is_not_killed(shown: Shown) -> None:
    """In a mount namespace of theirs, users have files of any path; here it is the keeper's own."""
    through = shown()
    ((spot, state),) = through.living()
    ready, told = os.pipe()

    def pretend() -> None:
        os.open(spot / "lock", os.O_RDONLY)
        Path("/proc/self/comm").write_text(PROCESS_NAME)
        os.setresuid(BOB.uid, 0, 0)
        os.write(told, b"x")
        signal.pause()

    other = Aside(pretend)
    assert os.read(ready, 1) == b"x"
    keeper_cleanup.kill_keeper(keeper_cleanup.LivingKeeper(spot, state, 0.0))
    until(lambda: not through.living(), "the keeper's end")
    os.kill(other.pid, signal.SIGTERM)
    assert other.ended() == -signal.SIGTERM
    os.close(ready)
    os.close(told)


def test_sweep_removes_a_read_through_directory_only_without_keeper_and_stager(
    node: Node, shown: Shown
) -> None:
    through = shown()
    wrong = Copy(through, source_bytes()).bring_marked()
    until(lambda: read_fresh(through.path) == wrong, "the part to be found")
    swept(through)
    assert through.spot.exists()
    through.kill_keeper()
    swept(through, dry_run=True)
    swept(through, seconds=0.0)
    assert through.spot.exists()
    swept(through)
    assert not through.spot.exists()
    # A server is left, and believes no mark that nobody would clear any more.
    assert read_fresh(through.path) == source_bytes()
