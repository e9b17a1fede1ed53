"""Is a job over? Only a clear answer says so; every other one, and none at all, means: not so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.cli.world import Exit
from forestage.errors import SlurmError
from forestage.slurm import queue
from forestage.slurm.queue import OVER, JobState, Slurm, found, why_over
from forestage.system import run

UNKNOWN = "slurm_load_jobs error: Invalid job id specified"

Fake = Callable[..., Slurm]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A Slurm whose commands are these scripts; what they were asked is in `asked`."""

    def faking(squeue: str = "exit 99", scontrol: str = "exit 99") -> Slurm:
        for name, script in (("squeue", squeue), ("scontrol", scontrol)):
            program = tmp_path / name
            words = f'echo "{name} $*" >>{tmp_path}/asked\nenv >{tmp_path}/env\n'
            program.write_text(f"#!/bin/sh\n{words}{script}\n")
            program.chmod(0o755)
        return Slurm(f"{tmp_path}:{run.PATH}", "", tmp_path / "proc")

    return faking


# Every state of slurm.h 22.05 to 26.05, flags included, as squeue's %T spells them.
NOT_OVER = (
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "LAUNCH_FAILED",
    "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING",
    "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "EXPEDITING",
    "A_WORD_OF_TOMORROW",
)  # fmt: skip


@pytest.mark.parametrize("state", NOT_OVER)
@pytest.mark.parametrize("nodes", ["", "n1", "n[1-3]", "n[3,1]"])
def test_job_that_may_still_be_here_is_not_over(state: str, nodes: str) -> None:
    assert why_over(JobState(state, nodes), "n1") == ""


@pytest.mark.parametrize("state", sorted(OVER))
@pytest.mark.parametrize("node", ["n1", ""])
def test_ended_job_is_over_wherever_it_ran(state: str, node: str) -> None:
    assert state in why_over(JobState(state, "n1"), node)


@pytest.mark.parametrize(
    ("nodes", "node", "over"),
    [
        ("n2", "n1", True),  # requeued: it runs there now
        ("n[10-12]", "n11", False),
        ("n2", "", False),  # nobody knows this node's name
        ("", "n1", False),  # it waits, and may come here
        ("(null)", "n1", False),
    ],
)
def test_job_on_other_nodes_is_over_here(nodes: str, node: str, over: bool) -> None:
    assert bool(why_over(JobState("RUNNING", nodes), node)) == over
    assert why_over(None, node), "Slurm has forgotten it"


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("7|RUNNING|n1\n", JobState("RUNNING", "n1")),
        ("7|PENDING|\n", JobState("PENDING", "")),
        # The tasks of an array, asked for by the number of one of them.
        ("8|RUNNING|n1\n9|RUNNING|n2\n7|COMPLETED|n1\n", JobState("COMPLETED", "n1")),
        ("8|RUNNING|n1\n9|RUNNING|n2\n", None),  # of which this one has been forgotten
    ],
)
def test_line_of_the_job_itself_counts(listing: str, expected: JobState | None) -> None:
    assert found(listing, 7) == expected


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "7|RUNNING|n1\nslurm_load_jobs error",
        "JOBID|STATE|NODELIST\n",
        "7|RUNNING|n1\n7|PENDING|\n",
    ],
)
def test_listing_that_cannot_be_understood_is_no_answer(listing: str) -> None:
    with pytest.raises(SlurmError):
        found(listing, 7)


def test_job_is_asked_for_by_its_number(fake: Fake, tmp_path: Path) -> None:
    assert fake("echo '7|RUNNING|n1'").job(7) == JobState("RUNNING", "n1")
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
def test_job_is_unknown_by_slurms_own_words_only(fake: Fake, squeue: str, unknown: bool) -> None:
    if unknown:
        assert fake(squeue).job(7) is None
        return
    with pytest.raises(SlurmError):
        fake(squeue).job(7)


def test_slurmctld_that_hangs_is_no_answer(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "TIMEOUT", 0.1)
    with pytest.raises(SlurmError, match="did not end"):
        fake("sleep 600").job(7)


def test_missing_commands_are_no_answer_but_a_hint(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="squeue is not installed") as caught:
        Slurm(str(tmp_path)).job(7)
    assert "PATH" in caught.value.hint
    assert Exit(caught.value.exit_code) is Exit.SLURM


@pytest.mark.parametrize(
    ("scontrol", "knows"),
    [
        ("echo 'NodeName=n1 Arch=x86_64 State=IDLE'", True),
        ("echo 'NodeName=n11 Arch=x86_64'", False),
        ("echo 'Node n1 not found'; exit 1", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_slurm_of_another_cluster_does_not_know_this_node(
    fake: Fake, scontrol: str, knows: bool | None
) -> None:
    asked = fake(scontrol=scontrol)
    if knows is None:
        with pytest.raises(SlurmError):
            asked.knows_node("n1")
    else:
        assert asked.knows_node("n1") == knows


def test_commands_come_from_path_and_read_the_named_configuration(
    fake: Fake, tmp_path: Path
) -> None:
    fake("echo '7|RUNNING|n1'")
    environ = {
        "PATH": str(tmp_path),
        "SLURM_CONF": "/opt/slurm.conf",
        "SQUEUE_FORMAT": "%i",
        "SLURM_CLUSTERS": "other",
    }
    assert Slurm.of(environ).job(7) == JobState("RUNNING", "n1")
    seen = (tmp_path / "env").read_text().splitlines()
    assert "SLURM_CONF=/opt/slurm.conf" in seen
    assert not [line for line in seen if line.startswith(("SQUEUE", "SLURM_CLUSTERS"))]
    assert Slurm.of({}).path == run.PATH


def test_step_manager_shows_that_its_job_is_at_work(tmp_path: Path, as_root: None) -> None:
    titles = {
        "11": b"slurmstepd: [7.batch]\0\0\0",
        "12": b"slurmstepd: [8.0]\0",
        "13": b"slurmstepd: [9+1.extern]\0",
        "14": b"slurmstepd: [10.0]\0",  # a user's
        "15": b"/bin/sh\0-c\0slurmstepd: [20.0]\0",
        "16": b"slurmstepd: [x.0]\0",
        "17": b"",
    }
    for pid, title in titles.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(title)
    os.chown(tmp_path / "14", 1000, 1000)
    (tmp_path / "18").mkdir()  # it has ended this moment
    (tmp_path / "self").mkdir()
    assert Slurm("", "", tmp_path).at_work() == {7, 8, 9}
