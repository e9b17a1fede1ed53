"""Root-squashed and odd file systems: the right bytes with their rights, or the original path."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from far import Far
from fault import CHUNKS, Points, Until, beside, image, served

from forestage.bind import unmount
from forestage.features.data import manifest
from forestage.sources import source
from forestage.stage import copy_queue
from forestage.system import file_systems, mounts
from node import ALICE, BOB, Later, Node, read_as, until

CLOSED = "closed/image.sqsh"  # none but its owner gets there


def put(far: Far, data: bytes | None = None) -> Path:
    """An image that nobody but alice may reach or read."""
    folder = far.folder / Path(CLOSED).parent
    folder.mkdir(mode=0o700)
    os.chown(folder, ALICE.uid, ALICE.gid)
    path = far.put(CLOSED, image() if data is None else data)
    (far.folder / CLOSED).chmod(0o640)
    return path


def is_alices(path: Path, data: bytes) -> bool:
    """Whether she has the bytes and the rights that she gave it, and nobody else anything."""
    argv = ["stat", "--format=%u %g %a", str(path)]
    shown = subprocess.run(argv, user=ALICE.uid, capture_output=True, text=True, check=True).stdout
    return (
        shown.split() == [str(ALICE.uid), str(ALICE.gid), "640"]
        and read_as(ALICE, path) == data
        and read_as(BOB, path) is None
    )


def redirected(node: Node) -> list[str]:
    """Where the node shows an entry, none of a copy being left. Root may not look at the path."""
    assert node.parts() == []
    assert set(node.binds().values()) == node.entries()
    return list(node.binds())


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ({"short": 5000}, {}),
        ({"eintr": 2}, {}),
        ({"squash": 1}, {}),
        ({"squash": 1, "short": 60_000, "eintr": 3}, {}),
        pytest.param({"stalls": 5000}, {}, marks=pytest.mark.long),
        ({"seconds": 1}, {}),
    ],
    ids=str,
)
def test_source_with_short_or_interrupted_reads_is_copied_whole_with_its_rights(
    node: Node,
    far: Far,
    monkeypatch: pytest.MonkeyPatch,
    words: dict[str, int],
    keys: dict[str, object],
) -> None:
    monkeypatch.setattr(source, "COARSE_TICK_NS", 1)  # that it is waited for is shown below
    node.configure(**keys)
    path = put(far)
    far.behaves(**words)
    ran = beside(lambda: node.prolog(1, path))
    assert (ran.code, *ran.said) == (0, "copied", "")
    assert redirected(node) == [str(path)]
    assert is_alices(path, image())
    assert beside(lambda: node.epilog(1)).code == 0
    assert node.binds() == {}
    assert is_alices(path, image())
    assert beside(lambda: node.prolog(2, path)).said == ("hit", "")


@pytest.mark.parametrize(
    ("words", "keys", "reason", "detail"),
    [
        ({"inodes": 1}, {"redirect": "none"}, "changed", "only its inode number is another"),
        ({"longer": 5000}, {}, "changed", "ends before its size says so"),
        ({"squash": 2}, {}, "source-error", "Permission denied"),
        # rsync opens the source anew, as root.
        ({"squash": 1}, {"engine": "rsync"}, "source-error", "Permission denied"),
        # At the deadline, which is over once it is read.
        ({"eintr": 1}, {"redirect": "none"}, "deadline", "are here"),
    ],
    ids=str,
)
def test_source_that_cannot_be_copied_is_declined_with_its_reason(
    node: Node, far: Far, words: dict[str, int], keys: dict[str, object], reason: str, detail: str
) -> None:
    node.configure(**keys)
    path = put(far)
    far.behaves(**words)
    clock = Until(lambda: reason == "deadline" and far.calls()["read"])
    ran = beside(lambda: node.prolog(1, path, clock=clock))
    assert (ran.code, *ran.said) == (0, "declined", reason)
    assert detail in ran.outcome.detail
    assert "inodes" not in words or far.calls()["read"] == 0, "read in vain"
    assert (node.lease(1) is None) is (reason != "deadline")
    assert beside(lambda: node.epilog(1)).code == 0
    assert node.entries() == set()
    assert node.parts() == [] or reason == "deadline"
    far.answer()
    assert node.binds() == {}
    assert is_alices(path, image())


MOMENTS: list[tuple[str, dict[str, object]]] = [
    *((point, {}) for point in ("claimed", "reserved", "chunk", "copied", "checked")),
    *((point, {"engine": "rsync"}) for point in ("reserved", "copied")),
]


@pytest.mark.parametrize(("point", "keys"), MOMENTS, ids=str)
def test_source_that_dies_at_any_moment_of_a_copy_is_declined_as_source_error(
    node: Node, far: Far, points: Points, point: str, keys: dict[str, object]
) -> None:
    node.configure(**keys)
    path = put(far)
    points.at(point, far.die)
    ran = beside(lambda: node.prolog(1, path))
    assert (ran.code, *ran.said) == (0, "declined", "source-error")
    assert f"{path} cannot be" in ran.outcome.detail
    assert beside(lambda: node.epilog(1)).code == 0
    assert node.binds() == {}
    assert node.lease(1) is None


def test_fuse_mount_of_a_user_that_excludes_root_is_declined(node: Node, farfs: Path) -> None:
    program = node.places.root / "farfs"  # where alice can start it
    shutil.copy(farfs, program)
    device = node.places.root / "fuse"  # she may open this one
    os.mknod(device, 0o600 | stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    device.chmod(0o666)
    mounts.mount(str(device), "/dev/fuse", mounts.MS_BIND)
    own = Far(program, node, node.places.root / "control", "own", ALICE, "default_permissions")
    try:
        path = own.put("image.sqsh", image())
        ran = beside(lambda: node.prolog(1, path))
        assert (ran.code, *ran.said) == (0, "declined", "no-permission")
        assert read_as(ALICE, path) == image()
        assert beside(lambda: node.epilog(1)).code == 0
        assert (node.binds(), node.lease(1), node.entries(), node.parts()) == ({}, None, set(), [])
    finally:
        own.end()


def test_hanging_source_directory_does_not_affect_images_of_other_sources(
    node: Node, far: Far
) -> None:
    path, elsewhere = node.put("alice/image.sqsh"), node.put("bob/image.sqsh")
    (node.server / "link").symlink_to(node.shared / "alice")
    sources = [str(far.point), str(node.shared / "link")]
    node.configure(sources=sources, deadline="20s")
    far.hang()
    ran = beside(lambda: node.prolog(1, path))
    assert (ran.code, *ran.said) == (0, "copied", "")
    ran = beside(lambda: node.prolog(2, elsewhere))
    assert (ran.code, *ran.said) == (0, "declined", "outside-sources")
    node.configure(sources=[str(far.point), str(node.shared / "alice")], deadline="20s")
    assert beside(lambda: node.prolog(3, path)).said == ("hit", "")


# The node's clock is right, or behind the file server's, or ahead of it.
CLOCKS = [-5.0, *(pytest.param(ahead, marks=pytest.mark.long) for ahead in (0.0, 5.0))]


@pytest.mark.parametrize("ahead", CLOCKS)
def test_source_change_within_one_tick_of_the_servers_clock_is_detected(
    node: Node, far: Far, points: Points, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    # A full tick of this server is one second, and half of it would not do.
    monkeypatch.setattr(source, "COARSE_TICK_NS", 1_050_000_000)
    far.behaves(seconds=1)
    until(lambda: time.time() % 1 < 0.2, "a second to begin")
    path = put(far)

    def rewrite() -> None:
        with (far.folder / CLOSED).open("r+b") as file:
            file.write(image(2))

    points.at("copied", rewrite)
    assert node.prolog(1, path, clock=Later(ahead)).said == ("copied", "")
    assert points.count("copied") == 2
    assert served(node, path, image(2))


def asked_for(far: Far, work: Callable[[], object]) -> int:
    """How often the file server was called meanwhile, for other things than bytes."""
    before = far.calls()
    work()
    until(far.is_left_alone, "what the hook started to close its files")
    return sum((far.calls() - before).values()) - (far.calls() - before)["read"]


def test_hooks_make_only_a_bounded_number_of_file_server_calls(node: Node, far: Far) -> None:
    """Each call may take a second. Walking to the file is four of them, two for each folder."""
    node.configure(sources=[str(far.point), "/mnt/other"])
    path = put(far)
    assert asked_for(far, lambda: node.prolog(0, "/etc/passwd")) == 0
    assert asked_for(far, lambda: node.prolog(1, path)) <= 48
    assert asked_for(far, lambda: node.prolog(2, path)) <= 32
    assert asked_for(far, lambda: node.epilog(2)) == 0
    assert asked_for(far, lambda: node.epilog(1)) <= 4
    assert asked_for(far, lambda: node.prolog(3, path)) <= 22


@pytest.mark.long
def test_file_server_with_half_a_second_per_call_delays_no_hook_past_its_deadline(
    node: Node, far: Far
) -> None:
    node.configure(deadline="12s")
    path = put(far)
    far.behaves(delay=500)  # a look, some 14 calls, ends in time; the copy does not
    ran = beside(lambda: node.prolog(1, path))
    assert ran.ended == (0, "declined", "deadline")
    assert ran.outcome.wait < 20
    assert node.lease(1) is not None, "steps may find it there"
    until(node.entries, "the copy to go on and publish")
    far.answer()
    assert node.prolog(2, path).said == ("hit", "")
    assert is_alices(path, image())


def test_hanging_copy_yields_its_slot_and_is_resumed_after_being_killed(
    node: Node, far: Far, points: Points, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(copy_queue, "STALLED_AFTER", 0.5)
    node.configure(max_copies=1, threads=1)
    path, other = put(far), node.put("alice/image.sqsh")
    hangs = tmp_path / "hangs"

    def hang() -> None:
        far.hang_reads()
        hangs.touch()

    points.at("chunk", hang, nth=2)
    clock = Until(hangs.exists)
    assert beside(lambda: node.prolog(1, path, clock=clock)).said == ("declined", "deadline")
    (part,) = node.parts()
    owner = part.find_record()
    assert owner is not None
    # It gives its place away, though it lives.
    assert beside(lambda: node.prolog(2, other)).said == ("copied", "")
    assert not node.is_idle(part.directory.name)
    # It may die only when the server answers, and then it does.
    os.kill(owner.pid, signal.SIGKILL)
    far.answer()
    until(lambda: node.is_idle(part.directory.name), "the killed stager's end")
    points.calm()
    before = points.count("chunk")
    assert beside(lambda: node.prolog(3, path)).said == ("copied", "")
    assert points.count("chunk") - before == CHUNKS - 2
    assert served(node, path, image())
    assert is_alices(path, image())


@pytest.mark.parametrize("harm", [Far.die, Far.hang], ids=["dead", "hangs"])
def test_redirect_on_a_dead_source_does_not_prevent_unmounting_other_redirects(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Far], None]
) -> None:
    monkeypatch.setattr(unmount, "TIMEOUT", 0.5)
    node.configure()
    before, after = node.put("alice/before.sqsh"), node.put("alice/after.sqsh")
    paths = [before, far.put("one.sqsh", image()), far.put("two.sqsh", image(2)), after]
    for job, path in enumerate(paths, 1):
        assert node.prolog(job, path).said == ("copied", "")
    for job in (1, 2, 3):
        node.leases.drop_lease(job)  # as if their Epilogs had been killed
    harm(far)

    ran = beside(lambda: node.epilog(4))

    assert (ran.code, ran.outcome.result, ran.outcome.unmounted) == (0, "released", 2)
    assert ran.outcome.reason == "redirect"
    # Whose job that was does not matter to this one's user.
    assert ran.outcome.detail == "still redirected: 2 of other jobs"
    assert set(node.binds()) == {str(path) for path in paths[1:3]}
    # A later Epilog of any job does the rest, once the file system answers or was unmounted.
    assert node.prolog(5, before).said == ("hit", "")
    if harm is Far.hang:
        far.answer()
    else:
        far.end()
        mounts.umount(str(far.point))
    later = Later(unmount.LEFT_TO_SWEEP)
    assert beside(lambda: node.epilog(5, clock=later)).said == ("released", "")
    assert node.binds() == {}


@pytest.mark.parametrize("believed", [False, True])
def test_files_reported_with_one_inode_number_are_not_copied_as_hard_links(
    far: Far, monkeypatch: pytest.MonkeyPatch, believed: bool
) -> None:
    """By their file system's kind; and by the kernel's handles, were that believed."""
    (far.folder / "set").mkdir()
    for name in ("a", "b"):
        far.put(f"set/{name}", name.encode() * 5000)
    if believed:
        monkeypatch.setattr(file_systems, "is_inode_number_true", lambda _: True)
    far.behaves(alike=1)
    root, path = manifest.open_root(str(far.point / "set"), ALICE)
    try:
        found = manifest.scan_directory(root, path, ALICE, 100)
    finally:
        os.close(root)
    _, a, b = found.files
    assert (a.inode, a.size, a.ctime_ns) == (b.inode, b.size, b.ctime_ns)
    assert found.links == ()
