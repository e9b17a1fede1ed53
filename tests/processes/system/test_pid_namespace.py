"""A program of a user's in a PID namespace of its own, and the init that is root's."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forestage.errors import Failed
from forestage.system import pid_namespace, run
from forestage.system.as_user import User
from forestage.system.files import open_descriptor
from node import until

CAROL = User("", 61003, 61003)

pytestmark = pytest.mark.usefixtures("machine")


def started(script: str) -> run.PipedProcess:
    return run.start_piped_program(CAROL, ("sh", "-c", script), ())


def said(program: run.PipedProcess) -> str:
    """The next line."""
    os.set_blocking(program.out, True)
    with os.fdopen(os.dup(program.out)) as lines:
        return lines.readline().strip()


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


HOST = "readlink /proc/self | cat"
"""The number of a process in here, as the node has it."""


def test_init_of_a_users_pid_namespace_is_roots_and_its_program_the_users() -> None:
    program = started(f"{HOST}; read end")
    said(program)
    (pid,) = children(program.pid)
    assert Path(f"/proc/{program.pid}/comm").read_text() == f"{pid_namespace.PROCESS_NAME}\n"
    assert (status(program.pid)["NSpid"][-1], status(program.pid)["Uid"]) == ("1", ["0"] * 4)
    assert (status(pid)["NSpid"][-1], status(pid)["Uid"]) == ("2", ["61003"] * 4)
    # Whatever it held would be held for as long as the program lives.
    assert {os.readlink(one) for one in Path(f"/proc/{program.pid}/fd").iterdir()} == {"/dev/null"}
    with pytest.raises(PermissionError):
        as_carol(program.pid)
    program.close_stdin()
    assert program.wait(60)


def as_carol(pid: int) -> None:
    script = f"import os; os.setresuid(*[61003] * 3); os.kill({pid}, 9)"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if "PermissionError" in ran.stderr:
        raise PermissionError


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


LEFT = "setsid sleep 4247 </dev/null >/dev/null 2>&1 & "


@pytest.mark.parametrize("how", ["killed", "by itself", "by a signal"])
def test_killing_the_namespaces_init_or_ending_its_program_ends_all_its_processes(how: str) -> None:
    end = {
        "killed": "read end",
        "by itself": "read end; exit 7",
        "by a signal": "read end; kill $$",
    }
    # It may not have its name yet.
    find = "until pgrep -u 61003 -x sleep | tail -1 | grep .; do :; done"
    program = started(f"{LEFT} {find}; {end[how]}")
    left = Path(f"/proc/{said(program)}")
    assert left.exists()
    if how == "killed":
        program.kill()
    else:
        program.close_stdin()
    assert program.wait(60)
    assert not left.exists()
    assert program.exit_code == {"killed": -9, "by itself": 7, "by a signal": 128 + 15}[how]


def test_processes_of_a_pid_namespace_end_with_their_starting_process() -> None:
    script = """
import os, sys
from forestage.system import run
from forestage.system.as_user import User
from forestage.system.files import open_descriptor
program = run.start_piped_program(User("", 61003, 61003), ("sleep", "4248"), ())
print(program.pid, flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as starter:
        assert starter.stdout is not None
        init = int(starter.stdout.readline())
        assert children(init)
        starter.kill()
    until(lambda: not Path(f"/proc/{init}").exists(), "the init's end")


def filtering(script: str) -> run.FilterProcess:
    with open_descriptor(os.devnull, os.O_RDONLY) as source:
        return run.start_filter(CAROL, ("sh", "-p", "-c", script), source)


def test_user_can_neither_trace_nor_read_a_filter_program_run_with_the_users_rights() -> None:
    """Outside of a step's cgroups it would be any program of theirs."""
    program = filtering(f"{HOST}; exec sleep 4250")
    os.read(program.out, 20)
    until(lambda: pgrep("sleep 4250"), "the program under its last name")
    (found,) = pgrep("sleep 4250")
    assert status(found)["Uid"] == [str(run.NOBODY), *["61003"] * 3]
    trace = f"""
import ctypes, os, sys
os.setresgid(*[61003] * 3); os.setresuid(*[61003] * 3)
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace(16, {found}, None, None)  # PTRACE_ATTACH
print(ctypes.get_errno())
open("/proc/{found}/mem", "rb")
"""
    argv = [sys.executable, "-c", trace]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.stdout == f"{errno.EPERM}\n"
    assert "PermissionError" in ran.stderr
    os.kill(found, 9)
    assert program.wait() == 128 + 9


def pgrep(argv: str) -> list[int]:
    ran = subprocess.run(["pgrep", "-fx", argv], capture_output=True, text=True, check=False)
    return list(map(int, ran.stdout.split()))


def test_processes_started_by_a_filter_program_end_with_the_filter_program() -> None:
    program = filtering("setsid sleep 4251 </dev/null >/dev/null 2>&1 & sleep 0; echo it")
    os.read(program.out, 3)
    assert program.wait() == 0
    assert pgrep("sleep 4251") == []


def test_init_of_a_pid_namespace_reaps_orphaned_processes() -> None:
    program = started(f"(sh -c 'exit 0' & ) ; {HOST}; read end")
    said(program)
    until(lambda: len(children(program.pid)) == 1, "only the program")
    program.kill()
    assert program.wait(60)


def test_starting_a_pid_namespace_does_not_change_the_namespace_of_later_children() -> None:
    before = os.readlink("/proc/self/ns/pid_for_children")
    program = started("read end")
    assert os.readlink("/proc/self/ns/pid_for_children") == before
    program.kill()
    assert program.wait(60)


def test_program_that_cannot_enter_its_cgroup_is_not_started(tmp_path: Path) -> None:
    def enter() -> None:
        raise OSError("it is gone")

    with pytest.raises(Failed, match="cgroups"):
        run.start_piped_program(CAROL, ("touch", str(tmp_path / "it")), (), enter)
    assert not (tmp_path / "it").exists()


def test_signal_other_processes_reaches_neither_its_sender_nor_processes_outside() -> None:
    """As a worker does: what it has started is alone with it."""
    script = """
import signal, subprocess, sys
from forestage.system import pid_namespace
one = subprocess.Popen(["setsid", "sleep", "4249"])
pid_namespace.signal_other_processes(signal.SIGKILL)
print(one.wait(), flush=True)
pid_namespace.signal_other_processes(signal.SIGKILL)
sys.stdin.read()
"""
    with subprocess.Popen(["sleep", "4250"], user=61003) as outside:
        program = run.start_piped_program(CAROL, (sys.executable, "-c", script), ())
        assert said(program) == "-9"
        assert outside.poll() is None
        outside.kill()
    program.close_stdin()
    assert program.wait(60)
    assert program.exit_code == 0
