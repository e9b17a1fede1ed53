"""The one door to other programs: argv lists, no shell, no stdin, a small environment."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import msgspec

from forestage.errors import Declined, Failed
from forestage.system import as_user, pid_namespace, processes
from forestage.system.as_user import User
from forestage.system.tree import PATH as PATH

# prctl(2), PR_SET_PDEATHSIG: an rsync that outlives its stager would go on writing into an entry.
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
NOBODY = 65534  # the kernel's overflowuid: owns nothing
NO_PRIVS = "--no-new-privs"  # of setpriv: no program gains any by set-user-ID or capabilities
KILLED = 5.0  # seconds for a program to be gone; one that hangs in the kernel is left behind
STOP_POLL = 0.2  # seconds between looks at whether a program should be stopped
ROUNDS = 50  # of looking for processes that are to be killed; they start others meanwhile
Program: TypeAlias = "subprocess.Popen[bytes]"
ENVIRONMENT = {"PATH": PATH, "LC_ALL": "C"}


class ProcessResult(msgspec.Struct, frozen=True):
    """How a program ended; `code` is negative for a signal, as in subprocess."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    def format_ending(self) -> str:
        """One line for the log: the program, how it ended, its last words."""
        end = f"signal {-self.code}" if self.code < 0 else f"exit {self.code}"
        last = self.err.strip().splitlines()[-1:] or [""]
        return f"{self.argv[0]}: {end} {last[0]}".strip()


def find_program(program: str) -> str:
    """Where a program is; "" if it is not installed."""
    return shutil.which(program, path=PATH) or ""


def start_as_user(
    user: User,
    argv: Sequence[str],
    pass_fds: Sequence[int],
    stderr: int,
    enter_cgroups: Callable[[], None],
) -> Program:
    """Starts a program for a user, who could start it as well, in a PID namespace of its own.

    All three ids are theirs, it has no privilege and gets none. What is to be the program calls
    `enter_cgroups` first, as root. What is returned is the namespace's init (pid_namespace.py): all
    that the program has started ends with it, and it ends with us. Raises Failed where it cannot be
    started so, OSError.
    """
    return _popen_in_pid_namespace(
        [*_setpriv_arguments(user), NO_PRIVS, "--", *argv],
        enter_cgroups,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=ENVIRONMENT,
        pass_fds=tuple(pass_fds),
    )


def _popen_in_pid_namespace(
    argv: Sequence[str], enter_cgroups: Callable[[], None], **how: Any
) -> "subprocess.Popen[bytes]":
    try:
        with pid_namespace.unshare_pid_namespace(enter_cgroups) as be_init:
            return _popen(argv, preexec_fn=be_init, **how)
    except subprocess.SubprocessError:  # raised by who was about to be the program
        raise Failed("helper", "no process can go to the cgroups of the step's tasks") from None


def _popen(argv: Sequence[str], **how: Any) -> "subprocess.Popen[bytes]":
    """Starts setpriv, which starts the program. Raises Failed where it is missing."""
    try:
        return subprocess.Popen(  # noqa: S603 - a list, and never a user's word as the program
            list(argv), cwd="/", **how
        )
    except FileNotFoundError:
        raise Failed("program", "setpriv is not installed", "it is part of util-linux") from None


class RunningProcess:
    """A program that runs beside us, in a session of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self._process = process  # whose end closes the pipes

    @property
    def exit_code(self) -> int | None:
        """How it ended, as in ProcessResult; None as long as it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kills it and what it has started in its session."""
        kill_session(self.pid)

    def wait(self, timeout: float) -> bool:
        """Whether it ended within so many seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


class PipedProcess(RunningProcess):
    """One whose `out`, to read and not blocking, is its stdout or stderr."""

    def __init__(self, process: "subprocess.Popen[bytes]", is_apart: bool = False) -> None:
        super().__init__(process)
        self.is_apart = is_apart
        out = process.stdout or process.stderr
        assert out is not None
        self.out = out.fileno()
        os.set_blocking(self.out, False)

    def close_stdin(self) -> None:
        """Closes its stdin."""
        if self._process.stdin:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kills it and what it has started: its namespace's init, or all of its session."""
        if self.is_apart:
            self._process.kill()
        else:
            super().kill()


def stay_in_cgroups() -> None:
    """It stays in the cgroups of who starts it."""


def start_piped_program(
    user: User | None,
    argv: Sequence[str],
    pass_fds: Sequence[int],
    enter_cgroups: Callable[[], None] = stay_in_cgroups,
) -> PipedProcess:
    """Starts a program of ours that speaks with us, in a session of its own.

    For a user all three ids are theirs, it has no privilege, and it is apart, as with
    `start_as_user`. Without one it runs as who we are, and ends when its stdin does. Raises Failed
    where it cannot be started, OSError.
    """
    how = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "env": ENVIRONMENT,
        "pass_fds": tuple(pass_fds),
    }
    if user is None:
        return PipedProcess(_popen(argv, start_new_session=True, **how))
    # Not NO_PRIVS: enroot's import needs the file capabilities of two programs of its own.
    return PipedProcess(
        _popen_in_pid_namespace([*_setpriv_arguments(user), "--", *argv], enter_cgroups, **how),
        is_apart=True,
    )


def start_command(
    argv: Sequence[str],
    variables: Mapping[str, str],
    pass_fds: Sequence[int],
    enter_cgroups: Callable[[], None] = stay_in_cgroups,
) -> RunningProcess:
    """Start a command of ours in a session of its own, with our stdout and stderr.

    It may outlive this process. `variables` are its whole environment. Before it is the command it
    calls `enter_cgroups`. Raises Failed if it is missing, OSError.
    """
    _check_installed(argv[0])
    process = _popen(
        argv,
        stdin=subprocess.DEVNULL,
        env=dict(variables),
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        preexec_fn=enter_cgroups,
    )
    return RunningProcess(process)


def start_in_current_session(argv: Sequence[str], variables: Mapping[str, str]) -> PipedProcess:
    """Starts a program in our own session, as the user whom this process is; `out` is its stderr.

    For a process that is a user's in all three ids: bash with real uid 0 makes itself root again.
    The program dies with us; what it started, `kill_session` ends. Raises Failed where it is
    missing.
    """
    _check_single_user(argv[0])
    _check_installed(argv[0])
    process = _popen(
        [*DIES_WITH_US, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**variables, "PATH": PATH},
    )
    return PipedProcess(process)


def kill_session(
    session: int, spare: int = 0, grace: float = 0.0, is_signalled: bool = False
) -> None:
    """Kills all processes of a session that we may signal, but `spare`.

    With `grace` they first get SIGTERM, unless they had it (`is_signalled`), and so many seconds to
    clean up. Programs of a shell, of GNU parallel above all, are in many process groups.
    """
    if grace:
        if not is_signalled:
            _send_signal(_list_members_except(session, spare), signal.SIGTERM)
        end = time.monotonic() + grace
        while _list_members_except(session, spare) and time.monotonic() < end:
            time.sleep(0.02)
    for _ in range(ROUNDS):
        found = _list_members_except(session, spare)
        if not found:
            return
        _send_signal(found, signal.SIGKILL)
        time.sleep(0.01)


def _list_members_except(session: int, spare: int) -> list[int]:
    return [pid for pid in list_session_processes(session) if pid != spare]


def _send_signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def list_session_processes(session: int) -> list[int]:
    """The processes of a session, but those that only wait to be reaped."""
    return [pid for pid in processes.list_pids() if _find_session(pid) == session]


def _find_session(pid: int) -> int:
    """The session of a process; -1 for one that is gone or only waits to be reaped."""
    try:
        found = processes.read_stat(Path(f"/proc/{pid}"))
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if found.is_over else found.session


def _setpriv_arguments(user: User, real: int | None = None) -> tuple[str, ...]:
    own = user.uid if real is None else real
    ids = (f"--ruid={own}", f"--euid={user.uid}", f"--regid={user.gid}")
    groups = f"--groups={','.join(map(str, as_user.list_group_ids(user)))}"
    return ("setpriv", *ids, groups, "--inh-caps=-all")


def run_program(
    argv: Sequence[str],
    pass_fds: Sequence[int] = (),
    stop: threading.Event | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    max_bytes: int | None = None,
) -> ProcessResult:
    """Runs a program to its end, or kills it and its process group.

    It is killed once `stop` is set, or after `timeout` seconds. `variables` are added to its
    environment. `max_bytes` are the bytes that it may write, where `timeout` is the only other
    limit. Raises Failed where the program is missing, or has written more.
    """
    _check_installed(argv[0])
    process = _popen(
        [*DIES_WITH_US, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, **variables},
        pass_fds=tuple(pass_fds),
        # A group of its own, so that its helpers go with it when it is killed.
        start_new_session=True,
    )
    end = None if timeout is None else time.monotonic() + timeout
    try:
        if max_bytes is None:
            out, err = _communicate_or_kill(process, stop, end)
        else:
            assert end is not None
            with process:
                out, err, cut = _read_output(process, end, max_bytes)
                if cut or _is_running_after(process, end):
                    _kill_process_group(process)
            if cut == "size":
                raise Failed("program", f"{argv[0]} has written more than {max_bytes} bytes")
    finally:
        # After an interrupt: it must not make the file that its caller is about to remove.
        if process.returncode is None:
            _kill_process_group(process)
            _is_running_after(process, time.monotonic() + KILLED)
    return ProcessResult(
        tuple(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
    )


def _communicate_or_kill(
    process: "subprocess.Popen[bytes]", stop: threading.Event | None, end: float | None
) -> tuple[bytes, bytes]:
    while True:
        try:
            return process.communicate(timeout=STOP_POLL)
        except subprocess.TimeoutExpired:
            late = end is not None and time.monotonic() >= end
            if late or (stop is not None and stop.is_set()):
                os.killpg(process.pid, signal.SIGKILL)


class FilterProcess:
    """A program that runs for a user, and what it writes: `out`, a pipe."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        self.out = process.stdout.fileno()
        self.wait = process.wait
        self._process = process  # whose end closes the pipe


def start_filter(user: User, argv: Sequence[str], source: int) -> FilterProcess:
    """Starts a program that reads the open file `source`, for a user who could start it as well.

    It has their rights, no privilege, and gets none. But it is in no cgroup of a step's, so it must
    not become what they like: its real id is nobody's, so that they cannot trace it, and all that
    it starts ends with it, and with this process (pid_namespace.py). For a process without threads,
    as root. Raises Declined where it is missing, Failed where it cannot be started so, OSError.
    """
    if not find_program(argv[0]):
        raise Declined("program", f"{argv[0]} is not installed on this node")
    process = _popen_in_pid_namespace(
        [*_setpriv_arguments(user, NOBODY), NO_PRIVS, "--", *argv],
        stay_in_cgroups,
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    return FilterProcess(process)


def _check_installed(program: str) -> None:
    if not find_program(program):
        raise Failed("program", f"{program} is not installed", "install it on every node")


def _check_single_user(program: str) -> None:
    if len({*os.getresuid()}) > 1 or len({*os.getresgid()}) > 1:
        raise Failed("helper", f"{program} is for a user, and this process is more than one")


class ProcessOutput(msgspec.Struct, frozen=True):
    """What a program wrote, and how it ended; `cut` says which of its limits it was killed for."""

    code: int
    out: bytes
    err: bytes
    cut: Literal["", "time", "size"] = ""


def run_as_current_user(
    argv: Sequence[str],
    variables: Mapping[str, str],
    timeout: float,
    max_bytes: int,
    stdin_bytes: bytes = b"",
) -> ProcessOutput:
    """Runs a program as the user whom this process is, with their environment, but our PATH.

    For a process that is a user's in all three ids, and for what that user wrote. The program reads
    `stdin_bytes` on stdin: what must not show in its argv. It and its process group are killed
    after `timeout` seconds, or once it has written more than `max_bytes` bytes. Raises Failed where
    it is missing, and where this process is more than one user: bash with real uid 0 makes itself
    root again.
    """
    _check_single_user(argv[0])
    _check_installed(argv[0])
    source = os.memfd_create("given")  # no pipe: nobody has to write while the other end reads
    try:
        os.write(source, stdin_bytes)
        os.lseek(source, 0, os.SEEK_SET)
        process = _popen(
            [*DIES_WITH_US, *argv],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**variables, "PATH": PATH},
            start_new_session=True,
        )
    finally:
        os.close(source)
    with process:
        end = time.monotonic() + timeout
        out, err, cut = _read_output(process, end, max_bytes)
        if not cut and _is_running_after(process, end):
            cut = "time"
        if cut:
            _kill_process_group(process)
    return ProcessOutput(process.returncode, out, err, cut)


def _kill_process_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_running_after(process: "subprocess.Popen[bytes]", end: float) -> bool:
    """Whether a program that has closed its pipes goes on until its time is over."""
    try:
        process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return True
    return False


def _read_output(
    process: "subprocess.Popen[bytes]", end: float, max_bytes: int
) -> tuple[bytes, bytes, Literal["", "time", "size"]]:
    """What it writes until both pipes end, in time and within `max_bytes` bytes altogether."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.fileno(), process.stderr.fileno()
    found = {out: bytearray(), err: bytearray()}
    poll = select.poll()
    for fd in found:
        poll.register(fd, select.POLLIN)
    cut: Literal["", "time", "size"] = ""
    open_pipes = len(found)
    while open_pipes and not cut:
        left = end - time.monotonic()
        ready = poll.poll(max(0.0, left) * 1000)
        for fd, _ in ready:
            data = os.read(fd, 1 << 16)
            found[fd] += data
            if not data:
                poll.unregister(fd)
                open_pipes -= 1
        if sum(map(len, found.values())) > max_bytes:
            cut = "size"
        elif open_pipes and left <= 0:
            cut = "time"
    return bytes(found[out]), bytes(found[err]), cut
