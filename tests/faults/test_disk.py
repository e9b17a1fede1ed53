"""The node's own disk fills up, goes read-only or breaks while an image is copied onto it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fault import MIB, Points, image, served, shut_down, untouched

from forestage.commands import explain, status
from forestage.hooks import hook_deadlines
from helper import Helper, ask, environ
from node import BOB, Node, make_read_only
from through import here


def fill(node: Node, uid: int) -> None:
    """Writes until the disk is full, as the processes of user `uid` would."""
    child = os.fork()
    if child == 0:
        try:
            os.seteuid(uid)
            fd = os.open(node.nvme / "scratch/enroot", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for size in (MIB, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(fd, bytes(size))
            os.fsync(fd)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.fixture
def scratch(node: Node, disk: Callable[..., Path], request: pytest.FixtureRequest) -> str:
    """Makes the node's NVMe a file system of the wanted kind that users may write to."""
    kind = str(request.param)
    if kind != "tmpfs":
        disk(kind, "320M" if kind == "xfs" else "64M")
    (node.nvme / "scratch").mkdir()
    (node.nvme / "scratch").chmod(0o777)
    return kind


@pytest.mark.parametrize(
    ("scratch", "uid", "engine", "point"),
    [
        # ext4 keeps a part of itself for root, xfs does not.
        ("ext4", BOB.uid, "chunks", "reserved"),
        ("ext4", BOB.uid, "chunks", "chunk"),
        ("ext4", BOB.uid, "chunks", "copied"),
        ("ext4", BOB.uid, "rsync", "reserved"),
        ("xfs", BOB.uid, "chunks", "reserved"),
        ("xfs", BOB.uid, "chunks", "chunk"),
        ("xfs", BOB.uid, "chunks", "copied"),
        ("xfs", BOB.uid, "rsync", "reserved"),
    ],
    indirect=["scratch"],
)
def test_copy_with_reserved_space_succeeds_though_the_disk_is_filled_meanwhile(
    node: Node, points: Points, scratch: str, uid: int, engine: str, point: str
) -> None:
    node.configure(engine=engine)
    path = node.put("alice/image.sqsh", image())
    points.at(point, lambda: fill(node, uid))
    ran = node.prolog(1, path)
    assert (ran.code, *ran.said) == (0, "copied", "")
    assert served(node, path, image())
    node.epilog(1)


def test_copy_on_a_disk_without_inodes_is_declined_and_entries_are_evicted(
    node: Node, disk: Callable[..., Path]
) -> None:
    """Such as one on which users have unpacked many containers."""
    disk("ext4")
    node.configure(min_free="5%")
    *paths, last = [node.put(f"alice/{number}.sqsh", image(number)) for number in range(5)]
    for job, path in enumerate(paths):
        assert node.prolog(job, path).said == ("copied", "")
    with contextlib.suppress(OSError):
        for number in range(os.statvfs(node.nvme).f_ffree + 1):
            (node.nvme / f"unpacked-{number}").touch()
    ran = node.prolog(8, last)
    assert (ran.code, *ran.said) == (0, "declined", "no-room")
    for job in (*range(len(paths)), 8):
        node.epilog(job)
    assert node.prolog(9, last).said == ("copied", "")
    assert served(node, last, image(4))


@pytest.mark.parametrize(
    ("scratch", "uid"),
    [("ext4", BOB.uid), ("ext4", 0), ("xfs", BOB.uid), ("tmpfs", BOB.uid)],
    indirect=["scratch"],
)
def test_copy_on_a_disk_that_is_already_full_is_declined(
    node: Node, points: Points, scratch: str, uid: int
) -> None:
    path = node.put("alice/image.sqsh", image())
    points.at("claimed", lambda: fill(node, uid))
    ran = node.prolog(1, path)
    assert (ran.code, *ran.said) == (0, "declined", "no-room")
    assert untouched(node, path, 1)
    assert node.entries() == set()
    assert node.parts() == []
    (node.nvme / "scratch/enroot").unlink()
    assert node.prolog(2, path).outcome.result == "copied"


@pytest.mark.ci
@pytest.mark.parametrize("scratch", ["ext4", "xfs"], indirect=True)
def test_job_on_a_full_disk_reads_its_source_and_explain_reports_no_room(
    node: Node, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hook_deadlines, "SMALL_IMAGE_BYTES", 0
    )  # nobody waits for the copy of an image that is larger
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 600.0)
    node.configure(redirect="spank", cold=None)
    node.prolog(1, node.put("alice/first.sqsh"))  # there are locks to take
    fill(node, 0)
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(7, path).said == ("declined", "no-room")
    assert Helper(node, environ(node, 7, path)).lines()[-1] == ["leave", "no-room"]
    told = [run for run in explain.read_job_history(node.places, 7).runs if run.hook != "stager"]
    assert ["no-room" in run.explained[0].sentences[0] for run in told] == [True, True]
    (node.nvme / "scratch/enroot").unlink()
    assert ask(node, 7, path)[0] in ("through", "use")


@pytest.mark.parametrize("scratch", ["ext4", "xfs"], indirect=True)
def test_image_data_and_job_directory_are_declined_on_a_disk_full_before_its_first_use(
    node: Node, scratch: str
) -> None:
    """No block is free for the directories of a cache."""
    fill(node, 0)
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(7, path).said == ("declined", "no-room")
    node.put("alice/data/file", b"x")
    node.configure(redirect="spank")
    for comment in (f"stage={node.shared}/alice/data/", "stage-dir=1M"):
        (found,) = node.prolog(7, comment=comment).outcomes
        assert (found.result, found.reason) == ("declined", "no-room"), comment
    node.configure()
    node.epilog(7)
    (node.nvme / "scratch/enroot").unlink()
    assert node.prolog(8, path).outcome.result == "copied"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda node: None, ("ok", "")),
        (lambda node: fill(node, 0), ("full", "no room for any entry: 0 B are free, ")),
        (lambda node: _gone_read_only(node), ("read-only", " is mounted read-only (see `dmesg`)")),
    ],
    ids=["fine", "full", "read-only"],
)
@pytest.mark.parametrize("scratch", ["ext4"], indirect=True)
def test_status_reports_a_full_or_read_only_disk_before_a_copy_has_failed(
    node: Node, scratch: str, fault: Callable[[Node], None], expected: tuple[str, str]
) -> None:
    here(node).cache.prepare(False)
    before = sorted(node.nvme.rglob("*"))
    fault(node)
    found = status.read_node_status(here(node))
    word, why = status.choose_state(found)
    assert (word, expected[1] in why) == (expected[0], True)
    percent = 100 if word == "full" else 0
    assert f"forestage state={word} full={percent}%" in status.format_oneline(found)
    left = {one for one in node.nvme.rglob("*") if one.name != "enroot"}
    assert sorted(left) == before, "looking has written nothing that stays"


def _gone_read_only(node: Node) -> None:
    """What ext4 does of itself at an error, also under files that are open for writing."""
    options = "remount,errors=remount-ro,abort"
    subprocess.run(["mount", "-o", options, node.nvme], check=True)


def _broken(node: Node) -> None:
    """From now on whatever is read or written is an I/O error."""
    shut_down(node.nvme)


@pytest.mark.parametrize(
    ("kind", "fault", "engine", "point"),
    [
        ("ext4", _gone_read_only, "chunks", "claimed"),
        ("ext4", _gone_read_only, "chunks", "reserved"),
        ("ext4", _gone_read_only, "chunks", "chunk"),
        ("ext4", _gone_read_only, "chunks", "copied"),
        ("ext4", _gone_read_only, "chunks", "checked"),
        ("ext4", _gone_read_only, "rsync", "reserved"),
        ("ext4", _broken, "chunks", "chunk"),
        ("xfs", _broken, "chunks", "chunk"),
        ("xfs", _broken, "rsync", "copied"),
    ],
)
def test_disk_failure_during_a_copy_is_a_failed_outcome_and_the_job_reads_the_source(
    node: Node,
    points: Points,
    disk: Callable[..., Path],
    kind: str,
    fault: Callable[[Node], None],
    engine: str,
    point: str,
) -> None:
    disk(kind, "320M" if kind == "xfs" else "64M")
    node.configure(engine=engine)
    path = node.put("alice/image.sqsh", image())
    points.at(point, lambda: fault(node))

    ran = node.prolog(1, path)

    assert (ran.code, *ran.said) == (1, "failed", "io")
    assert node.shows_source(path)
    node.epilog(1)
    ran = node.prolog(2, path)
    assert (ran.code, ran.outcome.result) == (1, "failed")
    assert node.shows_source(path)
    node.epilog(2)
    # Once the disk is out of the way, the next job is served again.
    subprocess.run(["umount", "--lazy", node.nvme], check=True)
    assert node.prolog(3, path).outcome.result == "copied"
    assert served(node, path, image())


def test_read_only_disk_serves_no_outdated_copy_and_keeps_no_redirect(
    node: Node, disk: Callable[..., Path]
) -> None:
    disk("ext4")
    path = node.put("alice/image.sqsh", image())
    node.prolog(1, path)
    make_read_only(node.nvme)
    (node.server / "alice/image.sqsh").write_bytes(image(2))
    node.prolog(2, path)
    assert path.read_bytes() == image(2)
    for job in (1, 2):
        node.epilog(job)
    assert untouched(node, path, 1)
