"""What the helper says of a job's data is mounted in each task, at directories that may be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from companion import GID, JOB, LEASES, UID, Step, keeping, line, served
from test_bind import options


@pytest.fixture
def socket(step: Step) -> Iterator[Path]:
    """Of a keeper that hands out clones of a directory with one file."""
    with keeping(step, "clones") as socket:
        yield socket


def test_data_mount_cloned_from_a_keeper_is_in_each_tasks_own_namespace(
    step: Step, point: Path, socket: Path
) -> None:
    step.answers(served(socket, point), "leave\tno-image")
    ran = step.run("tasks=3", f"task=cat {point}/file")
    assert ran.out == 3 * "from the keeper\n"
    assert all(len(options(table, point)) == 1 for table in ran.mounts)
    assert (ran.logged, ran.said) == ("", [])


def test_step_without_an_image_gets_its_data_mounted(step: Step, point: Path, socket: Path) -> None:
    LEASES.mkdir()
    (LEASES / f"{JOB}.hinted").touch()
    step.answers(served(socket, point), "leave\tno-image")
    assert step.run(f"task=cat {point}/file", image="").out == "from the keeper\n"


def test_image_and_data_are_mounted_in_the_same_task(step: Step, point: Path, socket: Path) -> None:
    step.answers(served(socket, point), step.use())
    ran = step.run(f"task=cat {point}/file; stat -c %i {step.image}")
    assert ran.out.split("\n")[:2] == ["from the keeper", str(step.entry().stat().st_ino)]


def test_contained_task_connects_to_the_data_keeper_itself(
    step: Step, point: Path, socket: Path
) -> None:
    step.answers(served(socket, point), "leave\tno-image")
    assert step.run("contained=1", f"task=cat {point}/file").out == "from the keeper\n"


def test_tasks_program_inherits_no_descriptor_of_its_data_mounts(
    step: Step, point: Path, socket: Path
) -> None:
    step.answers("leave\tno-image")
    alone = step.run("task=ls -l /proc/self/fd | wc -l").out
    step.answers(served(socket, point), "leave\tno-image")
    assert step.run("task=ls -l /proc/self/fd | wc -l").out == alone


def test_refusing_or_missing_data_keeper_is_reported_and_the_step_runs(
    step: Step, point: Path
) -> None:
    with keeping(step, "refuses") as socket:
        step.answers(served(socket, point), "leave\tno-image")
        refused = step.run("tasks=2", f"task=ls {point}")
    gone = step.run("tasks=2", f"task=ls {point}")
    for ran, why in ((refused, "as the test wants it"), (gone, "nobody serves it")):
        assert ran.out == ""
        assert ran.logged.count(f"nothing is mounted at {point}: {why}: ") == 2
        assert ran.said == [f"forestage: nothing is mounted at {point}: {why}"]


@pytest.mark.parametrize(("access", "flag"), [("ro", "ro"), ("rw", "rw")])
def test_loop_device_of_data_is_mounted_nosuid_and_nodev(
    step: Step, point: Path, disk: tuple[str, str], access: str, flag: str
) -> None:
    inode = point.stat().st_ino
    step.answers(line("device", *disk, "ext4", access, point, inode), "leave\tno-image")
    ran = step.run(f"task=cat {point}/file")
    assert ran.out == "from the disk\n"
    ((_, flags),) = options(ran.mounts[0], point)
    assert {flag, "nosuid", "nodev"} <= flags


def test_loop_device_that_now_has_another_file_is_not_mounted(
    step: Step, point: Path, disk: tuple[str, str]
) -> None:
    device, file = disk
    inode = point.stat().st_ino
    step.answers(line("device", device, f"{file}0", "ext4", "ro", point, inode), "leave\tno-image")
    ran = step.run(f"task=ls {point}")
    assert ran.out == ""
    assert ran.said == [f"forestage: nothing is mounted at {point}: its device is gone"]


def test_mount_point_opened_as_root_must_be_writable_by_root_alone(
    step: Step, socket: Path
) -> None:
    point = step.folder / "private/point"
    point.mkdir(parents=True)
    point.parent.chmod(0o700)
    step.answers(served(socket, point, "root"), "leave\tno-image")
    assert step.run(f"task=cat {point}/file").out == "from the keeper\n"
    point.chmod(0o777)
    ran = step.run(f"task=cat {point}/file 2>&1")
    assert "it is not root's alone" in ran.logged
    os.chown(point, UID, GID)
    point.chmod(0o700)
    assert "it is not root's alone" in step.run().logged


def test_mount_point_that_the_user_cannot_open_gets_no_mount(step: Step, socket: Path) -> None:
    point = step.folder / "private/point"
    point.mkdir(parents=True)
    point.parent.chmod(0o700)
    step.answers(served(socket, point), "leave\tno-image")
    ran = step.run(f"task=ls {point}")
    assert "it cannot be opened: Permission denied" in ran.logged
    assert ran.out == ""


def test_mount_point_with_a_symlink_in_its_path_gets_no_mount(
    step: Step, point: Path, socket: Path
) -> None:
    inode = point.stat().st_ino
    (step.folder / "home/link").symlink_to(point)
    (step.folder / "way").symlink_to(step.folder / "home")
    for path, why in (
        (step.folder / "home/link", "it cannot be opened: Not a directory"),
        (step.folder / "way/point", "there are links on its way"),
        (step.folder / "home/../home/point", "there are links on its way"),
    ):
        step.answers(line("served", socket, path, inode), "leave\tno-image")
        ran = step.run(f"task=ls {point}")
        assert why in ran.logged
        assert ran.out == ""


def test_mount_point_replaced_by_another_directory_gets_no_mount(
    step: Step, point: Path, socket: Path
) -> None:
    step.answers(served(socket, point), "leave\tno-image")
    swap = f"mv {point} {point}.old; mkdir {point}; chown {UID} {point}"
    ran = step.run(f"between={swap}", f"task=ls {point}")
    assert "it is another directory by now" in ran.logged
    assert ran.out == ""


def test_missing_mount_points_are_created_in_the_task_but_not_on_the_node(
    step: Step, socket: Path
) -> None:
    root = step.folder / "data"
    root.mkdir()
    lines = [line("folder", name, root, "root") for name in ("a/b", "c")]
    lines += [line("served", socket, root / name, "root") for name in ("a/b", "c")]
    step.answers(*lines[:3], "leave\tno-image")
    ran = step.run("tasks=2", f"task=cd {root}; ls; cat a/b/file; stat -c %a:%u a a/b c")
    once = "a\nc\nfrom the keeper\n755:0\n755:0\n755:0\n"
    assert sorted(ran.out.splitlines()) == sorted((2 * once).splitlines())
    assert ran.logged == ""
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("name", ["../up", "a/../../up"])
def test_missing_mount_point_outside_its_root_is_not_created(step: Step, name: str) -> None:
    root = step.folder / "data"
    root.mkdir()
    step.answers(line("folder", name, root, "root"), "leave\tno-image")
    step.run()
    assert not (step.folder / "up").exists()
    assert list(root.iterdir()) == []


def test_missing_mount_point_is_not_created_in_a_users_directory(step: Step, point: Path) -> None:
    step.answers(line("folder", "a", point, "root"), "leave\tno-image")
    ran = step.run()
    assert "it is not root's alone" in ran.logged
    assert list(point.iterdir()) == []


def test_env_line_of_the_answer_overwrites_a_variable_of_the_step(step: Step) -> None:
    step.answers(line("env", "FORESTAGE_DIR", "/forestage/job"), "leave\tno-image")
    assert step.run().facts("setenv") == {"setenv 1 FORESTAGE_DIR=/forestage/job"}


@pytest.mark.parametrize("image", [None, "", "dockerd://ubuntu"])
def test_image_variables_of_another_step_are_unset(step: Step, image: str | None) -> None:
    """Whatever a batch script or its user has there: this step's may be none of ours."""
    step.answers("leave\tno-image")
    names = [f"FORESTAGE_{name}" for name in ("RESULT", "IMAGE_PATH", "DATA_RESULT", "LOCAL")]
    ran = step.run(*(f"env={name}=x" for name in names), image=image)
    assert ran.facts("unsetenv") == {f"unsetenv {name}" for name in names}
    assert ran.facts("setenv") == set()


def test_env_line_without_a_value_keeps_the_users_variable(step: Step) -> None:
    step.answers(line("env", "CACHE"), "leave\tno-image")
    ran = step.run("env=CACHE=/home/cache")
    assert ran.environ["CACHE"] == "/home/cache"
    assert (ran.facts("setenv"), ran.logged) == (set(), "")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "env",
        "env\tlower",
        "env\t",
        "env\tlower\tx",
        "env\t1A\tx",
        "env\tA=B\tx",
        "env\t\tx",
        "env\tA\tx\ty",
        "served\tsock\t/x\t5",
        "served\t/sock\tx\t5",
        "served\t/sock\t/\t5",
        "served\t/sock\t/x\t-5",
        "served\t/sock\t/x\t5x",
        "served\t/sock\t/x\t",
        "served\t/sock\t/x\troot\tmore",
        "device\t/etc/passwd\t1:2\text4\tro\t/x\t5",
        "device\t/dev/loop9\t1:2\text4,bind\tro\t/x\t5",
        "device\t/dev/loop9\t1:2\text4\trx\t/x\t5",
        "device\t/dev/loop9\t1:2\text4\tro\t/x\t5\tmore",
        "device\t/dev/loop9\text4\tro\t/x\t5",
        "folder\ta\t/x\t5",
        "tree\t/x\troot",
    ],
)
def test_invalid_data_line_is_logged_and_the_other_lines_are_followed(
    step: Step, point: Path, socket: Path, text: str
) -> None:
    step.answers(text, served(socket, point), "leave\tno-image")
    ran = step.run(f"task=cat {point}/file")
    assert ran.out == "from the keeper\n"
    assert ran.logged == f"forestage: a line cannot be understood: {text}"
    assert ran.facts("setenv") == set()


def test_data_lines_above_the_limit_are_left_out(step: Step, point: Path) -> None:
    lines = [line("env", f"N{number}", "x") for number in range(8)]
    step.answers(*lines, "leave\tno-image")
    ran = step.run()
    assert len(ran.facts("setenv")) == 6
    assert ran.logged.count("more than 6 lines on data") == 2


def test_data_lines_are_followed_in_their_order(
    step: Step, point: Path, socket: Path, disk: tuple[str, str]
) -> None:
    """So parents come first (features/data/data_view.py): they would hide what is mounted below
    them."""
    parent = line("device", *disk, "ext4", "ro", point.parent, point.parent.stat().st_ino)
    step.answers(served(socket, point), parent, "leave\tno-image")
    ran = step.run(f"task=ls {point.parent}")
    assert ran.out.split() == ["file", "lost+found"]
