"""Claims on binds: who takes one off, who leaves it, and what a hung path is left for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from commands import Frozen
from forestage.bind import unmount
from forestage.bind.unmount import ClaimedBind, RedirectBind
from forestage.cache.layout import Cache
from forestage.clock import Deadline
from forestage.system import as_user, lock, mounts
from forestage.system.as_user import User
from forestage.system.mounts import MountInfo


@pytest.fixture
def table(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[MountInfo]:
    """What the kernel shows."""
    root = MountInfo(1, 0, "0:1", "/", "/")
    table = [root, *(bind(cache, n).mount for n in (5, 6))]
    monkeypatch.setattr(mounts, "list_mounts", lambda: list(table))
    return table


def bind(cache: Cache, number: int, path: str = "") -> RedirectBind:
    where = f"{cache.root}/entries/0{number}/image"
    return RedirectBind(
        MountInfo(number, 1, "0:1", where, path or f"/lustre/{number}"), f"0{number}"
    )


@contextlib.contextmanager
def claimed(
    cache: Cache, *wanted: RedirectBind, now: float | None = None
) -> Iterator[list[RedirectBind]]:
    with contextlib.ExitStack() as claims:
        yield [one.bind for one in unmount.claim_binds(cache, wanted, claims, now)]


def test_bind_claimed_by_one_process_is_not_claimed_by_another(
    cache: Cache, table: list[MountInfo]
) -> None:
    five, six = bind(cache, 5), bind(cache, 6)
    with claimed(cache, five) as first, claimed(cache, five, six) as second:
        assert (first, second) == ([five], [six])
        assert unmount.is_being_unmounted(cache, five)
    assert not unmount.is_being_unmounted(cache, five)
    assert list(cache.locks.iterdir()) == [], "claims leave no file"


def test_bind_unmounted_before_the_claim_is_not_claimed(
    cache: Cache, table: list[MountInfo]
) -> None:
    """Its number may be another mount's by the time it is unmounted."""
    five = bind(cache, 5)
    table.remove(five.mount)
    with claimed(cache, five) as mine:
        assert mine == []


def test_waiting_for_an_unmount_ends_with_the_claim_or_times_out(
    cache: Cache, table: list[MountInfo]
) -> None:
    five = bind(cache, 5)

    class Ends(Frozen):
        """Whoever has the claim lets it go while somebody sleeps."""

        def sleep(self, seconds: float) -> None:
            claims.close()

    with contextlib.ExitStack() as claims:
        unmount.claim_binds(cache, [five], claims)
        with pytest.raises(lock.LockTimeout, match="/lustre/5"):
            unmount.wait_until_unmounted(cache, [five], Deadline.after(0.0, Frozen()))
        unmount.wait_until_unmounted(cache, [five], Deadline.after(600.0, Ends()))
    unmount.wait_until_unmounted(cache, [five], Deadline.after(0.0, Frozen()))


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths that do not answer; all others do."""
    paths: set[str] = set()

    def each(works: list[object], *rest: Any) -> None:
        for number, work in enumerate(works):
            at = work.args[0]  # type: ignore[attr-defined]
            rest[-1](number, None if at[0].point in paths else [0] * len(at))

    monkeypatch.setattr(as_user, "run_each_in_child", each)
    return paths


def test_hooks_skip_a_bind_after_a_hung_unmount_for_a_while_and_the_sweep_retries(
    cache: Cache, table: list[MountInfo], hangs: set[str], me: User
) -> None:
    five, six = bind(cache, 5), bind(cache, 6)
    hangs.add(five.path)
    with claimed(cache, five, six), pytest.raises(unmount.UnmountError, match="/lustre/5") as hung:
        unmount.unmount_binds([ClaimedBind(five, cache), ClaimedBind(six, cache)], lambda bind: me)
    assert hung.value.removed == 1
    noted = (cache.locks / "5.unmount").stat().st_mtime
    assert not unmount.is_being_unmounted(cache, five), "it may be kept"
    with claimed(cache, five, six, now=noted + 60) as hook:
        assert hook == [six]
    with claimed(cache, five, now=noted + unmount.LEFT_TO_SWEEP) as later:
        assert later == [five]
    with claimed(cache, bind(cache, 5, "/lustre/another"), now=noted + 60) as reused:
        assert [one.path for one in reused] == ["/lustre/another"]
    hangs.clear()
    with claimed(cache, five) as sweep:
        assert sweep == [five]
        unmount.unmount_binds([ClaimedBind(five, cache)], lambda bind: me)
    assert list(cache.locks.iterdir()) == []


def test_notes_of_hung_unmounts_are_deleted_once_the_mount_is_gone(
    cache: Cache, table: list[MountInfo]
) -> None:
    for number in (5, 7):
        (cache.locks / f"{number}.unmount").write_text(f"/lustre/{number}")
    cache.space_lock.touch()
    unmount.delete_old_claims(cache)
    assert {file.name for file in cache.locks.iterdir()} == {"5.unmount", "space.lock"}


def test_bind_below_a_users_fuse_mount_is_unmounted_last(
    cache: Cache, table: list[MountInfo], hangs: set[str], monkeypatch: pytest.MonkeyPatch, me: User
) -> None:
    """It may hang whenever that user likes."""
    table.append(MountInfo(9, 1, "0:9", "/", "/lustre/5", rest="rw - fuse.x x rw,user_id=1000"))
    ordered: list[str] = []

    def each(works: list[object], *rest: object) -> None:
        ordered.extend(work.args[0][0].point for work in works)  # type: ignore[attr-defined]

    monkeypatch.setattr(as_user, "run_each_in_child", each)
    both = [bind(cache, 6), bind(cache, 5)]
    unmount.unmount_binds([ClaimedBind(one, cache) for one in both], lambda bind: me)
    assert ordered == ["/lustre/6", "/lustre/5"]


def test_unmounting_an_empty_list_starts_no_child(
    monkeypatch: pytest.MonkeyPatch, me: User
) -> None:
    monkeypatch.setattr(as_user, "_fork_child", None)
    unmount.unmount_binds([], lambda bind: me)
