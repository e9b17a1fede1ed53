"""Is a job over? Only a clear answer says so; every other one, and none at all, means: not so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.errors import SlurmError
from forestage.slurm import slurm_client
from forestage.slurm.slurm_client import JobState, SlurmClient
from forestage.system import run

UNKNOWN = "slurm_load_jobs error: Invalid job id specified"

Fake = Callable[..., SlurmClient]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A Slurm whose commands are these scripts; what they were asked is in `asked`."""

    def faking(squeue: str = "exit 99", scontrol: str = "exit 99") -> SlurmClient:
        for name, script in (("squeue", squeue), ("scontrol", scontrol)):
            program = tmp_path / name
            words = f'echo "{name} $*" >>{tmp_path}/asked\nenv >{tmp_path}/env\n'
            program.write_text(f"#!/bin/sh\n{words}{script}\n")
            program.chmod(0o755)
        return SlurmClient(f"{tmp_path}:{run.PATH}", "", tmp_path / "proc")

    return faking


def test_squeue_is_queried_for_the_one_job_by_its_id(fake: Fake, tmp_path: Path) -> None:
    assert fake("echo '7|RUNNING|n1'").find_job(7) == JobState("RUNNING", "n1")
    (line,) = (tmp_path / "asked").read_text().splitlines()
    assert line.split()[-1] == "--jobs=7", "all jobs of a cluster would be too many"
    assert {"--local", "--states=all", "--noheader"} < set(line.split())


@pytest.mark.parametrize(
    ("squeue", "unknown"),
    [
        (f"echo '{UNKNOWN}' >&2; exit 1", True),
        (f"echo '{UNKNOWN}' >&2; exit 0", False),
        (f"echo '{UNKNOWN}' >&2; exit 2", False),
        (f"echo '7|RUNNING|n1'; echo '{UNKNOWN}' >&2; exit 1", False),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", False),
        (
            "echo 'slurm_load_jobs error: Slurm backup controller in standby mode' >&2; exit 1",
            False,
        ),
        (f"echo '{UNKNOWN} or something else' >&2; exit 1", False),
        ("exit 0", False),
        ("exit 1", False),
        ("kill -KILL $$", False),
    ],
)
def test_job_is_unknown_only_if_squeue_fails_with_exactly_slurms_message(
    fake: Fake, squeue: str, unknown: bool
) -> None:
    if unknown:
        assert fake(squeue).find_job(7) is None
        return
    with pytest.raises(SlurmError):
        fake(squeue).find_job(7)


def test_squeue_that_hangs_raises_slurm_error_at_the_timeout(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_client, "TIMEOUT", 0.1)
    with pytest.raises(SlurmError, match="did not end"):
        fake("sleep 600").find_job(7)


@pytest.mark.parametrize(
    ("scontrol", "knows"),
    [
        ("echo 'NodeName=n1 Arch=x86_64 State=IDLE'", True),
        ("echo 'NodeName=n11 Arch=x86_64'", False),
        ("echo 'Node n1 not found'; exit 1", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_node_is_known_only_if_scontrol_prints_exactly_its_name(
    fake: Fake, scontrol: str, knows: bool | None
) -> None:
    asked = fake(scontrol=scontrol)
    if knows is None:
        with pytest.raises(SlurmError):
            asked.has_node("n1")
    else:
        assert asked.has_node("n1") == knows


def test_slurm_commands_run_from_path_with_slurm_conf_and_without_other_slurm_variables(
    fake: Fake, tmp_path: Path
) -> None:
    fake("echo '7|RUNNING|n1'")
    environ = {
        "PATH": str(tmp_path),
        "SLURM_CONF": "/opt/slurm.conf",
        "SQUEUE_FORMAT": "%i",
        "SLURM_CLUSTERS": "other",
    }
    assert SlurmClient.from_environ(environ).find_job(7) == JobState("RUNNING", "n1")
    seen = (tmp_path / "env").read_text().splitlines()
    assert "SLURM_CONF=/opt/slurm.conf" in seen
    assert not [line for line in seen if line.startswith(("SQUEUE", "SLURM_CLUSTERS"))]
    assert SlurmClient.from_environ({}).path == run.PATH
