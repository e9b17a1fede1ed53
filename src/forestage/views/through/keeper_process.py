"""A keeper at work: its mount, and /dev/fuse beneath it.

It starts servers, each in place of one that died or hangs, and hands clones of the mount to tasks
(system/daemon.py).

A copy whose stager was killed gets another one, MOST_STAGERS in all: a job that reads through has
no hook that would start it.

The mount lives in a mount namespace of the keeper's own, which holds nothing else: nobody on the
host meets it. The keeper reads no bytes and has one thread. It takes its own mount off when nobody
can ask for more clones; when the tasks' have gone too, the server hears it from the kernel, and
both end.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

import forestage
from forestage import events, log
from forestage.errors import Declined
from forestage.stage.task import CopyTask
from forestage.system import daemon, forked_child, fuse, mounts
from forestage.system.daemon import StartChannel, StartReport, TaskConnections
from forestage.views.through import keeper, read_server
from forestage.views.through.keeper import SERVER_NAME, KeeperState
from forestage.views.through.local_image import LocalImage
from forestage.views.through.read_server import ReadServer, ServedImage
from forestage.views.through.server_memory import ReadThroughState, RequestJournal

TURN = 0.25  # seconds between two looks at the server
SILENT = 3.0  # seconds without a beat, after which a server is replaced
LAST = 2.0  # seconds for steps that were told to come just before the copy was whole
UNNEEDED = 5.0  # seconds without a lease, after which no task will come any more
BURST, EACH = 256, 0.5  # servers started one upon the other, and then one in so many seconds
MOST_STAGERS = 3  # started by one keeper: something may kill them all
STAGER_PAUSE = 10.0  # seconds between two of them
REAP = 0.2  # seconds for the end of a killed server; one that hangs in the kernel is left
REST = 0.02  # seconds between two looks at what was killed
UNANSWERED = "its server does not answer"
FILE = "/run/image"  # in the keeper's namespace


class Keeper:
    """Its mount, its servers, its connections. Making one leaves the host's mount namespace."""

    def __init__(
        self, task: CopyTask, spot: Path, check_keeper_allowed: Callable[[Path, int], None]
    ) -> None:
        """`check_keeper_allowed` raises Declined where too many are there already."""
        node, opened, found = task.node, task.opened, task.image
        self.task = task
        self.uid = opened.user.uid
        self.shared_state = ReadThroughState.create_shared()
        # The kernel reads ahead in the served file; twice would be once too much.
        os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_RANDOM)
        local = LocalImage(node.cache, found, spot)
        self.served = ServedImage(found, opened.fd, local, node.leases)
        self.generations: list[tuple[int, RequestJournal]] = []  # the last is the server's
        self.well = self.needed = self.partial = self.started = time.monotonic()
        self.beat = 0
        self.credit = float(BURST)
        self.stagers = 0
        self.starting = 0  # the child that starts one
        self.next_stager = 0.0
        self.release = _read_program_stamp()
        # Before the namespace: all of this would be out of reach in there.
        self.namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        self.root = os.open("/", os.O_PATH | os.O_DIRECTORY)
        self.spot = os.open(spot, os.O_RDONLY | os.O_DIRECTORY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self.state = os.open(spot / "state", flags, 0o600)
        self._write_state()
        check_keeper_allowed(spot, self.uid)  # once more, now that those who start see each other
        self.guests = TaskConnections(
            daemon.listen_for_clients(spot / "sock.new"), self._send_clone
        )
        self.fuse_fd = os.open(fuse.DEVICE, os.O_RDWR)
        # A server that dies wakes the keeper.
        self.wake, theirs = socket.socketpair()
        self.wake.setblocking(False)
        theirs.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(theirs.detach())
        mounts.enter_empty_namespace()
        os.close(os.open(FILE, os.O_CREAT | os.O_WRONLY, 0o600))
        fuse.mount_fuse(self.fuse_fd, FILE, self.served.attributes.mode)

    def run(self, hook: StartChannel) -> None:
        """Keeps the file until its last mount has gone; says `ready` once it can be read.

        Raises Declined, OSError.
        """
        self._start_server()
        pid = os.fork()
        if pid == 0:
            forked_child.run_and_exit(
                self._open_file_once, partial(self._log_server_failure, "probe")
            )
        end = time.monotonic() + keeper.START
        while not os.waitpid(pid, os.WNOHANG)[0]:
            self._reap_servers()
            # A server that ends once the file is known is replaced: the probe is about to end.
            has_failed = self.generations[-1][1].has_ended and not self.shared_state.settled
            if has_failed or time.monotonic() > end:
                self._give_up(hook, pid)
            time.sleep(0.002)
        if not self.shared_state.settled:
            raise Declined("no-through", UNANSWERED)
        if self.shared_state.hides_acl:
            raise Declined("no-through", "this kernel cannot show the file's ACL")
        self._write_state()
        os.rename("sock.new", "sock", src_dir_fd=self.spot, dst_dir_fd=self.spot)
        hook.send(StartReport("ready"))
        hook.close()
        self._run_until_unmounted()

    def _give_up(self, hook: StartChannel, probe: int) -> NoReturn:
        """Ends what it has started, and holds its place until that has ended.

        What hangs with the source takes memory, and no signal ends it: each step that came would
        leave some more. Raises Declined.
        """
        hook.send(StartReport("failed", "no-through", UNANSWERED))
        hook.close()
        os.close(self.fuse_fd)  # once the server has ended, too, the kernel answers the probe
        ended = False
        for pid in [probe] + [pid for pid, memory in self.generations if not memory.has_ended]:
            os.kill(pid, signal.SIGKILL)
        while not (ended and all(memory.has_ended for _, memory in self.generations)):
            ended = ended or bool(os.waitpid(probe, os.WNOHANG)[0])
            self._reap_servers()
            os.utime(self.state)
            time.sleep(REST)
        raise Declined("no-through", UNANSWERED)

    def _write_state(self) -> None:
        state = KeeperState(os.getpid(), self.uid, self.shared_state.device)
        os.ftruncate(self.state, 0)
        os.pwrite(self.state, msgspec.json.encode(state), 0)

    def _run_until_unmounted(self) -> None:
        while True:
            if self.guests.serve_for(TURN, self.wake.fileno()):
                self.wake.recv(4096)
            if self._reap_servers():
                break
            self._replace_dead_server()
            self._restart_stager()
            self._unmount_if_unneeded()
            os.utime(self.state)
        with contextlib.suppress(FileNotFoundError):
            os.unlink("state", dir_fd=self.spot)

    # The server

    def _start_server(self) -> None:
        memory = RequestJournal(read_server.RECEIVERS)
        pid = os.fork()
        if pid == 0:
            forked_child.run_and_exit(
                partial(self._serve, memory), partial(self._log_server_failure, "server")
            )
        self.generations.append((pid, memory))
        self.well = time.monotonic()

    def _serve(self, memory: RequestJournal) -> None:
        """The server's whole life, on the host's mounts again."""
        signal.set_wakeup_fd(-1)
        mounts.enter_namespace(self.namespace, self.root)
        forked_child.close_descriptors_except({self.served.source, self.fuse_fd})
        Path("/proc/self/comm").write_text(SERVER_NAME)
        earlier = [generation for _, generation in self.generations]
        ReadServer(self.served, self.fuse_fd, memory, self.shared_state, earlier).run()

    def _open_file_once(self) -> None:
        """Opens and closes the file, so that the kernel asks no FLUSH of anybody who closes it.

        A child's whole life, and not the server's: who has /dev/fuse open must not wait for its
        answer. Killed just then, its other threads gone, it would wait for ever, and no signal ends
        such a wait: only the last descriptor of /dev/fuse does, which it would hold itself.
        """
        signal.set_wakeup_fd(-1)
        probe = os.open(FILE, os.O_PATH)
        mounts.enter_namespace(self.namespace, self.root)
        forked_child.close_descriptors_except({self.served.source, probe})
        path = f"/proc/self/fd/{probe}"
        os.close(os.open(path, os.O_RDONLY))
        os.pread(self.served.source, 1, 0)  # what root may not read from here, a user must not lose
        device = Path(path).stat().st_dev
        with contextlib.suppress(OSError):  # only a matter of speed
            ahead = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
            ahead.write_text(str(fuse.MAX_READ // 1024))
        self.shared_state.device = device
        self.shared_state.settled = 1

    def _log_server_failure(self, who: str, error: BaseException | None) -> None:
        path = self.served.image.path
        log.write_log_line(f"{who} image={path} result=failed detail={error!r}", by_slurm=True)

    def _reap_servers(self) -> bool:
        """Notes which servers have ended; True once one said that no mount is left."""
        over = False
        for pid, memory in self.generations:
            if not memory.has_ended:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    memory.mark_ended()
                    over = over or os.waitstatus_to_exitcode(status) == read_server.GONE
        return over

    def _replace_dead_server(self) -> None:
        now = time.monotonic()
        if self.shared_state.beat != self.beat:
            self.beat, self.well = self.shared_state.beat, now
        pid, memory = self.generations[-1]
        if not memory.has_ended:
            if now - self.well < SILENT:
                return
            os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + REAP
            while not memory.has_ended and time.monotonic() < end:
                self._reap_servers()
                time.sleep(0.005)
        if self._may_start_server():
            self.generations = [
                one for one in self.generations if not (one[1].has_ended and one[1].is_empty())
            ]
            self._start_server()

    def _may_start_server(self) -> bool:
        """Whether it is time for another server: those that all die at once must take no CPU."""
        now = time.monotonic()
        self.credit = min(BURST, self.credit + (now - self.started) / EACH)
        self.started = now
        if self.credit < 1:
            return False
        self.credit -= 1
        return True

    # The copy

    def _restart_stager(self) -> None:
        """Starts a stager where the last one has left the copy that a job needs."""
        if self.starting:
            ended, _ = os.waitpid(self.starting, os.WNOHANG)
            self.starting = 0 if ended else self.starting
        now = time.monotonic()
        may = self.stagers < MOST_STAGERS and now >= self.next_stager and not self.starting
        if not (self.shared_state.abandoned and may):
            return
        self.stagers += 1
        self.next_stager = now + STAGER_PAUSE
        self.starting = os.fork()
        if self.starting == 0:
            forked_child.run_and_exit(
                self._start_stager, lambda error: self._log_stager("failed", repr(error))
            )

    def _start_stager(self) -> None:
        """Starts one from the host's mounts; it is no child of the keeper's, and outlives it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mounts.enter_namespace(self.namespace, self.root)
        forked_child.close_descriptors_except({self.task.opened.fd})
        if (
            _read_program_stamp() != self.release
        ):  # what is there now does not go with what is loaded
            return
        from forestage.stage import stager

        self._log_stager("begun", "the last one has left its copy")
        stager.start_stager(self.task).close()

    def _log_stager(self, result: str, detail: str) -> None:
        about = f"job={self.task.job.id} image={events.quote_field(self.task.image.path)}"
        log.write_log_line(
            f"keeper {about} stager={self.stagers} {result=!s} {detail=}", by_slurm=True
        )

    # Tasks

    def _send_clone(self, task: socket.socket, asked: bytes) -> None:
        daemon.send_mount_clone(task, asked, FILE)

    def _unmount_if_unneeded(self) -> None:
        """Takes the keeper's own mount off when no task will ask for it any more."""
        now = time.monotonic()
        if not self.shared_state.unneeded:
            self.needed = now
        if not self.shared_state.whole:
            self.partial = now
        over = now - self.partial > LAST or now - self.needed > UNNEEDED
        if over and self.guests.listener and not self.guests.connections:
            os.unlink("sock", dir_fd=self.spot)
            self.guests.close()
            mounts.umount(FILE)


def _read_program_stamp() -> int:
    """Another number after an upgrade: packages put new files in place of the old ones."""
    return Path(forestage.__file__).stat().st_ctime_ns
