"""A job's own directory: made by its Prolog, seen by its steps, gone with its Epilog."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
import pytest

import jobdir
from forestage import trace
from forestage.cache import allocation, unpack_space
from forestage.cache.layout import Cache
from forestage.clock import Clock
from forestage.commands import status, sweep
from forestage.errors import Declined, Failed
from forestage.features.data import job_dir, job_disk
from forestage.features.data import requests as data
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.system import lock, loop, mounts
from forestage.system.as_user import User
from jobdir import MIB, Dirs, as_alice
from node import ALICE, BOB, Idle, Node, content, until

_fork = get_context("fork")


@pytest.fixture
def dirs(node: Node, tmp_path: Path) -> Iterator[Dirs]:
    with jobdir.made(node, tmp_path / "disk") as made:
        yield made


NONE = ("env", "FORESTAGE_DIR")  # unset: it may be from a node that has a directory


def free(dirs: Dirs) -> int:
    disk = os.statvfs(dirs.node.nvme)
    return disk.f_bavail * disk.f_frsize


# --- what a job gets


def test_job_directory_belongs_to_the_user_and_is_limited_to_the_requested_size(dirs: Dirs) -> None:
    assert dirs.prolog(7, "stage-dir=64M") == []
    lines = dirs.step(7).lines
    target = str(dirs.node.places.job_dir)
    assert ("env", "FORESTAGE_DIR", target) in lines
    with dirs.seen(7) as at:
        facts = at.stat()
        assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (ALICE.uid, ALICE.gid, 0o700)
        assert list(at.iterdir()) == []
        assert as_alice("echo here > file", at).returncode == 0
        ran = as_alice("cat /dev/zero > large", at)
        assert "No space left" in ran.stderr
        assert 60 * MIB < (at / "large").stat().st_size <= 64 * MIB
    assert not os.path.ismount(target)
    assert (dirs.node.places.job_dir.stat().st_mode & 0o777, list(Path(target).iterdir())) == (
        0o755,
        [],
    )


def test_job_directory_is_recreated_for_another_job_with_the_same_number(dirs: Dirs) -> None:
    """Another user's; the same user's that began at another time; and not for a second Prolog."""
    before: list[tuple[User, str, bool]] = [
        (ALICE, "100", False),
        (ALICE, "100", True),
        (ALICE, "", True),  # Slurm does not say when it began
        (ALICE, "200", False),
        (BOB, "200", False),
    ]
    for user, start, is_same in before:
        begin = {"SLURM_JOB_START_TIME": start} if start else {}
        lease = dirs.node.lease(7)
        if lease and not is_same:
            dirs.node._run("prolog", dirs.node.environ(7, user=user) | begin, None)
            assert dirs.node.lease(7) is None
            assert list(dirs.node.cache.jobs.iterdir()) == []
        asked = dirs.job(7, "stage-dir=64M", user, **begin)
        assert (
            data.start_job_data(
                dirs.on, asked, HookDeadlines.from_seconds(Clock(), 60.0, None), None
            )
            == []
        )
        with dirs.seen(7, user) as at:
            assert (at / "file").exists() is is_same
            (at / "file").touch()
    other = job_dir.JobDirectory(dirs.node.cache.jobs / "7.0")
    assert job_dir.find_job_dir(dirs.on, dirs.job(7, "", ALICE)) is None
    made = other.find_record()
    assert made is not None
    assert (made.uid, made.start) == (BOB.uid, 200)
    assert not made.is_same_run(msgspec.structs.replace(made, start=201))
    assert made.is_same_run(msgspec.structs.replace(made, start=0))


def test_steps_of_a_job_share_the_files_of_the_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    with dirs.seen(7) as at:
        as_alice("echo first > file", at)
        # Mounted once more while it is mounted, as by a second step.
        (device,) = dirs.devices()
        other = dirs.node.places.root / "other"
        other.mkdir()
        mounts.mount(device, str(other), mounts.MS_NOSUID | mounts.MS_NODEV, "ext4")
        as_alice("echo second > file", other)
        assert (at / "file").read_text() == "second\n"
        mounts.umount(str(other))
    with dirs.seen(7) as at:
        assert (at / "file").read_text() == "second\n"


def test_job_directory_reserves_its_disk_space_in_the_prolog_and_frees_it_in_the_epilog(
    dirs: Dirs,
) -> None:
    dirs.on.cache.prepare(require_mount=False)
    before = free(dirs)
    dirs.prolog(7, "stage-dir=128M")
    assert 128 * MIB <= before - free(dirs) < 130 * MIB
    assert dirs.taken().number == 1
    assert 128 * MIB <= dirs.taken().bytes < 130 * MIB
    told = status.format_output(status.read_node_status(dirs.on), 0.0)
    assert "128 MiB in 1 job directory" in str(told)
    assert dirs.node.epilog(7).said == ("released", "")
    assert_gone(dirs)
    assert before - free(dirs) < MIB
    assert "job director" not in str(status.format_output(status.read_node_status(dirs.on), 0.0))


def assert_gone(dirs: Dirs) -> None:
    assert dirs.taken().number == 0
    until(lambda: not dirs.devices(), "the devices to go")
    assert not list(dirs.node.cache.evicted.iterdir())


def test_step_of_another_user_gets_no_lines_of_the_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    assert dirs.step(7, BOB).lines == []
    (place,) = dirs.node.cache.jobs.iterdir()
    assert place.stat().st_mode & 0o777 == 0o700


def test_concurrent_prologs_of_six_jobs_create_six_job_directories(dirs: Dirs) -> None:
    hooks = [_fork.Process(target=dirs.prolog, args=(job, "stage-dir=32M")) for job in range(1, 7)]
    for hook in hooks:
        hook.start()
    for hook in hooks:
        hook.join()
        assert hook.exitcode == 0
    assert dirs.taken().number == 6
    found = {line[1] for job in range(1, 7) for line in dirs.step(job).lines if line[0] == "device"}
    assert len(found) == 6
    for job in range(1, 7):
        dirs.node.epilog(job)
    assert_gone(dirs)


# --- what it does not get


@pytest.mark.parametrize(
    ("comment", "reason", "text"),
    [
        ("stage-dir=4K", "bad-hint", "16 MiB at least"),
        ("stage-dir=450M", "too-large", "data: job_dir"),
        ("stage-dir=4K,ram", "bad-hint", "16 MiB at least"),
    ],
)
def test_job_directory_of_an_invalid_size_is_declined_with_the_reason_in_prolog_and_step(
    dirs: Dirs, comment: str, reason: str, text: str
) -> None:
    (told,) = dirs.prolog(7, comment)
    assert (told.result, told.reason) == ("declined", reason)
    assert text in told.detail
    shown = dirs.step(7)
    assert shown.lines == [NONE]
    (again,) = shown.outcomes  # which the step's user reads
    assert (again.request, text in again.detail) == ("stage-dir", True)
    assert dirs.devices() == []
    assert dirs.node.places.job_dir.is_dir()  # a container that mounts it starts all the same
    dirs.node.epilog(7)


def test_job_directory_is_declined_on_a_full_disk_and_leaves_no_file(dirs: Dirs) -> None:
    dirs.on.cache.prepare(require_mount=False)
    subprocess.run(
        ["fallocate", "-l", str(free(dirs) - 64 * MIB), dirs.node.nvme / "x"], check=True
    )
    before = free(dirs)
    (told,) = dirs.prolog(7, "stage-dir=100M")
    assert (told.result, told.reason) == ("declined", "no-room")
    assert dirs.taken().number == 0
    assert before - free(dirs) < MIB


def test_job_directory_that_would_use_the_min_free_space_is_declined(dirs: Dirs) -> None:
    dirs.node.configure(redirect="spank", require_mount=False, min_free="300M")
    (told,) = dirs.prolog(7, "stage-dir=200M")
    assert told.reason == "no-room"
    assert dirs.prolog(8, "stage-dir=64M") == []


def test_job_directories_of_all_jobs_together_stay_within_data_job_dir(dirs: Dirs) -> None:
    assert dirs.prolog(7, "stage-dir=240M") == []
    (told,) = dirs.prolog(8, "stage-dir=190M")
    assert (told.reason, "data: job_dir" in told.detail) == ("no-room", True)
    dirs.node.epilog(7)
    assert dirs.prolog(9, "stage-dir=190M") == []


def test_job_directory_is_declined_where_space_cannot_be_preallocated(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        allocation, "allocate_space", lambda *_: None
    )  # as where there is no fallocate(2)
    (told,) = dirs.prolog(7, "stage-dir=64M")
    assert (told.reason, "reserves no room" in told.detail) == ("job-dir", True)
    assert dirs.taken().number == 0


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_job_directory_is_declined_if_the_prologs_time_ends_at_the_lock(
    dirs: Dirs, seconds: float
) -> None:
    dirs.on.cache.prepare(require_mount=False)
    with lock.held(dirs.node.cache.locks / "jobs.lock", 0):
        (told,) = dirs.prolog(7, "stage-dir=64M", seconds=seconds)
    assert (told.result, told.reason) == ("declined", "deadline")
    assert dirs.taken().number == 0
    assert dirs.node.places.job_dir.is_dir()


def test_disk_that_fills_up_during_the_allocation_declines_the_job_directory(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack_space, "has_free_bytes", lambda *_: True)
    subprocess.run(
        ["fallocate", "-l", str(free(dirs) - 64 * MIB), dirs.node.nvme / "x"], check=True
    )
    (told,) = dirs.prolog(7, "stage-dir=100M")
    assert (told.result, told.reason) == ("declined", "no-room")
    assert dirs.taken().number == 0


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("user", "sizes", "fits"),
    [(BOB, [360], False), (ALICE, [360], True), (BOB, [200, 160], False)],
)
def test_job_directory_evicts_entries_only_within_its_users_share(
    dirs: Dirs, user: User, sizes: list[int], fits: bool
) -> None:
    keys = {"redirect": "bind", "require_mount": False, "data": {"job_dir": "90%"}}
    dirs.node.configure(**keys, max_size="100%", max_user_share="60%")
    path = dirs.node.put("bob/image.sqsh", content(size=MIB), user)
    dirs.node.prolog(1, path, user)
    dirs.node.epilog(1)
    image = dirs.node.cache.image_path(dirs.node.identity(path).key)
    assert image.exists()
    # As large as none that a test's file system takes.
    subprocess.run(["fallocate", "-l", "150M", image.with_name("map")], check=True)
    dirs.node.configure(**keys | {"redirect": "spank"}, max_size="100%", max_user_share="60%")
    told = [dirs.prolog(job, f"stage-dir={size}M") for job, size in enumerate(sizes, 7)]
    assert told[:-1] == [[]] * (len(sizes) - 1)  # all of the user's directories count
    assert (told[-1] == []) is fits
    assert image.exists() is not fits


def test_job_directory_is_declined_if_its_mount_point_is_a_link_or_a_users_directory(
    dirs: Dirs,
) -> None:
    point = dirs.node.places.job_dir
    point.parent.mkdir()
    point.symlink_to("/tmp")
    (told,) = dirs.prolog(7, "stage-dir=32M")
    assert (told.reason, str(point) in told.detail) == ("job-dir", True)
    point.unlink()
    point.mkdir()
    os.chown(point, ALICE.uid, ALICE.gid)
    (told,) = dirs.prolog(7, "stage-dir=32M")
    assert told.reason == "job-dir"


def test_mount_point_of_job_directories_has_mode_0755_under_any_umask(dirs: Dirs) -> None:
    before = os.umask(0o077)
    try:
        assert dirs.prolog(7, "stage-dir=32M") == []
    finally:
        os.umask(before)
    point = dirs.node.places.job_dir
    assert [one.stat().st_mode & 0o777 for one in (point.parent, point)] == [0o711, 0o755]


def test_prolog_sets_mode_0711_on_a_listable_parent_of_the_mount_point(dirs: Dirs) -> None:
    """Who lists it holds its lock, for which each look-up of the mount point may wait."""
    point = dirs.node.places.job_dir
    for one in (point.parent, point):  # as somebody's hand made them
        one.mkdir()
        one.chmod(0o755)
    assert dirs.prolog(7, "stage-dir=32M") == []
    assert [one.stat().st_mode & 0o777 for one in (point.parent, point)] == [0o711, 0o755]


# --- requeue, cancel, crash


def test_requeued_job_reuses_the_space_of_its_earlier_run_after_a_failed_epilog(dirs: Dirs) -> None:
    assert dirs.prolog(7, "stage-dir=300M") == []  # more than half of the disk
    assert [one.reason for one in dirs.prolog(8, "stage-dir=300M")] == ["no-room"]
    assert dirs.prolog(7, "stage-dir=300M", restart=1) == []
    assert [place.name for place in dirs.on.cache.jobs.iterdir()] == ["7.1"]
    assert list(dirs.on.cache.evicted.iterdir()) == []


@pytest.mark.parametrize("why", ["off", "disabled", "cache"])
def test_declined_job_directory_clears_the_variables_inherited_from_another_job(
    dirs: Dirs, why: str
) -> None:
    """sbatch in a job of such a directory hands on its environment."""
    comment = f"stage-dir=32M stage={dirs.source}/set@seed:CACHE,{dirs.source}/"
    refusal = Declined("disabled", "INC-1") if why == "disabled" else None
    if why == "cache":
        dirs.on.cache.root.mkdir()
        dirs.on.cache.root.chmod(0o777)
    asked = dirs.job(7, comment + " stage=off" * (why == "off"))
    limit = HookDeadlines.from_seconds(Clock(), 60.0, None)
    (outcome,) = data.start_job_data(dirs.on, asked, limit, refusal)
    assert outcome.result in ("declined", "failed")
    shown = data.show_job_data(dirs.on, dirs.job(7, "", SLURM_STEP_ID="0"), limit, refusal)
    assert shown.lines == [NONE, ("env", "CACHE")]
    assert [one.request for one in shown.outcomes] == ["stage-dir", f"{dirs.source}/set@seed:CACHE"]


def test_requeued_job_gets_an_empty_job_directory_on_disk(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    with dirs.seen(7) as at:
        as_alice("echo old > file", at)
    # Its Epilog never ran.
    assert dirs.prolog(7, "stage-dir=32M", restart=1) == []
    assert [place.name for place in dirs.node.cache.jobs.iterdir()] == ["7.1"]
    with dirs.seen(7) as at:
        assert list(at.iterdir()) == []
    until(lambda: len(dirs.devices()) == 1, "the old one to go")
    with dirs.seen(7) as at:
        assert as_alice("echo x > y", at).returncode == 0


def test_second_prolog_of_a_run_keeps_the_files_of_the_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    with dirs.seen(7) as at:
        as_alice("echo mine > file", at)
        dirs.prolog(7, "stage-dir=32M")
        assert (at / "file").read_text() == "mine\n"


def test_reused_job_number_shows_no_files_of_the_earlier_users_job_directory(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M", BOB)
    (declined,) = dirs.prolog(7, "stage-dir=32M")
    assert (declined.result, declined.reason) == ("declined", "other-job")
    dirs.node.prolog(7)  # releases what Bob's job has left
    assert dirs.prolog(7, "stage-dir=32M") == []
    with dirs.seen(7) as at:
        assert at.stat().st_uid == ALICE.uid


def killed_at(point: str, run: object, *args: object) -> None:
    """Runs it in a process that is killed -9 at a trace point."""

    def life() -> None:
        def listen(name: str) -> None:
            if name == point:
                os.kill(os.getpid(), signal.SIGKILL)

        trace.listener = listen
        run(*args)  # type: ignore[operator]

    process = _fork.Process(target=life)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_epilog_removes_the_job_directory_of_a_prolog_that_was_killed(dirs: Dirs) -> None:
    killed_at("job room", dirs.prolog, 7, "stage-dir=32M")
    assert dirs.taken().number == 1
    shown = dirs.step(7)  # it is not whole
    assert (shown.lines, [one.reason for one in shown.outcomes]) == ([NONE], ["job-dir"])
    assert dirs.node.epilog(7).said == ("released", "")
    assert_gone(dirs)


def swept(dirs: Dirs, dry_run: bool = False) -> tuple[str, ...]:
    done = sweep.run_sweep(dirs.on, Idle("", "", Path("/proc")), dry_run, lambda *_: None)
    assert done.problems == ()
    return done.added.get("job_dirs", ())


@pytest.mark.parametrize("point", ["job aside", "job detached"])
def test_sweep_finishes_the_job_directory_removal_of_a_killed_epilog(
    dirs: Dirs, point: str
) -> None:
    dirs.on.cache.prepare(require_mount=False)
    before = free(dirs)
    dirs.prolog(7, "stage-dir=128M")
    killed_at(point, dirs.node.epilog, 7)
    assert dirs.node.lease(7) is None
    assert dirs.step(7).lines == []
    swept(dirs)
    assert_gone(dirs)
    assert before - free(dirs) < MIB


def test_sweep_removes_the_job_directory_of_a_job_without_a_lease(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    dirs.prolog(8, "stage-dir=32M")
    dirs.node.leases.drop_lease(7)
    assert swept(dirs, dry_run=True) == ("7.0", "8.0")
    assert dirs.taken().number == 2
    assert job_dir.remove_leftovers(dirs.node.cache, dirs.node.leases) == ("7.0",)
    until(lambda: len(dirs.devices()) == 1, "the device to go")
    with dirs.seen(8):
        pass


def test_job_directory_in_use_after_the_epilog_is_unwritable_and_freed_with_its_last_mount(
    dirs: Dirs,
) -> None:
    dirs.on.cache.prepare(require_mount=False)
    before = free(dirs)
    dirs.prolog(7, "stage-dir=128M")
    with dirs.seen(7) as at:
        dirs.node.epilog(7)
        assert as_alice("echo late > file", at).returncode != 0  # nothing is written any more
    until(lambda: not dirs.devices(), "the device to go")
    assert before - free(dirs) < MIB


@contextlib.contextmanager
def descriptor(dirs: Dirs, job: int) -> Iterator[Path]:
    """What another job of the user's keeps by /proc/PID/root; the directory is full."""
    with dirs.seen(job, kept=True) as at:
        as_alice("head -c 100M /dev/zero | tr '\\0' x >full; sync -f full", at)
        fd = os.open(at / "full", os.O_RDONLY)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_epilog_frees_the_job_directorys_space_though_another_job_has_a_file_open(
    dirs: Dirs,
) -> None:
    dirs.on.cache.prepare(require_mount=False)
    before = free(dirs)
    dirs.prolog(7, "stage-dir=128M")
    with descriptor(dirs, 7) as full:
        assert dirs.node.epilog(7).said == ("released", "")
        assert before - free(dirs) < 4 * MIB
        assert len(dirs.devices()) == 1
        with pytest.raises(OSError, match="Input/output"):
            full.read_bytes()
        assert dirs.prolog(8, "stage-dir=300M", BOB) == []
    until(lambda: len(dirs.devices()) == 1, "the device to go")


def test_process_that_maps_a_file_of_a_removed_job_directory_gets_sigbus_and_reads_no_zeros(
    dirs: Dirs,
) -> None:
    """A shutdown stops calls, not faults: a page that is not in memory is read from the disk."""
    dirs.prolog(7, "stage-dir=128M")
    program = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)\n"
        "memory.madvise(mmap.MADV_RANDOM)\n"
        "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read(1)\n"
        "print(memory[50 << 20])\n"
    )
    with descriptor(dirs, 7) as full:
        path = f"/proc/{os.getpid()}/fd/{full.name}"
        argv = [sys.executable, "-c", program, path]
        with subprocess.Popen(argv, stdin=PIPE, stdout=PIPE, text=True) as mapped:
            assert mapped.stdout is not None
            assert mapped.stdout.readline() == "mapped\n"
            dirs.node.epilog(7)
            said, _ = mapped.communicate("x")
    assert (said, mapped.returncode) == ("", -signal.SIGBUS)


def test_open_file_stays_readable_if_the_job_directorys_shutdown_fails(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_disk, "_GOINGDOWN", 0x5877FF)  # no call of ext4's
    dirs.prolog(7, "stage-dir=300M")
    with descriptor(dirs, 7) as full:
        assert dirs.node.epilog(7).said == ("released", "")
        assert set(full.read_bytes()) == {ord("x")}
    until(lambda: not dirs.devices(), "the device to go")


def test_last_unmount_of_a_step_keeps_the_job_directorys_file_system_mounted_until_the_epilog(
    dirs: Dirs,
) -> None:
    dirs.prolog(7, "stage-dir=256M")
    (device,) = dirs.devices()
    mounted = Path("/proc/fs/ext4") / Path(device).name
    with dirs.seen(7):
        pass
    assert mounted.exists()  # nowhere any more, but who took it off had nothing to write
    dirs.node.epilog(7)
    until(lambda: not mounted.exists(), "the file system to go")
    assert_gone(dirs)


def test_job_directory_stays_writable_after_its_holder_lost_the_lock_file_and_exited(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_disk, "LOOK", 0.05)
    dirs.prolog(7, "stage-dir=32M")
    (place,) = dirs.node.cache.jobs.iterdir()
    with dirs.seen(7) as at, (place / "held").open() as held:
        (place / "held").unlink()
        fcntl.flock(held, fcntl.LOCK_EX)  # it has ended
        assert as_alice("echo x > y", at).returncode == 0


def test_job_directory_is_found_after_the_configured_cache_changes(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    other = Cache(dirs.node.nvme / "other")
    moved = msgspec.structs.replace(dirs.on, cache=other)
    assert job_dir.find_job_dir(moved, dirs.job(7, "")) is not None


def test_step_reports_the_error_if_the_job_directory_has_no_loop_device(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(file: Path, read_only: bool) -> str:
        raise Failed("loop", "no loop device is free")

    dirs.prolog(7, "stage-dir=32M")
    monkeypatch.setattr(loop, "attach_file", attach)
    shown = dirs.step(7)
    assert shown.lines == [NONE]
    assert "no loop device is free" in shown.outcomes[0].detail


def test_job_directory_on_disk_stays_usable_and_removable_after_its_holder_was_killed(
    dirs: Dirs,
) -> None:
    dirs.prolog(7, "stage-dir=32M")
    (place,) = dirs.node.cache.jobs.iterdir()
    os.kill(int((place / "held").read_text()), signal.SIGKILL)
    until(lambda: lock.is_free(place / "held"), "the holder's end")
    with dirs.seen(7) as at:
        assert as_alice("echo x > y", at).returncode == 0
    assert dirs.node.epilog(7).said == ("released", "")
    assert_gone(dirs)


def test_sweep_removes_the_job_directory_if_the_epilog_did_not_get_the_space_lock(
    dirs: Dirs, short_locks: None
) -> None:
    dirs.prolog(7, "stage-dir=32M")
    with lock.held(dirs.node.cache.space_lock, 0):
        assert dirs.node.epilog(7).said == ("failed", "busy")
    assert job_dir.remove_leftovers(dirs.node.cache, dirs.node.leases) == ("7.0",)
    until(lambda: not dirs.devices(), "the device to go")


def test_epilog_removes_a_job_directory_of_20000_files_with_fewer_than_20_unlinks(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirs.prolog(7, "stage-dir=360M")
    with dirs.seen(7) as at:
        made = "import os\nfor n in range(20000): os.close(os.open(f'f{n}', os.O_CREAT))"
        subprocess.run(["python3", "-c", made], cwd=at, check=True)
    unlinked: list[object] = []
    real = os.unlink

    def counted(path: Any, **more: Any) -> None:
        unlinked.append(path)
        real(path, **more)

    monkeypatch.setattr(os, "unlink", counted)
    dirs.node.epilog(7)
    assert len(unlinked) < 20
    assert dirs.taken().number == 0


def test_epilog_of_an_image_job_does_not_call_the_job_directorys_removal(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_dir, "remove_job_dirs", lambda *_: pytest.fail("looked"))
    path = dirs.node.put("alice/image.sqsh", content())
    dirs.node.prolog(7, path)
    assert dirs.node.epilog(7).said == ("released", "")


def test_job_directory_is_formatted_if_mkfs_does_not_know_the_newest_option(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_disk, "PREZEROED", "no_such_option=1")
    assert dirs.prolog(7, "stage-dir=32M") == []
    with dirs.seen(7) as at:
        assert as_alice("echo x > y", at).returncode == 0


# --- without Python


def test_holder_removes_the_job_directory_after_an_epilog_without_python(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_disk, "LOOK", 0.05)
    before = free(dirs)
    dirs.prolog(7, "stage-dir=64M")
    dirs.prolog(8, "stage-dir=32M")
    place, other = (dirs.node.cache.jobs / name for name in ("7.0", "8.0"))
    with dirs.seen(7, kept=True) as at:  # a process that the job has left
        as_alice("echo x > file", at)
        dirs.on.leases.over_mark(7).touch()
        until(lambda: not place.exists(), "the end of the directory")
    until(lambda: len(dirs.devices()) == 1, "the end of its device")
    assert other.exists()
    assert dirs.step(8).outcomes == []
    dirs.node.epilog(8)
    assert_gone(dirs)
    assert before - free(dirs) < MIB


def test_requeued_jobs_directory_is_kept_despite_the_end_mark_of_the_earlier_run(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_disk, "LOOK", 0.05)
    dirs.prolog(7, "stage-dir=32M")
    over = dirs.on.leases.over_mark(7)
    over.touch()
    until(lambda: not list(dirs.node.cache.jobs.iterdir()), "the end of the first")
    dirs.prolog(7, "stage-dir=32M", restart=1)
    assert not over.exists()
    with dirs.seen(7) as at:
        assert list(at.iterdir()) == []
    dirs.node.epilog(7)
