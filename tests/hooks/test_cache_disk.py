"""The cache's disk is missing or another one: what lies below is not taken for it.

The node's NVMe is a tmpfs, and so is what lies below it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from forestage import log
from forestage.bind import origins
from forestage.cache.known_disks import read_known_disks
from forestage.cache.layout import Cache
from forestage.cache.node import Node as NodeOfCache
from forestage.clock import Clock
from forestage.commands import sweep
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import CommandContext, main
from forestage.config import load_config
from forestage.system import mounts, records
from node import Idle, Node, content, unmount

REFUSED = (1, "failed", "cache-other-disk")
ON_NETWORK = (0, "declined", "cache-on-network")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines about a new disk that hooks of this process write to the log."""
    found: list[str] = []
    say = log.write_log_line

    def listen(line: str, by_slurm: bool) -> None:
        found.extend([line] if "result=new-disk" in line else [])
        say(line, by_slurm)

    monkeypatch.setattr(log, "write_log_line", listen)
    return found


def used(node: Node, name: str = "alice/image.sqsh") -> Path:
    """Has a job use the cache, and ends it; the path of its image."""
    path = node.put(name)
    assert node.prolog(1, path).outcome.result == "copied"
    node.epilog(1)
    return path


def mount_new_disk(node: Node) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "x", node.nvme], check=True)


def accept_disk(node: Node) -> int:
    world = CommandContext(node.places, Clock())
    done = CliRunner().invoke(main, ["check", "--accept-disk"], obj=world)
    if "from now on" not in done.output:
        print(done.output)
        return done.exit_code
    return ExitStatus.OK


def swept(node: Node) -> sweep.SweepReport:
    config = load_config(node.places.etc).node_config
    of_cache = NodeOfCache.from_config(config, node.places, Clock())
    return sweep.run_sweep(of_cache, Idle("", node="n1"), False, lambda _: None)


def test_cache_on_an_unmounted_disk_is_refused_until_an_admin_accepts_the_disk_below(
    node: Node, notes: list[str]
) -> None:
    path = used(node)
    unmount(node.nvme)
    for job in (2, 3):
        assert node.prolog(job, path).ended == REFUSED
        assert node.shows_source(path)
        node.epilog(job)
    assert swept(node).unmounted
    assert list(node.nvme.iterdir()) == []
    assert accept_disk(node) == ExitStatus.OK
    assert node.prolog(4, path).outcome.result == "copied"
    node.epilog(4)
    assert node.prolog(5, path).outcome.result == "hit"
    node.epilog(5)
    assert notes == []
    mount_new_disk(node)
    assert node.prolog(6, path).outcome.result == "copied", "a disk that is mounted is used"
    assert len(notes) == 1


def test_another_local_file_system_at_the_cache_is_used_at_once_with_one_log_note(
    node: Node, notes: list[str]
) -> None:
    path = used(node)
    assert notes == [], "nothing is said of a first use"
    unmount(node.nvme)
    mount_new_disk(node)
    assert node.prolog(2, path).outcome.result == "copied"
    assert len(notes) == 1
    assert str(node.nvme) in notes[0]
    node.epilog(2)
    assert node.prolog(3, path).outcome.result == "hit"
    assert swept(node).problems == ()
    assert len(notes) == 1


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_file_system_is_recognised_by_uuid_on_another_device_until_it_is_made_anew(
    node: Node, notes: list[str], tmp_path: Path, kind: str
) -> None:
    unmount(node.nvme)
    disk, other = tmp_path / "disk", tmp_path / "other"

    def make(file: Path) -> None:
        file.unlink(missing_ok=True)
        file.touch()
        os.truncate(file, 400 << 20)  # the least that mkfs.xfs takes is 300 MiB
        subprocess.run([f"mkfs.{kind}", "-q", file], check=True)

    def attach(file: Path) -> str:
        argv = ["losetup", "--find", "--show", file]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    devices: set[str] = set()

    def mount(device: str) -> None:
        devices.add(device)
        subprocess.run(["mount", "-t", kind, device, node.nvme], check=True)

    attached: list[str] = []
    try:
        make(disk)
        make(other)
        attached.append(attach(disk))
        mount(attached[-1])
        path = used(node)
        known = read_known_disks(node.places.known_disks)
        unmount(node.nvme)
        # As at a boot that finds the disks in another order.
        subprocess.run(["losetup", "--detach", attached.pop()], check=True)
        attached += [attach(other), attach(disk)]
        mount(attached[-1])
        assert node.prolog(2, path).outcome.result == "hit"
        node.epilog(2)
        assert swept(node).problems == ()
        assert (notes, read_known_disks(node.places.known_disks)) == ([], known)
        unmount(node.nvme)
        subprocess.run(["losetup", "--detach", attached.pop()], check=True)
        make(disk)
        attached.append(attach(disk))
        mount(attached[-1])
        assert node.prolog(3, path).outcome.result == "copied"
        node.epilog(3)
        assert len(notes) == 1
        unmount(node.nvme)
    finally:
        for device in attached:
            subprocess.run(["losetup", "--detach", device], check=True)


def test_sweep_remembers_the_disk_of_an_older_cache_and_a_hit_does_not(node: Node) -> None:
    path = used(node)
    remembered = node.places.known_disks.read_bytes()
    node.places.known_disks.unlink()
    assert node.prolog(2, path).outcome.result == "hit"
    node.epilog(2)
    assert not node.places.known_disks.exists()
    assert swept(node).problems == ()
    assert node.places.known_disks.read_bytes() == remembered


def test_disk_is_used_if_it_cannot_be_remembered(node: Node) -> None:
    state = node.places.known_disks.parent.parent
    state.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "x", state], check=True)
    path = used(node)
    assert list(state.iterdir()) == []
    unmount(node.nvme)
    # What lies below is no root disk, so `require_mount` says nothing.
    assert node.prolog(2, path).outcome.result == "copied"


@pytest.mark.ci
@pytest.mark.parametrize("text", [b"", b"{", b'{"version": 2, "caches": []}', b"[]"])
def test_damaged_record_of_known_disks_counts_as_empty(node: Node, text: bytes) -> None:
    path = used(node)
    node.places.known_disks.write_bytes(text)
    assert node.prolog(2, path).outcome.result == "hit"
    node.epilog(2)
    unmount(node.nvme)
    assert node.prolog(3, path).outcome.result == "copied"


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "virtiofs", "gfs2"])
def test_cache_on_a_network_file_system_is_not_used_and_drains_no_node(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    node.configure(require_mount=False)
    path = node.put("alice/image.sqsh")
    current = mounts.list_mounts

    def listed() -> list[mounts.MountInfo]:
        return [
            msgspec.structs.replace(one, rest=f"rw - {kind} server:/x rw")
            if one.point == str(node.nvme)
            else one
            for one in current()
        ]

    monkeypatch.setattr(mounts, "list_mounts", listed)
    assert node.prolog(1, path).ended == ON_NETWORK
    assert node.shows_source(path)
    assert node.epilog(1).code == 0
    assert accept_disk(node) == ExitStatus.CACHE, "no admin's word makes it a disk of the node"
    assert not node.cache.root.exists()
    assert not node.places.known_disks.exists()


def test_autofs_at_the_cache_without_a_disk_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = used(node)
    unmount(node.nvme)
    mount_new_disk(node)
    current = mounts.list_mounts

    def listed() -> list[mounts.MountInfo]:
        return [
            msgspec.structs.replace(one, rest="rw - autofs systemd-1 rw")
            if one.point == str(node.nvme)
            else one
            for one in current()
        ]

    monkeypatch.setattr(mounts, "list_mounts", listed)
    assert node.prolog(2, path).ended == REFUSED


def test_cache_below_a_missing_host_bind_mount_is_refused(
    node: Node, notes: list[str], tmp_path: Path
) -> None:
    """A slurmd in a container: the host's directory is bound there, and its own disk lies below."""
    host = tmp_path / "host"
    (host / "scratch/nvme").mkdir(parents=True)
    unmount(node.nvme)

    def bind() -> None:
        mounts.mount(str(host / "scratch/nvme"), str(node.nvme), mounts.MS_BIND)

    bind()
    path = used(node)
    unmount(node.nvme)
    assert node.prolog(2, path).ended == REFUSED
    assert list(node.nvme.iterdir()) == []
    bind()
    assert node.prolog(3, path).outcome.result == "hit"
    assert notes == []


def test_disk_reached_by_another_mount_point_is_the_same(node: Node, notes: list[str]) -> None:
    """A container has the cache itself bound there, and shares /var/lib with its host."""
    node.cache.root.mkdir(mode=0o700)
    mounts.mount(str(node.cache.root), str(node.cache.root), mounts.MS_BIND)
    path = used(node)
    (known,) = read_known_disks(node.places.known_disks).caches
    assert known.point == node.cache.real_root
    unmount(node.cache.root)
    assert node.prolog(2, path).outcome.result == "hit"
    assert notes == []


def test_nodes_with_unmounted_disks_create_no_cache_on_a_shared_disk_below(
    private_mounts: None,
) -> None:
    top = Path("/mnt")  # there on every Linux; covered in the test's own namespace only
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "x", top], check=True)
    common = top / "common"
    (common / "nvme").mkdir(parents=True)
    nodes = []
    for name in ("n1", "n2"):
        (top / name).mkdir()
        node = Node.boot(top / name)
        unmount(node.nvme)
        mounts.mount(str(common), str(node.nvme.parent), mounts.MS_BIND)
        mount_new_disk(node)
        nodes.append(node)
    try:
        paths = [used(node) for node in nodes]
        for node in nodes:
            unmount(node.nvme)
        for node, path in zip(nodes, paths, strict=True):
            assert node.prolog(2, path).ended == REFUSED
            node.epilog(2)
        assert list((common / "nvme").iterdir()) == []
    finally:
        for node in nodes:
            node.shut_down()


def test_epilog_after_a_lazy_unmount_releases_the_job_and_evicts_nothing_on_the_disk_below(
    node: Node,
) -> None:
    path = node.staged(1)
    subprocess.run(["umount", "--lazy", node.nvme], check=True)
    assert not node.shows_source(path), "the job reads its copy as before"
    # What several nodes have made there.
    below = Cache(node.cache.root)
    below.prepare(require_mount=False)
    below.entry_dir("k" * 64).mkdir()
    (below.entry_dir("k" * 64) / "image").write_bytes(b"x" * 4096)
    node.configure(max_size=1)
    assert node.epilog(1).said == ("released", "")
    assert node.lease(1) is None
    assert node.shows_source(path)
    assert below.entry_dir("k" * 64).exists()


def test_epilog_releases_a_job_if_the_file_system_below_a_lost_disk_is_unidentified(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below an automount that found no disk the automount is opened, not the root disk's XFS."""
    path = node.staged(1)
    subprocess.run(["umount", "--lazy", node.nvme], check=True)
    current = mounts.list_mounts

    def listed() -> list[mounts.MountInfo]:
        return [
            msgspec.structs.replace(one, rest="rw - xfs x rw") if one.kind == "tmpfs" else one
            for one in current()
        ]

    monkeypatch.setattr(mounts, "list_mounts", listed)
    assert node.epilog(1).said == ("released", "")
    assert node.lease(1) is None
    assert node.shows_source(path)
    assert node.prolog(2, path).ended == REFUSED


def test_prolog_unmounts_an_outdated_redirect_to_a_lazily_unmounted_disk(node: Node) -> None:
    path = node.staged(1)
    subprocess.run(["umount", "--lazy", node.nvme], check=True)
    node.put("alice/image.sqsh", content(2))
    assert path.read_bytes() == content(1), "the job that runs has what it began with"
    assert node.prolog(2, path).ended == REFUSED
    assert path.read_bytes() == content(2)


def test_unredirect_unmounts_redirects_to_a_lazily_unmounted_disk(node: Node) -> None:
    path = node.staged(1)
    subprocess.run(["umount", "--lazy", node.nvme], check=True)
    done = CliRunner().invoke(main, ["unredirect"], obj=CommandContext(node.places, Clock()))
    assert done.exit_code == ExitStatus.OK, done.output
    assert node.shows_source(path)


def test_recorded_origin_of_a_cache_is_dropped_once_nothing_of_its_disk_is_mounted(
    node: Node,
) -> None:
    def noted() -> tuple[mounts.BindOrigin, ...]:
        known = records.load(node.places.claims / origins.FILE, origins.KnownOrigins)
        return known.origins[node.cache.real_root]

    node.staged(1)
    node.epilog(1)
    (first,) = noted()
    other = node.nvme.parent / "other"
    other.mkdir()
    # While the old one is there: a device with a number of its own.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "x", other], check=True)
    unmount(node.nvme)
    subprocess.run(["mount", "--move", other, node.nvme], check=True)
    node.staged(2, "alice/other.sqsh")
    (second,) = noted()
    assert first.device != second.device
    assert [one.origin for one in origins.list_origins(node.cache)] == [second]
