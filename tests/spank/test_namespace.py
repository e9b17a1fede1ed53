"""A mount that hangs hangs in nobody's task, and what it mounts later shows to nobody."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from companion import EVENTS, GID, JOB, MARK, UID, Ran, Step, keeping, line, served
from test_bind import options

from forestage import events
from forestage.events import RequestOutcome, user_files
from forestage.system import forked_child
from forestage.system.files import open_descriptor
from forestage.system.lock_ranges import TASK_MOUNTS, TASK_TURNS
from node import until
from parking import Park

MOUNTER = "forestage-task"
BATCH = 0xFFFFFFFB  # the step, as fake.c has it
PR_SET_CHILD_SUBREAPER = 36
CGROUPS = Path("/sys/fs/cgroup")


def mounters() -> list[int]:
    """Those of this test: it adopts them. Others on this machine may have such processes too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (folder / "comm").read_text() != f"{MOUNTER}\n":
                continue
            if state(int(folder.name))[1] == str(os.getpid()):
                found.append(int(folder.name))
    return found


def state(pid: int) -> list[str]:
    """Its state, its parent, its group and its session."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]


def hanging() -> list[int]:
    found = []
    for pid in mounters():
        with contextlib.suppress(OSError):  # it has ended
            found += [pid] * (state(pid)[0] == "D")
    return found


def left_hanging(most: int) -> list[int]:
    """Once all others have ended: on its way each of them is in state D for a moment, too."""
    until(lambda: gone() or len(mounters()) <= most, "those that do not hang to end")
    return hanging()


def gone() -> bool:
    for pid in mounters():  # the test's own process adopts them
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
    return not mounters()


@pytest.fixture(autouse=True)
def _tidy(private_mounts: None, step: Step, park: Park) -> Iterator[None]:
    """Before the step's folder is deleted, which would wait for who holds a file in it.

    The FUSE by which that is held is mounted where no other test looks at what is mounted.
    """
    forked_child.call_prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    park.let_go()
    until(gone, "the mounters to end")
    forked_child.call_prctl(PR_SET_CHILD_SUBREAPER, 0)
    EVENTS.unlink(missing_ok=True)


def test_task_keeps_its_working_directory_after_its_mounts(step: Step) -> None:
    ran = step.run(f"stands={step.image.parent}", f"task=cat ./{step.image.name}")
    assert ran.facts("folder") == {f"folder {step.image.parent}"}
    assert options(ran.mounts[0], step.image)
    assert ran.out == "the image\n"


def test_task_in_its_mount_point_keeps_the_covered_working_directory(
    step: Step, point: Path
) -> None:
    """As it would without: what it has open leads to where it did."""
    with keeping(step, "clones") as socket:
        step.answers(served(socket, point), "leave\tno-image")
        ran = step.run(f"stands={point}", f"task=ls . {point}")
    assert ran.out == f".:\n\n{point}:\nfile\n"


def test_task_of_a_slurmd_in_a_chroot_keeps_its_root_directory(step: Step) -> None:
    root = step.folder / "root"
    make = [f"mkdir {root}", f"mount -t tmpfs root {root}", f"touch {root}/marker"]
    for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "tmp", "usr"):
        make.append(f"mkdir {root}/{name}; mount --rbind /{name} {root}/{name}")
    ran = step.run(f"before={'; '.join(make)}", f"chroot={root}", f"task=ls /marker {step.image}")
    assert ran.out.split() == ["/marker", str(step.image)]
    assert options(ran.mounts[0], step.image)


@pytest.mark.parametrize("how", ["read", "write"])
def test_task_reads_the_source_if_the_mount_over_its_image_hangs(
    hasty: Step, park: Park, how: str
) -> None:
    park(hasty.image, how)
    hasty.answers(hasty.use())
    ran = hasty.run("tasks=2", f"task=stat -c %i {hasty.image}")
    assert ran.out.split() == [str(hasty.image.stat().st_ino)] * 2
    assert ran.logged.count("a mount over it hangs (mount-hangs): Connection timed out") == 2
    assert len(ran.said) == 1
    assert "setenv 1 FORESTAGE_RESULT=mount-hangs" in ran.facts("setenv")


def noted() -> list[tuple[int, int | None, str, str, bool]]:
    found = []
    for event in events.read_events(EVENTS):
        assert isinstance(event.outcome, RequestOutcome)
        told = event.outcome
        found.append((event.job, event.step, told.reason, told.image, told.data))
    return found


def test_hanging_mount_is_recorded_as_one_event_for_explain(hasty: Step, park: Park) -> None:
    park(hasty.image, "read")
    hasty.answers(hasty.use())
    hasty.run("tasks=2")
    until(noted, "the event")
    assert noted() == [(JOB, BATCH, "mount-hangs", str(hasty.image), False)]


def test_each_hanging_mount_is_recorded_as_an_event_even_with_an_odd_path(
    hasty: Step, park: Park
) -> None:
    odd = hasty.folder / 'home/a "b"\\ c'
    odd.mkdir(parents=True)
    os.chown(odd.parent, UID, GID)
    os.chown(odd, UID, GID)
    park(hasty.image, "read")
    park(odd, "list")
    with keeping(hasty, "clones") as socket:
        hasty.answers(served(socket, odd), hasty.use())
        hasty.run()
    until(lambda: len(noted()) == 2, "two events")
    assert [(image, data) for *_, image, data in noted()] == [
        (str(hasty.image), False),
        (str(odd), True),
    ]


class Beside:
    """A step whose tasks look at a path when `path` was mounted, or would have been."""

    def __init__(self, step: Step, look: str, *arguments: str) -> None:
        self._go = step.folder / "go"
        waits = f"until test -e {self._go}; do sleep 0.02; done; {look}"
        self._ran: list[Ran] = []
        run: Callable[[], None] = lambda: self._ran.append(  # noqa: E731
            step.run(f"task=touch {step.folder}/$$.runs; {waits}", *arguments)
        )
        self._thread = threading.Thread(target=run)
        self._thread.start()
        until(lambda: list(step.folder.glob("*.runs")), "the task to run")

    def ran(self) -> Ran:
        self._go.touch()
        self._thread.join()
        return self._ran[0]


@pytest.mark.parametrize("how", ["read", "write"])
def test_late_mount_does_not_change_the_image_of_a_running_task(
    hasty: Step, park: Park, how: str
) -> None:
    park(hasty.image, how)
    hasty.answers(hasty.use())
    task = Beside(hasty, f"stat -c %i {hasty.image}")
    until(hanging, "the mounter to hang")
    park.let_go()
    until(gone, "the late mount")
    assert task.ran().out.split() == [str(hasty.image.stat().st_ino)]


def test_task_runs_without_its_data_while_the_mount_point_is_being_listed(
    hasty: Step, park: Park, point: Path
) -> None:
    park(point, "list")
    with keeping(hasty, "clones") as socket:
        hasty.answers(served(socket, point), "leave\tno-image")
        task = Beside(hasty, f"ls {point}")
        park.let_go()
        until(gone, "the late mount")
        ran = task.ran()
    assert ran.out == ""
    assert ran.said == [
        f"forestage: nothing is mounted at {point}: a mount over it hangs (mount-hangs)"
    ]


def test_hanging_mount_of_the_image_does_not_prevent_the_data_mount(
    hasty: Step, park: Park, point: Path
) -> None:
    park(hasty.image, "read")
    with keeping(hasty, "clones") as socket:
        hasty.answers(served(socket, point), hasty.use())
        ran = hasty.run(f"task=stat -c %i {hasty.image}; ls {point}")
    assert ran.out.split() == [str(hasty.image.stat().st_ino), "file"]


def test_mount_made_before_a_hanging_mount_is_made_again(
    hasty: Step, park: Park, point: Path
) -> None:
    other = point.parent / "other"
    other.mkdir()
    os.chown(other, UID, GID)
    park(other, "list")
    with keeping(hasty, "clones") as socket:
        hasty.answers(served(socket, point), served(socket, other), "leave\tno-image")
        ran = hasty.run(f"task=ls {point}")
    assert ran.out == "file\n"


def test_two_hanging_mounts_leave_the_task_without_any_mount(
    hasty: Step, park: Park, point: Path
) -> None:
    other = hasty.folder / "data"
    other.mkdir()
    park(hasty.image, "read")
    park(point, "list")
    with keeping(hasty, "clones") as socket:
        made = line("folder", "made", other, "root")
        hasty.answers(served(socket, point), made, hasty.use())
        ran = hasty.run(f"task=stat -c %i {hasty.image}; ls {other}")
    assert f"nothing is mounted at {other}: another mount hangs" in ran.logged
    assert ran.out.split() == [str(hasty.image.stat().st_ino)]


def test_only_one_process_hangs_for_a_mount_that_many_tasks_want(hasty: Step, park: Park) -> None:
    park(hasty.image, "read")
    hasty.answers(hasty.use())
    for _ in range(2):
        ran = hasty.run("tasks=6")
        assert ran.logged.count("a mount over it hangs (mount-hangs)") == 6
    assert len(left_hanging(1)) == 1


@contextlib.contextmanager
def others_mount(bytes_taken: int = TASK_MOUNTS.width) -> Iterator[int]:
    """All turns of this user to mount are taken, or the first bytes of them."""
    MARK.parent.mkdir(mode=0o711, exist_ok=True)
    with open_descriptor(MARK.parent / "mounting", os.O_RDWR | os.O_CREAT) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, bytes_taken, TASK_MOUNTS.first_byte(UID))
        yield fd


def test_task_without_a_free_mount_slot_reads_the_source_and_reports_mount_queue(
    crowded: Step,
) -> None:
    with others_mount():
        ran = crowded.run(f"task=stat -c %i {crowded.image}")
    why = "the mounts of other tasks took too long (mount-queue)"
    assert ran.out.split() == [str(crowded.image.stat().st_ino)]
    assert ran.said == [f"forestage: {crowded.image} is read from where it is: {why}"]
    assert "setenv 1 FORESTAGE_RESULT=mount-queue" in ran.facts("setenv")
    until(noted, "the event")
    assert noted() == [(JOB, BATCH, "mount-queue", str(crowded.image), False)]


def waiting(few: range) -> list[int]:
    """The processes that wait for one of the few turns of this user."""
    return [pid for waits, pid, byte in locks() if waits and byte in few]


def locks() -> Iterator[tuple[bool, int, int]]:
    """Of each lock of that file: whether it is only waited for, by which process, and its byte."""
    inode = (MARK.parent / "mounting").stat().st_ino
    for one in Path("/proc/locks").read_text().splitlines():
        *_, pid, file, first, _ = one.split()
        if file.endswith(f":{inode}"):
            yield "->" in one, int(pid), int(first)


def test_mounter_that_waits_for_a_slot_holds_no_path_lock(step: Step) -> None:
    """Else the next one of this path would take that wait for a mount that hangs."""
    few = range(TASK_MOUNTS.first_byte(UID), TASK_MOUNTS.first_byte(UID) + TASK_TURNS)
    with ThreadPoolExecutor(1) as pool:
        with others_mount(len(few)):
            ran = pool.submit(step.run, f"task=stat -c %i {step.image}")
            until(lambda: waiting(few), "the mounter to wait")
            (mounter,) = waiting(few)
            kept = [byte for waits, pid, byte in locks() if pid == mounter and not waits]
        assert ran.result().out.split() == [str(step.entry().stat().st_ino)]
    assert kept == []


def test_mounter_takes_a_free_slot_though_the_awaited_slot_hangs(hasty: Step) -> None:
    first, last = (TASK_MOUNTS.first_byte(UID) + number for number in range(2))
    with ThreadPoolExecutor(1) as pool, others_mount(2) as fd:
        ran = pool.submit(hasty.run, f"task=stat -c %i {hasty.image}")
        until(lambda: waiting(range(first, last + 1)), "the mounter to wait")
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, first)
        assert ran.result().out.split() == [str(hasty.entry().stat().st_ino)]


def test_mount_timeout_starts_only_when_the_mounter_has_its_slot(crowded: Step, park: Park) -> None:
    """The image is held for longer than the task waits for its turn."""
    park(crowded.image, "read")
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(crowded.run, f"task=stat -c %i {crowded.image}")
        until(hanging, "the mount to wait")
        time.sleep(6)
        park.let_go()
        assert ran.result().out.split() == [str(crowded.entry().stat().st_ino)]


@pytest.mark.parametrize("tasks", [1, 3])
def test_failed_redirect_of_a_task_is_printed_and_recorded_once_per_step(
    step: Step, tasks: int
) -> None:
    own = user_files.user_file_path(EVENTS.parent / "users", UID)
    own.parent.mkdir(parents=True)
    own.touch()
    ran = step.run(f"between=chmod 0700 {step.image.parent}", f"tasks={tasks}")
    why = "the step's user and groups may not read it"
    assert ran.said == [f"forestage: {step.image} is read from where it is: {why}"]
    assert "setenv 1 FORESTAGE_RESULT=no-mount" in ran.facts("setenv")
    until(lambda: noted() and gone(), "the event")
    (event,) = events.read_events(EVENTS)
    assert (event.outcome.reason, event.outcome.detail) == ("no-mount", why)
    assert noted() == [(JOB, BATCH, "no-mount", str(step.image), False)]
    assert own.read_bytes() == EVENTS.read_bytes(), "its user is told so"


def test_redirect_that_fails_in_some_tasks_is_printed_and_recorded(step: Step) -> None:
    """The first one has its copy."""
    hidden = f"rest=mount -t tmpfs none {step.image.parent}"
    ran = step.run("tasks=3", hidden, f"task=stat -c %i {step.image} || echo none")
    assert sorted(ran.out.split()) == sorted([str(step.entry().stat().st_ino), "none", "none"])
    why = "it cannot be opened"
    assert ran.said == [f"forestage: {step.image} is read from where it is: {why}"]
    until(lambda: noted() and gone(), "the event")
    assert noted() == [(JOB, BATCH, "no-mount", str(step.image), False)]


def test_failed_data_mount_of_a_task_is_recorded_as_an_event(step: Step, point: Path) -> None:
    made = line("folder", "made", point, "root")
    step.answers(made, "leave\tno-image")
    ran = step.run()
    until(lambda: noted() and gone(), "the event")
    assert noted() == [(JOB, BATCH, "no-mount", str(point), True)]
    assert "setenv 1 FORESTAGE_DATA_RESULT=no-mount" in ran.facts("setenv")
    assert ran.lines("fact").count("unsetenv FORESTAGE_LOCAL") == 2  # before, and by the task


def test_hanging_mounters_of_a_user_are_limited_to_two(
    hasty: Step, park: Park, point: Path
) -> None:
    points = [point / name for name in ("a", "b", "c")]
    with keeping(hasty, "clones") as socket:
        for one in points:
            one.mkdir()
            os.chown(one, UID, GID)
            park(one, "list")
            hasty.answers(served(socket, one), "leave\tno-image")
            hasty.run()
    assert len(left_hanging(2)) == 2


def test_hanging_mounter_is_in_no_slurm_cgroup_and_has_its_own_session(
    hasty: Step, park: Park
) -> None:
    folders = [CGROUPS / name / f"slurm_spank_{os.getpid()}" for name in ("freezer", "memory")]
    for folder in folders:
        if not (folder.parent / "cgroup.procs").exists():
            pytest.skip("needs cgroup v1")
        folder.mkdir()
    enter = "".join(f"echo $$ >{folder}/cgroup.procs\n" for folder in folders)
    inside = hasty.folder / "inside"
    inside.write_text(f'#!/bin/sh\n{enter}exec {hasty.program} "$@"\n')
    inside.chmod(0o755)
    hasty.program = inside
    park(hasty.image, "read")
    hasty.answers(hasty.use())
    try:
        task = Beside(hasty, "true")
        (pid,) = left_hanging(1)
        groups = Path(f"/proc/{pid}/cgroup").read_text()
        _, parent, group, session = state(pid)
        task.ran()
    finally:
        for folder in folders:
            until(lambda at=folder: not (at / "cgroup.procs").read_text(), "the step to end")
            folder.rmdir()
    assert "slurm" not in groups
    assert int(parent) == os.getpid()  # it has lost its own
    assert (int(group), int(session)) == (pid, pid)


def test_repeatedly_held_inode_shows_the_copy_or_the_source(
    hasty: Step, park: Park, point: Path
) -> None:
    park(hasty.image, "read", ms=40)
    park(point, "list", ms=60)
    right = {str(hasty.image.stat().st_ino), str(hasty.entry().stat().st_ino)}
    with keeping(hasty, "clones") as socket:
        hasty.answers(served(socket, point), hasty.use())
        for _ in range(10):
            ran = hasty.run("tasks=4", f"task=stat -c %i {hasty.image}")
            assert set(ran.out.split()) <= right
            assert len(ran.out.split()) == 4
