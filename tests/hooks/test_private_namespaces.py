"""A mount namespace that was made while a redirect lay: it does not keep the redirect's bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.bind import namespaces, unmount
from forestage.clock import Clock
from forestage.system import mounts
from node import BOB, Arrange, Node, content, until
from private import USERS, Private


@pytest.mark.parametrize("options", [(), USERS], ids=["root", "user"])
def test_private_namespace_shows_the_source_after_the_epilog(
    node: Node, private: Callable[..., Private], options: tuple[str, ...]
) -> None:
    path = node.staged(1)
    container = private(*options)
    assert container.binds(node) == 1
    assert node.epilog(1).said == ("released", "")
    assert container.binds(node) == 0
    node.put("alice/image.sqsh", content(2))
    assert container.reads(path) == content(2)


def test_namespace_that_outlives_a_step_loses_its_bind_at_the_epilog(
    node: Node, private: Callable[..., Private]
) -> None:
    """With `redirect: spank` the node has no bind; once the entry is evicted it would be late."""
    path = node.staged(1)
    container = private(*USERS)
    mounts.umount(str(path))
    assert (container.binds(node), node.binds()) == (1, {})
    assert node.epilog(1).said == ("released", "")
    assert container.binds(node) == 0


@pytest.mark.parametrize("options", [(), USERS], ids=["root", "user"])
def test_bind_in_a_namespace_stays_while_a_job_leases_its_entry(
    node: Node, private: Callable[..., Private], options: tuple[str, ...]
) -> None:
    """The companion makes such in each task of its job."""
    path, other = node.staged(1), node.staged(2, "alice/other.sqsh")
    node.configure(redirect="none")
    node.prolog(3, path)
    container = private(*options)
    node.epilog(2)
    assert container.binds(node) == 1
    node.epilog(1)
    assert (container.binds(node), node.binds()) == (1, {})
    assert container.reads(path) == content()
    assert str(other) not in node.binds()


def test_sweep_unmounts_a_bind_that_an_epilog_left_in_a_namespace(
    node: Node, private: Callable[..., Private]
) -> None:
    path = node.staged(1)
    container = private(*USERS)
    node.leases.drop_lease(1)
    for bind in mounts.list_mounts():
        if bind.point == str(path):
            mounts.umount(bind.point)
    assert container.binds(node) == 1
    left = namespaces.unmount_in_namespaces(node.cache, node.leases)
    assert (left.removed, left.problems, container.binds(node)) == (1, (), 0)
    assert namespaces.unmount_in_namespaces(node.cache, node.leases).removed == 0, (
        "it is covered once"
    )


def test_path_that_hung_in_one_namespace_is_skipped_by_epilogs_in_other_namespaces(
    node: Node, private: Callable[..., Private], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mounts of each namespace have ids of their own."""
    path = node.staged(1)
    private(*USERS)
    node.leases.drop_lease(1)
    mounts.umount(str(path))
    tries, now = node.places.root / "tries", Clock().wall()
    real = namespaces._unmount_in_one_namespace

    def hangs(ones: list[namespaces.ForeignBind]) -> list[int]:
        with tries.open("a") as file:
            file.write("try\n")
        until(lambda: False, "a dead file server")
        return []

    monkeypatch.setattr(namespaces, "_unmount_in_one_namespace", hangs)
    monkeypatch.setattr(unmount, "TIMEOUT", 1.0)
    assert namespaces.unmount_in_namespaces(node.cache, node.leases, now).removed == 0
    node.prolog(2, path)
    second = private(*USERS)
    assert node.epilog(2).said == ("released", "")
    assert tries.read_text() == "try\n"
    assert second.binds(node) == 1
    # The sweep tries it all the same, and says when it is well again.
    monkeypatch.setattr(namespaces, "_unmount_in_one_namespace", real)
    monkeypatch.setattr(unmount, "TIMEOUT", 600.0)
    assert namespaces.unmount_in_namespaces(node.cache, node.leases).removed == 2
    assert list(node.cache.claims.glob("*.hung")) == []


def test_bind_of_an_evicted_entry_in_a_namespace_is_reported_as_a_problem(
    node: Node, private: Callable[..., Private]
) -> None:
    """Nothing can be mounted over a file that was deleted (ENOENT)."""
    path = node.staged(1)
    container = private(*USERS)
    node.leases.drop_lease(1)
    mounts.umount(str(path))
    node.cache.evict_entry(node.identity(path).key)
    node.cache.delete_evicted()
    left = namespaces.unmount_in_namespaces(node.cache, node.leases)
    assert left.removed == 0
    assert f"{path} in the mount namespace of process {container.program.pid}" in left.problems[0]


def test_bind_of_an_evicted_entry_reappears_in_a_namespace_and_the_sweep_reports_that(
    node: Node, private: Callable[..., Private]
) -> None:
    """The kernel takes off what is mounted on a deleted file, in all namespaces."""
    path = node.staged(1)
    container = private(*USERS)
    node.epilog(1)
    assert container.binds(node) == 0
    node.cache.evict_entry(node.identity(path).key)
    node.cache.delete_evicted()
    assert container.binds(node) == 1
    assert container.reads(path) == content()
    assert len(namespaces.unmount_in_namespaces(node.cache, node.leases).problems) == 1


HOSTILE = {
    "no proc": "mount -t tmpfs none /proc",
    "false proc": "mount -t tmpfs none /proc; mkdir -p /proc/self;"
    " for n in $(seq 3 30); do ln -s {other} /proc/self/$n; done; ln -s . /proc/self/fd",
    "false path": "mount -t tmpfs none {parent}; ln -s {other} {path}",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("first", HOSTILE.values(), ids=HOSTILE)
def test_epilog_unmounts_no_other_path_whatever_the_user_mounts_in_a_namespace(
    node: Node, private: Callable[..., Private], first: str
) -> None:
    path, other = node.staged(1), node.put("bob/b.sqsh", content(2), BOB)
    node.prolog(2, other, user=BOB)
    places = {"other": other, "path": path, "parent": path.parent}
    container = private(*USERS, first=first.format(**places))
    assert node.epilog(1).said == ("released", "")
    assert set(node.binds()) == {str(other)}
    key = node.identity(other).key
    left = container.found(node)
    assert [one.bind.path for one in left if one.bind.key == key] == [str(other)]
    hidden = "parent" in first
    assert len(left) == 1 + hidden


def test_epilog_shows_no_other_users_file_in_a_namespace_if_a_directory_becomes_a_symlink(
    node: Node, private: Callable[..., Private], before: Arrange, after: Arrange
) -> None:
    """The source is opened as root, and would be shown to a user who may not walk there."""
    path = node.put("alice/sub/image.sqsh")
    node.prolog(1, path)
    secret = node.put("bob/sub/image.sqsh", content(3), BOB)
    container = private(*USERS)
    folder, away = node.server / "alice/sub", node.server / "alice/away"

    def swapped() -> None:
        folder.rename(away)
        folder.symlink_to(secret.parent)

    def swapped_back() -> None:
        folder.unlink()
        away.rename(folder)

    before(namespaces, "_clone_hidden_source", swapped)
    after(namespaces, "_clone_hidden_source", swapped_back)
    node.epilog(1)
    assert node.shows_source(path)
    assert container.reads(path) == content(), "the sweep tries again"


def test_newer_redirect_is_not_bound_over_an_older_bind_in_a_namespace(
    node: Node, private: Callable[..., Private]
) -> None:
    """It would be as old as that one day."""
    path = node.staged(1)
    container = private(*USERS)
    node.put("alice/image.sqsh", content(2))
    node.prolog(2, path)
    node.epilog(1)
    assert node.shows_entry(path, node.identity(path).key)
    assert namespaces.unmount_in_namespaces(node.cache, node.leases).removed == 0
    assert container.reads(path) == content()
    node.epilog(2)
    node.put("alice/image.sqsh", content(3))
    assert container.reads(path) == content(3)


def test_epilog_scans_namespaces_within_its_time_and_the_sweep_scans_the_rest(
    node: Node, private: Callable[..., Private], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users may make hundreds of namespaces, which cost a second each."""
    node.staged(1)
    container = private(*USERS)
    with monkeypatch.context() as hurried:
        hurried.setattr(namespaces, "LOOK", 0.0)
        assert node.epilog(1).said == ("released", "")
        assert namespaces.scan_namespaces(node.cache).unread_namespaces > 0
    assert container.binds(node) == 1
    with monkeypatch.context() as hurried:
        hurried.setattr(namespaces, "LOOK", 0.0)
        left = namespaces.unmount_in_namespaces(node.cache, node.leases)
    assert (left.removed, left.problems, container.binds(node)) == (1, (), 0)


def test_epilog_reads_a_bounded_part_of_a_namespaces_mount_table_and_the_sweep_more(
    node: Node, private: Callable[..., Private], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.staged(1)
    container = private(*USERS)
    monkeypatch.setattr(namespaces, "MOST", 200)
    assert node.epilog(1).said == ("released", "")
    monkeypatch.setattr(namespaces, "MOST", 1 << 20)
    assert container.binds(node) == 1
    with monkeypatch.context() as hurried:
        hurried.setattr(namespaces, "SWEEP_MOST", 200)
        left = namespaces.unmount_in_namespaces(node.cache, node.leases)
    assert left.removed == 0
    assert "not looked through" in left.problems[-1]
    left = namespaces.unmount_in_namespaces(node.cache, node.leases)
    assert (left.removed, left.problems, container.binds(node)) == (1, (), 0)


def test_namespaces_of_the_jobs_user_are_scanned_first(
    node: Node, private: Callable[..., Private], tmp_path: Path
) -> None:
    """Others' may take all the time: what this user's job has left goes all the same."""
    node.staged(1)
    containers = [private(*USERS), private()]
    for first in (BOB.uid, 0):
        found = namespaces.scan_namespaces(node.cache, first_uid=first).binds
        users = [Path(f"/proc/{one.pid}").stat().st_uid for one in found]
        assert sorted(users) == [0, BOB.uid]
        assert users[0] == first, containers
