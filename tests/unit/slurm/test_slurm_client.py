"""Is a job over? Only a clear answer says so; every other one, and none at all, means: not so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.commands.command_context import ExitStatus
from forestage.errors import SlurmError
from forestage.slurm.slurm_client import (
    OVER,
    JobState,
    SlurmClient,
    find_end_reason,
    parse_job_state,
)

# Every state of slurm.h 22.05 to 26.05, flags included, as squeue's %T spells them.
NOT_OVER = (
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "LAUNCH_FAILED",
    "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING",
    "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "EXPEDITING",
    "A_WORD_OF_TOMORROW",
)  # fmt: skip


@pytest.mark.parametrize("state", NOT_OVER)
@pytest.mark.parametrize("nodes", ["", "n1", "n[1-3]", "n[3,1]"])
def test_job_in_a_running_state_on_this_node_is_not_over(state: str, nodes: str) -> None:
    assert find_end_reason(JobState(state, nodes), "n1") == ""


@pytest.mark.parametrize("state", sorted(OVER))
@pytest.mark.parametrize("node", ["n1", ""])
def test_job_in_an_end_state_is_over_on_any_node(state: str, node: str) -> None:
    assert state in find_end_reason(JobState(state, "n1"), node)


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
def test_running_job_on_other_nodes_is_over_on_this_node(nodes: str, node: str, over: bool) -> None:
    assert bool(find_end_reason(JobState("RUNNING", nodes), node)) == over
    assert find_end_reason(None, node), "Slurm has forgotten it"


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
def test_squeue_line_of_the_job_itself_is_parsed_among_other_jobs(
    listing: str, expected: JobState | None
) -> None:
    assert parse_job_state(listing, 7) == expected


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "7|RUNNING|n1\nslurm_load_jobs error",
        "JOBID|STATE|NODELIST\n",
        "7|RUNNING|n1\n7|PENDING|\n",
    ],
)
def test_squeue_output_that_cannot_be_parsed_raises(listing: str) -> None:
    with pytest.raises(SlurmError):
        parse_job_state(listing, 7)


def test_missing_squeue_raises_with_a_hint_on_path(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="squeue is not installed") as caught:
        SlurmClient(str(tmp_path)).find_job(7)
    assert "PATH" in caught.value.hint
    assert ExitStatus(caught.value.exit_code) is ExitStatus.SLURM


def process(proc: Path, pid: str, title: bytes, uids: str = "0\t0\t0\t0") -> None:
    """One that has these ids: real, effective, saved, of the file system."""
    (proc / pid).mkdir()
    (proc / pid / "status").write_text(f"Name:\tx\\nUid:\nUmask:\t0022\nUid:\t{uids}\nGid:\t0\t0\n")
    (proc / pid / "cmdline").write_bytes(title)


def test_jobs_with_a_running_slurmstepd_are_at_work(tmp_path: Path) -> None:
    titles = {
        "11": b"slurmstepd: [7.batch]\0\0\0",
        "12": b"slurmstepd: [8.0]\0",
        "13": b"slurmstepd: [9+1.extern]\0",
        "15": b"/bin/sh\0-c\0slurmstepd: [20.0]\0",
        "16": b"slurmstepd: [x.0]\0",
        "17": b"",
    }
    for pid, title in titles.items():
        process(tmp_path, pid, title)
    (tmp_path / "18").mkdir()  # it has ended this moment
    (tmp_path / "self").mkdir()
    assert SlurmClient("", "", tmp_path).list_jobs_with_steps() == {7, 8, 9}


@pytest.mark.parametrize("uids", ["1000\t1000\t1000\t1000", "1000\t0\t0\t0"], ids=["own", "set-id"])
def test_title_of_a_users_process_is_not_read(tmp_path: Path, uids: str) -> None:
    """Not of a program with a set-id bit either: su waits for a password as long as they like."""
    process(tmp_path, "14", b"slurmstepd: [10.0]\0", uids)
    assert SlurmClient("", "", tmp_path).list_jobs_with_steps() == frozenset()
    (tmp_path / "14/cmdline").unlink()
    os.mkfifo(tmp_path / "14/cmdline")
    assert SlurmClient("", "", tmp_path).list_jobs_with_steps() == frozenset()
