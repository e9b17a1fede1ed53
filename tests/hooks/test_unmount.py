"""Redirects are unmounted beside each other and outside the lock: who hangs harms nobody else."""

from __future__ import annotations

import errno
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.bind import unmount
from forestage.cache import disk_errors
from forestage.cache.layout import Cache
from forestage.cache.node import Node as Here
from forestage.clock import Clock, Deadline
from forestage.commands import inventory, sweep, unredirect, verify
from forestage.config import Config
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import as_user, lock
from forestage.system.as_user import User
from node import BOB, HANGS, Arrange, Later, Node, content, until

_fork = multiprocessing.get_context("fork")


@pytest.fixture
def hang(node: Node, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Has a path hang for who would unmount it; returns a file with a line for each try: whether
    the space lock was free."""
    reach = as_user.open_path_as_root_or_user
    tries = node.places.root / "tries"

    def hanging(path: Path) -> Path:
        def reached(point: str, user: User) -> int:
            if point != str(path):
                return reach(point, user)
            with tries.open("a") as file:
                file.write(f"{lock.is_free(node.cache.space_lock)}\n")
            while True:
                signal.pause()

        monkeypatch.setattr(as_user, "open_path_as_root_or_user", reached)
        monkeypatch.setattr(unmount, "TIMEOUT", 3.0)  # seconds
        return tries

    return hanging


def test_hanging_unmount_does_not_stop_the_unmount_of_another_users_redirect(
    node: Node, hang: Callable[[Path], Path]
) -> None:
    """Both lie on the same file system; what hangs is between it and one of them."""
    other = node.put("bob/b.sqsh", content(2), BOB)
    node.prolog(2, other, user=BOB)
    hung = node.staged(1)  # the newest is the first to go
    node.leases.drop_lease(2)  # as if its Epilog had been killed
    tries = hang(hung)
    ran = node.epilog(1)
    assert (ran.ended, ran.outcome.unmounted) == ((0, "released", "redirect"), 1)
    assert f"{hung} (hangs)" in ran.outcome.detail
    assert set(node.binds()) == {str(hung)}
    assert node.shows_source(other)
    assert tries.read_text() == "True\n", "it must not hang under the node's lock"


def test_path_with_a_hung_unmount_is_skipped_by_later_epilogs_for_a_while(
    node: Node, hang: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = hang(node.staged(1))
    node.epilog(1)
    other = node.put("bob/b.sqsh", content(2), BOB)
    for job in (2, 3):
        node.prolog(job, other, user=BOB)
        assert node.epilog(job).said == ("released", "")
    assert len(tries.read_text().splitlines()) == 1
    monkeypatch.undo()
    node.prolog(4, other, user=BOB)
    assert node.epilog(4, clock=Later(unmount.LEFT_TO_SWEEP)).outcome.unmounted == 2
    assert node.binds() == {}


def test_redirect_left_by_a_hung_unmount_is_used_by_the_next_job(
    node: Node, hang: Callable[[Path], Path]
) -> None:
    path = node.staged(1)
    hang(path)
    node.epilog(1)
    assert node.prolog(2, path).said == ("hit", "")
    assert node.binds() == {str(path): node.identity(path).key}


def test_claim_on_a_failed_unmount_is_released_while_another_unmount_hangs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays, as it cannot be taken off; a Prolog that wants it does not wait for the other."""
    refused, hung = node.staged(1), node.put("bob/b.sqsh", content(2), BOB)
    node.prolog(2, hung, user=BOB)
    go, reach = node.places.root / "go", as_user.open_path_as_root_or_user

    def reached(point: str, user: User) -> int:
        if point == str(refused):
            raise OSError(errno.EIO, "Input/output error")
        until(go.exists, "the end of the test")
        return reach(point, user)

    monkeypatch.setattr(as_user, "open_path_as_root_or_user", reached)
    for job in (1, 2):
        node.leases.drop_lease(job)
    binds = {one.path: one for one in unmount.list_binds(node.cache)}
    sweeps = _fork.Process(
        target=sweep.run_sweep, args=(here(node), SlurmClient(""), False, lambda text: 0)
    )
    sweeps.start()
    is_going = unmount.is_being_unmounted
    until(lambda: is_going(node.cache, binds[str(hung)]), "the sweep to begin")
    until(lambda: not is_going(node.cache, binds[str(refused)]), "the first path to be done")
    assert is_going(node.cache, binds[str(hung)])
    assert str(refused) in node.binds()
    go.touch()
    sweeps.join(HANGS)
    assert set(node.binds()) == {str(refused)}


def test_epilog_with_a_hanging_unmount_still_scans_the_kernel_log(
    node: Node, hang: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr(disk_errors, "scan_kernel_log", lambda *_: looked.append(1))
    hang(node.staged(1))
    assert node.epilog(1).said == ("released", "redirect")
    assert looked == [1]


def _prolog(node: Node, path: Path, waits: Path) -> None:
    real = unmount.wait_until_unmounted

    def wait(*arguments: object) -> None:
        waits.touch()
        real(*arguments)  # type: ignore[arg-type]

    unmount.wait_until_unmounted = wait
    node.prolog(2, path)


def test_job_that_begins_between_the_unmount_decision_and_the_unmount_is_redirected(
    node: Node, before: Arrange
) -> None:
    """It finds the right redirect, which the Epilog of another job is about to take off."""
    path, waits = node.staged(1), node.places.root / "waits"
    begins = _fork.Process(target=_prolog, args=(node, path, waits))

    def job_begins() -> None:
        begins.start()
        until(waits.exists, "the Prolog to meet what goes")

    before(unmount, "unmount_binds", job_begins)
    assert node.epilog(1).outcome.unmounted == 1
    begins.join(HANGS)
    assert begins.exitcode == 0
    (outcome,) = node.outcomes("prolog", 2)
    assert (outcome.result, outcome.redirect) == ("hit", "mounted")  # type: ignore[union-attr]
    assert node.shows_entry(path, node.identity(path).key)
    assert [use.path for use in node.held(2).uses] == [str(path)]


@pytest.mark.parametrize(("comment", "waits"), [("stage-wait=0", False), ("stage-wait=600", True)])
def test_prolog_waits_for_an_unmount_under_way_only_as_long_as_stage_wait_allows(
    node: Node, monkeypatch: pytest.MonkeyPatch, comment: str, waits: bool
) -> None:
    """Whoever unmounts it hangs: the Prolog once took all of its 15 s."""
    path, real, left = node.staged(1), unmount.wait_until_unmounted, list[float]()

    def wait(cache: Cache, going: list[unmount.RedirectBind], end: Deadline) -> None:
        left.append(end.seconds_left())
        real(cache, going, Deadline.after(0.0, Clock()))

    (bind,) = unmount.list_binds(node.cache)
    node.cache.claims.mkdir(exist_ok=True)
    with lock.held(node.cache.claims / f"{bind.mount.id}.unmount", 0):
        monkeypatch.setattr(unmount, "wait_until_unmounted", wait)
        monkeypatch.setattr(unmount, "TIMEOUT", 2.0)  # as it is outside of tests
        ran = node.prolog(2, path, comment=comment)
    assert ran.said == ("declined", "busy")
    assert ran.outcome.detail == f"another process is unmounting the redirect of {path}"
    assert (left[-1] > 2.0) is waits


def test_unmount_claim_of_a_killed_hook_does_not_block_the_next_hook(node: Node) -> None:
    path = node.staged(1)
    (bind,) = unmount.list_binds(node.cache)
    node.cache.claims.mkdir(exist_ok=True)
    (node.cache.claims / f"{bind.mount.id}.unmount").touch()
    assert node.prolog(2, path).outcome.redirect == "kept"  # type: ignore[union-attr]
    unmount.wait_until_unmounted(node.cache, [bind], Deadline.after(0.0, Clock()))


def _sweep(node: Node, path: Path) -> None:
    node.leases.drop_lease(1)
    sweep.run_sweep(here(node), SlurmClient(""), False, lambda text: None)


def _verify(node: Node, path: Path) -> None:
    node.cache.image_path(node.identity(path).key).chmod(0o600)  # not what its record says
    items = inventory.read_inventory(here(node)).items
    assert verify.verify_entries(here(node), items, False, lambda text: None).bad == 1


def _changed(node: Node, path: Path) -> None:
    node.put("alice/image.sqsh", content(2))
    assert node.prolog(2, path).said == ("copied", "")


def here(node: Node) -> Here:
    return Here.from_config(Config(cache="/mnt/nvme/forestage"), node.places, Clock())


WAYS: dict[str, Callable[[Node, Path], object]] = {
    "epilog": lambda node, path: node.epilog(1),
    "prolog": _changed,
    "prolog that saves": lambda node, path: node.prolog(2, node.put("b.sqsh"), saves=str(path)),
    "sweep": _sweep,
    "unredirect": lambda node, path: unredirect.unmount_redirects(here(node)),
    "verify": _verify,
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_space_lock_is_free_while_a_redirect_is_unmounted(
    node: Node, monkeypatch: pytest.MonkeyPatch, way: Callable[[Node, Path], object]
) -> None:
    """For that its path is walked, which may hang; and all hooks of the node stand in line."""
    path, was_free = node.staged(1), node.places.root / "free"
    (bind,) = unmount.list_binds(node.cache)
    reach = as_user.open_path_as_root_or_user

    def noting(point: str, user: User) -> int:
        with was_free.open("a") as file:
            file.write(f"{lock.is_free(node.cache.space_lock)}\n")
        return reach(point, user)

    monkeypatch.setattr(as_user, "open_path_as_root_or_user", noting)
    way(node, path)
    assert set(was_free.read_text().split()) == {"True"}
    assert bind not in unmount.list_binds(node.cache)
