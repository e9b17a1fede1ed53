"""The log lines of hooks and stagers: a /dev/log that nobody reads holds up no job."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage import log
from forestage.system import mounts
from node import Node

DEV = Path("/dev")
NO_IMAGE = "from forestage.hooks import main; main({!r})"


@pytest.fixture
def dev_log(private_mounts: None, tmp_path: Path) -> Iterator[socket.socket]:
    """The socket behind /dev/log, in a /dev of the test's own."""
    host = tmp_path / "dev"
    host.mkdir()
    mounts.mount("/dev", str(host), mounts.MS_BIND | mounts.MS_REC)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", DEV], check=True)
    for device in host.iterdir():
        (DEV / device.name).symlink_to(device)
    (DEV / "log").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(DEV / "log"))
        yield listener


@pytest.fixture
def unread(dev_log: socket.socket) -> None:
    """Nobody reads, and the queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
        filler.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                filler.sendto(b"x", str(DEV / "log"))


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
def test_unread_dev_log_does_not_block_hook_or_stager(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    for job in (1, 2):
        environ = node.environ(job, path) | {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}
        assert node._run("prolog", environ, None).outcome.redirect in ("mounted", "kept")
    assert node.epilog(1).outcome.result == "released"


def test_line_has_the_format_of_syslog(dev_log: socket.socket) -> None:
    ran = run_without_image("prolog")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    received = dev_log.recv(65536).decode()
    line = r"<30>\w{3} [ \d]\d \d\d:\d\d:\d\d forestage\[\d+\]: prolog job=4294967294 result=none"
    assert re.fullmatch(rf"{line}.*", received)


@pytest.mark.usefixtures("dev_log")
def test_line_that_is_too_long_for_a_datagram_is_dropped() -> None:
    log.say("x" * 10_000_000, by_slurm=True)


def test_dev_log_whose_reader_has_gone_costs_the_line_only(dev_log: socket.socket) -> None:
    dev_log.close()
    log.say("lost", by_slurm=True)


def test_stderr_that_is_closed_costs_the_line_only(capfd: pytest.CaptureFixture[str]) -> None:
    stderr = os.dup(2)
    try:
        os.close(2)
        log.say("lost", by_slurm=False)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
