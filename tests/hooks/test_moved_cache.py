"""`cache:` names another directory while redirects of the one before lie: ours they stay."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from forestage.bind import origins
from forestage.cache.layout import Cache
from forestage.cache.node import Node as NodeOfCache
from forestage.clock import Clock
from forestage.commands import status, sweep
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import CommandContext, main
from forestage.config import load_config
from forestage.system import mounts
from node import BOB, Arrange, Idle, Node, content
from private import USERS, Private

OTHER, THIRD = "/mnt/nvme/other", "/mnt/nvme/third"


def run(*argv: str | Path) -> None:
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def of_config(node: Node) -> NodeOfCache:
    return NodeOfCache.from_config(load_config(node.places.etc).node_config, node.places, Clock())


def swept(node: Node) -> sweep.SweepReport:
    return sweep.run_sweep(of_config(node), Idle("", node="n1"), False, lambda _: None)


def overlay(node: Node) -> str:
    above = node.nvme / "overlay"
    for name in ("lower", "upper", "work", "merged"):
        (above / name).mkdir(parents=True)
    layers = f"lowerdir={above}/lower,upperdir={above}/upper,workdir={above}/work"
    run("mount", "-t", "overlay", "x", "-o", layers, above / "merged")
    return "/mnt/nvme/overlay/merged/forestage"


def btrfs(node: Node, *options: str) -> None:
    """Mounts a file system with the subvolumes `vol` and, in that, `inner`."""
    if not shutil.which("mkfs.btrfs") or "btrfs" not in Path("/proc/filesystems").read_text():
        pytest.skip("no btrfs here")
    top = node.places.root / "mnt/btrfs"
    disk, at = top / "disk", top / "at"
    top.mkdir(parents=True)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "x", top)
    at.mkdir()
    run("truncate", "--size=160M", disk)
    run("mkfs.btrfs", "-q", disk)
    run("mount", "-o", "loop", disk, at)
    run("btrfs", "subvolume", "create", at / "vol")
    run("btrfs", "subvolume", "create", at / "vol/inner")
    if options:
        run("umount", at)
        run("mount", "-o", ",".join(("loop", *options)), disk, at)


def subvolume(node: Node) -> str:
    btrfs(node, "subvol=vol")
    return "/mnt/btrfs/at/forestage"


def nested_subvolume(node: Node) -> str:
    btrfs(node)
    return "/mnt/btrfs/at/vol/inner/forestage"


@pytest.fixture(params=[overlay, subvolume, nested_subvolume, None])
def earlier(request: pytest.FixtureRequest, node: Node) -> Iterator[Node]:
    """A node with a cache on a file system of that kind."""
    if request.param:
        node.configure(cache=request.param(node))
    yield node
    # Whatever the test has left: a loop device goes with its file system.
    for mount in reversed(mounts.list_mounts()):
        if "/mnt/btrfs" in mount.point or mount.kind == "btrfs":
            mounts.umount(mount.point)


def evict_all(node: Node) -> None:
    done = CliRunner().invoke(main, ["evict", "--all"], obj=CommandContext(node.places, Clock()))
    assert done.exit_code == ExitStatus.OK, done.output


@pytest.mark.cases(2)
@pytest.mark.parametrize("is_evicted", [False, True], ids=["entry", "evicted"])
def test_outdated_redirect_of_an_earlier_cache_is_not_read_as_the_source(
    earlier: Node, is_evicted: bool
) -> None:
    node = earlier
    path = node.staged(1)
    if is_evicted:
        node.leases.drop_lease(1)
        evict_all(node)
    node.configure(cache=OTHER)
    node.put("alice/image.sqsh", content(2))
    assert path.read_bytes() == content(1), "the job that runs has what it began with"
    assert node.prolog(2, path, user=BOB).said == ("copied", "")
    assert path.read_bytes() == content(2)
    assert node.binds() == {str(path): node.identity(path).key}
    node.epilog(1)
    assert node.binds() != {}, "its own job still runs"
    assert node.epilog(2).outcome.unmounted == 1
    assert node.binds() == {}
    assert node.shows_source(path)


def test_current_redirect_of_an_earlier_cache_stays_until_its_last_job_ends(
    node: Node,
) -> None:
    path = node.staged(1)
    node.configure(cache=OTHER)
    assert node.prolog(2, path, user=BOB).said == ("copied", "")
    assert node.shows_entry(path, node.identity(path).key)
    node.epilog(1)
    assert set(node.binds()) == {str(path)}
    node.epilog(2)
    assert node.shows_source(path)


def test_redirect_of_an_earlier_cache_is_unmounted_if_the_user_may_not_open_the_source(
    node: Node,
) -> None:
    path = node.staged(1)
    node.configure(cache=OTHER)
    node.elsewhere(lambda: (node.server / "alice/image.sqsh").chmod(0o600))
    assert node.prolog(2, path, user=BOB).outcome.result == "declined"
    assert node.shows_source(path)


def test_redirects_of_two_earlier_caches_are_listed_by_status_and_unmounted_by_epilogs_and_sweep(
    node: Node,
) -> None:
    names = [f"alice/{n}.sqsh" for n in range(4)]
    first = [node.staged(1, names[0]), node.staged(2, names[1])]
    node.configure(cache=OTHER)
    second = [node.staged(3, names[2]), node.staged(4, names[3])]
    node.configure(cache=THIRD)
    assert set(node.binds()) == {str(path) for path in first + second}
    assert set(status.read_node_status(of_config(node)).redirects) == set(node.binds())
    node.epilog(1)
    node.epilog(3)
    assert set(node.binds()) == {str(first[1]), str(second[1])}
    for job in (2, 4):  # of killed hooks
        node.leases.drop_lease(job)
    assert set(swept(node).redirects) == {str(first[1]), str(second[1])}
    assert node.binds() == {}
    assert all(node.shows_source(path) for path in first + second)


def test_epilog_of_any_job_unmounts_unneeded_redirects_of_an_earlier_cache(node: Node) -> None:
    path = node.staged(1)
    node.configure(cache=OTHER)
    other = node.staged(2, "alice/other.sqsh")
    node.leases.drop_lease(1)
    node.epilog(2)
    assert node.binds() == {}
    assert node.shows_source(path)
    assert node.shows_source(other)


def test_unredirect_unmounts_redirects_of_all_earlier_caches(node: Node) -> None:
    paths = []
    for job, cache in enumerate((OTHER, THIRD)):
        node.configure(cache=cache)
        paths.append(node.staged(job, f"alice/{job}.sqsh"))
        node.leases.drop_lease(job)
    node.write_config("no: configuration")
    done = CliRunner().invoke(main, ["unredirect"], obj=CommandContext(node.places, Clock()))
    assert done.exit_code == ExitStatus.OK, done.output
    assert "2 redirects unmounted" in done.output
    assert all(node.shows_source(path) for path in paths)


def test_prolog_with_a_broken_configuration_unmounts_an_outdated_redirect_of_an_earlier_cache(
    node: Node,
) -> None:
    node.configure(cache=OTHER)
    path = node.staged(1)
    node.leases.drop_lease(1)
    node.put("alice/image.sqsh", content(2))
    node.write_config("no: configuration")
    node.prolog(2, path)
    assert path.read_bytes() == content(2)


def test_redirect_mounted_by_a_hook_of_another_cache_during_an_epilog_stays(
    node: Node, before: Arrange
) -> None:
    """It has another space lock."""
    node.staged(1)
    node.configure(cache=OTHER)
    begun: list[Path] = []

    def begins() -> None:
        if not begun:
            begun.append(node.put("bob/other.sqsh", content(3), BOB))
            assert node.prolog(2, begun[0], user=BOB).outcome.result == "copied"

    before(mounts, "list_mounts", begins)
    node.epilog(1)
    assert set(node.binds()) == {str(begun[0])}


def test_two_caches_that_record_their_origins_at_once_lose_neither(
    node: Node, before: Arrange
) -> None:
    first, second = node.cache, Cache(node.nvme / "other", node.places.claims)
    begun: list[int] = []

    def begins() -> None:
        if not begun:
            begun.append(1)
            origins.record_origin(second, mounts.list_mounts())

    before(origins.lock, "held", begins)
    node.places.claims.mkdir(parents=True)
    origins.record_origin(first, mounts.list_mounts())
    looked = origins.list_origins(Cache(node.nvme / "third", node.places.claims))
    assert {one.root for one in looked} >= {first.real_root, second.real_root}


LOOK_ALIKE = (
    "mount -t tmpfs x {nvme} && mkdir -p {entry} && echo mine >{entry}/image"
    " && mount --bind {entry}/image {path}"
)


def test_users_mount_that_looks_like_a_redirect_in_a_namespace_is_not_unmounted(
    node: Node, private: Callable[..., Private]
) -> None:
    path = node.staged(1)
    entry = node.cache.entry_dir(node.identity(path).key)
    mounts.umount(str(path))
    first = LOOK_ALIKE.format(nvme=node.nvme, entry=entry, path=path)
    container = private(*USERS, first=first)
    assert container.reads(path) == b"mine\n"
    node.configure(cache=OTHER)
    node.epilog(1)
    swept(node)
    assert container.reads(path) == b"mine\n", "what its user made stays"


def test_epilog_of_any_job_unmounts_a_bind_of_an_earlier_cache_in_a_users_namespace(
    node: Node, private: Callable[..., Private]
) -> None:
    path = node.staged(1)
    container = private(*USERS)
    node.configure(cache=OTHER)
    node.staged(2, "alice/other.sqsh")
    node.leases.drop_lease(1)
    mounts.umount(str(path))
    assert container.binds(node) == 1
    node.epilog(2)
    assert container.binds(node) == 0
    node.put("alice/image.sqsh", content(2))
    assert container.reads(path) == content(2)
