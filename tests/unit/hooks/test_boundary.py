"""The hooks as processes: which have work, how they end, and what a warm one loads."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.errors import Declined
from forestage.events import Outcome
from forestage.hooks import prolog
from forestage.hooks.boundary import (
    IMAGE_OPTION,
    STAGE_OPTION,
    HookRun,
    has_no_work,
    record_call,
    update_nodelist,
)
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.paths import NodePaths
from forestage.slurm.job import Job
from forestage.system.as_user import User


@pytest.mark.parametrize(
    ("environ", "nothing"),
    [
        ({}, True),
        ({"SLURM_JOB_COMMENT": "words"}, True),
        ({"SLURM_JOB_COMMENT": "stage=/a"}, False),
        ({"SLURM_JOB_COMMENT": "stage-wait=1"}, False),
        ({"SLURM_JOB_COMMENT": "Stage=/a"}, True),
        ({"SLURM_JOB_COMMENT": "project=/a"}, True),
        ({IMAGE_OPTION: "/a"}, False),
        ({IMAGE_OPTION: ""}, False),
        ({STAGE_OPTION: "stage=/a\n"}, False),
        ({STAGE_OPTION: ""}, False),
    ],
)
def test_prolog_has_work_if_the_job_names_an_image_or_its_comment_says_stage(
    tmp_path: Path, environ: dict[str, str], nothing: bool
) -> None:
    assert has_no_work("prolog", environ, str(tmp_path)) is nothing


def test_prolog_has_work_if_a_lease_of_its_job_number_exists(tmp_path: Path) -> None:
    """Of an earlier job: another user's, perhaps, whose Epilog never came."""
    leases = NodePaths(tmp_path).leases
    leases.mkdir(parents=True)
    (leases / "7.json").touch()
    assert not has_no_work("prolog", {"SLURM_JOB_ID": "7"}, str(tmp_path))
    assert has_no_work("prolog", {"SLURM_JOB_ID": "77"}, str(tmp_path))


def test_epilog_has_work_if_its_job_has_a_lease(tmp_path: Path) -> None:
    """Whatever the job asked for: the Epilog may not see it any more."""
    environ = {"SLURM_JOB_ID": "7", IMAGE_OPTION: "/a"}
    leases = NodePaths(tmp_path).leases
    leases.mkdir(parents=True)
    (leases / "77.json").touch()
    assert has_no_work("epilog", environ, str(tmp_path))
    (leases / "7.json").write_bytes(b"damaged")
    assert not has_no_work("epilog", {"SLURM_JOB_ID": "7"}, str(tmp_path))


def test_epilog_has_work_if_a_step_used_a_registry(tmp_path: Path) -> None:
    """There is a lease at the end of an import only."""
    images = NodePaths(tmp_path).images
    images.mkdir(parents=True)
    (images / "7.asked").touch()
    for job, nothing in (("7", False), ("77", True)):
        assert has_no_work("epilog", {"SLURM_JOB_ID": job}, str(tmp_path)) is nothing


ON_TWO = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A node's /run/forestage, with the companion's mark."""
    (tmp_path / "companion").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("listed", "nodes"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, "n[1-2]"),
        ({"SLURM_NODELIST": "n1,m7"}, "n1,m7"),  # before 23.02.6
        ({"SLURM_JOB_NODELIST": "n1"}, ""),
        ({}, ""),
    ],
)
def test_prolog_stores_the_jobs_node_list_for_its_steps(
    run: Path, listed: dict[str, str], nodes: str
) -> None:
    (run / "leases").mkdir()
    (run / "leases/7.nodes").write_text("n[1-64]")  # a job's of that number, long ago
    update_nodelist("prolog", {"SLURM_JOB_ID": "7"} | listed, str(run))
    assert LeaseDirectory(run / "leases").read_nodelist(7) == nodes


def test_stored_node_list_is_deleted_by_the_epilog_only(run: Path) -> None:
    update_nodelist("prolog", ON_TWO, str(run))
    update_nodelist("step", {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x[1-9]"}, str(run))
    LeaseDirectory(run / "leases").write_or_drop(
        Lease(7, User("", 1, 1), 0.0, "/cache")
    )  # which holds nothing
    assert LeaseDirectory(run / "leases").read_nodelist(7) == "n[1-2]"
    update_nodelist("epilog", {"SLURM_JOB_ID": "7"}, str(run))
    assert list((run / "leases").iterdir()) == []


OF_ALICE = {"SLURM_JOB_UID": "1", "SLURM_JOB_START_TIME": "100"}


@pytest.mark.parametrize(
    ("later", "left"),
    [
        (OF_ALICE, False),
        ({"SLURM_JOB_UID": "1"}, False),
        (OF_ALICE | {"SLURM_JOB_START_TIME": "200"}, False),
        (OF_ALICE | {"SLURM_JOB_START_TIME": "50"}, True),  # it comes late
        (OF_ALICE | {"SLURM_JOB_UID": "2"}, True),
    ],
)
def test_epilog_keeps_the_node_list_of_another_users_job_and_of_a_later_run(
    run: Path, later: dict[str, str], left: bool
) -> None:
    update_nodelist("prolog", ON_TWO | OF_ALICE, str(run))
    update_nodelist("epilog", {"SLURM_JOB_ID": "7"} | later, str(run))
    assert (LeaseDirectory(run / "leases").read_nodelist(7, 1) == "n[1-2]") is left
    assert (run / "leases/7.nodes").exists() is left


def test_node_list_is_not_stored_without_a_leases_directory(tmp_path: Path) -> None:
    update_nodelist("prolog", ON_TWO, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_node_list_that_cannot_be_stored_raises_no_error(run: Path) -> None:
    (run / "leases").touch()
    update_nodelist("prolog", ON_TWO, str(run))
    update_nodelist("epilog", ON_TWO, str(run))
    assert LeaseDirectory(run / "leases").read_nodelist(7) == ""


@pytest.mark.parametrize(
    ("environ", "nothing"), [({}, True), ({IMAGE_OPTION: ""}, True), ({IMAGE_OPTION: "/a"}, False)]
)
def test_step_has_work_only_if_an_image_is_named(environ: dict[str, str], nothing: bool) -> None:
    assert has_no_work("step", environ, "/nowhere") is nothing


def test_step_has_work_if_its_jobs_comment_names_images(tmp_path: Path) -> None:
    hinted = LeaseDirectory(NodePaths(tmp_path).leases).hints_flag(7)
    hinted.parent.mkdir(parents=True)
    hinted.touch()
    assert not has_no_work("step", {"SLURM_JOB_ID": "7"}, str(tmp_path))
    assert has_no_work("step", {"SLURM_JOB_ID": "77"}, str(tmp_path))


def test_step_is_answered_once_and_a_broken_pipe_raises_no_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = HookRun("step", {}, 0.0)
    hook.write_answer("leave", "bad\udcff")
    hook.write_answer("leave", "error")
    HookRun("prolog", {}, 0.0).write_answer("leave", "error")
    assert capfd.readouterr().out == "leave\tbad\\udcff\n"

    def gone(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", gone)
    HookRun("step", {}, 0.0).write_answer("leave", "error")


def test_prolog_with_a_broken_configuration_shares_one_deadline_among_caches(
    tmp_path: Path, me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm drains the node of a Prolog that takes longer than slurm.conf allows."""
    places = NodePaths(tmp_path)
    places.etc.mkdir(parents=True)
    (places.etc / "forestage.yaml").write_text("deadline: soon\n")
    caches = {str(tmp_path / name) for name in ("old", "new")}
    for job, cache in enumerate(caches):
        LeaseDirectory(places.leases).write_lease(
            Lease(job, me, 0.0, cache, (EntryUse("0a", "/lustre/b"),))
        )
    given: list[tuple[str, HookDeadlines, Declined | None]] = []

    def noting(
        node: Node, job: Job, limit: HookDeadlines, refusal: Declined | None
    ) -> list[Outcome]:
        given.append((str(node.cache.root), limit, refusal))
        return []

    monkeypatch.setattr(prolog, "serve_prolog", noting)
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1", "SLURM_JOB_GID": "1", IMAGE_OPTION: "/a"}
    HookRun("prolog", environ, 0.0).run(places, Clock())
    assert {cache for cache, _, _ in given} == caches
    assert len({limit.end.end for _, limit, _ in given}) == 1
    assert {refusal.reason for _, _, refusal in given if refusal} == {"config"}


def test_record_call_stores_the_highest_job_number_and_the_time(tmp_path: Path) -> None:
    run, mark = str(tmp_path), tmp_path / "called.prolog"
    for job, latest in (("7", 7), ("123456", 123456), ("123449", 123456)):
        record_call("prolog", {"SLURM_JOB_ID": job}, run)
        assert int(mark.read_text()) == latest
    os.utime(mark, (0, 0))
    record_call("prolog", {"SLURM_JOB_ID": "9"}, run)
    assert mark.stat().st_mtime > 0


def test_record_call_of_a_much_lower_job_number_restarts_with_the_time_of_the_change(
    tmp_path: Path,
) -> None:
    """MaxJobId is passed, or slurmctld has lost its state."""
    run, mark = str(tmp_path), tmp_path / "called.prolog"
    record_call("prolog", {"SLURM_JOB_ID": "67043327"}, run)
    before = int(time.time())
    record_call("prolog", {"SLURM_JOB_ID": "1"}, run)
    job, since = map(int, mark.read_text().split())
    assert (job, before <= since <= time.time()) == (1, True)
    record_call("prolog", {"SLURM_JOB_ID": "3"}, run)
    record_call("prolog", {"SLURM_JOB_ID": "2"}, run)
    assert mark.read_text().split() == ["3", str(since)]


@pytest.mark.parametrize("job", ["", "x", "1" * 50, "-1"])
def test_record_call_without_a_valid_job_number_writes_no_file(tmp_path: Path, job: str) -> None:
    record_call("prolog", {"SLURM_JOB_ID": job} if job else {}, str(tmp_path))
    record_call("step", {"SLURM_JOB_ID": "7"}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_record_call_follows_no_symlink_and_tolerates_a_missing_directory(tmp_path: Path) -> None:
    (tmp_path / "called.prolog").symlink_to(tmp_path / "other")
    record_call("prolog", {"SLURM_JOB_ID": "7"}, str(tmp_path))
    assert not (tmp_path / "other").exists()
    record_call("prolog", {"SLURM_JOB_ID": "7"}, str(tmp_path / "nowhere"))
    (tmp_path / "called.epilog").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "called.epilog")
    record_call("epilog", {"SLURM_JOB_ID": "7"}, str(tmp_path))
