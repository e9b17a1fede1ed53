"""A step's image of a registry: who waits for it, what the worker is told, what the user reads."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from fixtures import REFERENCE
from forestage.cache.node import Node
from forestage.errors import Declined, Failed
from forestage.events import RequestOutcome
from forestage.features.registry import prolog, waiting_tasks, worker
from forestage.features.registry import step_image as registry
from forestage.features.registry.step_image import RegistryRequest, format_final_line, make_order
from forestage.features.registry.waiting_tasks import WaitingTasks
from forestage.features.registry.worker_messages import ImportOrder
from forestage.hooks import bare_name
from forestage.slurm import companion
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.slurm.slurm_conf import SlurmConf
from forestage.slurm.step_protocol import PROTOCOL_GREETING
from forestage.system import forked_child, processes, run

DIGEST = f"sha256:{'a' * 64}"


def task(tasks: WaitingTasks) -> socket.socket:
    """A task that has come, and was seen."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(10)
    made.connect(os.fspath(tasks.path))
    tasks.wait(-1)
    assert made.recv(100) == PROTOCOL_GREETING.encode()
    return made


@pytest.mark.parametrize(
    ("image", "found"),
    [(REFERENCE, True), ("docker://ubuntu", True), ("/a.sqsh", False), ("./a.sqsh", False)],
)
def test_container_image_option_is_a_registry_reference_unless_the_value_is_a_path(
    asking: Job, image: str, found: bool
) -> None:
    hinted = Request("/lustre/b.sqsh", "hint")
    job = msgspec.structs.replace(asking, requests=(Request(image, "option"), hinted))
    assert (job.reference is not None) == found
    assert (prolog.drop_reference(job).requests == (hinted,)) == found


def test_image_named_in_a_comment_is_never_a_registry_reference(asking: Job) -> None:
    job = msgspec.structs.replace(asking, requests=(Request("ubuntu", "hint"),))
    assert job.reference is None


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("", ""),
        ("runtime_path=/run/pyxis importer=/x/forestage-importer", "/x/forestage-importer"),
        ("importer=/first importer=/last", "/last"),
    ],
)
def test_importer_is_found_in_the_pyxis_line_of_plugstack_conf(
    tmp_path: Path, arguments: str, program: str
) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=x\n")
    stack = f"optional forestage.so importer=/none\nrequired /opt/spank_pyxis.so {arguments}\n"
    (tmp_path / "plugstack.conf").write_text(stack)
    assert companion.find_importer(SlurmConf(str(tmp_path / "slurm.conf"))) == program


def test_own_importer_is_recognized_by_its_file_name() -> None:
    assert companion.is_own_importer("/usr/lib/forestage/bin/forestage-importer")
    assert not companion.is_own_importer("/opt/importers/caching_importer.sh")
    assert not companion.is_own_importer("")


def test_importer_without_plugstack_conf_is_empty(tmp_path: Path) -> None:
    assert companion.find_importer(SlurmConf(str(tmp_path / "slurm.conf"))) == ""


def stored(node: Node) -> Node:
    registry = msgspec.structs.replace(node.config.registry, store="/lustre/store")
    return node.with_config(registry=registry)


@pytest.mark.parametrize(
    ("batch", "nodes", "step_nodes", "job", "leads"),
    [
        (True, "n[0-4]", "n[1-4]", "7", True),  # the job's first node has no part in this step
        (True, "n[0-4]", "n[0-4]", "7", False),
        (False, "n[0-4]", "n[1-4]", "7.2", True),
        (False, "n[1-4]", "n[0-4]", "7.2", False),
        (False, "", "", "7.2", True),
    ],
)
def test_import_order_makes_the_first_node_of_job_or_step_the_leader(
    staging_node: Node,
    asking: Job,
    asked: RegistryRequest,
    batch: bool,
    nodes: str,
    step_nodes: str,
    job: str,
    leads: bool,
) -> None:
    asking = msgspec.structs.replace(asking, step=2, nodelist=nodes, step_nodelist=step_nodes)
    order = make_order(stored(staging_node), asking, msgspec.structs.replace(asked, batch=batch))
    assert (order.job, order.leads, order.reference) == (job, leads, REFERENCE)
    assert (order.directory, order.cache) == ("/lustre/store", staging_node.config.cache)


def test_worker_enters_the_tasks_cgroups_except_the_freezer_once_known(
    asking: Job, tasks: WaitingTasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In v1's freezer, by which Slurm kills, enroot could not clean up."""
    groups = [tmp_path / name / "cgroup.procs" for name in ("freezer", "memory")]
    for one in groups:
        one.parent.mkdir()
    found = iter([None, groups, groups])
    monkeypatch.setattr(
        forked_child, "find_task_cgroups", lambda manager: next(found) if manager == 42 else None
    )
    registry._wait_for_task_cgroups(msgspec.structs.replace(asking, manager=42), tasks)()
    assert [one.exists() for one in groups] == [False, True]


def test_worker_of_a_step_without_tasks_is_declined(
    asking: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_child, "find_task_cgroups", lambda manager: None)
    asking = msgspec.structs.replace(asking, manager=42)
    with WaitingTasks(tmp_path / "sock", 0.0) as tasks, pytest.raises(Declined, match="has ended"):
        registry._wait_for_task_cgroups(asking, tasks)


@pytest.mark.parametrize("ended", [True, False])
def test_worker_start_failure_is_declined_as_stopped_if_its_task_disconnected(
    asking: Job,
    asked: RegistryRequest,
    tasks: WaitingTasks,
    monkeypatch: pytest.MonkeyPatch,
    ended: bool,
) -> None:
    """A task that is killed just then takes its cgroups along."""

    def start(*_: object) -> None:
        if ended:
            waiting_task.close()
        raise Failed("helper", "no process can go to the cgroups of the step's tasks")

    monkeypatch.setattr(worker, "start_worker", start)
    waiting_task = task(tasks)
    with pytest.raises(Declined) as caught, waiting_task:
        registry._start_worker(
            asking,
            ImportOrder(reference=REFERENCE, directory="/store"),
            asked,
            run.stay_in_cgroups,
            tasks,
        )
    assert caught.value.reason == ("stopped" if ended else "helper")


def test_worker_of_a_prolog_stays_in_its_cgroups(asking: Job, tasks: WaitingTasks) -> None:
    assert registry._wait_for_task_cgroups(asking, tasks) is run.stay_in_cgroups


def test_late_task_receives_all_earlier_lines(tasks: WaitingTasks) -> None:
    tasks.send_user_line("first")
    early = task(tasks)
    tasks.broadcast_line("leave", "x")
    late = task(tasks)
    for one in (early, late):
        assert [one.recv(100), one.recv(100)] == [b"say\tforestage: first", b"leave\tx"]
        one.close()


def test_task_socket_is_private_to_root_and_removed_at_the_end(tmp_path: Path) -> None:
    with WaitingTasks(tmp_path / "sock", 60.0) as made:
        assert made.path.stat().st_mode & 0o777 == 0o600
    assert not made.path.exists()


def test_line_breaks_in_user_text_start_no_line_for_tasks(tasks: WaitingTasks) -> None:
    one = task(tasks)
    tasks.send_user_line("a\nuse\t/etc/shadow")
    said = one.recv(200)
    assert b"\n" not in said
    assert said.count(b"\t") == 1
    one.close()


def test_wait_for_tasks_ends_after_the_last_task_disconnected(
    tasks: WaitingTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_tasks, "LAST", 0.0)
    first, second = task(tasks), task(tasks)
    first.close()
    tasks.wait(-1)
    assert not tasks.have_tasks_gone
    second.close()
    while not tasks.have_tasks_gone:
        tasks.wait(-1)
    assert tasks.clients.connections == {}


def test_tasks_do_not_count_as_disconnected_before_the_first_task_connects(
    tasks: WaitingTasks,
) -> None:
    tasks.wait(-1)
    assert not tasks.have_tasks_gone


def test_registry_image_is_staged_only_before_the_last_task_disconnected(
    tasks: WaitingTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_tasks, "LAST", 0.0)
    tasks.check_any_waiting()
    one = task(tasks)
    tasks.check_any_waiting()
    one.close()
    with pytest.raises(Declined, match="the step has ended"):
        tasks.check_any_waiting()


def test_registry_image_is_declined_for_a_step_that_ended_without_tasks(
    tasks: WaitingTasks,
) -> None:
    """Its lease would come after the Epilog."""
    tasks.path.unlink()
    with pytest.raises(Declined, match="the step has ended"):
        tasks.check_any_waiting()


def test_process_identity_is_its_pid_and_start_time() -> None:
    own = processes.find_identity(os.getpid())
    assert own is not None
    assert own.is_running
    assert not own._replace(began=own.began + 1).is_running
    assert processes.find_identity(1 << 30) is None


def test_task_that_does_not_read_is_disconnected_without_blocking_other_tasks(
    tasks: WaitingTasks,
) -> None:
    deaf, other = task(tasks), task(tasks)
    while len(tasks.clients.connections) == 2:
        tasks.broadcast_line("say", "x" * 10_000)
        assert len(other.recv(20_000)) > 10_000
    tasks.broadcast_line("end")
    assert other.recv(100) == b"end"
    deaf.close()
    other.close()


def test_worker_message_ends_the_wait_for_tasks(tasks: WaitingTasks) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    tasks.wait(ours)  # at once
    assert os.read(ours, 1) == b"x"
    os.close(ours)
    os.close(theirs)


def handled(**facts: object) -> RequestOutcome:
    outcome = RequestOutcome(
        "hit", request=REFERENCE, image="/lustre/store/1/a.sqsh", digest=DIGEST
    )
    return msgspec.structs.replace(outcome, **facts)


@pytest.mark.parametrize(
    ("outcome", "wanted", "text"),
    [
        (handled(), "problems", ""),
        (
            handled(),
            "all",
            (
                f"{REFERENCE} is {DIGEST[:19]}: hit, read from this node's copy of"
                " /lustre/store/1/a.sqsh"
            ),
        ),
        (
            handled(result="declined", image="", reason="registry-denied", detail="no"),
            "problems",
            f"{REFERENCE} is left to enroot, for this step alone: no",
        ),
        (
            handled(result="failed", reason="io", detail="disk"),
            "problems",
            f"{REFERENCE} is read from /lustre/store/1/a.sqsh: disk",
        ),
        (handled(result="declined", image="", reason="registry-denied", detail="x"), "none", ""),
        (handled(result="declined", reason="too-large", detail="x"), "all", ""),
    ],
)
def test_user_message_of_a_reference_describes_its_outcome(
    outcome: RequestOutcome, wanted: str, text: str
) -> None:
    assert format_final_line(outcome, wanted) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("lies", [True, False])
def test_missing_registry_image_is_declined_as_bare_name_if_a_file_of_that_name_exists(
    staging_node: Node,
    asking: Job,
    tasks: WaitingTasks,
    monkeypatch: pytest.MonkeyPatch,
    lies: bool,
) -> None:
    def refuse(*_: object) -> None:
        raise Declined("registry-missing", "it has no such image")

    found = Declined("bare-name", "write ./a.sqsh") if lies else None
    monkeypatch.setattr(registry, "_import_image", refuse)
    monkeypatch.setattr(bare_name, "find_bare_name_refusal", lambda *_: found)
    asked = RegistryRequest(Request("a.sqsh", "option"), 0, False, "", "")
    outcome = registry._import_and_stage(staging_node, asking, asked, tasks).outcome
    assert outcome.reason == ("bare-name" if lies else "registry-missing")
    assert outcome.came == "enroot"
