"""The process that holds a squashfs file's mount for one step, and the user's program beneath it.

    /run/forestage/served/<uid>-<job>-<step>-<inode>-<pid>    where it listens; root's alone
                          … .lock                             held as long as anything of it lives

It mounts the file by a descriptor of /dev/fuse in a hidden mount namespace, so that nobody on the
node meets the mount. Tasks get clones of it (system/daemon.py). With the first that asks, it
has squashfuse answer the descriptor as the user, with all three ids: what users wrote, no code of
root's parses. So the program is born where Slurm has put that task, with the step's limits, and in
a PID namespace of its own (system/pid_namespace.py): all that it starts ends with it.

It ends with the step's manager. Where squashfuse is killed the tasks get ENOTCONN, and the next
step has a server of its own.
"""

import contextlib
import os
import select
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from forestage import log
from forestage.errors import Declined, ForestageError
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import SERVE_TIMEOUT
from forestage.system import as_user, daemon, folders, forked_child, fuse, lock, mounts, run
from forestage.system.daemon import (
    OOM_EXEMPT,
    DaemonSpec,
    StartChannel,
    StartReport,
    TaskConnections,
)
from forestage.system.run import Program
from forestage.units import make_printable

PROCESS_NAME = "forestage-mount"
SERVER_SPEC = DaemonSpec(PROCESS_NAME, oom_score_adj=OOM_EXEMPT)
PROGRAMS = ("squashfuse_ll", "squashfuse")  # the first knows FUSE's faster interface
TYPE = "fuse.squashfuse"  # in mountinfo

MAX_FILES, MAX_FILES_OF_USER = (
    256,
    128,
)  # files of jobs that a node, and one user on it, has mounted at once
MAX_SERVERS, MAX_SERVERS_OF_USER = 512, 256  # each step has one for each file: 10 MiB
HELP = 2.0  # seconds for what a program says of itself
BEGIN = 5.0  # seconds until the process listens
SAID = 0.2  # seconds in which a program that fails says why
WORDS = 1000  # bytes of what squashfuse says last
PROBED = 0.2  # seconds for which somebody who counts may hold the lock

IMAGE, MOUNT = "/run/image", "/run/mount"  # in the hidden namespace


class SquashfsSource:
    """Where the file's bytes are read: one of an entry, a keeper's socket, a line with the file.

    The line is one of `as_user.run_in_child_with_socket`: its descriptor is never closed where that
    may hang.
    """

    def __init__(self) -> None:
        self.entry_path: Path | None = None
        self.keeper_socket: Path | None = None
        self.descriptor_socket: socket.socket | None = None

    def __enter__(self) -> "SquashfsSource":
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor_socket is not None:
            self.descriptor_socket.close()


def start_server(folder: Path, job: Job, inode: int, content: SquashfsSource) -> Path:
    """Returns the socket of a new process that serves the file of that inode to the job's step.

    Raises Declined (no-mount), OSError.
    """
    folders.ensure_directory_with_mode(folder)
    program = _check_and_find_program(folder, job, inode)
    name = f"{job.user.uid}-{job.id}-{job.step}-{inode}-"

    def work(hook: StartChannel) -> None:
        """The whole life of the process."""
        hook.release_hook(
            *(
                (content.descriptor_socket.fileno(),)
                if content.descriptor_socket is not None
                else ()
            )
        )
        served = folder / f"{name}{os.getpid()}"
        held = Path(f"{served}.lock")
        with lock.held(held, PROBED):
            _SquashfsServer(served, job, program, content).serve_until_end(hook)
            held.unlink(missing_ok=True)

    about = f"mounted job={job.id} step={job.step}"
    with daemon.start_daemon(SERVER_SPEC, about, work) as channel:
        channel.wait_until_ready(BEGIN, "no-mount")
    return folder / f"{name}{channel.pid}"


def _check_and_find_program(folder: Path, job: Job, inode: int) -> str:
    """Returns the program that serves."""
    program = _find_program()
    if not program:
        raise Declined("no-mount", "squashfuse is not installed on this node")
    if not os.path.exists(fuse.DEVICE):
        raise Declined("no-mount", f"this node has no {fuse.DEVICE}")
    check_server_limits(_list_live_servers(folder), job, inode)
    return program


def check_server_limits(names: Sequence[str], job: Job, inode: int) -> None:
    """Pure: raises Declined where the node serves too much already, by the names of sockets.

    A file counts once for each job, however many of its steps have it.
    """
    files, servers = [], []
    for name in names:
        uid, number, _, file = name.split("-")[:4]
        servers.append(uid)
        files.append((uid, number, file))
    user = str(job.user.uid)
    wanted = (user, str(job.id), str(inode))
    others = set(files) - {wanted}
    own = {file for file in others if file[0] == user}
    if len(others) >= MAX_FILES or len(own) >= MAX_FILES_OF_USER:
        told = f"{len(own)} files of this user and {len(others)} of all are mounted on this node"
        raise Declined("no-mount", f"{told}, at most {MAX_FILES_OF_USER} and {MAX_FILES}")
    if len(servers) >= MAX_SERVERS or servers.count(user) >= MAX_SERVERS_OF_USER:
        told = f"steps on this node have {len(servers)} files mounted"
        raise Declined("no-mount", f"{told}, {servers.count(user)} of them this user's")


def _find_program() -> str:
    """The first of PROGRAMS that is here and can say whose the files are; "" for none.

    squashfuse_ll can since its release 0.2. The other one always could: by libfuse.
    """
    for program in filter(None, map(run.find_program, PROGRAMS)):
        if not program.endswith("_ll") or "uid=" in _read_help(program):
            return program
    return ""


def _read_help(program: str) -> str:
    ran = run.run_program([program, "--help"], timeout=HELP)
    return ran.out + ran.err


def _list_live_servers(folder: Path) -> list[str]:
    """The names of those of which something lives; what the others left is deleted."""
    found = []
    for held in folder.glob("*.lock"):
        if lock.is_free(held):
            held.with_suffix("").unlink(missing_ok=True)
            lock.remove_if_free(held)
        else:
            found.append(held.stem)
    return found


class _SquashfsServer:
    """The mount, its server, its connections."""

    def __init__(self, name: Path, job: Job, program: str, content: SquashfsSource) -> None:
        self.name, self.job, self.program = name, job, program
        self.server: Program | None = None
        self.exit_fd = -1  # its end
        self.stderr_fd, self.last_stderr = -1, b""  # the last ones of the program
        self.refusal = ""  # why there is no mount
        self.manager = os.pidfd_open(job.manager)
        self._mount_hidden(content)
        self.clients = TaskConnections(daemon.listen_for_clients(name), self._send_clone)

    def _mount_hidden(self, content: SquashfsSource) -> None:
        """Makes the mount where nobody looks."""
        proc = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
        self.host = _open_namespace(proc)
        self.fuse_fd = os.open(fuse.DEVICE, os.O_RDWR)
        clone = _open_clone(content)
        mounts.enter_empty_namespace()
        try:
            self.image = _open_image(clone, content)
            _mount_fuse(self.fuse_fd, self.job)
            self.hidden = _open_namespace(proc)
        finally:
            mounts.enter_namespace(*self.host)
        os.close(proc)

    def serve_until_end(self, hook: StartChannel) -> None:
        """Serves until the step's manager or the program has ended; says `ready` at once."""
        hook.send(StartReport("ready"))
        hook.close()
        ready: set[int] = set()
        try:
            while not ready & {self.manager, self.exit_fd}:
                ready = self.clients.serve_for(None, self.manager, self.exit_fd, self.stderr_fd)
                if self.stderr_fd in ready:
                    self._read_stderr(0)
        finally:
            self._end()

    def _send_clone(self, task: socket.socket, asked: bytes) -> None:
        if not self._ensure_serving():
            with contextlib.suppress(OSError):  # the task is gone
                task.send(f"no {self.refusal}".encode()[: daemon.LONGEST_WORDS])
            return
        mounts.enter_namespace(*self.hidden)
        try:
            daemon.send_mount_clone(task, asked, MOUNT)
        finally:
            mounts.enter_namespace(*self.host)

    def _ensure_serving(self) -> bool:
        """Whether the program serves; the first task that asks has it started."""
        if self.server is None and not self.refusal:
            try:
                self._start_program()
                self._check_answers()
            except (ForestageError, OSError) as error:
                self.refusal = make_printable(str(error))
                self._log_failure(self.refusal)
                if self.server is not None:  # further tasks hear why it is not there
                    self.server.kill()
                    os.close(self.exit_fd)
                    self.exit_fd = -1
        return not self.refusal

    def _start_program(self) -> None:
        user = self.job.user
        self.stderr_fd, theirs = os.pipe()
        # Files are never somebody else's, or root's: set-user-ID programs believe those. libfuse
        # takes a descriptor of /dev/fuse for a mount point.
        owner = f"uid={user.uid},gid={user.gid}"
        argv = (self.program, "-f", "-o", owner, f"/dev/fd/{self.image}", f"/dev/fd/{self.fuse_fd}")
        enter = partial(forked_child.enter_task_cgroups, self.job.manager)
        try:
            self.server = run.start_as_user(user, argv, (self.image, self.fuse_fd), theirs, enter)
        finally:
            # The program alone has them: when it dies, its readers get an error and do not wait.
            for fd in (self.image, self.fuse_fd, theirs):
                os.close(fd)
        self.exit_fd = os.pidfd_open(self.server.pid)

    def _check_answers(self) -> None:
        """Raises Declined."""
        if not self._is_answering():
            while self._read_stderr(SAID):
                pass
            said = self.last_stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise Declined("no-mount", said[0] if said else "its server does not answer")

    def _is_answering(self) -> bool:
        """Whether the mount can be looked at. In a child: whoever looks waits for the server."""

        def look() -> as_user.ChildResult[None]:
            mounts.enter_namespace(*self.hidden)
            os.close(os.open(MOUNT, os.O_RDONLY | os.O_DIRECTORY))
            return None, []

        try:
            as_user.run_in_child(look, type(None), SERVE_TIMEOUT, keep=self.hidden)
        except (Declined, OSError):
            return False
        return True

    def _read_stderr(self, seconds: float) -> bool:
        """Takes what it says on stderr; False after so long, or where it will say no more."""
        if self.stderr_fd < 0 or not select.select([self.stderr_fd], [], [], seconds)[0]:
            return False
        data = os.read(self.stderr_fd, 4096)
        self.last_stderr = (self.last_stderr + data)[-WORDS:]
        if not data:
            os.close(self.stderr_fd)
            self.stderr_fd = -1
        return bool(data)

    def _end(self) -> None:
        """Takes no more connections, lets go of the mount, and ends all that the user has here.

        Returns when nothing of that lives, which takes as long as the kernel keeps one of them.
        """
        self.name.unlink(missing_ok=True)
        self.clients.close()
        for fd in self.hidden:
            os.close(fd)
        if self.server is None:
            return
        died = not self.refusal and select.select([self.exit_fd], [], [], 0)[0]
        # Without such a task it is Slurm that ends the step.
        if died and forked_child.has_child_owned_by(self.job.manager, self.job.user.uid):
            self._log_failure(f"its squashfuse ended: {self.server.wait()}")
        self.server.kill()
        self.server.wait()

    def _log_failure(self, what: str) -> None:
        about = f"job={self.job.id} step={self.job.step}"
        log.write_log_line(f"mounted {about} result=failed detail={what!r}", by_slurm=True)


def _open_namespace(proc: int) -> tuple[int, int]:
    """This process' mount namespace and root; `proc` is its directory in /proc."""
    return (
        os.open("ns/mnt", os.O_RDONLY, dir_fd=proc),
        os.open("/", os.O_PATH | os.O_DIRECTORY),
    )


def _open_clone(content: SquashfsSource) -> int | None:
    """A detached mount of the file, for what root alone may reach."""
    if content.entry_path is not None:
        return mounts.clone_mount(os.fspath(content.entry_path))
    if content.keeper_socket is None:
        return None
    return daemon.fetch_mount_clone(content.keeper_socket, "no-mount")


def _open_image(clone: int | None, content: SquashfsSource) -> int:
    """A descriptor of the file that can be opened for reading only, by whom its mode lets."""
    if clone is None:
        assert content.descriptor_socket is not None
        return as_user.receive_descriptors(content.descriptor_socket)[0]
    os.close(os.open(IMAGE, os.O_CREAT | os.O_WRONLY, 0o600))
    target = os.open(IMAGE, os.O_PATH)
    mounts.attach_mount(clone, target)
    # An entry has the owner and the mode of its source: its owner could open it for writing.
    flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
    mounts.mount("", IMAGE, mounts.MS_REMOUNT | mounts.MS_BIND | flags)
    os.close(target)
    os.close(clone)
    image = os.open(IMAGE, os.O_PATH)
    mounts.umount(IMAGE)
    return image


def _mount_fuse(line: int, job: Job) -> None:
    Path(MOUNT).mkdir(mode=0o700)
    flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
    owner = f"user_id={job.user.uid},group_id={job.user.gid}"
    # Only this user's tasks and root get there; modes within are what the user wrote.
    mounts.mount("forestage", MOUNT, flags, TYPE, f"fd={line},rootmode=40000,{owner},allow_other")
