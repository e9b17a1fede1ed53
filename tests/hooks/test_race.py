"""Two hooks at the same moment: one copy, and nobody sees half of it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.bind import redirect
from forestage.cache import evict
from forestage.cache.layout import Cache, Entry
from forestage.cache.source_image import SourceImage
from forestage.stage import copy_wait
from forestage.system import mounts
from node import BOB, HANGS, Arrange, Node, Ran, content

fork = multiprocessing.get_context("fork")


def together(*runs: Callable[[], Ran]) -> list[Ran]:
    """Runs hooks in processes of their own; each goes on only when all have found no entry."""
    barrier = fork.Barrier(len(runs), timeout=HANGS)
    answers = fork.SimpleQueue()
    find = Cache.find_entry

    def child(number: int, run: Callable[[], Ran]) -> None:
        met = False

        def meeting(cache: Cache, image: SourceImage) -> Entry | None:
            nonlocal met
            found = find(cache, image)
            if not met:
                met = True
                barrier.wait()
            return found

        Cache.find_entry = meeting  # type: ignore[method-assign]
        answers.put((number, run()))

    children = [fork.Process(target=child, args=item) for item in enumerate(runs)]
    for process in children:
        process.start()
    for process in children:
        process.join(HANGS)
        assert process.exitcode == 0
    return [ran for _, ran in sorted((answers.get() for _ in runs), key=lambda item: item[0])]


def test_two_prologs_for_one_image_make_one_copy_and_both_are_redirected(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    rans = together(lambda: node.prolog(1, path), lambda: node.prolog(2, path, BOB))
    outcomes = [ran.outcome for ran in rans]
    assert sorted(one.result for one in outcomes) == ["copied", "joined"]
    assert sorted(one.redirect for one in outcomes) == ["kept", "mounted"]
    assert sum(one.bytes for one in outcomes) == len(content())
    (key,) = node.entries()
    assert node.shows_entry(path, key)
    assert {bind.path for bind in redirect.list_binds(node.cache)} == {str(path)}
    assert len(redirect.list_binds(node.cache)) == 1
    node.epilog(1)
    assert node.shows_entry(path, key)
    node.epilog(2)
    assert node.binds() == {}


def test_prologs_for_different_images_do_not_wait_for_each_other(node: Node) -> None:
    paths = [node.put(f"alice/{n}.sqsh", content(n)) for n in (1, 2)]
    rans = together(lambda: node.prolog(1, paths[0]), lambda: node.prolog(2, paths[1]))
    assert [ran.outcome.result for ran in rans] == ["copied", "copied"]
    assert [path.read_bytes() for path in paths] == [content(1), content(2)]


@pytest.mark.parametrize("warm", [True, False])
def test_entry_is_not_evicted_between_copy_and_redirect(
    node: Node, after: Arrange, warm: bool
) -> None:
    path = node.put("alice/image.sqsh")
    key = node.identity(path).key
    if warm:
        node.prolog(1, path)
        node.epilog(1)
    evicted: list[tuple[str, ...]] = []
    pressed = functools.partial(evict.evict_keys, node.cache, node.leases, [key])
    after(copy_wait, "wait_for_copy", lambda: evicted.append(pressed()))
    assert node.prolog(2, path).outcome.result == ("hit" if warm else "copied")
    assert evicted == [()]
    assert node.shows_entry(path, key)


@pytest.mark.parametrize(
    ("times", "said", "shown"),
    [(1, ("copied", ""), True), (9, ("declined", "changed"), False)],
)
def test_entry_that_verify_evicts_under_its_lease_is_staged_again_or_declined(
    node: Node, after: Arrange, times: int, said: tuple[str, str], shown: bool
) -> None:
    path = node.put("alice/image.sqsh")
    key = node.identity(path).key
    calls = iter(range(10))
    after(copy_wait, "wait_for_copy", lambda: next(calls) < times and node.cache.evict_entry(key))
    assert node.prolog(1, path).ended == (0, *said)
    assert node.shows_entry(path, key) if shown else node.shows_source(path)
    assert (node.lease(1) is not None) is shown


Change = Callable[[Node, Path, Path], object]


def _written(node: Node, folder: Path, other: Path) -> None:
    (folder / "image.sqsh").write_bytes(content(2))


def _replaced(node: Node, folder: Path, other: Path) -> None:
    node.put("alice/new", content(2))
    (node.server / "alice/new").replace(folder / "image.sqsh")


def _removed(node: Node, folder: Path, other: Path) -> None:
    (folder / "image.sqsh").unlink()


def _closed(node: Node, folder: Path, other: Path) -> None:
    os.chown(folder, BOB.uid, BOB.gid)
    folder.chmod(0o700)


def _swapped_for_a_file(node: Node, folder: Path, other: Path) -> None:
    folder.rename(node.server / "alice/old")
    folder.write_text("")


def _swapped_for_a_loop(node: Node, folder: Path, other: Path) -> None:
    folder.rename(node.server / "alice/old")
    folder.symlink_to("sub")


def _swapped_for_a_link(node: Node, folder: Path, other: Path) -> None:
    folder.rename(node.server / "alice/old")
    folder.symlink_to(other.parent)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_written, "changed"),
        (_replaced, "changed"),
        (_removed, "missing"),
        (_closed, "no-permission"),  # root could walk there: the target is opened as the user
        (_swapped_for_a_file, "missing"),
        (_swapped_for_a_loop, "bad-path"),
        (_swapped_for_a_link, "no-permission"),  # it is followed as the job itself would
    ],
)
def test_path_changed_between_copy_and_redirect_is_declined(
    node: Node, before: Arrange, change: Change, reason: str
) -> None:
    path = node.put("alice/sub/image.sqsh", content(1))
    other = node.put("bob/sub/image.sqsh", content(3), user=BOB, mode=0o600)
    before(redirect, "mount_redirect", lambda: change(node, node.server / "alice/sub", other))
    assert node.prolog(1, path).ended == (0, "declined", reason)
    assert (node.binds(), node.lease(1)) == ({}, None)
    assert reason != "changed" or path.read_bytes() == content(2)
    assert other.read_bytes() == content(3)


def test_file_replaced_just_before_the_mount_is_staged_again(node: Node, before: Arrange) -> None:
    path = node.put("alice/image.sqsh", content(1))
    node.put("alice/new.sqsh", content(2))
    folder = node.server / "alice"
    once = iter([folder / "new.sqsh"])
    before(
        redirect, "_bind_read_only", lambda: [new.replace(folder / "image.sqsh") for new in once]
    )
    assert node.prolog(1, path).ended == (0, "copied", "")
    assert path.read_bytes() == content(2)
    assert node.shows_entry(path, node.identity(path).key)


def test_lease_is_written_before_the_redirect_is_mounted(node: Node, before: Arrange) -> None:
    """An Epilog takes off what no lease mentions, so the other order would lose a redirect."""
    path = node.put("alice/image.sqsh")
    mentioned: list[frozenset[str]] = []
    before(
        redirect, "_bind_read_only", lambda: mentioned.append(node.leases.list_redirected_paths())
    )
    node.prolog(1, path)
    assert mentioned == [frozenset({str(path)})]


def test_redirect_is_read_only_from_its_first_moment(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = node.put("alice/image.sqsh")
    mount = mounts.mount
    seen = tmp_path / "seen"  # what is mounted over a file is so in a process of its own

    def spying(source: str, target: str, how: int) -> None:
        mount(source, target, how)
        if target.startswith("/proc/self/fd/"):
            seen.write_text(str(os.statvfs(path).f_flag & os.ST_RDONLY))

    monkeypatch.setattr(mounts, "mount", spying)
    node.prolog(1, path)
    assert seen.read_text() == str(os.ST_RDONLY)


def test_redirect_unmounted_half_made_by_another_hook_shows_the_source(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of `cache:` both hold a lock. It must not be the empty file that is bound."""
    path = node.put("alice/image.sqsh")
    mount, umount = mounts.mount, mounts.umount
    spots: list[Path] = []

    def cleared(source: str, target: str, how: int) -> None:
        mount(source, target, how)
        if how & mounts.MS_REMOUNT:
            spots.append(Path(target))
            umount(target)

    monkeypatch.setattr(mounts, "mount", cleared)
    assert node.prolog(1, path).said == ("failed", "io")
    monkeypatch.undo()
    assert path.read_bytes() == content()
    assert str(path) not in Path("/proc/self/mountinfo").read_text()
    assert len(spots) == 1
    assert not spots[0].exists()
    assert node.prolog(2, path).outcome.redirect == "mounted"


def test_admins_own_bind_over_an_image_is_neither_listed_nor_unmounted(node: Node) -> None:
    """An admin's own bind over an image is neither taken off nor listed."""
    path = node.put("alice/image.sqsh", content(1))
    special = node.nvme / "special.sqsh"
    special.write_bytes(content(5))
    special.chmod(0o644)
    subprocess.run(["mount", "--bind", special, path], check=True)
    assert node.binds() == {}
    ran = node.prolog(1, path)
    assert ran.outcome.result == "copied"
    node.epilog(1)
    assert path.read_bytes() == content(5)


def test_redirect_unmounted_while_the_next_prolog_opens_the_source_is_mounted_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look has opened the copy, and then the mount table no longer tells that it is one."""
    path = node.staged(1)
    real = mounts.list_mounts

    def after_its_end() -> list[mounts.MountInfo]:
        if user := os.geteuid():  # in the look's own process, which acts as the user just now
            os.seteuid(0)
            if any(mount.point == str(path) for mount in real()):
                mounts.umount(str(path))
            os.seteuid(user)
        return real()

    monkeypatch.setattr(mounts, "list_mounts", after_its_end)
    ran = node.prolog(2, path)
    assert (*ran.said, ran.outcome.redirect) == ("hit", "", "mounted")
    assert node.shows_entry(path, ran.outcome.key)
