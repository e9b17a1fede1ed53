"""The process that holds a squashfs file's mount for one step, and the user's program beneath it.

    /run/forestage/served/<uid>-<job>-<step>-<inode>-<pid>    where it listens; root's alone

It mounts the file by a descriptor of /dev/fuse in a hidden mount namespace, so that nobody on the
node meets the mount, and has squashfuse answer that descriptor as the user, with all three ids:
what users wrote, no code of root's parses. Tasks get clones of the mount (through/clones.py).

It lets go of its own mount when the step manager has closed its connection; squashfuse ends with
the last clone, and with it this process. Where squashfuse is killed the tasks get ENOTCONN, and the
next step has a server of its own.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from forestage import log
from forestage.errors import Declined
from forestage.slurm.job import Job
from forestage.system import as_user, child, folders, fuse, mounts
from forestage.through import clones

PROCESS_NAME = "forestage-mount"
PROGRAMS = ("squashfuse_ll", "squashfuse")  # the first knows FUSE's faster interface
TYPE = "fuse.squashfuse"  # in mountinfo

MOST, MOST_OF_USER = 256, 128  # files of jobs that a node, and one user on it, has mounted at once
SERVERS, SERVERS_OF_USER = 512, 256  # each step has one for each file: 10 MiB
MOST_TASKS = 512  # connections at once; others stand in line
START = 10.0  # seconds until the first look into the file
FIRST = 60.0  # seconds in which somebody must connect
LAST = 10.0  # seconds from the last connection's end; tasks that cannot share one come at once
SAID = 0.2  # seconds in which a program that fails says why
WORDS = 1000  # bytes of what squashfuse says last

TURN = 0.25  # seconds between two looks at what runs
_CREDENTIALS = struct.Struct("iII")  # pid uid gid: unix(7)

IMAGE, MOUNT = "/run/image", "/run/mount"  # in the hidden namespace


class Bytes:
    """Where the file's bytes are read: one of an entry, a keeper's socket, a line with the file.

    The line is one of `as_user.ask`: its descriptor is never closed where that may hang.
    """

    def __init__(self) -> None:
        self.entry: Path | None = None
        self.through: Path | None = None
        self.line: socket.socket | None = None

    def __enter__(self) -> "Bytes":
        return self

    def __exit__(self, *_: object) -> None:
        if self.line is not None:
            self.line.close()


def start(folder: Path, job: Job, inode: int, content: Bytes) -> Path:
    """Returns the socket of a new process that serves the file of that inode to the job's step.

    Raises Declined (no-mount), OSError.
    """
    folders.keep(folder)
    program = _must_be_possible(folder, job, inode)
    name = f"{job.user.uid}-{job.id}-{job.step}-{inode}-"
    pid, ours = child.begin(
        lambda hook: _live(folder / f"{name}{os.getpid()}", job, program, content, hook),
        lambda hook, error: child.tell(hook, str(error)),
    )
    with ours:
        said = child.heard(ours, START + 1, "its server does not answer")
    if said != "ready":
        raise Declined("no-mount", said or "its server died")
    return folder / f"{name}{pid}"


def _must_be_possible(folder: Path, job: Job, inode: int) -> str:
    """Returns the program that serves."""
    from forestage.system import run

    program = next(filter(None, map(run.which, PROGRAMS)), "")
    if not program:
        raise Declined("no-mount", "squashfuse is not installed on this node")
    if not os.path.exists(fuse.DEVICE):
        raise Declined("no-mount", f"this node has no {fuse.DEVICE}")
    clones.must_be_possible("no-mount")
    must_be_room(_living(folder), job, inode)
    return program


def must_be_room(names: Sequence[str], job: Job, inode: int) -> None:
    """Pure: raises Declined where the node serves too much already, by the names of sockets.

    A file counts once for each job, however many of its steps have it.
    """
    files, servers = [], []
    for name in names:
        uid, number, _, *rest = name.split("-")
        servers.append(uid)
        files.append((uid, number, *rest[:1]))
    user = str(job.user.uid)
    wanted = (user, str(job.id), str(inode))
    others = set(files) - {wanted}
    own = {one for one in others if one[0] == user}
    if len(others) >= MOST or len(own) >= MOST_OF_USER:
        told = f"{len(own)} files of this user and {len(others)} of all are mounted on this node"
        raise Declined("no-mount", f"{told}, at most {MOST_OF_USER} and {MOST}")
    if len(servers) >= SERVERS or servers.count(user) >= SERVERS_OF_USER:
        told = f"steps on this node have {len(servers)} files mounted"
        raise Declined("no-mount", f"{told}, {servers.count(user)} of them this user's")


def _living(folder: Path) -> list[str]:
    """The names of those that run; what the others left is deleted."""
    found = []
    for name in os.listdir(folder):  # noqa: PTH208 - names are wanted
        if os.path.exists(f"/proc/{name.rpartition('-')[2]}"):
            found.append(name)
        else:
            (folder / name).unlink(missing_ok=True)
    return found


def _live(name: Path, job: Job, program: str, content: Bytes, hook: socket.socket) -> None:
    """The whole life of the process."""
    child.stand_alone(PROCESS_NAME)
    keep = {hook.fileno()}
    if content.line is not None:
        keep.add(content.line.fileno())
    child.let_go(keep)
    _Served(name, job, program, content).run(hook)


class _Served:
    """The mount, its server, its connections."""

    def __init__(self, name: Path, job: Job, program: str, content: Bytes) -> None:
        self.name, self.job = name, job
        self.connections: dict[int, socket.socket] = {}
        self.tasks: list[int] = []  # of the step, that have asked
        self.followed = False
        self.hidden: tuple[int, ...] = ()
        self.words = b""  # the last ones of the program
        self.listener: socket.socket | None = clones.listener(name)
        # Each request says which task it is of.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._close)
            self._start(program, content)
            on_error.pop_all()
        self.ended = os.pidfd_open(self.server.pid)

    def _start(self, program: str, content: Bytes) -> None:
        """Makes the mount where nobody looks, and starts the program where all others run."""
        from forestage.system import run

        proc = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
        self.host = _namespace(proc)
        line = os.open(fuse.DEVICE, os.O_RDWR)
        clone = _clone(content)
        mounts.empty_namespace()
        try:
            image = _image(clone, content)
            _mount(line, self.job)
            self.hidden = _namespace(proc)
        finally:
            mounts.enter_namespace(*self.host)
        self.words_of, theirs = os.pipe()
        # libfuse takes a descriptor of /dev/fuse for a mount point.
        argv = (program, "-f", f"/dev/fd/{image}", f"/dev/fd/{line}")
        self.server = run.start_as(self.job.user, argv, (image, line), theirs)
        # The program alone has them: when it dies, its readers get an error and do not wait.
        for fd in (image, line, proc, theirs):
            os.close(fd)

    def run(self, hook: socket.socket) -> None:
        """Serves until the last mount has gone; says `ready` once the file can be read.

        Raises Declined.
        """
        try:
            self._must_answer()
            child.tell(hook, "ready")
            hook.close()
            self._keep()
        finally:
            self._close()
            self.server.kill()

    def _must_answer(self) -> None:
        if not self._answers():
            while self._listen(SAID):
                pass
            said = self.words.decode(errors="replace").strip().splitlines()[-1:]
            raise Declined("no-mount", said[0] if said else "its server does not answer")

    def _answers(self) -> bool:
        """Whether the mount can be looked at. In a child: whoever looks waits for the server."""
        pid = os.fork()
        if pid == 0:
            child.live(self._look, lambda _: None)
        ended = os.pidfd_open(pid)
        in_time = bool(select.select([ended], [], [], START)[0])
        os.close(ended)
        if not in_time:
            os.kill(pid, signal.SIGKILL)  # it may stay in the kernel, and is left there
            return False
        return os.waitpid(pid, 0)[1] == 0

    def _look(self) -> None:
        mounts.enter_namespace(*self.hidden)
        os.close(os.open(MOUNT, os.O_RDONLY | os.O_DIRECTORY))

    def _listen(self, seconds: float) -> bool:
        """Takes what it says on stderr; False after so long, or where it will say no more."""
        if not select.select([self.words_of], [], [], seconds)[0]:
            return False
        data = os.read(self.words_of, 4096)
        self.words = (self.words + data)[-WORDS:]
        return bool(data)

    def _keep(self) -> None:
        alone, limit = time.monotonic(), FIRST
        while not self._attend():
            if self.connections:
                alone, limit = time.monotonic(), LAST
            elif time.monotonic() - alone > limit:
                self._close()
            self._follow()
        code = self.server.wait()
        if code != 0 and any(map(self._runs, self.tasks)):  # else Slurm ends the step
            log.say(
                f"mounted job={self.job.id} step={self.job.step} result=failed"
                f" detail='its squashfuse ended: {code}'",
                by_slurm=True,
            )

    def _attend(self) -> bool:
        """Answers what tasks ask, for a moment; True once the program has ended."""
        poll = select.poll()
        files = [self.ended, *self.connections]
        if self.words_of >= 0:
            files.append(self.words_of)
        if self.listener is not None and len(self.connections) < MOST_TASKS:
            files.append(self.listener.fileno())
        for fd in files:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(TURN * 1000 if self.listener is not None else None):
            if fd == self.ended:
                return True
            if fd in self.connections:
                self._answer(self.connections[fd])
            elif self.listener is not None and fd == self.listener.fileno():
                with contextlib.suppress(BlockingIOError):
                    made, _ = self.listener.accept()
                    made.settimeout(clones.ANSWER)
                    self.connections[made.fileno()] = made
            elif not self._listen(0):
                os.close(self.words_of)
                self.words_of = -1
        return False

    def _answer(self, connection: socket.socket) -> None:
        try:
            asked, control, _, _ = connection.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:
            asked, control = b"", []
        if not asked:
            del self.connections[connection.fileno()]
            connection.close()
            return
        for _, kind, data in control:
            if kind == socket.SCM_CREDENTIALS:
                self.tasks.append(_CREDENTIALS.unpack(data)[0])
        mounts.enter_namespace(*self.hidden)
        try:
            clones.give(connection, asked, MOUNT)
        finally:
            mounts.enter_namespace(*self.host)

    def _follow(self) -> None:
        """Has the program live where the tasks do: it is the user's, who can make it do anything.

        So it has the step's limits, and goes when Slurm ends the step. Only a task that runs its
        program is for certain where Slurm wants it.
        """
        task = next(filter(self._runs, self.tasks), 0)
        if task and not self.followed:
            with contextlib.suppress(OSError):
                child.join(self.server.pid, task)
                # One of the hierarchies may refuse for a moment; then again at the next turn.
                self.followed = child.is_with(self.server.pid, task)

    def _runs(self, task: int) -> bool:
        """Whether a task runs the user's program."""
        with contextlib.suppress(OSError):
            return os.stat(f"/proc/{task}").st_uid == self.job.user.uid  # noqa: PTH116
        return False

    def _close(self) -> None:
        """Takes no more connections, and lets go of the mount."""
        if self.listener is not None:
            self.name.unlink(missing_ok=True)
            self.listener.close()
            self.listener = None
            for fd in self.hidden:
                os.close(fd)


def _namespace(proc: int) -> tuple[int, int]:
    """This process' mount namespace and root; `proc` is its directory in /proc."""
    return (
        os.open("ns/mnt", os.O_RDONLY, dir_fd=proc),
        os.open("/", os.O_PATH | os.O_DIRECTORY),
    )


def _clone(content: Bytes) -> int | None:
    """A detached mount of the file, for what root alone may reach."""
    if content.entry is not None:
        return mounts.clone(os.fspath(content.entry))
    if content.through is None:
        return None
    return clones.fetch(content.through, "no-mount")


def _image(clone: int | None, content: Bytes) -> int:
    """A descriptor of the file that can be opened for reading only, by whom its mode lets."""
    if clone is None:
        assert content.line is not None
        return as_user.receive_fds(content.line)[0]
    os.close(os.open(IMAGE, os.O_CREAT | os.O_WRONLY, 0o600))
    target = os.open(IMAGE, os.O_PATH)
    mounts.attach(clone, target)
    # An entry has the owner and the mode of its source: its owner could open it for writing.
    flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
    mounts.mount("", IMAGE, mounts.MS_REMOUNT | mounts.MS_BIND | flags)
    os.close(target)
    os.close(clone)
    image = os.open(IMAGE, os.O_PATH)
    mounts.umount(IMAGE)
    return image


def _mount(line: int, job: Job) -> None:
    Path(MOUNT).mkdir(mode=0o700)
    flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
    owner = f"user_id={job.user.uid},group_id={job.user.gid}"
    # Only this user's tasks and root get there; modes within are what the user wrote.
    mounts.mount("forestage", MOUNT, flags, TYPE, f"fd={line},rootmode=40000,{owner},allow_other")
