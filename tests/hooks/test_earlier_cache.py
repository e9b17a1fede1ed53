"""`cache:` names another directory: what jobs left in the one before goes, its entries do not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import jobdir
from forestage.cache import disk_probe
from forestage.cache.known_disks import read_known_disks
from forestage.cache.layout import Cache
from forestage.cache.node import Node as NodeOfCache
from forestage.cache.part import boot_id
from forestage.clock import Clock
from forestage.commands import sweep
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import CommandContext, main
from forestage.config import load_config
from forestage.system.probe import HangReport
from jobdir import Dirs
from node import ALICE, BOB, Idle, Node, until

OTHER = "/mnt/nvme/other"


@pytest.fixture
def dirs(node: Node, tmp_path: Path) -> Iterator[Dirs]:
    with jobdir.made(node, tmp_path / "disk") as made:
        yield made


def configure(node: Node, cache: str | None = None) -> None:
    node.configure(redirect="spank", require_mount=False, data={"job_dir": "80%"}, cache=cache)


def swept(node: Node, dry_run: bool = False) -> sweep.SweepReport:
    config = load_config(node.places.etc).node_config
    here = NodeOfCache.from_config(config, node.places, Clock())
    return sweep.run_sweep(here, Idle("", node="n1"), dry_run, lambda _: None)


def evicted(node: Node, root: Path | str, *more: str) -> Result:
    argv = ["evict", "--all", "--cache", str(root), *more]
    return CliRunner().invoke(main, argv, obj=CommandContext(node.places, Clock()))


def used(node: Node, job: int = 1, name: str = "alice/image.sqsh") -> Path:
    """Has a job use the cache, and ends it; the path of its image."""
    path = node.put(name)
    assert node.prolog(job, path).outcome.result == "copied"
    node.epilog(job)
    return path


def left_dir(dirs: Dirs) -> Node:
    """A node whose job was lost with its directory, before the cache moved."""
    assert dirs.prolog(7, "stage-dir=32M") == []
    assert len(dirs.devices()) == 1
    configure(dirs.node, OTHER)
    return dirs.node


@pytest.mark.parametrize("has_lease", [True, False], ids=["lease", "no lease"])
def test_sweep_removes_an_ended_jobs_directory_in_an_earlier_cache(
    dirs: Dirs, has_lease: bool
) -> None:
    node = left_dir(dirs)
    if not has_lease:  # its Epilog was killed then
        node.leases.drop_lease(7)
    assert swept(node, dry_run=True).added == {"job_dirs": ("7.0",)}
    done = swept(node)
    assert (done.added, done.problems) == ({"job_dirs": ("7.0",)}, ())
    assert dirs.taken().number == 0
    until(lambda: not dirs.devices(), "the devices to go")
    assert list(node.cache.evicted.iterdir()) == []


def test_sweep_keeps_a_running_jobs_directory_in_an_earlier_cache(dirs: Dirs) -> None:
    node = left_dir(dirs)

    class AtWork(Idle):
        def list_jobs_with_steps(self) -> frozenset[int]:
            return frozenset({7})

    config = load_config(node.places.etc).node_config
    here = NodeOfCache.from_config(config, node.places, Clock())
    assert sweep.run_sweep(here, AtWork("", node="n1"), False, lambda _: None).added == {}
    with dirs.seen(7) as at:
        assert at.stat().st_uid == ALICE.uid


def foreign_mark(node: Node) -> Path:
    """What another forestage, with another /run, has left in the first cache."""
    (mark,) = node.cache.instances.iterdir()
    other = mark.with_name(f"{boot_id()}.1-1")
    other.touch()
    return other


def test_earlier_cache_marked_by_another_instance_is_neither_swept_nor_removed(dirs: Dirs) -> None:
    node = left_dir(dirs)
    node.leases.drop_lease(7)
    mark = foreign_mark(node)
    assert swept(node).added == {}
    done = evicted(node, node.cache.root)
    assert done.exit_code == ExitStatus.NOT_FOUND, done.output
    assert str(mark) in done.output
    assert dirs.taken().number == 1
    mark.unlink()
    assert swept(node).added == {"job_dirs": ("7.0",)}


def test_instance_mark_of_an_earlier_boot_does_not_protect_a_cache(node: Node) -> None:
    used(node)
    mark = foreign_mark(node).rename(node.cache.instances / "1f.1-1")
    node.configure(cache=OTHER)
    assert evicted(node, node.cache.root).exit_code == ExitStatus.OK
    assert not mark.exists()


def test_two_instances_leave_two_marks_in_a_cache(node: Node) -> None:
    node.cache.prepare(require_mount=False)
    node.places.claims.mkdir(parents=True)
    other = node.places.root / "container/run/forestage"
    other.mkdir(parents=True)
    for claims in (node.places.claims, other / "claims", node.places.claims):
        Cache(node.cache.root, claims).mark_in_use()
    assert len(list(node.cache.instances.iterdir())) == 2


def test_sweep_without_the_configuration_evicts_nothing_of_the_configured_cache(node: Node) -> None:
    node.configure(cache=OTHER)
    right = Cache(node.nvme / "other", node.places.claims)
    path = used(node)
    key = node.identity(path).key
    node.configure()  # as if a file of conf.d were not there
    used(node, 2, "alice/other.sqsh")
    done = swept(node)
    assert (done.evicted, done.problems) == ((), ())
    node.configure(cache=OTHER)
    assert right.find_entry_by_key(key) is not None
    assert node.prolog(3, path).said == ("hit", "")


def test_evict_cache_removes_an_earlier_cache_with_pins_and_job_directories(dirs: Dirs) -> None:
    node = left_dir(dirs)
    node.configure(require_mount=False)
    path = used(node)
    (node.cache.entry_dir(node.identity(path).key) / "pinned").touch()
    (node.cache.entry_dir(node.identity(path).key) / "hot").write_bytes(b"[0]")
    swept(node)
    assert list(node.cache.hot_names.iterdir())
    configure(node, OTHER)
    swept(node)
    dry = evicted(node, node.cache.root, "--dry-run")
    assert dry.exit_code == ExitStatus.OK
    assert "1 entry would be evicted" in dry.output
    assert node.entries() == {node.identity(path).key}
    done = evicted(node, node.cache.root)
    assert done.exit_code == ExitStatus.OK, done.output
    assert f"The cache {node.cache.root} is removed." in done.output
    assert not node.cache.root.exists()
    assert read_known_disks(node.places.known_disks).find_location(node.cache.real_root) is None
    assert evicted(node, node.cache.root).exit_code == ExitStatus.NOT_FOUND


def test_evict_cache_keeps_leased_entries_of_an_earlier_cache_until_the_job_ends(
    node: Node,
) -> None:
    path, idle = node.put("alice/image.sqsh"), used(node, 1, "alice/idle.sqsh")
    node.prolog(2, path)
    node.configure(cache=OTHER)
    done = evicted(node, node.cache.root)
    assert done.exit_code == ExitStatus.NOT_FOUND
    assert "leased by job 2" in done.output
    assert "in use, and stays" in done.output
    assert node.entries() == {node.identity(path).key}
    assert idle != path
    assert node.shows_entry(path, node.identity(path).key)
    node.epilog(2)
    assert evicted(node, node.cache.root).exit_code == ExitStatus.OK
    assert not node.cache.root.exists()


def test_evict_cache_refuses_a_cache_that_was_not_configured_before(node: Node) -> None:
    path = used(node)
    stranger = Cache(node.nvme / "stranger")
    stranger.prepare(require_mount=False)
    for root in (node.cache.root, stranger.root, node.nvme, "relative"):
        done = evicted(node, root)
        assert done.exit_code == ExitStatus.NOT_FOUND, done.output
        assert "no cache that was configured here before" in done.output
    assert node.entries() == {node.identity(path).key}
    assert (stranger.root / "format").exists()
    usage = CliRunner().invoke(
        main, ["evict", "--cache", "/x"], obj=CommandContext(node.places, Clock())
    )
    assert usage.exit_code == ExitStatus.USAGE


def test_evict_cache_refuses_the_current_cache_under_another_path(node: Node) -> None:
    path, other = used(node), node.places.root / "mnt/again"
    other.mkdir()
    subprocess.run(["mount", "--bind", node.nvme, other], check=True)
    node.configure(cache="/mnt/again/forestage")
    swept(node)
    assert evicted(node, node.cache.root).exit_code == ExitStatus.NOT_FOUND
    assert node.entries() == {node.identity(path).key}


def test_evict_cache_refuses_an_earlier_cache_with_an_unmounted_or_replaced_disk(
    node: Node,
) -> None:
    old = node.places.root / "mnt/old"
    old.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "x", old], check=True)
    node.configure(cache="/mnt/old/forestage")
    used(node)
    node.configure()
    used(node, 2)
    root = old / "forestage"
    subprocess.run(["umount", "--lazy", old], check=True)
    below = Cache(root)
    below.prepare(require_mount=False)  # of several nodes, perhaps
    (below.entry_dir("k" * 32)).mkdir()
    assert evicted(node, root).exit_code == ExitStatus.UNMOUNTED
    assert swept(node).problems == ()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "y", old], check=True)
    another = Cache(root)
    another.prepare(require_mount=False)
    (another.entry_dir("l" * 32)).mkdir()
    assert evicted(node, root).exit_code == ExitStatus.UNMOUNTED
    assert another.entry_dir("l" * 32).exists()
    subprocess.run(["umount", old], check=True)
    assert below.entry_dir("k" * 32).exists()


def test_earlier_cache_on_a_hanging_disk_is_neither_swept_nor_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    used(node)
    node.prolog(2, node.put("bob/b.sqsh", user=BOB), user=BOB)
    node.configure(cache=OTHER)
    used(node, 3, "alice/third.sqsh")
    (node.cache.jobs / "9.0").mkdir(parents=True)
    hangs = disk_probe.probe_disk

    def asked(places: object, cache: Cache, left: float = 60.0) -> HangReport | None:
        if cache.root == node.cache.root:
            return HangReport("writes", 60.0)
        return hangs(node.places, cache, left)

    monkeypatch.setattr(disk_probe, "probe_disk", asked)
    done = swept(node)
    assert done.released == ()
    assert done.added == {}
    assert "does not answer" in str(done.problems)
    assert evicted(node, node.cache.root).exit_code == ExitStatus.CACHE
    monkeypatch.undo()
    done = swept(node)
    assert [one.job for one in done.released] == [2]
    assert done.added == {"job_dirs": ("9.0",)}


def test_evict_cache_keeps_foreign_files_in_the_directory_of_an_earlier_cache(node: Node) -> None:
    used(node)
    (node.cache.root / "notes").write_text("of an admin's")
    node.configure(cache=OTHER)
    assert evicted(node, node.cache.root).exit_code == ExitStatus.OK
    assert [one.name for one in node.cache.root.iterdir()] == ["notes"]
