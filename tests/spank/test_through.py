"""While the copy is under way, each task sees the file that its keeper serves (keeper.py)."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest
from companion import OLD_KEY, OLDER_KERNEL, SERVED, Keeper, Step, shown_before
from test_bind import options


def test_read_through_file_is_mounted_read_only_in_each_task(step: Step, keeper: Keeper) -> None:
    keeper("clones")
    ran = step.run("tasks=4", f"task=cat {step.image}; echo new 2>/dev/null > {step.image}; true")
    assert ran.out == 4 * SERVED
    for table in ran.mounts:
        ((_, flags),) = options(table, step.image)
        assert {"ro", "nosuid", "nodev"} <= flags
        assert table.count("fuse.forestage") == 1
    assert ran.logged == ""


def test_tasks_program_inherits_no_descriptor_of_the_read_through_mount(
    step: Step, keeper: Keeper
) -> None:
    keeper("clones")
    alone = step.run("task=ls -l /proc/self/fd | wc -l", image="").out
    ran = step.run("task=ls -l /proc/self/fd | wc -l")
    assert ran.out == alone
    assert ran.facts("descriptors") == {"descriptors -1 more"}


@pytest.mark.parametrize("contained", ["", "contained=1"])
def test_task_that_does_not_see_the_socket_reads_through_unless_contained(
    step: Step, keeper: Keeper, contained: str
) -> None:
    keeper("clones")
    hidden = f"between=mv {step.place}/sock {step.folder}/sock"
    ran = step.run(hidden, f"task=cat {step.image}", *filter(None, [contained]))
    if contained:  # what is beside the step manager cannot hand on a connection
        assert "no process serves its copy" in ran.logged
    else:
        assert ran.out == SERVED


def test_contained_task_connects_to_the_read_through_keeper_itself(
    step: Step, keeper: Keeper
) -> None:
    keeper("clones")
    assert step.run("contained=1", f"task=cat {step.image}").out == SERVED


@pytest.mark.parametrize(
    ("manner", "why"),
    [
        ("refuses", "not served: Connection refused"),
        ("silent", "not served: Resource temporarily"),
        ("another", "another file is served"),
    ],
)
def test_task_reads_the_source_if_the_keeper_refuses_is_silent_or_serves_another_file(
    step: Step, keeper: Keeper, manner: str, why: str
) -> None:
    keeper(manner)
    ran = step.run("tasks=2", f"task=cat {step.image}")
    assert ran.out == 2 * "the image\n"
    assert why in ran.logged
    assert not any("fuse.forestage" in table for table in ran.mounts)
    assert len(ran.said) == 1


def test_task_on_a_kernel_without_mount_api_reads_the_source_and_a_hit_is_redirected(
    step: Step, keeper: Keeper
) -> None:
    """Linux before 5.2. The keeper's own kernel refuses clones then (tests/faults)."""
    keeper("clones")
    step.kernel = OLDER_KERNEL
    ran = step.run("tasks=2", f"task=cat {step.image}")
    assert ran.out == 2 * "the image\n"
    assert "it cannot be mounted over: Function not implemented" in ran.logged
    step.answers(step.use())
    assert step.run(f"task=stat -c %i {step.image}").out == f"{step.entry().stat().st_ino}\n"


def test_silent_keeper_is_waited_for_only_once_per_step(step: Step, keeper: Keeper) -> None:
    # And what it may answer later is not taken for an answer to the next task.
    keeper("silent")
    ran = step.run("tasks=3")
    assert ran.logged.count("Resource temporarily unavailable") == 1
    assert ran.logged.count("Broken pipe") == 2


def test_task_reads_the_source_if_there_is_no_keeper(step: Step) -> None:
    step.answers(step.through())
    ran = step.run(f"task=cat {step.image}")
    assert "no process serves its copy" in ran.logged
    assert ran.out == "the image\n"


def test_read_through_file_that_the_user_cannot_open_is_not_mounted(
    step: Step, keeper: Keeper
) -> None:
    (step.place / "bytes").chmod(0o400)
    keeper("clones")
    ran = step.run(f"task=cat {step.image}")
    assert ran.out == "the image\n"
    assert "fuse.forestage" not in ran.mounts[0]


@pytest.mark.parametrize("number", ["ino", "size", "m", "c"])
def test_file_that_differs_from_the_served_identity_is_not_covered(
    step: Step, keeper: Keeper, number: str
) -> None:
    keeper("clones")
    step.answers(step.through(**{number: 5}))
    ran = step.run(f"task=cat {step.image}")
    assert ran.out == "the image\n"
    assert "another file" in ran.logged


@pytest.mark.parametrize("answer", [Step.use, Step.through])
def test_read_through_file_already_mounted_is_kept(
    step: Step, keeper: Keeper, answer: Callable[[Step], str]
) -> None:
    keeper("clones")
    step.answers(answer(step))
    ran = step.run(f"before={shown_before(step)}", f"task=cat {step.image}")
    assert ran.out == SERVED
    assert len(options(ran.mounts[0], step.image)) == 1
    assert "shared:" in ran.mounts[0]  # no namespace was needed


def test_read_through_file_of_an_older_image_is_unmounted_in_the_task(
    step: Step, keeper: Keeper
) -> None:
    keeper("another")
    step.answers(step.use())
    ran = step.run(f"before={shown_before(step)}", f"task=cat {step.image}")
    assert ran.out == "the image\n"
    ((root, _),) = options(ran.mounts[0], step.image)
    assert root.endswith("/image")


def test_older_copy_is_replaced_by_the_read_through_file(step: Step, keeper: Keeper) -> None:
    keeper("clones")
    older = shlex.join(["mount", "--bind", str(step.entry(OLD_KEY)), str(step.image)])
    ran = step.run(f"before={older}", f"task=cat {step.image}")
    assert ran.out == SERVED
    assert len(options(ran.mounts[0], step.image)) == 1
