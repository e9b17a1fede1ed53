"""A read-through server is killed, stopped, fails or hangs: its readers get the right bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from far import Far
from fault import MIB, shut_down, source_bytes

from forestage.system import mounts
from forestage.views.through import keeper_process
from forestage.views.through.keeper_process import Keeper
from forestage.views.through.read_server import ReadServer
from node import HANGS, Node, until
from through import SIZE, Aside, Copy, Shown, direct, read_fresh, reading, servers_of, shows


def squashfs(folder: Path) -> tuple[Path, bytes]:
    """A real image of incompressible files; its own path and the bytes of one of them."""
    tree = folder / "tree"
    tree.mkdir()
    for number in range(4):
        (tree / str(number)).write_bytes(random.Random(number).randbytes(3 * MIB))
    argv = ["mksquashfs", tree, folder / "real.sqsh", "-quiet", "-no-progress"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return tree, (folder / "real.sqsh").read_bytes()


class Unpacker:
    """Runs unsquashfs again and again until it is told to stop; each run must be right."""

    def __init__(self, image: Path, tree: Path, out: Path) -> None:
        self._stop = out.with_name("stop")

        def work() -> None:
            while not self._stop.exists():
                fd = os.open(image, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
                subprocess.run(["unsquashfs", "-q", "-n", "-f", "-d", out, image], check=True)
                subprocess.run(["diff", "-r", tree, out], check=True)

        self._aside = Aside(work)

    def stop(self) -> None:
        self._stop.touch()
        assert self._aside.ended() == 0


KILLS = (50, pytest.param(200, marks=pytest.mark.ci), pytest.param(400, marks=pytest.mark.long))


@pytest.mark.parametrize("kills", KILLS)
def test_readers_get_right_bytes_though_servers_are_repeatedly_killed(
    node: Node, shown: Shown, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment of a server's life, while the copy comes and once it is an entry."""
    monkeypatch.setattr(keeper_process, "BURST", kills)
    tree, data = squashfs(tmp_path)
    through = shown(node.put("alice/image.sqsh", data))
    copy, dice = Copy(through, data), random.Random(kills)
    unpacker = Unpacker(through.path, tree, tmp_path / "out")
    with reading(through.path, data, 20) as readers:
        for number in range(kills):
            if number < kills // 2:
                copy.bring(number * len(data) // kills, MIB)
            elif number == kills // 2:
                copy.bring(0, len(data))
                copy.publish()
            if number % 2:
                through.server()  # one that is at work; else one that just begins
            pid = until(lambda: servers_of(through.pid), "a server")[-1]
            time.sleep(dice.random() * 0.03)  # not waiting for anything: any moment will do
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: pid not in servers_of(through.pid), "a server's end")
        before = min(reader.count for reader in readers)
        until(lambda: min(reader.count for reader in readers) > before, "each to read on")
    unpacker.stop()


def test_stopped_read_through_server_is_replaced(shown: Shown) -> None:
    through = shown()
    os.kill(through.server(), signal.SIGSTOP)
    assert shows(through.path, source_bytes())


def test_server_that_always_fails_is_restarted_at_a_bounded_rate(
    node: Node, shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def fail(self: ReadServer) -> None:
        until(
            lambda: self.shared_state.settled, "the file to be known"
        )  # else there is none to serve
        with log.open("ab") as file:
            file.write(b".")
        raise RuntimeError("as a test wants it")

    monkeypatch.setattr(keeper_process, "BURST", 5)
    monkeypatch.setattr(keeper_process, "EACH", 1e9)
    monkeypatch.setattr(keeper_process, "SILENT", HANGS)  # none is killed before it has its dot
    monkeypatch.setattr(ReadServer, "_run_main_loop", fail)
    through = shown(lay=False)
    until(
        lambda: log.exists() and log.stat().st_size == 6, "the first server and five others to end"
    )
    through.turns(8)
    assert log.stat().st_size == 6


def test_server_that_dies_once_the_file_is_readable_is_replaced(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the probe, which has nothing left to do, still lives."""
    first, watch, settle = tmp_path / "first", ReadServer._run_main_loop, Keeper._open_file_once

    def end_first(self: ReadServer) -> None:
        if not first.exists():
            first.touch()
            until(lambda: self.shared_state.settled, "the file to be known")
            os._exit(1)
        watch(self)

    def settle_late(self: Keeper) -> None:
        settle(self)
        until(lambda: not servers_of(os.getppid()), "the first server's end")

    monkeypatch.setattr(ReadServer, "_run_main_loop", end_first)
    monkeypatch.setattr(Keeper, "_open_file_once", settle_late)
    assert shows(shown().path, source_bytes())


def slow(far: Far) -> Far:
    """Its reads come from the server, not from the kernel's read-ahead: who reads hangs in D."""
    far.behaves(short=MIB)
    return far


def hang(far: Far) -> None:
    far.behaves(reads=-1, short=MIB)


@pytest.fixture
def place(node: Node) -> Path:
    """Not on the file system that hangs: whoever takes the mount off would have to ask it."""
    place = node.nvme / "place"
    place.touch()
    return place


def waiting(at: Path, far: Far, start: int) -> Aside:
    """A reader for which a server waits at the source."""
    before = far.calls()["read"]

    def work() -> None:
        found = read_fresh(at, start, 4096)
        assert found == source_bytes()[start : start + 4096]

    aside = Aside(work)
    until(lambda: far.calls()["read"] > before, "the server to ask the source")
    return aside


def test_hanging_source_blocks_neither_reads_of_the_copy_nor_killing_readers(
    node: Node, shown: Shown, far: Far, place: Path
) -> None:
    through = shown(slow(far).put("image.sqsh", source_bytes()), place)
    copy = Copy(through, source_bytes())
    copy.bring(0, 4 * MIB)
    until(lambda: read_fresh(place, 0, 4096) == source_bytes()[:4096], "a read")
    hang(far)
    # More than a server has threads for the source.
    readers = [waiting(place, far, 6 * MIB)]
    readers += [Aside(lambda n=n: direct(place, source_bytes(), n)) for n in range(5, 45)]
    until(lambda: all(reader.waits() for reader in readers), "readers to hang")
    assert shows(place, source_bytes()[MIB : MIB + 64 * 1024], MIB)
    # Also what comes only now, as from a peer.
    copy.bring(4 * MIB, 3 * MIB)
    assert readers.pop(0).ended() == 0
    for argv in (["stat", place], ["df", place], ["lsof", place]):
        subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    assert {reader.kill() for reader in readers} == {-signal.SIGKILL}
    far.behaves()


def test_new_server_answers_requests_of_a_killed_server_that_hangs_in_the_kernel(
    node: Node, shown: Shown, far: Far, place: Path
) -> None:
    through = shown(slow(far).put("image.sqsh", source_bytes()), place)
    copy = Copy(through, source_bytes())
    copy.bring(0, 4 * MIB)
    hang(far)
    patient, doomed = waiting(place, far, 5 * MIB), waiting(place, far, 7 * MIB)
    old = through.server()
    os.kill(old, signal.SIGKILL)
    through.server(besides=old)
    assert old in servers_of(through.pid)  # its threads hang in the kernel
    assert shows(place, source_bytes()[MIB : MIB + 4096], MIB)
    assert doomed.kill() == -signal.SIGKILL
    far.behaves(short=MIB)
    assert patient.ended() == 0
    until(lambda: old not in servers_of(through.pid), "the old server to end")


def test_killed_readers_of_a_read_through_file_end_at_any_moment(
    node: Node, shown: Shown, far: Far, place: Path
) -> None:
    """Their INTERRUPT may come before the READ that it is about has been noted."""
    slow(far)
    through = shown(far.put("image.sqsh", source_bytes()), place)
    far.behaves(reads=5, short=MIB)
    dice = random.Random(1)
    for number in range(30):
        readers = [Aside(lambda n=n: direct(place, source_bytes(), n)) for n in range(4)]
        time.sleep(dice.random() * 0.02)  # not waiting for anything: any moment will do
        if number % 10 == 9:
            through.kill_server()
        assert {reader.kill() for reader in readers} <= {-signal.SIGKILL, 0}
    assert read_fresh(place) == source_bytes()


def test_signal_that_does_not_kill_interrupts_no_read(
    node: Node, shown: Shown, far: Far, place: Path
) -> None:
    """As of any disk or file server: programs need not expect EINTR from a file."""
    shown(slow(far).put("image.sqsh", source_bytes()), place)
    far.behaves(reads=20, short=MIB)

    def work() -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        fd, buffer = os.open(place, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, MIB)
        # Not Python's: that tries again after EINTR.
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.pread(fd, address, MIB, ctypes.c_long(0)) == MIB, ctypes.get_errno()

    assert Aside(work).ended() == 0
    far.behaves()


def test_read_through_stops_reading_from_a_hanging_disk_until_the_disk_answers(
    node: Node, shown: Shown, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = shown()
    copy = Copy(through, source_bytes())
    # The part lies on the file system that will hang.
    wrong = bytes(byte ^ 0xFF for byte in source_bytes())
    slow(far).put("image", wrong)
    subprocess.run(["mount", "--bind", far.point, copy.part.directory], check=True)
    copy.follow()
    copy.readers.mark_arrived(0, SIZE)
    until(lambda: read_fresh(through.path) == wrong, "the part to be found")
    hang(far)
    assert shows(through.path, source_bytes()[:4096])
    calls = far.calls()["read"]
    assert shows(through.path, source_bytes())
    assert far.calls()["read"] == calls
    far.behaves(short=MIB)
    until(lambda: read_fresh(through.path) == wrong, "the disk to be asked again")
    mounts.umount(str(copy.part.directory))


def test_read_through_uses_the_source_if_the_disk_gives_errors(
    node: Node, shown: Shown, disk: Callable[..., Path]
) -> None:
    disk("ext4")
    through = shown()
    copy = Copy(through, source_bytes())
    wrong = copy.bring_marked()
    until(lambda: read_fresh(through.path) == wrong, "the part to be found")
    shut_down(node.nvme)
    assert read_fresh(through.path) == source_bytes()


def test_reader_that_was_signalled_before_its_server_died_can_be_killed(
    node: Node, shown: Shown, far: Far, place: Path
) -> None:
    """The kernel tells of its first signal only, and told the server that is dead."""
    through = shown(slow(far).put("image.sqsh", source_bytes()), place)
    hang(far)

    def work() -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        direct(place, source_bytes())

    reader = Aside(work)
    until(lambda: far.calls()["read"] > 0, "the server to ask the source")
    old = through.server()
    os.kill(old, signal.SIGKILL)
    through.server(besides=old)
    assert reader.kill() == -signal.SIGKILL
    far.behaves()
