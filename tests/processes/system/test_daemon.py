"""A holder: what it tells who started it, what it leaves, who is connected to it, and its end."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forestage import log
from forestage.errors import Declined
from forestage.system import daemon, forked_child, lock
from forestage.system.daemon import DaemonSpec, StartChannel, StartReport, TaskConnections

Patch = pytest.MonkeyPatch
LIFE = DaemonSpec("holder")


@pytest.fixture
def said(tmp_path: Path, monkeypatch: Patch) -> Callable[[], str]:
    """What is logged in whatever process."""

    def say(line: str, by_slurm: bool) -> None:
        with (tmp_path / "log").open("a") as lines:
            lines.write(line + "\n")

    monkeypatch.setattr(log, "write_log_line", say)
    return (tmp_path / "log").read_text


@pytest.fixture(autouse=True)
def cgroup_moves(monkeypatch: Patch) -> list[tuple[int, str]]:
    """Where it goes from its cgroups, in place of going there."""
    gone: list[tuple[int, str]] = []
    monkeypatch.setattr(
        forked_child, "leave_job_cgroups", lambda adj, leaf: gone.append((adj, leaf))
    )
    return gone


@pytest.fixture(autouse=True)
def no_children_left(monkeypatch: Patch) -> Iterator[None]:
    """Also of a test that fails."""
    begin, pids = forked_child.fork_with_socket, list[int]()

    def noted(*works: Callable[..., None]) -> tuple[int, socket.socket]:
        pid, ours = begin(*works)
        pids.append(pid)
        return pid, ours

    monkeypatch.setattr(forked_child, "fork_with_socket", noted)
    yield
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: Patch) -> str:
    """The path of a socket, however long the test's directory is."""
    monkeypatch.chdir(tmp_path)
    return "sock"


def ended(channel: StartChannel) -> None:
    os.waitpid(channel.pid, 0)
    channel.close()


def channels() -> tuple[StartChannel, StartChannel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return StartChannel(ours), StartChannel(theirs)


def test_messages_of_a_holder_are_received_whole_in_order_and_then_its_death() -> None:
    sent = [StartReport("busy"), StartReport("failed", "no-room", "ü" * 2000, node_failed=True)]
    ours, theirs = channels()
    with ours:
        for message in sent:
            theirs.send(message)
        assert [ours.receive_message(600), ours.receive_message(600)] == sent
        assert ours.receive_message(0) is None
        theirs.close()
        assert [ours.receive_message(600), ours.receive_message(600)] == [StartReport("died")] * 2


def test_holder_can_send_to_a_hook_that_has_exited_without_an_error() -> None:
    ours, theirs = channels()
    ours.close()
    with theirs:
        theirs.send(StartReport("published"))


def test_hook_continues_only_after_the_holder_has_left_its_session() -> None:
    """Slurm kills the hook's process group at its end, also of one that may not wait."""

    def work(hook: StartChannel) -> None:
        hook.release_hook()
        hook.send(StartReport("ready"))
        signal.pause()

    with daemon.start_daemon(LIFE, "it", work, 600.0) as channel:
        assert channel.receive_message(600) == StartReport("ready"), (
            "it has waited for the first message"
        )
        assert os.getsid(channel.pid) == channel.pid == os.getpgid(channel.pid)
        assert Path(f"/proc/{channel.pid}/comm").read_text() == "holder\n"
        assert os.readlink(f"/proc/{channel.pid}/cwd") == "/"
        os.kill(channel.pid, signal.SIGKILL)
        ended(channel)


def test_holder_keeps_only_the_named_descriptors_of_its_hook(tmp_path: Path) -> None:
    """slurmd waits for who has its hook's output; a copy of a lock's descriptor keeps the lock."""
    kept = os.open(tmp_path / "kept", os.O_CREAT | os.O_RDWR)

    def work(hook: StartChannel) -> None:
        hook.release_hook(kept)
        signal.pause()

    with lock.held(tmp_path / "lock", 0), daemon.start_daemon(LIFE, "it", work, 600.0) as channel:
        links = [os.readlink(file) for file in Path(f"/proc/{channel.pid}/fd").iterdir()]
        assert sorted(one for one in links if not one.startswith("socket:")) == [
            *["/dev/null"] * 3,
            os.fspath(tmp_path / "kept"),
        ]
        os.kill(channel.pid, signal.SIGKILL)
        ended(channel)
    os.close(kept)


@pytest.mark.parametrize(
    ("life", "gone"),
    [
        (DaemonSpec("x"), [(0, "serve")]),
        (DaemonSpec("x", "copy", daemon.OOM_EXEMPT), [(daemon.OOM_EXEMPT, "copy")]),
        (DaemonSpec("x", None), []),  # its work is to end with the step
    ],
)
def test_holder_leaves_the_steps_cgroups_unless_it_is_to_end_with_the_step(
    life: DaemonSpec, gone: list[tuple[int, str]], cgroup_moves: list[tuple[int, str]]
) -> None:
    def work(hook: StartChannel) -> None:
        hook.release_hook()
        hook.send(StartReport("ready" if cgroup_moves == gone else "failed"))

    with daemon.start_daemon(life, "it", work) as channel:
        assert channel.receive_message(600) == StartReport("ready")
        ended(channel)


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (OSError("broken \udcff"), "broken \\udcff"),
        (Declined("x", "none here"), "none here"),
        (KeyboardInterrupt(), "KeyboardInterrupt()"),
        (SystemExit(0), "0"),
    ],
)
def test_error_that_ends_a_holder_is_sent_to_the_hook_and_logged(
    began: bool, error: BaseException, detail: str, said: Callable[[], str]
) -> None:
    here = os.getpid()

    def work(hook: StartChannel) -> None:
        if began:
            hook.release_hook()
        raise error

    try:
        channel = daemon.start_daemon(LIFE, "it", work, 600.0)
    finally:
        if os.getpid() != here:
            os._exit(99)  # it came back into the hook's code
    with pytest.raises(Declined) as caught:
        channel.wait_until_ready(600.0, "why")
    assert (caught.value.reason, str(caught.value)) == ("why", detail)
    assert os.waitstatus_to_exitcode(os.waitpid(channel.pid, 0)[1]) == 1
    channel.close()
    assert said() == f"it result=failed detail={error!r}\n"


def killed(hook: StartChannel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (killed, "its process died"),
        (lambda hook: hook.release_hook(), "its process died"),
        (lambda hook: hook.send(StartReport("failed", "x", "a copy's")), "a copy's"),
    ],
)
def test_holder_that_dies_or_fails_is_declined_with_its_error(
    work: Callable[[StartChannel], None], why: str
) -> None:
    with daemon.start_daemon(LIFE, "it", work) as channel:
        with pytest.raises(Declined, match=why):
            channel.wait_until_ready(600.0, "why")
        ended(channel)


def test_holder_that_sends_no_message_is_declined_at_the_timeout() -> None:
    with daemon.start_daemon(LIFE, "it", lambda hook: signal.pause(), 0.05) as channel:
        with pytest.raises(Declined, match="does not answer"):
            channel.wait_until_ready(0.05, "why")
        os.kill(channel.pid, signal.SIGKILL)
        ended(channel)


@pytest.mark.parametrize(("state", "ready"), [("ready", True), ("busy", False)])
def test_await_ready_is_false_if_another_holder_is_already_running(state: str, ready: bool) -> None:
    def work(hook: StartChannel) -> None:
        hook.release_hook()
        hook.send(StartReport(state))  # type: ignore[arg-type]

    with daemon.start_daemon(LIFE, "it", work) as channel:
        assert channel.wait_until_ready(600.0, "why") is ready
        ended(channel)


# Guests


@pytest.fixture
def clients(path: str) -> Iterator[TaskConnections]:
    """They hear what they ask."""
    made = TaskConnections(
        daemon.listen_for_clients(Path(path)), lambda guest, asked: guest.sendall(asked)
    )
    yield made
    made.close()


def connect_client(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(60)
    made.connect(path)
    return made


def test_socket_of_a_holder_has_mode_0600_and_replaces_an_older_file(path: str) -> None:
    Path(path).touch(0o666)
    with daemon.listen_for_clients(Path(path)):
        assert Path(path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("limit", "most"),
    [(resource.RLIM_INFINITY, 900), (1 << 20, 900), (1024, 900), (256, 132), (64, 32), (1, 1)],
)
def test_client_limit_of_a_holder_leaves_descriptors_for_the_holder_itself(
    limit: int, most: int
) -> None:
    assert daemon.max_client_count(limit) == most


def test_clients_beyond_the_descriptor_limit_of_a_holder_are_queued_and_answered(path: str) -> None:
    listener = daemon.listen_for_clients(Path(path))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.dup2(listener.fileno(), 4)
            os.dup2(theirs.fileno(), 5)
            os.closerange(6, 4096)
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))
            taken = TaskConnections(
                socket.socket(fileno=4), lambda guest, asked: guest.sendall(asked)
            )
            while not taken.serve_for(None, 5):
                continue
            os._exit(0)
        os._exit(1)
    theirs.close()
    comers = [connect_client(path) for _ in range(60)]
    for one in comers:
        one.send(b"asked")
    for one in comers:  # each makes place for another
        assert one.recv(100) == b"asked"
        one.close()
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    listener.close()


def test_each_connected_client_gets_its_answer_until_its_connection_closes(
    clients: TaskConnections, path: str
) -> None:
    first, second = connect_client(path), connect_client(path)
    while len(clients.connections) < 2:
        clients.serve_for(None)
    for one in (second, first):
        one.send(b"asked")
        clients.serve_for(None)
        assert one.recv(100) == b"asked"
    first.close()
    clients.serve_for(None)
    assert len(clients.connections) == 1
    second.close()
    clients.serve_for(None)
    assert clients.connections == {}


def test_clients_above_the_maximum_are_accepted_after_another_disconnects(
    clients: TaskConnections, path: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(daemon, "MOST", 1)
    first, second = connect_client(path), connect_client(path)
    second.send(b"second")
    clients.serve_for(None)
    clients.serve_for(0.0)
    assert len(clients.connections) == 1
    first.close()
    thread = threading.Thread(target=lambda: [clients.serve_for(60.0) for _ in range(3)])
    thread.start()
    assert second.recv(100) == b"second"
    second.close()
    thread.join()


def test_client_connections_of_a_holder_are_non_blocking(path: str) -> None:
    blocking: list[bool] = []
    made = TaskConnections(
        daemon.listen_for_clients(Path(path)), lambda one, _: blocking.append(one.getblocking())
    )
    with connect_client(path) as deaf:
        deaf.send(b"asked")
        while not blocking:
            made.serve_for(None)
    made.close()
    assert blocking == [False]


def test_descriptor_sent_with_a_clients_request_is_closed(
    clients: TaskConnections, path: str
) -> None:
    """A companion of another build may send one."""
    with connect_client(path) as one:
        clients.serve_for(None)
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(one, [b"asked"], [0])
        clients.serve_for(None)
        assert one.recv(100) == b"asked"
        assert len(os.listdir("/proc/self/fd")) == before


def test_new_client_is_sent_the_greeting(path: str) -> None:
    greeted = TaskConnections(
        daemon.listen_for_clients(Path(path)), print, lambda one: one.sendall(b"hello")
    )
    with connect_client(path) as one:
        greeted.serve_for(None)
        assert one.recv(100) == b"hello"
    greeted.close()


def test_attend_returns_the_other_descriptors_that_are_readable(clients: TaskConnections) -> None:
    ours, theirs = os.pipe()
    silent, never = os.pipe()
    os.write(theirs, b"x")
    assert clients.serve_for(None, -1, ours, silent) == {ours}
    assert clients.serve_for(0.0, -1, silent) == set()
    for fd in (ours, theirs, silent, never):
        os.close(fd)


def test_closed_task_connections_refuse_new_clients_and_still_attend(
    clients: TaskConnections, path: str
) -> None:
    one = connect_client(path)
    clients.serve_for(None)
    clients.close()
    assert one.recv(1) == b""
    assert clients.serve_for(0.0) == set()
    one.close()
    with pytest.raises(ConnectionRefusedError):
        connect_client(path)


# Its directory

HOLDS = """
import os, signal, sys
from forestage.system import daemon
held = daemon.lock_pid_file(os.open(sys.argv[1], os.O_RDONLY))
signal.pause()
"""


def test_stop_daemon_ends_the_process_that_holds_the_directorys_lock(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", HOLDS, os.fspath(tmp_path)])
    while not (tmp_path / "held").exists() or not (tmp_path / "held").read_text():
        os.sched_yield()
    reaper = threading.Thread(target=os.waitpid, args=(pid, 0))
    reaper.start()
    daemon.stop_daemon(tmp_path, 600.0)
    reaper.join()
    assert lock.is_free(tmp_path / "held")


@pytest.mark.parametrize("left", [None, "", f"{os.getpid()}", "not a number"])
def test_stop_daemon_kills_no_process_for_the_lock_file_of_a_dead_holder(
    tmp_path: Path, left: str | None
) -> None:
    if left is not None:
        (tmp_path / "held").write_text(left)
    daemon.stop_daemon(tmp_path, 0.0)
