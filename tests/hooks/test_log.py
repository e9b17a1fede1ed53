"""The log lines of hooks and stagers: a /dev/log that nobody reads holds up no job."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from forestage import log
from node import Node

NO_IMAGE = "from forestage.hooks import main; main({!r})"


def run_without_image(hook: str) -> subprocess.CompletedProcess[str]:
    """As slurmd does; a hook that hangs raises TimeoutExpired."""
    environ = {"SLURM_SCRIPT_CONTEXT": f"{hook}_slurmd", "SLURM_JOB_ID": "4294967294"}
    argv = [sys.executable, "-I", "-c", NO_IMAGE.format(hook)]
    return subprocess.run(
        argv, env=environ, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_unread_dev_log_does_not_block_a_job_without_images(hook: str) -> None:
    ran = run_without_image(hook)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.usefixtures("unread")
def test_unread_dev_log_does_not_block_a_hook_or_its_stager(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    for job in (1, 2):
        environ = node.environ(job, path) | {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}
        assert node._run("prolog", environ, None).outcome.redirect in ("mounted", "kept")
    assert node.epilog(1).outcome.result == "released"


def test_log_line_has_the_format_of_syslog(dev_log: socket.socket) -> None:
    ran = run_without_image("prolog")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    received = dev_log.recv(65536).decode()
    line = r"<30>\w{3} [ \d]\d \d\d:\d\d:\d\d forestage\[\d+\]: prolog job=4294967294 result=none"
    assert re.fullmatch(rf"{line}.*", received)


@pytest.mark.usefixtures("dev_log")
def test_log_line_too_long_for_a_datagram_is_dropped() -> None:
    log.write_log_line("x" * 10_000_000, by_slurm=True)


def test_log_line_to_a_dead_dev_log_is_dropped(dev_log: socket.socket) -> None:
    dev_log.close()
    log.write_log_line("lost", by_slurm=True)


def test_log_line_to_a_closed_stderr_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    stderr = os.dup(2)
    try:
        os.close(2)
        log.write_log_line("lost", by_slurm=False)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
