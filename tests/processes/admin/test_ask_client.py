"""A user's question from elsewhere: which nodes are asked, and what the silent ones come to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.admin import ask_answer, ask_client, explain
from forestage.admin.ask_client import NODES, Told
from forestage.errors import NotFound, PeerError, SlurmError
from forestage.events import Event, Handled
from forestage.paths import Places
from forestage.slurm.queue import Slurm
from forestage.system.terminal import Line

Command = Callable[[str, str], None]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A login node: nothing of forestage's is here."""
    return Places(tmp_path / "login")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path / "bin")}


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Puts a command of Slurm's there."""
    (tmp_path / "bin").mkdir()

    def put(name: str, script: str) -> None:
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    return put


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that were asked. All answer but n2, which refuses, and n3, which is not there."""
    found: list[str] = []

    def ask_node(peers: object, node: str, job: int, munge: object) -> bytes:
        found.append(node)
        if node == "n2":
            raise PeerError("it refuses, with status 403", "its clock")
        if node == "n3":
            raise ConnectionRefusedError(111, "Connection refused")
        hit = Handled("hit", request="/a", redirect="spank")
        event = Event(1.0, "prolog", job, hit, user="alice", node=node)
        return ask_answer.encoded(ask_answer.Answer(explain.history(job, [event], None)))

    monkeypatch.setattr(ask_client, "ask_node", ask_node)
    return found


def test_each_node_of_the_job_is_asked_and_the_silent_ones_are_named(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str]
) -> None:
    command("squeue", "echo '7|COMPLETED|n[1-4]'")
    told = ask_client.about_job(places, 7, environ)
    assert sorted(nodes) == ["n1", "n2", "n3", "n4"]
    assert [one.runs[0].node for one in told.histories] == ["n1", "n4"]
    assert told.problems == (
        "n2: it refuses, with status 403 (its clock)",
        "n3: its peer service does not answer (Connection refused)",
    )
    texts = [piece.text for piece in ask_client.pieces(told, 2.0) if isinstance(piece, Line)]
    assert [text for text in texts if text.startswith("Job 7")] == [
        "Job 7 of alice on n1", "Job 7 of alice on n4"
    ]  # fmt: skip
    assert texts[-2:] == [f"Problem: {one}" for one in told.problems]
    assert ask_client.document(told) is told


def test_job_of_many_nodes_asks_some_of_them_and_says_so(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str]
) -> None:
    command("squeue", "echo '7|RUNNING|m[1-5000]'")
    told = ask_client.about_job(places, 7, environ)
    assert len(nodes) == len(told.histories) == NODES
    assert told.problems == (f"{5000 - NODES} further nodes of the job were not asked",)


def test_job_that_slurm_has_forgotten_is_found_in_the_accounting(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str]
) -> None:
    command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    command("sacct", "echo n1")
    told = ask_client.about_job(places, 7, environ)
    assert nodes == ["n1"]
    assert ask_client.document(told) is told.histories[0]


@pytest.mark.parametrize(
    ("squeue", "sacct"),
    [
        ("echo 'Invalid job id specified' >&2; exit 1", "echo disabled >&2; exit 1"),
        ("echo 'Invalid job id specified' >&2; exit 1", "echo 'None assigned'"),
        ("echo 'Invalid job id specified' >&2; exit 1", "echo; echo"),
        ("echo 'Invalid job id specified' >&2; exit 1", "echo '$(reboot)'"),
        ("echo '7|PENDING|'", "echo n1"),
        ("exit 1", "echo n1"),
        ("echo rubbish", "echo n1"),
    ],
)
def test_job_whose_nodes_nobody_knows_is_said_to_be_unknown_here(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str],
    squeue: str, sacct: str,
) -> None:  # fmt: skip
    command("squeue", squeue)
    command("sacct", sacct)
    with pytest.raises(NotFound, match="nothing is recorded about job 7 on this node"):
        ask_client.about_job(places, 7, environ)
    assert nodes == []


def test_machine_without_slurm_says_what_it_knows(
    places: Places, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forestage.system.run.PATH", "/nowhere")
    with pytest.raises(NotFound, match="job 7 on this node"):
        ask_client.about_job(places, 7, environ)


def test_root_is_told_of_this_node_alone(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    command("squeue", "echo '7|RUNNING|n1'")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(NotFound):
        ask_client.about_job(places, 7, environ)
    assert nodes == []


def test_no_node_that_answers_is_an_error_with_every_reason(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str]
) -> None:
    command("squeue", "echo '7|RUNNING|n[2-3]'")
    with pytest.raises(NotFound) as found:
        ask_client.about_job(places, 7, environ)
    assert "n2: it refuses" in str(found.value)
    assert "n3: its peer service does not answer" in str(found.value)
    assert "forestage-ask.socket answers without peers" in str(found.value)


def test_node_that_has_answered_is_not_asked_again(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    answer = ask_answer.encoded(ask_answer.Answer(problem="nothing is recorded about your job 7"))
    monkeypatch.setattr(ask_client, "ask", lambda places, question: answer)
    command("squeue", "echo '7|RUNNING|n3'")
    with pytest.raises(NotFound) as found:
        ask_client.about_job(places, 7, {**environ, "SLURMD_NODENAME": "n3"})
    assert (str(found.value), nodes) == ("nothing is recorded about your job 7", [])
    command("squeue", "echo '7|RUNNING|n[1,3]'")
    told = ask_client.about_job(places, 7, {**environ, "SLURMD_NODENAME": "n3"})
    assert (len(told.histories), nodes) == (1, ["n1"])


def test_node_whose_service_does_not_run_says_so_to_its_users(
    places: Places, environ: dict[str, str], command: Command, nodes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def unreadable(places: Places, job: int) -> explain.History:
        raise PermissionError(13, "Permission denied", "/run/forestage/leases/7.json")

    monkeypatch.setattr(explain, "gather", unreadable)
    command("squeue", "echo '7|RUNNING|n3'")
    with pytest.raises(NotFound, match=r"forestage-ask.socket does not answer users .*; n3: its"):
        ask_client.about_job(places, 7, environ)
    command("squeue", "echo '7|PENDING|'")
    with pytest.raises(PermissionError, match=r"it may not be enabled"):
        ask_client.about_job(places, 7, environ)
    with pytest.raises(PermissionError, match=r"it may not be enabled"):
        ask_client.public(places)


def test_accounting_that_fails_is_slurms_silence(environ: dict[str, str], command: Command) -> None:
    command("squeue", "echo 'Invalid job id specified' >&2; exit 1")
    command("sacct", "echo 'accounting storage is disabled' >&2; exit 1")
    with pytest.raises(SlurmError, match="disabled"):
        Slurm.of(environ).nodes_of(7)


def test_document_of_nobody_is_the_whole_story() -> None:
    assert ask_client.document(Told((), ("n1: silent",))) == Told((), ("n1: silent",))
