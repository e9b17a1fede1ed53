"""One contract for both ways to ask Slurm: its commands, and pyslurm.

The commands' answers were recorded from Slurm 22.05; tests/slurm asks them of a real one. No
pyslurm is to be had for the releases that are tested, so here it is a stand-in with the names of
its API (Job.load, Node.load, RPCError.errno): that shows what is made of its answers, not that it
gives them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest_mock import MockerFixture

from forestage.errors import SlurmError
from forestage.slurm import pyslurm, slurm_client
from forestage.slurm.slurm_client import JobState, SlurmClient
from forestage.system import run

Asked = Callable[[str], SlurmClient]


class RPCError(Exception):
    def __init__(self, errno: int) -> None:
        super().__init__(f"Slurm error {errno}")
        self.errno = errno


SQUEUE = {
    "running": "echo '7|RUNNING|n[1-2]'",
    "pending": "echo '7|PENDING|'",
    "over": "echo '7|COMPLETED|n1'",
    "unknown": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "silent": "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
}
LOADED: dict[str, Callable[[int], object]] = {
    "running": lambda job: SimpleNamespace(id=job, state="RUNNING", allocated_nodes="n[1-2]"),
    "pending": lambda job: SimpleNamespace(id=job, state="PENDING", allocated_nodes=None),
    "over": lambda job: SimpleNamespace(id=job, state="COMPLETED", allocated_nodes="n1"),
}


def commands(folder: Path, squeue: str, scontrol: str = "exit 99") -> SlurmClient:
    for name, script in (("squeue", squeue), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >>{folder}/asked\n{script}\n")
        (folder / name).chmod(0o755)
    return SlurmClient(f"{folder}:{run.PATH}")


def bound(mocker: MockerFixture, load: object, name: str = "Job") -> None:
    """Puts a module in pyslurm's place; the child that asks inherits it."""
    module = SimpleNamespace(RPCError=RPCError, **{name: SimpleNamespace(load=load)})
    mocker.patch.dict(sys.modules, {"pyslurm": module})


@pytest.fixture(params=["commands", "pyslurm"])
def asked(request: pytest.FixtureRequest, mocker: MockerFixture, tmp_path: Path) -> Asked:
    """A Slurm whose only job, 7, is in that case."""

    def asking(case: str) -> SlurmClient:
        if request.param == "commands":
            return commands(tmp_path, SQUEUE[case])
        errors = {"unknown": pyslurm.INVALID_JOB, "silent": 1800}
        load = mocker.Mock(side_effect=RPCError(errors[case]) if case in errors else LOADED[case])
        bound(mocker, load)
        # In doubt the commands are asked, which are silent as well.
        return commands(tmp_path, SQUEUE["silent"])._replace(uses_pyslurm=True)

    return asking


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("running", JobState("RUNNING", "n[1-2]")),
        ("pending", JobState("PENDING", "")),
        ("over", JobState("COMPLETED", "n1")),
        ("unknown", None),
    ],
)
def test_job_state_is_the_same_from_squeue_and_from_pyslurm(
    asked: Asked, case: str, expected: JobState | None
) -> None:
    assert asked(case).find_job(7) == expected


def test_query_of_a_silent_slurm_raises_slurm_error(asked: Asked) -> None:
    with pytest.raises(SlurmError):
        asked("silent").find_job(7)


# --- what only pyslurm can do wrong


def ends(job: int) -> object:
    os._exit(1)  # as libslurm does where it finds no slurm.conf


def hangs(job: int) -> object:
    time.sleep(600)
    return None


def another(job: int) -> object:
    return SimpleNamespace(id=job + 1, state="COMPLETED", allocated_nodes="n1")


def without_names(job: int) -> object:
    return SimpleNamespace(id=job)


@pytest.mark.parametrize("load", [ends, hangs, another, without_names])
def test_job_query_falls_back_to_squeue_if_pyslurm_fails_hangs_or_names_another_job(
    mocker: MockerFixture, tmp_path: Path, load: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(mocker, load)
    if load is hangs:
        monkeypatch.setattr(slurm_client, "TIMEOUT", 0.5)
    slurm = commands(tmp_path, SQUEUE["running"])._replace(uses_pyslurm=True)
    assert slurm.find_job(7) == JobState("RUNNING", "n[1-2]")
    assert (tmp_path / "asked").read_text() == "squeue\n"


def test_job_query_answered_by_pyslurm_runs_no_squeue(
    mocker: MockerFixture, tmp_path: Path
) -> None:
    bound(mocker, LOADED["over"])
    assert commands(tmp_path, "exit 9")._replace(uses_pyslurm=True).find_job(7) is not None
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("knows", [True, False])
def test_pyslurm_reports_whether_slurm_knows_the_node(
    mocker: MockerFixture, tmp_path: Path, knows: bool
) -> None:
    error = RPCError(pyslurm.INVALID_NODE)
    load = mocker.Mock(
        side_effect=None if knows else error, return_value=SimpleNamespace(name="n1")
    )
    bound(mocker, load, "Node")
    assert commands(tmp_path, "exit 9")._replace(uses_pyslurm=True).has_node("n1") is knows


@pytest.mark.parametrize(
    ("own", "site", "expected"),
    [
        ("24.11.0", "slurm 24.11.5", True),
        ("22.5.1", "slurm-wlm 22.05.8", True),  # as Python writes it
        ("24.11.0", "slurm 25.05.1", False),
        ("24.11.0", "", False),
        ("", "slurm 24.11.5", False),
    ],
)
def test_pyslurm_is_used_only_if_its_release_matches_the_sites_slurm(
    mocker: MockerFixture, own: str, site: str, expected: bool, tmp_path: Path
) -> None:
    mocker.patch.object(pyslurm, "find_installed_version", return_value=own)
    assert pyslurm.is_compatible(site) is expected
    assert commands(tmp_path, f"echo '{site}'").with_pyslurm().uses_pyslurm is expected


def test_missing_pyslurm_is_not_imported_and_no_slurm_command_is_run(tmp_path: Path) -> None:
    assert commands(tmp_path, "exit 9").with_pyslurm().uses_pyslurm is False
    assert not (tmp_path / "asked").exists()
    assert "pyslurm" not in sys.modules
