"""What forestage puts into a step's environment leads nowhere in another step, and is taken out."""

from __future__ import annotations

import pytest
from companion import JOB, LEASES, OWN, Step, line

DIR = f"FORESTAGE_DIR={OWN}"
SEED = f"CACHE={OWN}/seed/CACHE"
WAS = "FORESTAGE_WAS_CACHE=/home/cache"
NONE = "leave\tno-image"


@pytest.mark.parametrize("arguments", [[], ["arg=nonsense=1"]])
def test_forestage_variables_of_the_submitting_job_are_removed_from_the_step(
    step: Step, arguments: list[str]
) -> None:
    names = ("RESULT", "IMAGE_PATH", "DATA_RESULT", "LOCAL")
    said = [f"env=FORESTAGE_{name}=x" for name in names]
    given = ["env=A=1", f"env={DIR}", f"env={SEED}", f"env={WAS}", "env=B=2", *said, *arguments]
    ran = step.run(*given, image="")
    assert ran.environ == {"A": "1", "B": "2", "CACHE": "/home/cache"}
    assert (step.asked(), ran.said) == (0, [])


@pytest.mark.parametrize(
    "given",
    [
        {"FORESTAGE_DIR": "/mine"},
        {"FORESTAGE_DIR": f"{OWN}/below"},
        {"FORESTAGE_DIR": f"{OWN}/seed/FORESTAGE_DIR"},
        {"CACHE": str(OWN)},
        {"CACHE": f"{OWN}/seed/OTHER"},
        {"CACHE": f"{OWN}/seed/CACHE/below"},
        {"CACHE": f"x{OWN}/seed/CACHE"},
        {"OTHER": "", "LONG" * 50: f"{OWN}/seed/{'LONG' * 50}"},
    ],
)
def test_variable_with_a_value_that_only_resembles_forestages_is_kept(
    step: Step, given: dict[str, str]
) -> None:
    ran = step.run(*(f"env={name}={value}" for name, value in given.items()), image="")
    assert ran.environ == given


def test_variable_set_by_the_script_is_not_replaced_by_the_saved_value(step: Step) -> None:
    assert step.run("env=CACHE=/new", f"env={WAS}", image="").environ == {"CACHE": "/new"}
    assert step.run(f"env={WAS}", image="").environ == {}


@pytest.mark.parametrize("first", [True, False])
def test_users_value_is_saved_while_a_seed_replaces_the_variable(step: Step, first: bool) -> None:
    """The batch script's step finds the user's, each of the script's own steps that of the seed."""
    had = ["env=CACHE=/home/cache"] if first else [f"env={WAS}", f"env={SEED}"]
    name, value = SEED.split("=")
    step.answers(line("env", "FORESTAGE_DIR", OWN), line("env", name, value), NONE)
    ran = step.run(*had)
    assert ran.environ == {
        "FORESTAGE_DIR": str(OWN),
        "CACHE": f"{OWN}/seed/CACHE",
        "FORESTAGE_WAS_CACHE": "/home/cache",
    }


def test_empty_value_of_a_variable_is_saved_and_an_unset_variable_is_not(step: Step) -> None:
    name, value = SEED.split("=")
    step.answers(line("env", name, value), NONE)
    assert step.run("env=CACHE=").environ == {"CACHE": value, "FORESTAGE_WAS_CACHE": ""}
    assert step.run().environ == {"CACHE": value}
    assert step.run(f"env={SEED}", "env=FORESTAGE_WAS_CACHE=", image="").environ == {"CACHE": ""}


def test_job_directory_that_cannot_be_mounted_sets_no_variable(step: Step) -> None:
    OWN.mkdir()
    name, value = SEED.split("=")
    lines = [line("env", "FORESTAGE_DIR", OWN), line("env", name, value)]
    step.answers(*lines, line("device", "/dev/loop0", "0:0", "ext4", "rw", OWN, "root"), NONE)
    ran = step.run("env=CACHE=/home/cache")
    assert ran.environ == {"CACHE": "/home/cache", "FORESTAGE_DATA_RESULT": "no-mount"}
    assert ran.said == [f"forestage: nothing is mounted at {OWN}: its device is gone"]


def test_step_without_its_job_directory_prints_the_cause_once(step: Step) -> None:
    LEASES.mkdir()
    (LEASES / f"{JOB}.hinted").touch()
    lost = f"forestage: this step does not have its job's {OWN}: "
    for script, why in (
        ("exit 1", "it gave no answer"),
        ("echo 'forestage 3'", "it is of another release"),
    ):
        step.script(script)
        ran = step.run(f"env={DIR}", "tasks=2", image="")
        assert (ran.environ, ran.said) == ({}, [f"{lost}{why}"])
        assert step.run(image="").said == []
    # It answers, and says nothing of the directory.
    (LEASES / f"{JOB}.directory").touch()
    step.answers("leave\terror")
    assert step.run(image="").said == [f"{lost}forestage has failed on this node"]
    # Its own line says why.
    step.answers("say\tno room", line("env", "FORESTAGE_DIR"), NONE)
    assert step.run(f"env={DIR}", image="").said == ["no room"]
