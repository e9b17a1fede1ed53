"""The companion's helper as a process, on a test's node."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from forestage.clock import Clock
from forestage.hooks import user_messages
from forestage.hooks.boundary import IMAGE_OPTION, HookRun
from forestage.slurm.job import SAVE_OPTION
from forestage.slurm.step_protocol import PROTOCOL_GREETING
from forestage.system.as_user import User
from node import ALICE, HANGS, Node, start_hook


def environ(
    node: Node,
    job: int,
    image: str | Path,
    user: User = ALICE,
    step: int = 0,
    saves: str | None = None,
    timeout: int = 600,
    groups: Sequence[int] = (),
) -> dict[str, str]:
    """Exactly what the companion gives its helper."""
    given = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SLURM_SCRIPT_CONTEXT": "spank_step",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_UID": str(user.uid),
        "SLURM_JOB_GID": str(user.gid),
        "FORESTAGE_GROUPS": ",".join(map(str, groups or (user.gid,))),
        "SLURM_STEP_ID": str(step),
        "SLURM_JOB_WORK_DIR": str(node.shared),
        "SLURM_JOB_PARTITION": "batch",
        "SLURMD_NODENAME": "n1",
        IMAGE_OPTION: str(image),
        "FORESTAGE_TIMEOUT": str(timeout),
    }
    return given | ({SAVE_OPTION: saves} if saves else {})


def unhurried() -> None:
    """However slow the helper is: nothing is said by the way."""
    user_messages.FIRST_MESSAGE_AFTER = 3600.0


class Helper:
    """One `forestage step`, started as the companion does it; `variables` are the step's."""

    def __init__(
        self, node: Node, given: dict[str, str], variables: dict[str, str] | None = None
    ) -> None:
        memory = os.memfd_create("environment")
        if variables is not None:
            entries = "".join(f"{name}={value}\0" for name, value in variables.items())
            os.write(memory, os.fsencode(entries))
            given = given | {"FORESTAGE_ENVIRONMENT": str(memory)}
        self.process = start_hook(node, "step", given, subprocess.DEVNULL, memory, unhurried)
        os.close(memory)
        self.begun = b""  # what was read of its output

    def waits(self) -> bool:
        """Whether it says nothing for a while but its first line, which comes at once."""
        assert self.process.stdout is not None
        self.begun = self.process.stdout.readline()
        return not select.select([self.process.stdout], [], [], 0.5)[0]

    def kill(self) -> None:
        """As the companion does it at its limit, and when the step is cancelled."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def lines(self) -> list[list[str]]:
        """All that it said but of the environment, in fields, after it has ended well."""
        return [line for line in self.all() if line[0] != "env"]

    def all(self) -> list[list[str]]:
        out, _ = self.process.communicate(timeout=HANGS)
        assert self.process.returncode == 0
        assert out.endswith(b"\n")
        number, *lines = (self.begun + out).decode().removesuffix("\n").split("\n")
        assert number == PROTOCOL_GREETING
        return [line.split("\t") for line in lines]

    def answer(self) -> list[str]:
        """Its last line, and nothing before it for the user."""
        (only,) = self.lines()
        return only

    def variables(self) -> dict[str, str]:
        """What it said of the step's environment."""
        return {line[1]: line[2] for line in self.all() if line[0] == "env"}


def ask(node: Node, job: int, image: str | Path, **more: object) -> list[str]:
    return Helper(node, environ(node, job, image, **more)).answer()  # type: ignore[arg-type]


def noted(node: Node, job: int) -> list[list[str]]:
    """What the companion finds of images in the job's record."""
    file = node.leases.step_record_file(job)
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.split("\t")[1:] for line in lines if line.startswith("image\t")]


def run_step(
    node: Node, job: int, capfd: pytest.CaptureFixture[str], image: Path | None = None
) -> str:
    """Run a helper in this process; return its answer, but for the step's environment."""
    given = node.environ(job, image) | {"SLURM_STEP_ID": "4294967291"}
    capfd.readouterr()
    HookRun("step", given, time.monotonic()).run(node.places, Clock())
    lines = capfd.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("env\t"))


def texts_for_user(answer: str) -> list[str]:
    """Return what the step's user reads of a helper's answer."""
    lines = [line.partition("\t") for line in answer.splitlines()]
    return [rest for kind, _, rest in lines if kind == "say"]
