"""A compute node below a folder: NVMe, shared file system, configuration, and its hooks."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import squashfs
from forestage import events, trace
from forestage.bind import redirect
from forestage.cache import source_image
from forestage.cache.layout import Cache
from forestage.cache.lease import Lease, LeaseDirectory
from forestage.cache.part import Part
from forestage.cache.source_image import FileIdentity
from forestage.clock import Clock
from forestage.errors import Failed
from forestage.events import Outcome
from forestage.hooks import boundary, epilog, prolog, step  # noqa: F401  (each hook would)
from forestage.hooks.boundary import IMAGE_OPTION, HookRun
from forestage.paths import NodePaths
from forestage.slurm.job import SAVE_OPTION
from forestage.slurm.slurm_client import JobState, SlurmClient
from forestage.stage import copy_queue, engines  # noqa: F401  (each stager would import them)
from forestage.system import lock, mounts
from forestage.system.as_user import User
from forestage.views.through.keeper import PROCESS_NAME, SERVER_NAME

T = TypeVar("T")
Arrange = Callable[[object, str, Callable[[], object]], None]
"""`before` and `after` of tests/hooks: (module, its function's name, what happens)."""

ALICE = User("alice", 65534, 65534)
BOB = User("bob", 4242, 4242)

SIZE = 256 * 1024
HANGS = 240.0  # seconds; a machine may stand still for minutes, and pytest's own limit is 300
READ_ONLY = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV


def content(seed: int = 1, size: int = SIZE) -> bytes:
    """An image's bytes, which differ in every block, and from those of another seed.

    Made faster than kept: whatever a test's process has, each of its many forks takes along.
    """
    return squashfs.beginning(random.Random(seed).randbytes(size))


@dataclass(frozen=True)
class Ran:
    """One hook run, by the outcomes that it left in the event file."""

    outcomes: tuple[Outcome, ...]

    @property
    def code(self) -> int:
        """1 if the hook says that the node is at fault, and not the request; else 0.

        No exit status: a hook's is 0 whatever it says. A test whose node fails asks what is `said`.
        """
        return int(any(outcome.result == "failed" for outcome in self.outcomes))

    @property
    def outcome(self) -> Outcome:
        (only,) = self.outcomes
        return only

    @property
    def said(self) -> tuple[str, str]:
        return self.outcome.result, self.outcome.reason

    @property
    def ended(self) -> tuple[int, str, str]:
        return self.code, *self.said


def until(happened: Callable[[], T], what: str) -> T:
    """Waits until it happened, and gives what it was told of that; what never comes ends the test
    after a minute.

    Looks are counted, not seconds: a machine that stood still has not waited.
    """
    for _ in range(12000):
        if told := happened():
            return told
        time.sleep(0.005)
    raise AssertionError(f"waited in vain for {what}")


def children_left(besides: int = 0) -> set[int]:
    """The test's own children that still live; `besides` is one that is to.

    Who has lost its parent is among them: a look that lingers, or a stager (tests/conftest.py).
    """
    me = os.getpid()
    listed = map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split())
    return {pid for pid in listed if pid != besides and os.waitpid(pid, os.WNOHANG)[0] == 0}


def comm(pid: int) -> str:
    """A process' name; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def end_keepers() -> None:
    """Ends the keepers of read-through files and, once these are the test's own, their servers."""

    def over() -> bool:
        left = [pid for pid in children_left() if comm(pid) in (PROCESS_NAME, SERVER_NAME)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return not left

    until(over, "keepers and servers to end")


class Later(Clock):
    """The real clock, `seconds` ahead of everybody else's."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wall(self) -> float:
        return super().wall() + self.seconds


class Node:
    """`shared` is the file system as this node sees it, `server` the same one as others do."""

    def __init__(self, top: Path) -> None:
        self.places = NodePaths(top / "node")
        self.shared = top / "shared"
        self.server = top / "server"
        self.nvme = self.places.root / "mnt/nvme"
        self.cache = Cache(self.nvme / "forestage", self.places.claims)
        self.leases = LeaseDirectory(self.places.leases)

    @classmethod
    def boot(cls, top: Path) -> Node:
        """Lays fresh file systems below `top`. In a private mount namespace only."""
        node = cls(top)
        _tmpfs(top, "size=16m,mode=755")
        for directory in (node.shared, node.server, node.nvme):
            directory.mkdir(parents=True)
        _tmpfs(node.nvme, "size=64m,mode=755")
        _tmpfs(node.shared, "size=64m,mode=755")
        # What is written here changes the source as another node would: no bind is in the way.
        mounts.mount(str(node.shared), str(node.server), mounts.MS_BIND)
        node.configure()
        return node

    def shut_down(self) -> None:
        """Ends the hooks, stagers and keepers that still live, and collects all that have ended."""
        for hook in multiprocessing.active_children():
            hook.kill()
            hook.join()
        for part in self.parts():
            owner = part.find_record()
            if owner is not None and not self.is_idle(part.directory.name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(owner.pid, signal.SIGKILL)
                until(lambda key=part.directory.name: self.is_idle(key), "a killed stager's end")
        end_keepers()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def configure(self, **keys: object) -> None:
        """Writes the configuration: the tests' own, and on top of it `keys`."""
        config = {
            "sources": [str(self.shared)],
            "low_watermark": "100%",
            "min_free": 0,
            "unpack_ratio": 0,
            "cold": "wait",
            "redirect": "bind",
            "chunk_size": "1M",  # the smallest, so that small images have several
            **keys,
        }
        # JSON is YAML.
        self.write_config(json.dumps({k: v for k, v in config.items() if v is not None}))

    def write_config(self, text: str) -> None:
        self.places.etc.mkdir(parents=True, exist_ok=True)
        (self.places.etc / "forestage.yaml").write_text(text)

    def put(
        self, name: str, data: bytes | None = None, user: User = ALICE, mode: int = 0o644
    ) -> Path:
        """Puts a file on the shared file system; gives its path on the node."""
        data = content() if data is None else data
        file = self.server / name
        for parent in reversed(Path(name).parents[:-1]):
            if not (self.server / parent).exists():
                (self.server / parent).mkdir(mode=0o755)
                os.chown(self.server / parent, user.uid, user.gid)
        file.write_bytes(data)
        os.chown(file, user.uid, user.gid)
        file.chmod(mode)
        return self.shared / name

    def environ(
        self,
        job: int,
        image: str | Path | None = None,
        user: User = ALICE,
        comment: str | None = None,
        saves: str | None = None,
    ) -> dict[str, str]:
        """What slurmd gives its hooks, as far as they read it; its conf sets no limits."""
        conf = self.places.root / "slurm.conf"
        conf.write_text("BatchStartTimeout=7200\nAuthInfo=cred_expire=7200\n")
        environ = {
            "SLURM_CONF": str(conf),
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_USER": user.name,
            "SLURM_JOB_UID": str(user.uid),
            "SLURM_JOB_GID": str(user.gid),
            "SLURM_JOB_PARTITION": "batch",
            "SLURM_JOB_WORK_DIR": str(self.shared),
            "SLURMD_NODENAME": "n1",
        }
        asked = {IMAGE_OPTION: image, "SLURM_JOB_COMMENT": comment, SAVE_OPTION: saves}
        return environ | {name: str(value) for name, value in asked.items() if value is not None}

    def prolog(
        self,
        job: int,
        image: str | Path | None = None,
        user: User = ALICE,
        comment: str | None = None,
        saves: str | None = None,
        clock: Clock | None = None,
    ) -> Ran:
        return self._run("prolog", self.environ(job, image, user, comment, saves), clock)

    def epilog(self, job: int, clock: Clock | None = None) -> Ran:
        """With the user whose job it is."""
        user = ALICE
        with contextlib.suppress(Failed, OSError):
            lease = self.lease(job)
            user = lease.user if lease else ALICE
        return self._run("epilog", self.environ(job, user=user), clock)

    def _run(self, name: events.EventHook, environ: dict[str, str], clock: Clock | None) -> Ran:
        before = len(self.outcomes(name, int(environ["SLURM_JOB_ID"])))
        HookRun(name, environ, time.monotonic()).run(self.places, clock or Clock())
        return Ran(self.outcomes(name, int(environ["SLURM_JOB_ID"]))[before:])

    def outcomes(self, hook: events.EventHook, job: int | None = None) -> tuple[Outcome, ...]:
        """What the event file says of a kind of hook, or of one job's; in order."""
        return tuple(
            event.outcome
            for event in events.read_events(self.places.events)
            if event.hook == hook and job in (None, event.job)
        )

    def binds(self) -> dict[str, str]:
        """The paths that the node redirects, each with the key of the entry that it shows."""
        return {bind.path: bind.key for bind in redirect.list_binds(self.cache)}

    def entries(self) -> set[str]:
        return {path.name for path in self.cache.entries.glob("*")}

    def parts(self) -> list[Part]:
        """The copies under way, and what killed ones left."""
        return [Part(path) for path in sorted(self.cache.parts.glob("*"))]

    def is_idle(self, key: str) -> bool:
        """Whether no stager of this key lives: nobody holds its lock."""
        return lock.is_free(self.cache.key_lock(key))

    def staged(self, job: int, name: str = "alice/image.sqsh", data: bytes | None = None) -> Path:
        """Puts an image of Alice's there, for which a job's Prolog runs; its path."""
        path = self.put(name, data)
        assert self.prolog(job, path).code == 0
        return path

    def switch_off(self, why: str = "") -> None:
        self.places.disabled.parent.mkdir(parents=True, exist_ok=True)
        self.places.disabled.write_text(why)

    def lease(self, job: int) -> Lease | None:
        return self.leases.find_lease(job)

    def held(self, job: int) -> Lease:
        """The lease of a job that must have one."""
        lease = self.lease(job)
        assert lease is not None, job
        return lease

    def identity(self, path: Path) -> FileIdentity:
        """The identity of a path's source, as the server has it now."""
        fd = os.open(self.server / path.relative_to(self.shared), os.O_RDONLY)
        try:
            return source_image.read_identity(fd, str(path))
        finally:
            os.close(fd)

    def shows_entry(self, path: Path, key: str) -> bool:
        """Whether the path leads to that entry's very inode, through a mount as it should be."""
        flags = os.statvfs(path).f_flag
        return path.samefile(self.cache.image_path(key)) and flags & READ_ONLY == READ_ONLY

    def shows_source(self, path: Path) -> bool:
        """Whether the path leads to the shared file system's own inode."""
        return path.samefile(self.server / path.relative_to(self.shared))

    def elsewhere(self, change: Callable[[], object]) -> None:
        """Makes a change as another node would: where none of our binds is in the way.

        A thread has a mount namespace of its own as well as a process, and is cheaper.
        """

        def live() -> None:
            mounts.enter_private_namespace()
            for bind in redirect.list_binds(self.cache):
                with contextlib.suppress(OSError):
                    mounts.umount(bind.path)
            change()

        with ThreadPoolExecutor() as pool:
            pool.submit(live).result()


def start_hook(
    node: Node,
    name: boundary.HookKind,
    environ: Mapping[str, str],
    stderr: int,
    keep: int = 3,
    first: Callable[[], object] = int,
) -> subprocess.Popen[bytes]:
    """Starts a hook as Slurm does: in a session of its own, with this environment, and a pipe.

    It is a fork of the test's process: a new interpreter takes three times as long to import what
    is there already. It has the descriptor `keep`, and begins with `first`.
    """

    def live() -> None:
        # Among the descriptors is the pipe by which Popen would learn of a program's start.
        for low, high in ((3, keep), (keep + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(low, high)
        gc.disable()
        os.environ.clear()
        os.environ.update(environ)
        first()
        os._exit(boundary._run_to_exit_status(name, str(node.places.root)))

    return subprocess.Popen(
        [name],
        preexec_fn=live,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd="/",
        start_new_session=True,
        restore_signals=False,  # an interpreter would ignore SIGPIPE again
    )


def unmount(point: Path) -> None:
    """Takes a file system away, once nobody has it open."""
    _once_idle(["umount", point])


def make_read_only(point: Path) -> None:
    """Does so once nobody has a file open for writing."""
    _once_idle(["mount", "-o", "remount,ro", point])


def _once_idle(argv: list[str | Path]) -> None:
    """A stager answers its hook before it ends, and has files open until then: EBUSY."""

    def done() -> bool:
        speaking = os.environ | {"LC_ALL": "C"}
        ran = subprocess.run(argv, capture_output=True, text=True, check=False, env=speaking)
        assert ran.returncode == 0 or "busy" in ran.stderr, ran.stderr
        return ran.returncode == 0

    until(done, f"{argv} to be possible")


class Idle(SlurmClient):
    """Knows the node, and no job on it."""

    def list_jobs_with_steps(self) -> frozenset[int]:
        return frozenset()

    def has_node(self, node: str) -> bool:
        return True

    def find_job(self, job: int) -> JobState | None:
        return None


@contextlib.contextmanager
def held_at(point: str, folder: Path) -> Iterator[Callable[[], None]]:
    """No process goes on from this trace point before the test calls what is yielded, or ends."""
    opened, before = folder / "opened", trace.listener

    def wait(name: str) -> None:
        if name == point:
            until(opened.exists, f"the test to let a process go on from {point}")

    trace.listener = wait
    try:
        yield opened.touch
    finally:
        opened.touch()
        trace.listener = before


def read_as(user: User, path: Path) -> bytes | None:
    """What a user's own program reads from the path; None where it gets a permission error."""
    ran = subprocess.run(
        [
            sys.executable,
            "-ISc",
            "import sys; sys.stdout.buffer.write(open(sys.argv[1],'rb').read())",
            path,
        ],
        user=user.uid,
        group=user.gid,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    if b"PermissionError" in ran.stderr:
        return None
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@contextlib.contextmanager
def leased(path: Path, user: User = ALICE) -> Iterator[Callable[[], bool]]:
    """A process of the user's has a write lease on the file (F_SETLEASE) and never gives it back.

    What is yielded says whether the kernel still lets it: after lease-break-time, 45 s, somebody
    who waited for the lease gets it.
    """
    code = (
        "import fcntl, os, signal, sys\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print('taken', flush=True)\n"
        "signal.pause()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-ISc", code, path],
        user=user.uid,
        group=user.gid,
        extra_groups=[],
        stdout=subprocess.PIPE,
    )

    def held() -> bool:
        rows = map(str.split, Path("/proc/locks").read_text().splitlines())
        return any("LEASE" in row and str(holder.pid) in row for row in rows)

    with holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"taken\n"
            assert held()
            yield held
        finally:
            holder.kill()


def fill_with_tmpfs(path: Path) -> None:
    """Mount a file system there that has no space left, with what lay there out of sight."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o711)
    _tmpfs(path, "size=64k,mode=711")
    with open(path / "full", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _tmpfs(path: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
