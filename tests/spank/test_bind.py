"""Each task sees the copy, and only where the very file that was staged lies."""

from __future__ import annotations

import os
import shlex

import pytest
from companion import KEY, OLD_KEY, UID, Step

from forestage.system.as_user import User
from node import leased


def options(mounts: str, path: object) -> list[tuple[str, set[str]]]:
    """The mounts at a path, each with its root and its flags."""
    rows = [line.split(" ") for line in mounts.splitlines()]
    return [(row[3], set(row[5].split(","))) for row in rows if row[4] == str(path)]


def test_redirect_in_a_task_is_read_only_and_the_only_mount(step: Step) -> None:
    ran = step.run(f"task=stat -c %i {step.image}; echo new 2>/dev/null > {step.image} || echo no")
    assert ran.out.split() == [str(step.entry().stat().st_ino), "no"]
    ((root, flags),) = options(ran.mounts[0], step.image)
    assert root.endswith(str(step.entry())[-40:])
    assert {"ro", "nosuid", "nodev"} <= flags
    assert options(ran.mounts[0], step.entry()) == []
    assert "shared:" not in ran.mounts[0]
    assert step.entry().read_text() == "the image\n"
    assert ran.logged == ""


def test_sixteen_tasks_of_a_step_start_one_helper(step: Step) -> None:
    ran = step.run("tasks=16", f"task=stat -c %i {step.image}")
    assert ran.out.split() == [str(step.entry().stat().st_ino)] * 16
    assert step.asked() == 1


def test_relative_image_path_is_resolved_in_the_steps_folder(step: Step) -> None:
    # Under job_container/tmpfs a task is elsewhere until it becomes the user.
    ran = step.run(f"cwd={step.image.parent}", f"task=stat -c %i {step.image}", image="./img.sqsh")
    assert ran.out.split() == [str(step.entry().stat().st_ino)]


def test_step_in_a_deleted_folder_gets_a_redirect_only_for_an_absolute_path(step: Step) -> None:
    gone = step.folder / "gone"
    gone.mkdir()
    ran = step.run(f"cwd={gone}", f"before=rmdir {gone}", image="./img.sqsh")
    assert (step.asked(), ran.logged) == (0, "")
    gone.mkdir()
    ran = step.run(f"cwd={gone}", f"before=rmdir {gone}")
    assert options(ran.mounts[0], step.image)


@pytest.mark.parametrize("number", ["ino", "size", "m", "c"])
def test_file_that_differs_from_the_staged_identity_is_not_redirected(
    step: Step, number: str
) -> None:
    step.answers(step.use(**{number: 5}))
    ran = step.run(f"task=stat -c %i {step.image}", "tasks=2")
    assert ran.out.split() == [str(step.image.stat().st_ino)] * 2
    assert "another file" in ran.logged
    assert len(ran.said) == 1  # not one for each task


def test_answer_with_user_sees_0_prints_nothing_to_the_user(step: Step) -> None:
    step.answers(step.use(size=5, user_sees=0))
    assert step.run().said == []


@pytest.mark.parametrize(
    "swap",
    [
        "mv {0} {0}.old; ln -s {1}/secret {0}",
        "mv {0} {0}.old; ln -s {0}.old {0}",
        "mv {1}/shared {1}/moved; ln -s {1}/moved {1}/shared",
        "rm {0}; mkdir {0}",
        "rm {0}; mkfifo {0}",
        "rm {0}",
        "cp -p {0} {0}.new; mv {0}.new {0}",
    ],
)
def test_path_swapped_after_the_answer_is_not_redirected(step: Step, swap: str) -> None:
    (step.folder / "secret").write_text("secret\n")
    (step.folder / "secret").chmod(0o600)
    ran = step.run(f"between={swap.format(step.image, step.folder)}")
    assert "stays as it is" in ran.logged
    assert str(step.entry().parent.name) not in ran.mounts[0]


def test_image_path_is_opened_with_the_users_rights(step: Step) -> None:
    ran = step.run(f"between=chmod 0700 {step.image.parent}")
    assert "the step's user and groups may not read it" in ran.logged
    assert options(ran.mounts[0], step.image) == []


def test_image_readable_only_by_the_jobs_group_is_redirected(step: Step) -> None:
    os.chown(step.image.parent, 0, 4244)
    step.image.parent.chmod(0o750)
    step.answers(step.use())
    assert options(step.run().mounts[0], step.image)


def test_copy_unreadable_for_the_user_is_not_mounted_in_a_task(step: Step) -> None:
    step.entry().chmod(0o600)
    assert options(step.run().mounts[0], step.image) == []


def test_path_is_not_redirected_if_the_copy_is_gone(step: Step) -> None:
    ran = step.run(f"between=rm {step.entry()}")
    assert "copy is gone" in ran.logged
    assert options(ran.mounts[0], step.image) == []


@pytest.mark.parametrize(
    "work",
    [
        "chown {uid} {0}",
        "chmod 0750 {0}",
        "chmod 0701 {0}",
        "mv {0} {0}.moved; ln -s {0}.moved {0}",
        "mv {0}/image {0}/moved; ln -s moved {0}/image",
    ],
)
def test_copy_in_an_entry_directory_with_wrong_owner_mode_or_link_is_not_mounted(
    step: Step, work: str
) -> None:
    # Under job_container/tmpfs, the cache's path may lead below a directory of the job's own.
    ran = step.run(f"between={work.format(step.entry().parent, uid=UID)}")
    assert "stays as it is" in ran.logged
    assert options(ran.mounts[0], step.image) == []


def test_task_sees_the_checked_copy_though_the_cache_is_swapped_while_binding(step: Step) -> None:
    cache, inode = step.folder / "cache", step.entry().stat().st_ino
    step.environ = {
        "SWAP": f"mv {cache} {cache}.old; mkdir -p {cache}/entries/{KEY};"
        f"echo another > {cache}/entries/{KEY}/image"
    }
    ran = step.run(f"task=stat -c %i {step.image}")
    assert (step.entry().read_text(), ran.out.split()) == ("another\n", [str(inode)])
    assert len(options(ran.mounts[0], step.image)) == 1
    assert ran.mounts[0].count("/image ") == 1  # nothing is left at the entry


def bind(step: Step, key: str) -> str:
    return f"mount --bind {shlex.quote(str(step.entry(key)))} {shlex.quote(str(step.image))}"


EVICTED = "{0}; mv {1} {2}/evicted/{3}.17"


@pytest.mark.parametrize(
    "mounted",
    ["{0}; {0}", "{0}; rm {1}/image", EVICTED, EVICTED + "; rm -r {2}/evicted/{3}.17"],
)
def test_older_copy_on_the_path_is_unmounted_in_the_task(step: Step, mounted: str) -> None:
    folder = step.entry(OLD_KEY).parent
    before = mounted.format(bind(step, OLD_KEY), folder, step.folder / "cache", OLD_KEY)
    ran = step.run(f"before={before}", f"task=stat -c %i {step.image}")
    assert ran.out.split() == [str(step.entry().stat().st_ino)]
    assert len(options(ran.mounts[0], step.image)) == 1


def test_copy_already_mounted_on_the_path_is_kept(step: Step) -> None:
    ran = step.run(f"before={bind(step, step.entry().parent.name)}")
    assert len(options(ran.mounts[0], step.image)) == 1
    assert "shared:" in ran.mounts[0]  # no namespace was needed
    assert ran.logged == ""


def test_foreign_mount_on_the_path_is_kept(step: Step) -> None:
    other = step.folder / "other"
    other.write_text("somebody's\n")
    ran = step.run(f"before=mount --bind {other} {step.image}", f"task=cat {step.image}")
    assert ran.out == "somebody's\n"
    assert "another file" in ran.logged


def test_file_lease_on_the_copy_does_not_block_the_task(step: Step) -> None:
    with leased(step.entry(), User("root", 0, 0)) as held:
        ran = step.run(f"task=stat -c %i {step.image}")
        assert ran.out.split() == [str(step.entry().stat().st_ino)]
        assert held()
