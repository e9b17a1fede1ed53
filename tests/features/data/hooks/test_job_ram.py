"""A job's own directory in memory: made by its first step, held between steps, gone with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

import jobdir
from forestage.errors import Declined
from forestage.features.data import job_dir, job_disk, job_ram
from forestage.system import forked_child, lock, mounts
from forestage.system.daemon import fetch_mount_clone
from jobdir import MIB, Dirs, as_alice
from node import ALICE, BOB, Node, content, until

_fork = get_context("fork")
NONE = ("env", "FORESTAGE_DIR")


@pytest.fixture
def dirs(node: Node, tmp_path: Path) -> Iterator[Dirs]:
    with jobdir.made(node, tmp_path / "disk") as made:
        os.chown(made.source, ALICE.uid, ALICE.gid)
        yield made
        for job in {place.name.partition(".")[0] for place in node.cache.jobs.glob("*")}:
            job_dir.remove_job_dirs(node.cache, int(job))
        until(lambda: holders(made) == [], "the end of all holders")


def holders(dirs: Dirs) -> list[int]:
    """The processes that have a file of this node's disk open, for their lock."""
    found, disk = [], dirs.node.nvme.stat().st_dev
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "comm").read_text().strip() == job_disk.PROCESS_NAME:
                files = [fd.stat().st_dev for fd in (process / "fd").iterdir()]
                found += [int(process.name)] if disk in files else []
    return found


def holder(dirs: Dirs) -> int:
    (place,) = dirs.node.cache.jobs.iterdir()
    return int((place / "held").read_text())


def why(dirs: Dirs, job: int = 7) -> str:
    """Why a step of the job has no directory."""
    shown = dirs.step(job)
    assert shown.lines == [NONE]
    (told,) = shown.outcomes
    assert (told.request, told.result) == ("stage-dir", "declined")
    return told.detail


# --- what a job gets


def test_job_directory_in_memory_belongs_to_the_user_and_has_the_requested_size(dirs: Dirs) -> None:
    assert dirs.prolog(7, "stage-dir=32M,ram") == []
    assert holders(dirs) == []  # the Prolog knows nothing of the job's memory
    target = str(dirs.node.places.job_dir)
    assert ("env", "FORESTAGE_DIR", target) in dirs.step(7).lines
    with dirs.seen(7) as at:
        facts = at.stat()
        assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (ALICE.uid, ALICE.gid, 0o700)
        flags = os.statvfs(at).f_flag
        assert flags & (os.ST_NOSUID | os.ST_NODEV) == os.ST_NOSUID | os.ST_NODEV
        ran = as_alice("cat /dev/zero > large", at)
        assert "No space left" in ran.stderr
        assert (at / "large").stat().st_size == 32 * MIB
        ran = as_alice("rm large; seq 5000 | xargs touch; ls | wc -l", at)
        assert "No space left" in ran.stderr  # files are bounded as well
        assert 2000 < int(ran.stdout) < 32 * MIB // job_ram.BYTES_PER_FILE
    assert not os.path.ismount(target)
    assert (dirs.taken().number, dirs.devices()) == (0, [])  # nothing of the disk


def test_steps_share_the_memory_job_directory_without_a_mount_in_the_nodes_namespace(
    dirs: Dirs,
) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    before = mounts.list_mounts()
    with dirs.seen(7) as at:
        as_alice("echo first > file", at)
    assert mounts.list_mounts() == before
    with dirs.seen(7) as at:
        assert (at / "file").read_text() == "first\n"
    assert len(holders(dirs)) == 1


def test_concurrent_first_steps_start_one_holder_process_of_the_memory_directory(
    dirs: Dirs,
) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    at_once = _fork.Barrier(6)

    def life() -> None:
        at_once.wait()
        job_dir.prepare_mount_for_step(dirs.on, dirs.job(7, ""))

    steps = [_fork.Process(target=life) for _ in range(6)]
    for step in steps:
        step.start()
    for step in steps:
        step.join()
        assert step.exitcode == 0
    assert holders(dirs) == [holder(dirs)]


def test_memory_directory_holder_gives_each_of_many_tasks_a_clone_of_the_mount(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forestage.system.daemon.MOST", 2)
    dirs.prolog(7, "stage-dir=32M,ram")
    name = Path(job_dir.prepare_mount_for_step(dirs.on, dirs.job(7, "")).line[1])
    for _ in range(50):
        os.close(fetch_mount_clone(name, "job-dir"))


def test_step_of_another_user_gets_no_lines_of_the_memory_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    dirs.step(7)
    assert dirs.step(7, BOB).lines == []


def test_tree_archive_and_seed_are_copied_into_the_memory_job_directory_as_the_user(
    dirs: Dirs,
) -> None:
    tree = dirs.source / "tree"
    tree.mkdir()
    (tree / "file").write_text("x" * MIB)
    subprocess.run(["tar", "-cf", dirs.source / "set.tar", "-C", tree, "file"], check=True)
    named = [f"{tree}@job", f"{dirs.source}/set.tar@job", f"{tree}@seed:CACHE"]
    began = dirs.prolog(7, f"stage-dir=32M,ram stage={','.join(named)}")
    assert [one.result for one in began] == ["started"] * 3
    shown = dirs.step(7)
    assert [one.result for one in shown.outcomes] == ["copied"] * 3
    target = f"{dirs.node.places.job_dir}/seed/CACHE"
    assert ("env", "CACHE", target) in shown.lines
    assert [one.result for one in dirs.step(7).outcomes] == ["hit"] * 3
    with dirs.seen(7) as at:
        for name in ("tree", "set", "seed/CACHE"):
            assert (at / name / "file").read_text() == "x" * MIB
            assert (at / name / "file").stat().st_uid == ALICE.uid


def test_file_larger_than_the_memory_job_directory_is_declined_and_takes_no_memory(
    dirs: Dirs,
) -> None:
    (dirs.source / "large").write_bytes(bytes(20 * MIB))
    dirs.prolog(7, f"stage-dir=16M,ram stage={dirs.source}/large@job")
    (told,) = dirs.step(7).outcomes
    assert (told.result, told.reason) == ("declined", "job-dir-full")
    with dirs.seen(7) as at:
        assert list(at.iterdir()) == []
        assert os.statvfs(at).f_bfree == os.statvfs(at).f_blocks


def test_memory_job_directory_does_not_count_to_the_users_share_of_the_disk(dirs: Dirs) -> None:
    keys = {"require_mount": False, "data": {"job_dir": "90%"}, "max_size": "100%"}
    dirs.node.configure(redirect="bind", **keys)
    path = dirs.node.put("bob/image.sqsh", content(size=MIB), BOB)
    dirs.node.prolog(1, path, BOB)
    dirs.node.epilog(1)
    image = dirs.node.cache.image_path(dirs.node.identity(path).key)
    # As large as none that a test's file system takes.
    subprocess.run(["fallocate", "-l", "250M", image.with_name("map")], check=True)
    dirs.node.configure(redirect="spank", max_user_share="60%", **keys)
    assert dirs.prolog(7, "stage-dir=250M,ram") == []
    assert dirs.prolog(8, "stage-dir=260M") == []  # for which another user's entry goes
    assert not image.exists()


# --- what it does not get


@pytest.mark.parametrize(("limit", "fits"), [(32 * MIB, True), (32 * MIB - 1, False)])
def test_memory_job_directory_larger_than_the_jobs_memory_limit_is_declined(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch, limit: int, fits: bool
) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    monkeypatch.setattr(
        forked_child, "read_job_memory_limit", lambda pid: limit if pid == os.getppid() else None
    )
    if fits:
        assert dirs.step(7).outcomes == []
    else:
        assert "this job's memory" in why(dirs)
        assert holders(dirs) == []


def test_memory_job_directory_without_a_job_limit_may_have_half_of_the_available_memory(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_child, "read_job_memory_limit", lambda pid: None)
    dirs.prolog(7, "stage-dir=1000000G,ram")
    assert "half of what this node has available" in why(dirs)
    monkeypatch.setattr(job_ram, "_read_available_bytes", lambda: 64 * MIB)
    dirs.prolog(8, "stage-dir=33M,ram")
    assert "half of what this node has available" in why(dirs, 8)
    dirs.prolog(9, "stage-dir=32M,ram")
    assert dirs.step(9).outcomes == []


def test_memory_job_directory_is_declined_for_a_step_in_the_jobs_pid_namespace(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_child, "is_in_job_namespace", lambda: True)
    dirs.prolog(7, "stage-dir=32M,ram")
    assert "PID or user namespace" in why(dirs)
    monkeypatch.undo()


def test_memory_directory_holder_reports_a_mount_error_and_the_next_step_retries(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    dirs.prolog(7, "stage-dir=32M,ram")
    with monkeypatch.context() as patched:
        patched.setattr(mounts, "mount", mount)
        assert "Cannot allocate memory" in why(dirs)
    assert dirs.step(7).outcomes == []


# --- requeue, cancel, crash


def test_memory_job_directory_of_a_killed_holder_is_declined_and_not_recreated_empty(
    dirs: Dirs,
) -> None:
    dirs.prolog(7, f"stage-dir=32M,ram stage={dirs.source}@seed:CACHE")
    assert [one.result for one in dirs.step(7).outcomes] == ["copied"]
    os.kill(holder(dirs), signal.SIGKILL)
    (place,) = dirs.node.cache.jobs.iterdir()
    until(lambda: lock.is_free(place / "held"), "the holder's end")
    shown = dirs.step(7)
    assert [one.result for one in shown.outcomes] == ["declined", "declined"]
    assert "who held them was killed" in shown.outcomes[0].detail
    assert shown.lines == [NONE, ("env", "CACHE")]
    assert dirs.node.epilog(7).said == ("released", "")
    assert not list(dirs.node.cache.jobs.iterdir())


def test_requeued_job_gets_an_empty_memory_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    with dirs.seen(7) as at:
        as_alice("echo old > file", at)
    assert dirs.prolog(7, "stage-dir=32M,ram", restart=1) == []  # its Epilog never ran
    assert holders(dirs) == []
    with dirs.seen(7) as at:
        assert list(at.iterdir()) == []


def test_second_prolog_of_a_run_keeps_the_files_of_the_memory_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    with dirs.seen(7) as at:
        as_alice("echo mine > file", at)
    dirs.prolog(7, "stage-dir=32M,ram")
    with dirs.seen(7) as at:
        assert (at / "file").read_text() == "mine\n"


def test_epilog_stops_the_holder_and_the_sweep_does_if_the_epilog_did_not_run(dirs: Dirs) -> None:
    for job in (7, 8):
        dirs.prolog(job, "stage-dir=32M,ram")
        dirs.step(job)
    assert len(holders(dirs)) == 2
    dirs.node.epilog(7)
    assert len(holders(dirs)) == 1
    dirs.node.leases.drop_lease(8)
    assert job_dir.remove_leftovers(dirs.node.cache, dirs.node.leases) == ("8.0",)
    assert holders(dirs) == []
    assert not list(dirs.node.cache.jobs.iterdir())


def test_epilog_before_the_first_step_removes_the_memory_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    assert dirs.node.epilog(7).said == ("released", "")
    assert not list(dirs.node.cache.jobs.iterdir())
    with pytest.raises(Declined, match="no directory of its own"):
        job_dir.prepare_mount_for_step(dirs.on, dirs.job(7, ""))


def test_memory_directory_holder_exits_once_its_lock_file_is_deleted(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_ram, "LOOK", 0.05)
    dirs.prolog(7, "stage-dir=32M,ram")
    dirs.step(7)
    (place,) = dirs.node.cache.jobs.iterdir()
    (place / "held").unlink()
    until(lambda: holders(dirs) == [], "its end")


def test_memory_job_directory_recorded_before_a_reboot_is_declined(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    monkeypatch.setattr(job_dir, "boot_id", lambda: "another")
    assert "no directory of its own" in why(dirs)


def test_memory_directory_holder_exits_after_an_epilog_without_python(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_ram, "LOOK", 0.05)
    dirs.prolog(7, "stage-dir=32M,ram")
    dirs.step(7)
    dirs.on.leases.over_mark(7).touch()
    until(lambda: holders(dirs) == [], "the end of its holder")
    assert list(dirs.node.cache.jobs.iterdir()) == []
