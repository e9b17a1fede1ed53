"""A step's image of a registry: who waits for it, what the worker is told, what the user reads."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.events import RequestOutcome
from forestage.features.registry import step_files, user_notes
from forestage.features.registry import step_image as registry
from forestage.features.registry.step_image import RegistryRequest
from forestage.features.registry.waiting_tasks import WaitingTasks
from forestage.hooks import leases
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.hooks.request_results import RequestResult
from forestage.slurm.job import Job
from forestage.system import forked_child
from node import children_left, until


@pytest.mark.parametrize(
    ("manager", "over", "left"),
    [("lives", True, "job_7/step_0"), ("ended", False, "job_7"), ("ended", True, "uid_1")],
)
def test_empty_cgroups_of_a_worker_are_removed_after_the_step_has_ended(
    asking: Job,
    tasks: WaitingTasks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manager: str,
    over: bool,
    left: str,
) -> None:
    """Not while Slurm may still use them: the job's, until its Epilog has been here."""
    group = tmp_path / "uid_1/job_7/step_0"
    group.mkdir(parents=True)
    monkeypatch.setattr(forked_child, "find_task_cgroups", lambda manager: [group / "cgroup.procs"])
    pid = os.getpid() if manager == "lives" else dead()
    with registry._clean_up_cgroups(msgspec.structs.replace(asking, manager=pid), tasks):
        if over:
            tasks.path.unlink()
    assert max(tmp_path.rglob("*")).as_posix().endswith(left)


def dead() -> int:
    """The pid of no process."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_lease_acquired_after_the_epilog_is_released(
    staging_node: Node,
    asking: Job,
    asked: RegistryRequest,
    make_image: Callable[..., SourceImage],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job was cancelled, and is over, while its image was staged."""
    found, held = make_image(), tmp_path / "held"
    staging_node.cache.prepare(require_mount=False)

    def answer(node: Node, job: Job, asked: RegistryRequest, tasks: WaitingTasks) -> RequestResult:
        tasks.path.unlink()
        step_files.make_placeholder(node.places, job.id, job.step, found.size)
        with leases.hold_entry(
            node, job, found.key, HookDeadlines.from_seconds(node.clock, 60.0, None)
        ):
            return RequestResult(RequestOutcome("hit"), found)

    def report(outcomes: object) -> None:
        held.write_text(f"{staging_node.leases.list_jobs()}")

    monkeypatch.setattr(registry, "_import_and_stage", answer)
    monkeypatch.setattr(registry, "FIRST_TASK_TIMEOUT", 0.0)
    asked = msgspec.structs.replace(asked, timeout="0")
    registry.start_import_process(
        staging_node, msgspec.structs.replace(asking, step=0), asked, report
    )
    until(held.exists, "the lease")
    until(lambda: not staging_node.leases.list_jobs(), "its end")
    until(lambda: not list(staging_node.places.images.iterdir()), "the end of the place")
    assert held.read_text() == f"({asking.id},)"


@pytest.mark.parametrize("end", ["manager", "Epilog"])
def test_registry_process_without_tasks_exits_at_the_steps_end(
    staging_node: Node, asking: Job, asked: RegistryRequest, end: str
) -> None:
    """The step was cancelled before Slurm had started a task of it."""
    manager = subprocess.Popen(["sleep", "inf"])
    reported: Path = staging_node.places.run / "reported"
    asking = msgspec.structs.replace(asking, step=0, manager=manager.pid)
    try:
        registry.start_import_process(
            staging_node, asking, asked, lambda outcomes: reported.touch()
        )
        sock = staging_node.places.images / f"{asking.id}.0.sock"
        assert sock.exists()
        assert not reported.exists()
        if end == "Epilog":
            step_files.delete_job_files(staging_node.places, asking.id)
        else:
            manager.kill()  # and is not reaped
        until(reported.exists, "the end of the wait for a task")
        until(lambda: not children_left(manager.pid), "the end of the process")
        assert not sock.exists()
    finally:
        manager.kill()
        manager.wait()


def test_refusal_note_is_written_before_the_task_continues_and_removed_with_the_job(
    staging_node: Node,
    asking: Job,
    asked: RegistryRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = RequestOutcome(
        "declined", request="here#image", reason="registry-missing", detail="no"
    )
    monkeypatch.setattr(registry, "_import_and_stage", lambda *_: RequestResult(refused))
    asking = msgspec.structs.replace(asking, step=0)
    monkeypatch.setattr(registry, "FIRST_TASK_TIMEOUT", 600.0)
    _, sock = registry.start_import_process(staging_node, asking, asked, lambda outcomes: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as task:
        task.connect(sock)
        while not task.recv(4096).startswith(b"leave"):
            pass
        places = staging_node.places
        found = user_notes.find_refusal(places, f"{asking.id}", "0", "docker://here#image")
        assert found is not None
        assert found.reason == "registry-missing"
        assert user_notes.find_refusal(places, f"{asking.id}", "1", "docker://here#image") is None
        step_files.delete_job_files(places, asking.id)
        assert user_notes.find_refusal(places, f"{asking.id}", "0", "docker://here#image") is None
    until(lambda: not children_left(), "the end of the process")
