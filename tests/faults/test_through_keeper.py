"""The keeper of a read-through file: who may have one, how it ends, what it leaves alone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fault import MIB, source_bytes

from forestage.cache.lease import EntryUse, Lease
from forestage.errors import Declined
from forestage.system import fuse, mounts
from forestage.views.through import keeper, keeper_process, read_server
from forestage.views.through.keeper import list_keepers
from forestage.views.through.keeper_process import Keeper
from forestage.views.through.read_server import ReadServer
from node import ALICE, BOB, Node, children_left, until
from through import SIZE, Aside, Copy, Shown, Through, here, opened, read_fresh, servers_of, task


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that let go as soon as no lease needs them."""
    monkeypatch.setattr(keeper_process, "UNNEEDED", 0.0)
    monkeypatch.setattr(read_server, "NEED_BEATS", 1)


def leased(node: Node) -> Path:
    """An image for which job 1 holds a lease."""
    path = node.put("alice/image.sqsh", source_bytes())
    use = EntryUse(opened(path).image.key)
    node.leases.write_lease(Lease(1, ALICE, 0.0, str(node.cache.root), (use,)))
    return path


def test_read_through_file_survives_its_killed_keeper_but_not_the_loss_of_its_server(
    shown: Shown,
) -> None:
    through = shown()
    pid = through.server()
    through.kill_keeper()
    assert read_fresh(through.path) == source_bytes()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        until(lambda: read_fresh(through.path) != source_bytes(), "an error")
    # What it left behind is in nobody's way.
    through.take_off()
    through.start()
    assert through.lay().read_bytes() == source_bytes()


def test_keeper_and_server_end_with_the_last_mount(
    node: Node, shown: Shown, impatient: None
) -> None:
    path = leased(node)
    through = shown(path)
    through.lay()
    node.leases.drop_lease(1)
    until(lambda: not through.sock.exists(), "the keeper to let go")
    assert read_fresh(through.path) == source_bytes()
    through.take_off()
    through.kill_server()
    assert read_fresh(through.path) == source_bytes()
    through.take_off()
    through.ended()


@pytest.mark.parametrize("needed_by", ["lease", "connection"])
def test_keeper_stays_while_a_lease_or_connection_needs_the_file(
    node: Node, shown: Shown, impatient: None, needed_by: str
) -> None:
    through = shown(leased(node), lay=False)
    with through.connect() as line:
        if needed_by == "connection":
            node.leases.drop_lease(1)
        else:
            line.close()
        through.turns(6)
        assert through.sock.exists()
    node.leases.drop_lease(1)
    through.ended()


def test_keeper_of_a_published_image_accepts_no_new_tasks_but_serves_existing_mounts(
    node: Node, shown: Shown
) -> None:
    path = leased(node)
    through = shown(path)
    copy = Copy(through, source_bytes())
    copy.bring(0, SIZE)
    copy.publish()
    until(lambda: not through.sock.exists(), "the keeper to let go")
    os.truncate(node.server / "alice/image.sqsh", 0)  # the entry stays what it is
    assert read_fresh(path) == source_bytes()
    through.kill_server()
    assert read_fresh(path) == source_bytes()
    through.take_off()
    through.ended()


def test_step_answered_just_before_publication_can_still_mount_the_read_through_file(
    node: Node, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_process, "LAST", 600.0)
    path = leased(node)
    through = shown(path, lay=False)
    copy = Copy(through, source_bytes())
    copy.bring(0, SIZE)
    copy.publish()
    through.turns(8)
    assert through.lay().read_bytes() == source_bytes()


def test_keeper_mounts_nothing_on_the_host_and_keeps_no_host_file_system_busy(
    node: Node, shown: Shown, tmp_path: Path
) -> None:
    disk, point = tmp_path / "disk", tmp_path / "point"
    point.mkdir()
    subprocess.run(["truncate", "-s", "8M", disk], check=True)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, point], check=True)
    argv = ["losetup", "--associated", disk]

    def is_used() -> bool:
        return bool(subprocess.run(argv, capture_output=True, check=True).stdout)

    assert is_used()
    through = shown(leased(node), lay=False)
    assert fuse.TYPE not in Path("/proc/self/mountinfo").read_text()
    through.kill_server()
    through.server()
    subprocess.run(["umount", point], check=True)
    until(lambda: not is_used(), "the device to be free")


def test_server_has_no_descriptor_that_keeps_the_file_or_a_task(shown: Shown) -> None:
    through = shown()
    with through.connect():
        through.kill_server()
        folder = Path(f"/proc/{through.server()}/fd")
        links = sorted(os.readlink(folder / fd) for fd in os.listdir(folder))
    assert set(links) == {"/dev/null", "/dev/fuse", str(through.path)}


def test_keeper_reports_a_kernel_without_mount_api_to_the_task(
    node: Node, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 5.2: the task reads its source (tests/spank/test_through.py)."""

    def missing(path: str) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(mounts, "clone_mount", missing)
    through = shown(leased(node), lay=False)
    with through.connect() as line:
        line.send(b"mount")
        assert line.recv(64) == b"no Function not implemented"
    node.leases.drop_lease(1)
    through.ended()


def test_keeper_refuses_an_invalid_request_and_answers_the_next_request(shown: Shown) -> None:
    through = shown(lay=False)
    with through.connect() as line:
        for wrong in (b"serve", b"bad", b"x" * 64):
            line.send(wrong)
            assert line.recv(64).startswith(b"no ")
        line.send(b"mount")
        assert line.recv(64) == b"ok"


@pytest.mark.parametrize(("limit", "others"), [("MOST", False), ("MOST_OF_USER", True)])
def test_images_beyond_the_limit_are_declined_for_reading_through(
    node: Node, shown: Shown, monkeypatch: pytest.MonkeyPatch, limit: str, others: bool
) -> None:
    monkeypatch.setattr(keeper, limit, 2)
    for name in ("a", "b"):
        shown(node.put(f"alice/{name}"), lay=False)
    third = node.put("alice/c")
    with pytest.raises(Declined) as declined:
        shown(third, lay=False)
    assert declined.value.reason == "no-through"
    if others:
        keeper.start_keeper(task(here(node), opened(third, BOB)))


def test_limit_of_images_read_through_holds_for_concurrent_hooks(
    node: Node, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MOST", 2)
    through = shown(lay=False)
    paths = [node.put(f"alice/{number}") for number in range(6)]

    def start(path: Path) -> None:
        with contextlib.suppress(Declined):
            keeper.start_keeper(task(through.node, opened(path)))

    for aside in [Aside(lambda path=path: start(path)) for path in paths]:
        assert aside.ended() == 0
    assert len(through.living()) <= 2


def test_concurrent_hooks_for_one_image_share_a_keeper(node: Node, shown: Shown) -> None:
    through = shown(lay=False)
    path = node.put("alice/other.sqsh")
    asides = [
        Aside(lambda: keeper.start_keeper(task(through.node, opened(path)))) for _ in range(6)
    ]
    assert {aside.ended() for aside in asides} == {0}
    assert len(through.living()) == 2


def test_failing_keeper_ends_and_never_continues_as_its_hook(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = shown(lay=False)
    path = through.path.with_name("other")
    path.write_bytes(source_bytes())

    def fail(self: Keeper) -> None:
        raise RuntimeError("as a test wants it")

    def start() -> None:
        me = os.getpid()
        try:
            keeper.start_keeper(task(through.node, opened(path)))
        finally:
            if os.getpid() != me:
                (tmp_path / "came-back").touch()

    monkeypatch.setattr(Keeper, "_run_until_unmounted", fail)
    assert Aside(start).ended() == 0
    until(lambda: len(through.living()) == 1, "the keeper's end")
    assert not (tmp_path / "came-back").exists()


def test_hook_ends_if_server_and_keeper_are_killed_before_an_answer(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a FUSE beyond all signals must not be who holds its /dev/fuse."""
    path, asked = leased(node), tmp_path / "asked"
    node.cache.prepare(require_mount=False)
    take = ReadServer._dispatch_request

    def answer_no_open(self: ReadServer, slot: memoryview) -> None:
        request = fuse.parse_request(slot)
        if request is None or request.op == fuse.FuseOpcode.INIT:
            take(self, slot)
        else:
            asked.touch()

    monkeypatch.setattr(ReadServer, "_dispatch_request", answer_no_open)
    hook = Aside(lambda: keeper.start_keeper(task(here(node), opened(path))))
    until(asked.exists, "the kernel to ask")
    ((_, state),) = list_keepers(node.places.through)
    (serving,) = servers_of(state.pid)
    os.kill(serving, signal.SIGKILL)
    os.kill(state.pid, signal.SIGKILL)
    hook.ended()
    until(lambda: not children_left(), "all of them to end")


def test_full_run_file_system_declines_read_through_and_keeps_existing_files_readable(
    node: Node, shown: Shown
) -> None:
    through = shown()
    filler = node.places.run / "filler"
    for size in (65536, 4096):
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))
    with pytest.raises((Declined, OSError)):
        Through(node, node.put("alice/other.sqsh"))
    through.kill_server()
    assert read_fresh(through.path) == source_bytes()
    filler.unlink()


UPGRADED = """
import os, sys
from pathlib import Path
from forestage.views.through import keeper, keeper_process
from forestage.cache.node import Clock, Config, Node, NodePaths
from forestage.slurm.hints import JobHints
from forestage.slurm.job import Job
from forestage.sources.source import SourceImage, OpenImage, User, source_image
from forestage.stage.task import CopyTask
from forestage.cache.source_image import AccessRights

class Gone:
    def find_spec(self, name, path=None, target=None):
        with open(sys.argv[3], "a") as file:
            file.write(name)

top, path = map(Path, sys.argv[1:3])
fd = os.open(path, os.O_RDONLY)
facts = os.fstat(fd)
access = AccessRights(facts.st_uid, facts.st_gid, facts.st_mode & 0o7777)
found = SourceImage(source_image.identity_from_stat(facts, str(path)), access)
opened = OpenImage(found, User("", 1, 1), fd)
config = Config(cache="/mnt/nvme/forestage", chunk_size=2**20)
node = Node.from_config(config, NodePaths(top), Clock())
job = Job(7, opened.user, "n1", "batch", "/", requests=(), saves=None, hints=JobHints())
sys.meta_path[:] = [Gone()]
keeper.start_keeper(CopyTask(node, job, opened))
"""


def test_running_keeper_and_server_import_nothing_after_a_package_upgrade(
    node: Node, shown: Shown, tmp_path: Path
) -> None:
    """Once there is a keeper nothing but its process is imported: files may have gone."""
    path, asked = leased(node), tmp_path / "asked"
    node.cache.prepare(require_mount=False)
    argv = [sys.executable, "-Ic", UPGRADED, node.places.root, path, asked]
    subprocess.run(argv, check=True)
    through = shown(path)
    through.kill_server()
    copy = Copy(through, source_bytes())
    wrong = copy.bring_marked()
    until(lambda: read_fresh(path) == wrong, "the part to be found")
    copy.drop()
    os.kill(through.server(), signal.SIGSTOP)
    assert read_fresh(path)[:MIB] in (source_bytes()[:MIB], wrong[:MIB])
    os.truncate(node.server / "alice/image.sqsh", MIB)
    until(lambda: read_fresh(path) == source_bytes()[:MIB], "the change to be seen")
    through.take_off()
    node.leases.drop_lease(1)
    assert not asked.exists(), asked.read_text()
