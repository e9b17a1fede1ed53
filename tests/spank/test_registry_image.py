"""A step whose image is a registry's: its helper gets the environment, its tasks wait."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from companion import JOB, KEY, MARK, SERVED, Keeper, Ran, Step

from forestage.slurm.step_protocol import PROTOCOL_GREETING

REFERENCE = "nvcr.io#nvidia/pytorch:25.01-py3"
PREFIX = "SPANK__SLURM_SPANK_OPTION_pyxis_container_"
Answer = Callable[[socket.socket], None]

# What the helper was given, for the test to read; it writes its answer itself afterwards.
NOTE = """
import json, os, sys
folder = sys.argv[1]
found = os.environ.get("FORESTAGE_ENVIRONMENT", "")
block = os.read(int(found), 1 << 20) if found else b""
facts = {"environ": dict(os.environ), "block": block.decode(errors="surrogateescape"),
         "open": sorted(map(int, os.listdir("/proc/self/fd"))), "uid": os.getresuid()}
open(folder + "/given", "w").write(json.dumps(facts))
"""


@pytest.fixture
def place(step: Step) -> Path:
    """Where the tasks wait."""
    return step.folder / "77.sock"


@contextlib.contextmanager
def answering(place: Path, *answers: Answer) -> Iterator[None]:
    """Somebody listens there and gives each task that comes one of these, the last one for all."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place))
    listener.listen(16)

    def serve() -> None:
        for number in range(100):
            try:
                made, _ = listener.accept()
            except OSError:
                return
            with made, contextlib.suppress(OSError):
                answers[min(number, len(answers) - 1)](made)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def says(*lines: str) -> Answer:
    def answer(made: socket.socket) -> None:
        for line in (PROTOCOL_GREETING, *lines):
            made.send(line.encode())

    return answer


def run(step: Step, place: Path, *arguments: str, image: str = REFERENCE) -> Ran:
    step.answers(f"later\t{place}", first=note(step))
    return step.run(*arguments, image=image)


def note(step: Step) -> str:
    return shlex.join([sys.executable, "-I", "-c", NOTE, str(step.folder)])


def given(step: Step) -> dict[str, object]:
    found: dict[str, object] = json.loads((step.folder / "given").read_text())
    return found


@pytest.mark.parametrize("image", ["dockerd://ubuntu", "podman://ubuntu"])
def test_image_of_a_docker_or_podman_daemon_starts_no_helper(
    step: Step, place: Path, image: str
) -> None:
    run(step, place, image=image)
    assert step.asked() == 0


def test_helper_of_a_registry_image_gets_reference_container_name_and_job_environment(
    step: Step, place: Path
) -> None:
    with answering(place, says("leave\tnone")):
        run(
            step, place, "container=work", "env=HOME=/home/x", "env=ENVIRONMENT=BATCH", "env=A=b\nc"
        )
    found = given(step)
    environ = found["environ"]
    assert isinstance(environ, dict)
    assert environ[f"{PREFIX}image"] == REFERENCE
    assert environ[f"{PREFIX}name"] == "work"
    assert environ["ENVIRONMENT"] == "BATCH"
    assert found["block"] == "HOME=/home/x\0ENVIRONMENT=BATCH\0A=b\nc\0"
    assert found["uid"] == [0, 0, 0]


def test_step_variable_names_the_path_at_which_a_registry_image_appears(
    step: Step, place: Path
) -> None:
    """By the step's number as Slurm knows it; fake.c's is that of a batch script."""
    with answering(place, says("leave\tnone")):
        ran = run(step, place)
    path = f"{MARK.parent}/images/{JOB}.4294967291.sqsh"
    assert f"setenv 1 FORESTAGE_IMAGE_PATH={path}" in ran.lines("fact")


def test_helper_of_a_registry_image_gets_no_other_descriptor(step: Step, place: Path) -> None:
    with answering(place, says("leave\tnone")):
        run(step, place, "leak=1")
    assert given(step)["open"] == [0, 1, 2, 3, 4]  # the last is that of the look itself


def test_helper_of_an_image_path_gets_the_job_environment_but_no_import_variables(
    step: Step,
) -> None:
    step.answers("leave\tnone", first=note(step))
    step.run("env=HOME=/home/x", "env=ENVIRONMENT=BATCH")
    assert given(step)["block"] == "HOME=/home/x\0ENVIRONMENT=BATCH\0"
    assert "BATCH" not in str(given(step)["environ"])


def test_waiting_tasks_mount_the_answered_copy_and_print_its_message_once(
    step: Step, place: Path
) -> None:
    with answering(place, says("say\tforestage: it comes", step.use())):
        ran = run(step, place, "tasks=3", f"task=cat {step.image}")
    assert ran.out == step.entry().read_text() * 3
    assert all(f"/{KEY}/image" in table for table in ran.mounts)
    assert ran.said == ["forestage: it comes"]  # from the first task alone


def test_waiting_task_reads_through_the_answered_copy(
    step: Step, place: Path, keeper: Keeper
) -> None:
    keeper("clones")
    with answering(place, says(step.through())):
        ran = run(step, place, f"task=cat {step.image}")
    assert ran.out == SERVED


def test_waiting_task_sets_only_the_result_variable_of_the_answer(step: Step, place: Path) -> None:
    lines = ("env\tFORESTAGE_RESULT\thit", "env\tPATH\t/evil", step.use())
    with answering(place, says(lines[0], lines[2])):
        ran = run(step, place)
    assert "setenv 1 FORESTAGE_RESULT=hit" in ran.lines("fact")
    place.unlink()
    with answering(place, says(*lines)):
        ran = run(step, place)
    assert not [line for line in ran.lines("fact") if "=/evil" in line], "no other variable"
    assert any(KEY in table for table in ran.mounts), "and the answer counts"


@pytest.mark.parametrize(
    "answer",
    [
        says(),
        says("leave\tregistry-denied"),
        says("nonsense"),
        says("later\t/x"),
        says("use\trelative\tx\t1\t2\t3\t4\t1"),
        says("say\tone", "say\ttwo"),
    ],
    ids=["ends", "leaves", "nonsense", "later-again", "relative", "only-words"],
)
def test_waiting_task_without_a_usable_answer_runs_with_the_source(
    step: Step, place: Path, answer: Answer
) -> None:
    with answering(place, answer):
        ran = run(step, place, f"task=cat {step.image}")
    assert ran.out == step.image.read_text()
    assert not any(KEY in table for table in ran.mounts)


def test_task_runs_if_no_helper_listens_on_the_wait_socket(step: Step, place: Path) -> None:
    ran = run(step, place)
    assert "nobody answers" in ran.logged


def test_task_waits_for_a_late_answer_while_another_task_runs(step: Step, place: Path) -> None:
    """It comes once another task is over, and that has waited for its own."""
    first_is_over = threading.Event()

    def at_once(made: socket.socket) -> None:
        says("leave\tnone")(made)
        made.recv(1)  # until the task has gone on
        first_is_over.set()

    def late(made: socket.socket) -> None:
        first_is_over.wait()
        says(step.use())(made)

    with answering(place, at_once, late):
        ran = run(step, place, "tasks=2", f"task=cat {step.image}")
    assert sorted(ran.out.splitlines()) == sorted(
        [*step.entry().read_text().splitlines(), *step.image.read_text().splitlines()]
    )


def peer(made: socket.socket) -> int:
    return int(struct.unpack("iII", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def test_waiting_task_ends_by_sigterm(step: Step, place: Path) -> None:
    """As its program would; Slurm sends nothing to what has a step manager's name."""
    names: list[str] = []

    def cancel(made: socket.socket) -> None:
        names.append(Path(f"/proc/{peer(made)}/comm").read_text().strip())
        os.kill(peer(made), signal.SIGTERM)
        made.recv(1)  # until it has gone

    with answering(place, cancel, says("leave\tnone")):
        ran = run(step, place, "tasks=2")
    assert names == ["forestage-wait"]
    assert ran.facts("ended") == {"ended 0", f"ended {signal.SIGTERM.value}"}


def test_task_has_its_name_and_signal_mask_restored_after_the_answer(
    step: Step, place: Path
) -> None:
    with answering(place, says("leave\tnone")):
        # Who starts a program blocks all signals until that runs, and for a moment longer.
        started = "while grep -q 'SigBlk.*fffffffff' /proc/$PPID/status; do sleep 0.01; done"
        look = "cat /proc/$PPID/comm; grep -E 'SigBlk|SigCgt' /proc/$PPID/status"
        ran = run(step, place, f"task={started}; {look}")
    name, blocked, caught = ran.out.splitlines()
    assert name != "forestage-wait"
    assert int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)), "its handler is there again"
    assert int(blocked.split()[1], 16) & (1 << (signal.SIGTERM - 1)) == 0  # as fake.c has it
