"""A directory that a comment names: staged whole, shown to steps, and never outdated."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from forestage.cache.job_notes import DirectoryCopyState
from forestage.cache.node import Node as Bare
from forestage.clock import Clock, Deadline
from forestage.commands import inventory, status
from forestage.commands.show import format_listing
from forestage.config import load_config
from forestage.events import CopyOutcome, RequestOutcome
from forestage.features.data import (
    data_view,
    directory,
    erofs,
    file_readers,
    manifest,
    retry,
    shared_scan,
)
from forestage.features.data import requests as data
from forestage.features.data.shared_scan import ScanNotice
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.job import Job
from forestage.stage import chunks
from forestage.system import forked_child, lock, loop, mounts, terminal
from forestage.system.as_user import User
from node import ALICE, BOB, Arrange, Node, content, read_as, until

MANY = 40
MIB = 1 << 20


@pytest.fixture
def spank(node: Node) -> Iterator[Node]:
    node.configure(redirect="spank")
    yield node
    for one in devices(node):
        loop.detach_device(one)


def devices(node: Node) -> list[loop.LoopDevice]:
    """Those of files on the node's disk; another mount namespace may have files of their names."""
    return [one for one in loop.list_attached_devices() if one.is_on_file_system(node.nvme.stat())]


def fill(node: Node, name: str = "alice/set", user: User = ALICE) -> Path:
    """Puts a small tree on the shared file system; gives its path on the node."""
    for number in range(MANY):
        node.put(f"{name}/a/{number:03}", os.urandom(number * 997), user)
    node.put(f"{name}/empty", b"", user)
    node.put(f"{name}/private", b"mine", user, mode=0o600)
    top = node.server / name
    (top / "link").symlink_to("a/003")
    os.lchown(top / "link", user.uid, user.gid)
    (top / "a" / "sub").mkdir(mode=0o750)
    os.chown(top / "a" / "sub", user.uid, user.gid)
    with open(os.fsencode(top / "a" / "sub") + b"/\xff\n name", "wb") as file:
        file.write(b"odd")
    os.chown(os.fsencode(top / "a" / "sub") + b"/\xff\n name", user.uid, user.gid)
    return node.shared / name


def ready(node: Node, job: int) -> Bare:
    """The node as a hook of the job has it."""
    config = load_config(node.places.etc).for_partition("batch")
    return Bare(config, node.places, node.cache, node.leases, Clock())


def as_job(node: Node, job: int, comment: str, user: User = ALICE) -> Job:
    return Job.from_environ(node.environ(job, user=user, comment=comment))


def begin(node: Node, job: int, comment: str, user: User = ALICE) -> list[RequestOutcome]:
    limit = HookDeadlines.from_seconds(Clock(), 600.0, None)
    return data.start_job_data(ready(node, job), as_job(node, job, comment, user), limit, None)


def show(node: Node, job: int, user: User = ALICE, wait: float | None = None) -> data.StepPart:
    limit = HookDeadlines.from_seconds(Clock(), 600.0, wait)
    return data.show_job_data(ready(node, job), as_job(node, job, "", user), limit, None)


def settled(node: Node, job: int, path: Path) -> DirectoryCopyState:
    """How the directory stands once its process has ended."""

    def found() -> DirectoryCopyState | None:
        one = data_view.read_job_data(node.leases, job).trees.get(str(path) + "/")
        return one if one and one.state in ("ready", "declined") else None

    return until(found, "the tree")  # type: ignore[return-value]


def staged(node: Node, job: int, path: Path, user: User = ALICE) -> DirectoryCopyState:
    (outcome,) = begin(node, job, f"stage={path}/", user)
    assert (outcome.result, outcome.reason) == ("started", "")
    return settled(node, job, path)


@pytest.fixture
def mounted(spank: Node) -> Iterator[Callable[[data.StepPart], Path]]:
    """Mounts what a step is shown, where the test can look at it."""
    points: list[Path] = []

    def mount(shown: data.StepPart) -> Path:
        (line,) = shown.lines
        kind, device, file, fs, how, _, _ = line
        assert file in [
            loop.format_file_id(spank.cache.image_path(key).stat()) for key in spank.entries()
        ]
        assert (kind, fs, how) == ("device", "erofs", "ro")
        point = spank.places.root / f"mounted{len(points)}"
        point.mkdir()
        mounts.mount(device, str(point), 7, "erofs")
        points.append(point)
        return point

    yield mount
    for point in points:
        mounts.umount(str(point))


def differences(path: Path, copy: Path) -> str:
    """What rsync would change: contents, owners, modes, times, links, ACLs."""
    argv = ["rsync", "-nacAX", "--delete", "--out-format=%i %n", f"{path}/", f"{copy}/"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_staged_directory_shows_the_same_files_with_the_same_rights(
    spank: Node, mounted: Callable[[data.StepPart], Path]
) -> None:
    path = fill(spank)
    found = staged(spank, 1, path)
    assert (found.state, found.path) == ("ready", str(path))
    shown = show(spank, 1)
    (outcome,) = shown.outcomes
    assert (outcome.result, outcome.image, outcome.key) == ("hit", str(path), found.key)
    assert shown.lines[0][-2:] == (str(path), str(path.stat().st_ino))
    copy = mounted(shown)
    assert differences(path, copy) == ""
    assert read_as(ALICE, copy / "private") == b"mine"
    assert read_as(BOB, copy / "private") is None


def test_acl_of_a_file_is_kept_in_a_staged_directory(
    spank: Node, mounted: Callable[[data.StepPart], Path]
) -> None:
    path = fill(spank)
    file = spank.server / "alice/set/private"
    subprocess.run(["setfacl", "-m", f"u:{BOB.uid}:r", file], check=True)
    staged(spank, 1, path)
    copy = mounted(show(spank, 1))
    assert differences(path, copy) == ""
    assert read_as(BOB, copy / "private") == b"mine"


def test_ls_and_status_list_a_staged_directory_as_data_and_not_as_an_image(spank: Node) -> None:
    image = spank.put("alice/image.sqsh", content(1))
    assert spank.prolog(7, image).said == ("started", "")
    key = spank.identity(image).key
    until(lambda: key in spank.entries() and spank.is_idle(key), "the image")
    found = staged(spank, 1, fill(spank))
    (shown,) = show(spank, 1).outcomes
    assert shown.data
    assert [one.data for one in spank.outcomes("stager")] == [False, True]  # type: ignore[union-attr]

    node = ready(spank, 1)
    items = inventory.read_inventory(node)
    assert {one.key: one.kind for one in items.items} == {key: "image", found.key: "data"}
    said = io.StringIO()
    terminal.write_plain(format_listing(items, 0.0), said)
    (line,) = (line for line in said.getvalue().splitlines() if found.path in line)
    assert line.split()[1] == "data"
    now = status.read_node_status(node)
    (taken,) = (one.bytes for one in items.items if one.kind == "data")
    assert (now.entries.data, now.data) == (1, taken)
    assert "data" in dict(status._list_facts(now))


def test_set_id_bits_are_not_copied_into_a_staged_directory(
    spank: Node, mounted: Callable[[data.StepPart], Path]
) -> None:
    path = fill(spank)
    (spank.server / "alice/set/a/003").chmod(0o6755)
    staged(spank, 1, path)
    assert (mounted(show(spank, 1)) / "a/003").stat().st_mode & 0o7777 == 0o755


def test_second_job_of_a_staged_directory_has_a_hit_and_copies_nothing(spank: Node) -> None:
    path = fill(spank)
    first = staged(spank, 1, path)
    assert staged(spank, 2, path).key == first.key
    assert [one.result for one in spank.outcomes("stager")] == ["copied"]
    assert spank.held(2).uses[0].key == first.key


def test_step_reports_each_directory_of_the_comment_as_local_path(spank: Node) -> None:
    path, late = fill(spank), fill(spank, "alice/late")
    staged(spank, 7, path)
    assert show(spank, 7).local_paths == (str(path),)
    begin(spank, 8, f"stage={late}/,{path}/,{path}/a/")
    for one in (path, late, path / "a"):
        settled(spank, 8, one)
    # One in another is in that one's copy, too.
    assert show(spank, 8).local_paths == (str(late), str(path), str(path / "a"))


def test_directory_that_changed_after_it_was_staged_is_declined_for_steps(spank: Node) -> None:
    path = fill(spank)
    staged(spank, 1, path)
    (spank.server / "alice/set/a/007").write_bytes(b"other")
    shown = show(spank, 1)
    assert shown.lines == []
    assert (shown.outcomes[0].result, shown.outcomes[0].reason) == ("declined", "changed")


@pytest.mark.parametrize("change", ["new", "gone", "mode", "replaced"])
def test_any_change_in_a_directory_makes_another_entry(spank: Node, change: str) -> None:
    path = fill(spank)
    file = spank.server / "alice/set/a/007"
    first = staged(spank, 1, path)
    if change == "new":
        (file.parent / "new").write_bytes(b"")
    elif change == "gone":
        file.unlink()
    elif change == "mode":
        file.chmod(0o600)
    else:
        facts = file.stat()
        (file.parent / ".new").write_bytes(file.read_bytes()[::-1])
        os.utime(file.parent / ".new", ns=(facts.st_mtime_ns, facts.st_mtime_ns))
        (file.parent / ".new").replace(file)
    os.chown(file.parent, ALICE.uid, ALICE.gid)
    second = staged(spank, 2, path)
    assert second.state == "ready"
    assert second.key != first.key


def test_other_user_with_read_access_to_the_whole_directory_shares_its_entry(spank: Node) -> None:
    path = fill(spank)
    (spank.server / "alice/set/private").unlink()
    (spank.server / "alice/set/a/sub").chmod(0o755)
    assert staged(spank, 1, path).key == staged(spank, 2, path, BOB).key


def test_directory_entry_is_declined_for_a_user_without_access_to_each_file(spank: Node) -> None:
    path = fill(spank)
    assert staged(spank, 1, path).state == "ready"
    found = staged(spank, 2, path, BOB)
    assert (found.state, found.reason) == ("declined", "no-permission")
    shown = show(spank, 2, BOB)
    assert (shown.lines, shown.outcomes[0].reason) == ([], "no-permission")
    # Not by the other job's entry either, should the record say so.
    with lock.held(spank.cache.space_lock, 5):
        noted = data_view.read_job_data(spank.leases, 2)
        trees = {str(path) + "/": data_view.read_job_data(spank.leases, 1).trees[str(path) + "/"]}
        spank.leases.add_notes(2, BOB.uid, data=msgspec.structs.replace(noted, trees=trees))
    assert show(spank, 2, BOB).lines == []


def odd(node: Node, what: str) -> None:
    top = node.server / "alice/set"
    if what == "fifo":
        os.mkfifo(top / "fifo")
    elif what == "socket":
        os.mknod(top / "socket", 0o140600)
    elif what == "device":
        os.mknod(top / "device", 0o020600, os.makedev(1, 3))
    else:
        (top / "other").mkdir()
        mounts.mount("tmpfs", str(node.shared / "alice/set/other"), 0, "tmpfs")


@pytest.mark.parametrize("what", ["fifo", "socket", "device", "disk"])
def test_directory_with_a_fifo_socket_device_or_mount_is_declined(spank: Node, what: str) -> None:
    path = fill(spank)
    odd(spank, what)
    found = staged(spank, 1, path)
    assert (found.state, found.reason) == ("declined", "odd-file")
    assert spank.entries() == set()
    if what == "disk":
        mounts.umount(str(path / "other"))


def test_directory_of_links_only_is_declined_with_a_detail_that_counts_the_links(
    spank: Node,
) -> None:
    spank.put("alice/snapshots/x", b"")
    top = spank.server / "alice/snapshots"
    (top / "x").unlink()
    (top / "model").symlink_to("../../blobs/1234")
    found = staged(spank, 1, spank.shared / "alice/snapshots")
    assert (found.state, found.reason) == ("declined", "empty")
    assert "only 1 links" in found.detail


def test_directory_with_more_than_max_files_is_declined_with_the_limit(spank: Node) -> None:
    spank.configure(redirect="spank", data={"max_files": 10})
    found = staged(spank, 1, fill(spank))
    assert (found.state, found.reason) == ("declined", "too-many-files")
    assert "more than 10 files" in found.detail


@pytest.mark.parametrize("size", [8 << 50, (1 << 63) - 1])
def test_directory_with_a_file_of_petabytes_is_declined_before_its_layout_is_computed(
    spank: Node, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = fill(spank)
    os.truncate(spank.server / "alice/set/empty", size)
    monkeypatch.setattr(erofs, "compute_layout", lambda *_: pytest.fail("has been laid out"))
    found = staged(spank, 1, path)
    assert (found.state, found.reason) == ("declined", "too-large")
    assert spank.entries() == set()


def test_sparse_files_of_a_directory_take_only_their_datas_space_and_evict_no_image(
    spank: Node, mounted: Callable[[data.StepPart], Path]
) -> None:
    image = spank.put("bob/image.sqsh", content(1), BOB)
    assert spank.prolog(7, image, BOB).said == ("started", "")
    key = spank.identity(image).key
    until(lambda: key in spank.entries() and spank.is_idle(key), "the image")
    spank.epilog(7)
    path = fill(spank)
    free = shutil.disk_usage(spank.nvme).free
    for name in ("hole", "bytes"):
        (spank.server / f"alice/set/{name}").touch()
        os.truncate(spank.server / f"alice/set/{name}", 256 * MIB)  # the disk has 64
    with (spank.server / "alice/set/bytes").open("r+b") as file:
        for start in (0, 123_456_789, 256 * MIB - 5):
            file.seek(start)
            file.write(b"bytes")
    found = staged(spank, 1, path)
    assert (found.state, spank.entries()) == ("ready", {key, found.key})
    assert free - shutil.disk_usage(spank.nvme).free < 16 * MIB
    copy = mounted(show(spank, 1))
    assert differences(path, copy) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [("alice/none", "missing"), ("alice/file", "not-a-directory"), ("bob", "no-permission")],
)
def test_directory_request_is_declined_as_missing_not_a_directory_or_no_permission(
    spank: Node, name: str, reason: str
) -> None:
    spank.put("alice/file", b"x")
    spank.put("bob/x", b"x", BOB)
    (spank.server / "bob").chmod(0o700)
    found = staged(spank, 1, spank.shared / name)
    assert (found.state, found.reason) == ("declined", reason)


def test_directory_outside_of_the_sources_is_declined(spank: Node) -> None:
    found = staged(spank, 1, Path("/usr/share/doc"))
    assert (found.state, found.reason) == ("declined", "outside-sources")


def test_directory_that_opens_as_another_path_is_declined(
    spank: Node, before: Callable[[object, str, Callable[[], object]], None]
) -> None:
    """As /proc/PID/root of a user's own namespace does: its name is another directory's here."""
    path = fill(spank)
    (spank.server / "alice/other").mkdir()
    real = os.readlink
    with pytest.MonkeyPatch.context() as patch:
        elsewhere = str(spank.shared / "alice/other")
        patch.setattr(
            os, "readlink", lambda name, **_: elsewhere if "/fd/" in str(name) else real(name)
        )
        found = staged(spank, 1, path)
    assert (found.state, found.reason) == ("declined", "bad-path")


def test_directory_above_the_jobs_working_directory_is_not_mounted_over(spank: Node) -> None:
    spank.put("alice/set/x", b"x")
    path = spank.shared
    staged(spank, 1, path / "alice/set")
    job = msgspec.structs.replace(as_job(spank, 1, ""), work_dir=str(path / "alice/set/sub"))
    shown = data.show_job_data(
        ready(spank, 1), job, HookDeadlines.from_seconds(Clock(), 600.0, None), None
    )
    assert (shown.lines, shown.outcomes[0].reason) == ([], "no-mount")


def test_directory_that_changes_while_it_is_copied_makes_no_entry(
    spank: Node, before: Callable[[object, str, Callable[[], object]], None]
) -> None:
    path = fill(spank)
    before(file_readers, "read_file_into", lambda: (spank.server / "alice/set/late").touch())
    found = staged(spank, 1, path)
    assert (found.state, found.reason) == ("declined", "changed")
    assert spank.entries() == set()


def test_directory_with_a_file_open_for_writing_is_declined_and_not_retried_for_a_while(
    spank: Node,
) -> None:
    """A database or a log is open for ever: else each job would read all that lies before it."""
    path = fill(spank)
    file = "alice/set/a/020"
    with (spank.server / file).open("ab"):
        found = staged(spank, 1, path)
    assert (found.state, found.reason) == ("declined", "written")
    assert str(spank.shared / file) in found.detail
    (outcome,) = show(spank, 1).outcomes
    assert (outcome.result, outcome.reason, outcome.detail) == (
        *("declined", "written"),
        found.detail,
    )
    again = staged(spank, 2, path)
    assert (again.state, again.reason) == ("declined", "written")
    assert again.detail.startswith(f"{found.detail}; {path} is not tried again for ")
    assert len(spank.outcomes("stager")) == 1

    (noted,) = spank.cache.locks.glob(f"*{retry.SUFFIX}")
    os.utime(noted, (0, 0))
    assert staged(spank, 3, path).state == "ready"


def test_file_replaced_by_a_link_before_it_is_read_makes_no_entry(
    spank: Node, before: Callable[[object, str, Callable[[], object]], None]
) -> None:
    path = fill(spank)
    file = spank.server / "alice/set/a/039"

    def swap() -> None:
        if file.is_file() and not file.is_symlink():
            file.unlink()
            file.symlink_to("/etc/shadow")

    before(file_readers, "open_unchanged", swap)
    found = staged(spank, 1, path)
    assert found.state == "declined"
    assert spank.entries() == set()


def test_directory_without_free_space_is_declined_and_evicts_no_image(spank: Node) -> None:
    image = spank.put("alice/image.sqsh", content(1))
    assert spank.prolog(7, image).said == ("started", "")
    key = spank.identity(image).key
    until(lambda: key in spank.entries() and spank.is_idle(key), "the image")
    spank.epilog(7)
    path = fill(spank)
    spank.put("alice/set/large", bytes(40 << 20))
    found = staged(spank, 1, path)
    assert (found.state, found.reason) == ("declined", "no-room")
    assert spank.entries() == {key}
    assert spank.parts() == []


def test_hard_links_in_a_staged_directory_take_the_space_of_one_file(
    spank: Node, mounted: Callable[[data.StepPart], Path]
) -> None:
    """Twenty-one names of 8 MiB would be more than the disk has."""
    path = fill(spank)
    file = spank.server / "alice/set/large"
    spank.put("alice/set/large", os.urandom(8 * MIB))
    for number in range(20):
        folder = file.parent / f"d{number}"
        folder.mkdir()
        os.chown(folder, ALICE.uid, ALICE.gid)
        (folder / "name").hardlink_to(file)
    os.utime(file, (0, 0))
    found = staged(spank, 1, path)
    assert (found.state, found.detail) == ("ready", "")
    (size,) = (spank.cache.image_path(key).stat().st_size for key in spank.entries())
    assert size < 10 * MIB
    copy = mounted(show(spank, 1))
    assert differences(path, copy) == ""
    assert (copy / "large").stat().st_nlink == 21
    assert (copy / "d19/name").samefile(copy / "large")


def test_killed_copy_of_a_directory_is_resumed_by_the_next_job(
    spank: Node, after: Callable[[object, str, Callable[[], object]], None]
) -> None:
    path = fill(spank)
    spank.put("alice/set/large", os.urandom(3 << 20))
    with pytest.MonkeyPatch.context() as once:
        real = chunks.ChunkCopy.mark_complete

        def note(run: chunks.ChunkCopy, number: int, found: bytes) -> None:
            real(run, number, found)
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        once.setattr(chunks.ChunkCopy, "mark_complete", note)
        begin(spank, 1, f"stage={path}/")
    (part,) = until(lambda: [one for one in spank.parts() if one.read_digests()], "a part")
    until(lambda: spank.is_idle(part.directory.name), "the stager's end")
    assert staged(spank, 2, path).state == "ready"
    (copied,) = spank.outcomes("stager")
    assert isinstance(copied, CopyOutcome)
    assert copied.resumed > 0


def test_step_that_waits_gets_the_directory_that_its_job_stages(spank: Node) -> None:
    path = fill(spank)
    begin(spank, 1, f"stage={path}/")
    assert [line[0] for line in show(spank, 1, wait=600.0).lines] == ["device"]


@pytest.mark.parametrize("state", ["looking", "copying"])
def test_step_that_waits_reports_whether_the_directory_is_scanned_or_copied(
    spank: Node, monkeypatch: pytest.MonkeyPatch, state: Literal["looking", "copying"]
) -> None:
    path = fill(spank)
    key = "0" * 32
    monkeypatch.setattr(forked_child, "close_descriptors_except", lambda keep: None)
    there, here = os.pipe()

    def bring(node: Bare, job: Job, path: str, stop: object) -> DirectoryCopyState:
        data_view.record_directory_state(node, job, path, DirectoryCopyState(state, key, path))
        os.read(there, 1)
        return DirectoryCopyState("declined", reason="io", detail="enough")

    monkeypatch.setattr(directory, "_scan_and_copy", bring)
    begin(spank, 1, f"stage={path}/")
    until(
        lambda: data_view.read_job_data(spank.leases, 1).trees[f"{path}/"].state == state,
        "the state",
    )
    heard: list[str] = []

    def progress(line: Callable[[], str]) -> None:
        heard.append(line())
        if len(heard) == 2:
            os.write(here, b".")

    limit = msgspec.structs.replace(
        HookDeadlines.from_seconds(Clock(), 600.0, 600.0), on_data_wait=progress
    )
    shown = data.show_job_data(ready(spank, 1), as_job(spank, 1, ""), limit, None)
    assert shown.outcomes[0].reason == "io"
    words = {"looking": "whose files are being looked at", "copying": "which is about to begin"}
    assert all(line.startswith("waiting for") for line in heard)
    assert all(line.endswith(words[state]) for line in heard)
    assert len(heard) >= 2
    os.close(there)
    os.close(here)


def test_step_does_not_wait_for_a_killed_process_that_stages_a_directory(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fill(spank)
    monkeypatch.setattr(
        directory, "_scan_and_copy", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    begin(spank, 1, f"stage={path}/")
    shown = show(spank, 1, wait=600.0)  # the test would not
    assert (shown.lines, shown.outcomes[0].reason) == ([], "helper")
    assert "killed" in shown.outcomes[0].detail


def test_directory_process_of_an_earlier_run_writes_nothing_into_the_requeued_jobs_record(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate = fill(spank), spank.nvme / "gate"
    real, said = directory._scan_and_copy, directory._copy_and_record

    def late(node: Bare, job: Job, *rest: object) -> DirectoryCopyState:
        if job.restart == 0:
            until(gate.exists, "the new run")
            return DirectoryCopyState("declined", reason="io", detail="of the earlier run")
        return real(node, job, *rest)  # type: ignore[arg-type]

    def ended(node: Bare, job: Job, *rest: object) -> None:
        said(node, job, *rest)  # type: ignore[arg-type]
        (spank.nvme / f"ended{job.restart}").touch()

    monkeypatch.setattr(directory, "_scan_and_copy", late)
    monkeypatch.setattr(directory, "_copy_and_record", ended)
    begin(spank, 1, f"stage={path}/")
    job = msgspec.structs.replace(as_job(spank, 1, f"stage={path}/"), restart=1)
    data.start_job_data(
        ready(spank, 1), job, HookDeadlines.from_seconds(Clock(), 600.0, None), None
    )
    assert settled(spank, 1, path).state == "ready"
    gate.touch()
    until((spank.nvme / "ended0").exists, "the earlier run's process")
    assert settled(spank, 1, path).state == "ready"
    # Nor does it take a lease for it.
    with pytest.raises(directory.Declined, match="over"):
        directory._add_to_lease(ready(spank, 1), as_job(spank, 1, ""), "0" * 32)


def test_max_image_size_limits_directories_too(spank: Node) -> None:
    spank.configure(redirect="spank", max_image_size="1M")
    path = fill(spank)
    assert staged(spank, 1, path).state == "ready"
    spank.put("alice/set/large", bytes(1 << 20))
    found = staged(spank, 2, path)
    assert (found.state, found.reason) == ("declined", "too-large")
    assert "max_image_size" in found.detail


def test_step_that_does_not_wait_for_a_directory_keeps_the_shared_path(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fill(spank)
    monkeypatch.setattr(directory, "_scan_and_copy", lambda *_: DirectoryCopyState("looking"))
    begin(spank, 1, f"stage={path}/")
    shown = show(spank, 1)
    assert (shown.lines, shown.outcomes[0].result) == ([], "started")


def test_directory_of_a_job_without_a_lease_is_not_staged(
    spank: Node, before: Callable[[object, str, Callable[[], object]], None]
) -> None:
    path = fill(spank)
    before(directory, "_add_to_lease", lambda: spank.leases.drop_lease(1))
    begin(spank, 1, f"stage={path}/")
    until(lambda: not spank.leases.lease_file(1).exists(), "the lease to go")
    assert spank.entries() == set()
    assert spank.lease(1) is None


def test_directories_of_one_user_are_staged_in_turn_while_another_users_proceeds(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes root's memory for all its names, whatever job it is of."""
    monkeypatch.setattr(directory, "MAX_OF_USER", 1)
    monkeypatch.setattr(directory, "MAX_AT_ONCE", 2)
    monkeypatch.setattr(directory, "SLOT_INTERVAL", 0.01)
    path, others = fill(spank), fill(spank, "bob/set", BOB)
    spank.cache.prepare(require_mount=False)
    with lock.held(spank.cache.locks / f"trees-{ALICE.uid}.0.lock", 5):
        begin(spank, 1, f"stage={path}/")
        begin(spank, 2, f"stage={path}/")
        assert staged(spank, 3, others, BOB).state == "ready"
        assert data_view.read_job_data(spank.leases, 1).trees[f"{path}/"].state == "looking"
        spank.epilog(2)
        until(
            lambda: lock.is_free(directory._process_lock(ready(spank, 2), 2, 0, f"{path}/")),
            "its end",
        )
    assert settled(spank, 1, path).state == "ready"


def test_step_scans_of_one_user_run_in_turn_and_do_not_block_another_user(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_OF_USER", 1)
    path = fill(spank)
    (spank.server / "alice/set/private").unlink()
    (spank.server / "alice/set/a/sub").chmod(0o755)
    staged(spank, 1, path)
    assert staged(spank, 2, path, BOB).state == "ready"
    with lock.held(spank.cache.locks / f"looks-{ALICE.uid}.0.lock", 5):
        with monkeypatch.context() as patch:
            patch.setattr(directory, "SCAN_TIMEOUT", 0.1)
            (outcome,) = show(spank, 1).outcomes
            assert (outcome.result, outcome.reason) == ("declined", "deadline")
        assert show(spank, 2, BOB).outcomes[0].result == "hit"
    assert show(spank, 1).outcomes[0].result == "hit"


def test_scan_that_would_exceed_the_steps_time_is_declined_before_it_starts(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it takes is known from the job's start."""
    path = fill(spank)
    found = staged(spank, 1, path)
    assert found.files > MANY
    assert found.seconds > 0
    slow = msgspec.structs.replace(found, seconds=1e6)
    data_view.record_directory_state(ready(spank, 1), as_job(spank, 1, ""), f"{path}/", slow)
    with monkeypatch.context() as patch:
        patch.setattr(shared_scan, "digest_for_step", lambda *_: pytest.fail("looked"))
        (outcome,) = show(spank, 1).outcomes
    assert (outcome.result, outcome.reason) == ("declined", "too-many-files")
    assert f"holds {found.files} files" in outcome.detail
    assert "forestage pack" in outcome.detail


def test_scan_that_runs_out_of_time_is_declined_as_too_many_files(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fill(spank)
    staged(spank, 1, path)
    real = manifest.scan_directory

    def take(
        root: int, path: str, user: User, most: int, end: Deadline
    ) -> manifest.DirectoryManifest:
        assert (
            end.seconds_left() < directory.SCAN_TIMEOUT - 1
        )  # who waits for it would give up later
        return real(root, path, user, most, Deadline.after(0, Clock()))

    monkeypatch.setattr(manifest, "scan_directory", take)
    (outcome,) = show(spank, 1).outcomes
    assert (outcome.result, outcome.reason) == ("declined", "too-many-files")
    assert "longer to look at than a step has" in outcome.detail


class Looks:
    """Looks of steps, counted; `step` makes one, as a helper of a step does."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.count = ready(node, 1), 0
        self.job = as_job(node, 1, "")
        node.cache.prepare(require_mount=False)
        monkeypatch.setattr(shared_scan, "_scan_now", self._look)

    def _look(self, *_: object) -> ScanNotice:
        self.count += 1
        return ScanNotice("looked", digest=str(self.count))

    def step(self) -> str:
        until_late = Deadline.after(240, self.node.clock)
        return shared_scan._scan_as_step(self.node, self.job, "/set/", until_late).digest

    @property
    def file(self) -> Path:
        (found,) = self.node.cache.locks.glob("look-*.lock")
        return found


def test_concurrent_steps_share_one_scan_that_started_after_the_steps(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, asked = Looks(spank, monkeypatch), threading.Semaphore(0)
    looks.step()
    real = lock.held

    def held(*args: Any) -> Any:
        asked.release()
        return real(*args)

    found: list[str] = []
    with lock.held(looks.file, 5), monkeypatch.context() as patch:
        patch.setattr(lock, "held", held)
        steps = [threading.Thread(target=lambda: found.append(looks.step())) for _ in range(5)]
        for step in steps:
            step.start()
        for _ in steps:
            assert asked.acquire(timeout=240)
    for step in steps:
        step.join()
    assert found == 5 * ["2"]


def test_step_does_not_use_a_scan_that_started_before_the_step(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may have written to the directory since."""
    looks = Looks(spank, monkeypatch)
    assert [looks.step(), looks.step()] == ["1", "2"]


@pytest.mark.parametrize("what", ["boot", "damaged"])
def test_step_ignores_a_scan_record_of_another_boot_or_a_damaged_record(
    spank: Node, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    looks = Looks(spank, monkeypatch)
    looks.step()
    if what == "damaged":
        looks.file.write_bytes(b"{")
    else:
        last = shared_scan._LastScan("before", 1e12, ScanNotice("looked", digest="old"))
        looks.file.write_bytes(msgspec.json.encode(last))
    assert looks.step() == "2"


def test_directory_waits_if_all_slots_for_staged_directories_are_held(
    spank: Node, monkeypatch: pytest.MonkeyPatch, before: Arrange
) -> None:
    monkeypatch.setattr(directory, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(directory, "SLOT_INTERVAL", 0.01)
    path, waits = fill(spank), spank.places.root / "waits"
    before(directory, "_check_wanted", waits.touch)
    spank.cache.prepare(require_mount=False)
    with lock.held(spank.cache.locks / "trees.0.lock", 5):
        begin(spank, 1, f"stage={path}/")
        until(waits.exists, "it to wait")
        assert data_view.read_job_data(spank.leases, 1).trees[f"{path}/"].state == "looking"
    assert settled(spank, 1, path).state == "ready"


def test_loop_device_of_a_directory_is_released_with_its_last_lease(spank: Node) -> None:
    path = fill(spank)
    staged(spank, 1, path)
    staged(spank, 2, path)
    assert show(spank, 1).lines == show(spank, 2).lines

    for job, left in ((1, 1), (2, 0)):
        assert spank.epilog(job).said == ("released", "")
        assert len(devices(spank)) == left


def test_step_stops_waiting_for_a_directory_at_its_deadline(
    spank: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's wait ends, whatever becomes of the copy."""
    path = fill(spank)
    monkeypatch.setattr(
        directory, "_scan_and_copy", lambda *_: DirectoryCopyState("copying", "0" * 32, str(path))
    )
    begin(spank, 1, f"stage={path}/")
    with lock.held(
        directory._process_lock(ready(spank, 1), 1, 0, f"{path}/"), 240.0
    ):  # as if it went on
        shown = show(spank, 1, wait=0.01)
    assert (shown.lines, shown.outcomes[0].result) == ([], "started")


@pytest.mark.parametrize("own", ["FORESTAGE_HOME", "SLURM_JOB_WORK_DIR"])
@pytest.mark.parametrize("written", ["link", "resolved"])
def test_directory_above_the_jobs_home_or_working_directory_is_not_mounted_even_through_links(
    spank: Node, own: str, written: str
) -> None:
    """It would become read-only, and with it the home or the directory that the job works in."""
    path = fill(spank)
    link = spank.shared / "home"
    (spank.server / "home").symlink_to("alice/set/a")
    assert staged(spank, 1, path).state == "ready"
    environ = spank.environ(1) | {"SLURM_STEP_ID": "1"}
    environ[own] = str(link if written == "link" else path / "a")
    limit = HookDeadlines.from_seconds(Clock(), 600.0, None)
    shown = data.show_job_data(ready(spank, 1), Job.from_environ(environ), limit, None)
    assert shown.lines == []
    (outcome,) = shown.outcomes
    assert outcome.reason == "no-mount"
    assert "holds the job's own directory" in outcome.detail
