"""A process of its own that holds something for jobs: started by a hook, gone when nobody needs it.

It holds a key's lock, a file system in a hidden mount namespace, /dev/fuse, a worker: what must not
end with the hook, whose session, step and cgroups Slurm ends. What and how long is its module's
matter: stage/stager, features/data/directory, views/through/keeper_process,
features/data/squashfs_server, features/data/job_disk, features/data/job_ram and
features/registry/step_image. The rest is the same for all:

    messages  to who started it, if that is still there: the first once its hook may end
    guests    the tasks that are connected to its socket, where it has one
    held      a file in its directory: locked as long as it lives, with its pid
    clones    of a mount that it holds where nobody on the node meets it; what is asked and
              answered, one packet each:

              b"mount"           b"ok", with a detached clone, for move_mount(2)
              anything else      b"no REASON"
"""

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from forestage import log
from forestage.errors import Declined
from forestage.system import files, forked_child, lock, mounts
from forestage.units import make_printable

START = 10.0  # seconds in which it leaves the hook
OOM_EXEMPT = -1000  # oom_score_adj: its end is an I/O error to tasks, and frees little memory
MOST = 900  # guests at once; others stand in line
OWN = 124  # descriptors for the holder itself; half of them all, where a process may have few
LONGEST = 64  # bytes that a guest asks
LONGEST_MESSAGE = 1 << 16  # bytes
LONGEST_WORDS = 1000  # bytes that a guest hears
ANSWER = 5.0  # seconds for who gives a clone
LONGEST_DETAIL = 4096  # characters of an error


class DaemonSpec(msgspec.Struct, frozen=True):
    """Its name in ps(1), its cgroup (forked_child.leave_job_cgroups) and its oom_score_adj.

    With `leaf` None it stays in the step's cgroups.
    """

    name: str
    leaf: forked_child.CgroupName | None = "serve"
    oom_score_adj: int = 0


class StartReport(msgspec.Struct, frozen=True):
    """What a holder tells who started it.

    First `started`: nothing that ends the hook ends it any more. Then `ready`: tasks can ask it; or
    `busy`: another has what it should hold. A copy ends with `busy`, `found` (another has just
    published it), `published` or `failed`, with `node_failed` where the node is at fault and not
    the request. `died` is of an error that nobody expected, or without a word: it was killed.
    """

    state: Literal["started", "ready", "busy", "found", "published", "failed", "died"]
    reason: str = ""
    detail: str = ""
    node_failed: bool = False


class StartChannel:
    """One end of the socket between a holder and who started it; `pid` is the holder's, or 0."""

    def __init__(self, end: socket.socket, pid: int = 0) -> None:
        self.pid = pid
        self._end = end

    def __enter__(self) -> "StartChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._end.close()

    def send(self, message: StartReport) -> None:
        """Tells who started this process, if that still listens."""
        with contextlib.suppress(OSError):
            self._end.send(msgspec.json.encode(message), socket.MSG_NOSIGNAL)

    def release_hook(self, *fds: int) -> None:
        """Says that the hook may end; this process has no other descriptors any more."""
        forked_child.close_descriptors_except({self._end.fileno(), *fds})
        self.send(StartReport("started"))

    def receive_message(self, timeout: float, flags: int = 0) -> StartReport | None:
        """Returns the next message, `died` at the end; None after `timeout` seconds."""
        self._end.settimeout(max(0.001, timeout))
        try:
            data = self._end.recv(LONGEST_MESSAGE, flags)
        except TimeoutError:
            return None
        return msgspec.json.decode(data, type=StartReport) if data else StartReport("died")

    def wait_for_start(self, timeout: float) -> None:
        """Waits until the holder has left the hook.

        Any other message is left for `receive_message`.
        """
        if self.receive_message(timeout, socket.MSG_PEEK) == StartReport("started"):
            self.receive_message(timeout)

    def wait_until_ready(self, timeout: float, reason: str) -> bool:
        """Waits until the holder can be asked; False where another one has what it should hold.

        Raises Declined, for this reason, with what it says instead.
        """
        message = self.receive_message(timeout)
        if message is None or message.state == "started":
            raise Declined(reason, "its process does not answer")
        if message.state not in ("ready", "busy"):
            raise Declined(reason, message.detail or "its process died")
        return message.state == "ready"


def start_daemon(
    spec: DaemonSpec, about: str, work: Callable[[StartChannel], None], patience: float = START
) -> StartChannel:
    """Starts a holder that `work` is all of; the caller closes the channel on which it tells.

    `work` says on its end that the hook may end (StartChannel.release_hook). This waits for
    that, `patience` seconds at most. `about` begins the line in the log where an error ends it.
    """
    pid, ours = forked_child.fork_with_socket(
        lambda theirs: _run_daemon(spec, work, StartChannel(theirs)),
        lambda theirs, error: _report_death(about, StartChannel(theirs), error),
    )
    channel = StartChannel(ours, pid)
    channel.wait_for_start(patience)
    return channel


def _run_daemon(spec: DaemonSpec, work: Callable[[StartChannel], None], hook: StartChannel) -> None:
    forked_child.detach_session(spec.name)
    if spec.leaf is not None:
        forked_child.leave_job_cgroups(spec.oom_score_adj, spec.leaf)
    work(hook)


def _report_death(about: str, hook: StartChannel, error: BaseException | None) -> None:
    hook.send(
        StartReport("died", detail=make_printable(str(error) or repr(error))[:LONGEST_DETAIL])
    )
    log.write_log_line(f"{about} result=failed detail={error!r}", by_slurm=True)


def listen_for_clients(path: Path) -> socket.socket:
    """A socket for guests, root's alone. Raises OSError, also for a path that is too long."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = os.umask(0o177)
    try:
        made.bind(os.fspath(path))
    finally:
        os.umask(mask)
    made.listen(MOST)
    made.setblocking(False)
    return made


def max_client_count(limit: int) -> int:
    """Return how many guests a process takes at once that may have so many descriptors. Pure.

    One more descriptor than allowed would end the holder, and with it what all its guests have.
    """
    return MOST if limit < 0 else max(1, min(MOST, limit - min(OWN, limit // 2)))


RequestHandler = Callable[[socket.socket, bytes], None]
"""Answers what a guest asks."""


class TaskConnections:
    """The tasks that are connected to a holder's socket, by their connections' numbers.

    `listener` is None where no more are taken; `on_connect` is called with each that comes.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        handle_request: RequestHandler,
        on_connect: Callable[[socket.socket], None] = lambda guest: None,
    ) -> None:
        self.listener = listener
        self.connections: dict[int, socket.socket] = {}
        self._handle_request = handle_request
        self._on_connect = on_connect

    def serve_for(self, seconds: float | None, *others: int) -> set[int]:
        """Answers what is asked, or returns when there is nothing for so long; None: ever.

        Returns those of the `others`, descriptors or -1, at which there is something.
        """
        most = max_client_count(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        takes = self.listener if len(self.connections) < most else None
        door = takes.fileno() if takes else -1
        poll = select.poll()
        for fd in (door, *self.connections, *others):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
        for fd in ready & self.connections.keys():
            self._serve(self.connections[fd])
        if takes and door in ready:
            self._accept(takes)
        return ready & {*others}

    def disconnect(self, guest: socket.socket) -> None:
        """Ends a connection."""
        if self.connections.pop(guest.fileno(), None):
            guest.close()

    def close(self) -> None:
        """Takes no more of them, and ends the connections of those that are there."""
        if self.listener:
            self.listener.close()
        self.listener = None
        for guest in [*self.connections.values()]:
            self.disconnect(guest)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            guest, _ = listener.accept()
            guest.setblocking(False)
            self.connections[guest.fileno()] = guest
            self._on_connect(guest)

    def _serve(self, guest: socket.socket) -> None:
        try:
            asked = guest.recv(LONGEST)  # a descriptor that comes with it is dropped
        except BlockingIOError:
            return
        except OSError:
            asked = b""
        if asked:
            self._handle_request(guest, asked)
        else:  # it has ended
            self.disconnect(guest)


def send_mount_clone(guest: socket.socket, request: bytes, point: str) -> None:
    """Answers what was asked with the mount at `point` of this process' namespace."""
    with contextlib.suppress(OSError):  # the task is gone
        if request != b"mount":
            guest.send(b"no such request")
            return
        try:
            clone = mounts.clone_mount(point)
        except OSError as error:
            guest.send(f"no {error.strerror}".encode())
            return
        try:
            socket.send_fds(guest, [b"ok"], [clone])
        finally:
            os.close(clone)


def fetch_mount_clone(name: Path, reason: str) -> int:
    """Returns the descriptor of a clone. Raises Declined for this reason, OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(ANSWER)
        line.connect(os.fspath(name))
        line.send(b"mount")
        said, fds, _, _ = socket.recv_fds(line, LONGEST_WORDS, 1)
    if not fds:
        raise Declined(reason, f"{name} gives no mount: {said.decode(errors='replace')}")
    os.set_inheritable(fds[0], False)
    return fds[0]


def lock_pid_file(directory: int) -> int:
    """Locks `held` in the open directory, as long as this process lives; its pid is in there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    held = os.open("held", flags, 0o600, dir_fd=directory)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(held, b"%d" % os.getpid())
    return held


def stop_daemon(directory: Path, patience: float) -> None:
    """Ends who holds in this directory. Waits up to `patience` seconds for that. Raises OSError."""
    held = directory / "held"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ProcessLookupError, ValueError):
        if lock.is_free(held):
            return
        os.kill(int(files.read_file(held)), signal.SIGTERM)
    until = time.monotonic() + patience
    while not lock.is_free(held) and time.monotonic() < until:
        time.sleep(lock.POLL)
