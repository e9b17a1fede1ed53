"""What a forked process must let go of before it may outlive, or outhang, its parent."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

from forestage import log
from forestage.system import libc

NO_LIMIT = 1 << 60  # bytes
TASK_PLACING_TIME = 3.0  # seconds in which Slurm puts a task where it is to run
PAUSE = 0.01  # seconds between two tries


def fork_with_socket(
    run: Callable[[socket.socket], None],
    report_error: Callable[[socket.socket, BaseException | None], None],
) -> tuple[int, socket.socket]:
    """Forks a process that `run` is all of; returns its pid, and our end of the socket to it.

    `run` and `report_error`, which gets the error that ended it, are given the other end.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        run_and_exit(partial(run, theirs), partial(report_error, theirs))
    theirs.close()
    return pid, ours


def run_and_exit(
    run: Callable[[], None], report_error: Callable[[BaseException | None], None]
) -> NoReturn:
    """Runs all that a forked process is for, then ends it, whatever happens.

    It must never return into its parent's code. `report_error` gets the error that ended it.
    """
    ended = False
    try:
        run()
        ended = True
    finally:
        try:
            # Not by exc_info() alone: the parent may have been handling an error when it forked.
            if not ended:
                report_error(sys.exc_info()[1])
        finally:
            os._exit(0 if ended else 1)


def close_descriptors_except(keep: set[int]) -> None:
    """Drops what the child would hold for as long as it lives, all descriptors but `keep`.

    That is the hook's stdout and stderr (slurmd waits until all who hold them are gone) and every
    lock (flock(2) belongs to the open file, so a copy of the descriptor keeps it).
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def is_in_job_namespace(root: Path = Path("/")) -> bool:
    """Whether this process is in a job's own PID or user namespace (namespace/linux, Slurm 25.11).

    It is killed with the job then, and nobody outside may read a FUSE that it mounts. The first
    process of a job's PID namespace is a step manager. Where it is the node's, it has another user
    namespace, or may not be looked at.
    """
    proc = root / "proc"
    with contextlib.suppress(OSError):
        if (proc / "1/comm").read_bytes() == b"slurmstepd\n":
            return True
        users = os.readlink(proc / "self/ns/user")
        return users != FIRST_USERS and users != os.readlink(proc / "1/ns/user")
    return True


FIRST_USERS = "user:[4026531837]"  # PROC_USER_INIT_INO of linux/proc_ns.h
SLURM_CGROUP_NAMES = ("slurm*", "*slurmstepd.scope", "job_*")
"""Names of Slurm's cgroups: slurmd.service, slurm_n1/uid_1/job_7, n1_slurmstepd.scope/SLUID."""
OWN_UNITS = ("forestage-hold.service", "forestage.service")
"""Our own units: a hook's child comes from the first, what outlives a run of `tend` from the other.
Of a process that is left there systemd would complain at each start."""
HOLD_CGROUP = "run/forestage/hold"
"""Leads to the cgroup of forestage-hold.service (packaging/hold), where that runs: not with v1."""

CgroupName = Literal["copy", "serve", "idle"]


def leave_job_cgroups(
    oom_score_adj: int = 0, leaf: CgroupName = "serve", root: Path = Path("/")
) -> None:
    """Goes from Slurm's cgroups, if this process is in such, to a leaf of forestage's own.

    Where there is none, to the roots of their hierarchies. A site may bound `copy`; with `serve` a
    job's reads would fail or wait.

    What a step's helper starts is in the step's. There it would be killed with the step (cgroup
    v2), keep the job's directories from going (v1), and have the job pay for the page cache that it
    fills. What a Prolog starts is in slurmd.service, and would be stopped with it. slurmstepd, and
    all it starts, is also the last that the kernel kills for want of memory, which `oom_score_adj`
    sets.
    """
    found = _list_slurm_cgroups(root, "self", (*SLURM_CGROUP_NAMES, *OWN_UNITS))
    if found and not _try_join_cgroup(root / HOLD_CGROUP / leaf):
        for top, _ in found:
            with contextlib.suppress(OSError):
                (top / "cgroup.procs").write_text("0")
    with contextlib.suppress(OSError):
        (root / "proc/self/oom_score_adj").write_text(str(oom_score_adj))


def _try_join_cgroup(leaf: Path) -> bool:
    try:
        (leaf / "cgroup.procs").write_text("0")
    except FileNotFoundError:
        return False
    except OSError as error:
        log.write_log_line(f"hold result=failed detail={str(error)!r}", by_slurm=True)
        return False
    return True


def join_slurm_cgroups(pid: int, other_pid: int, root: Path = Path("/")) -> None:
    """Puts a process into those of Slurm's cgroups that another one is in. Raises OSError."""
    for top, path in _list_slurm_cgroups(root, str(other_pid)):
        with contextlib.suppress(OSError):
            (top / path.lstrip("/") / "cgroup.procs").write_text(str(pid))


def find_task_cgroups(manager: int, root: Path = Path("/")) -> list[Path] | None:
    """The `cgroup.procs` of Slurm's cgroups of a step's task; none where Slurm uses no cgroups.

    None as long as Slurm has not put a task where it is to run. It does so while the task is in
    task_init_privileged of its plugins; before, a task is where the step manager is: with cgroup v2
    that has none of the step's limits. `manager` is the pid of the step's. Raises OSError.
    """
    for task in _list_children(root / "proc" / str(manager)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found = _list_slurm_cgroups(root, str(task))
            if all(is_task_cgroup(path) for _, path in found):
                inside = [top / path.lstrip("/") / "cgroup.procs" for top, path in found]
                return [one for one in inside if one.exists()]
    return None


def enter_task_cgroups(
    manager: int, without: str = "", patience: float = TASK_PLACING_TIME
) -> None:
    """Goes to the cgroups of a step's task, but for v1's hierarchy `without`.

    Again, where that fails: on its way there, a task is in others for a moment (task_special), and
    so would this process be. Raises OSError after `patience` seconds.
    """
    end = time.monotonic() + patience
    while True:
        try:
            found = find_task_cgroups(manager)
            if found is None:
                raise TimeoutError("Slurm has put no task into its cgroups")
            for one in found:
                if without not in one.parts:
                    one.write_text("0")
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(PAUSE)
        else:
            return


def remove_empty_cgroups(groups: Iterable[Path], kinds: Sequence[str]) -> None:
    """Removes empty cgroups of a step, and those above them, up to the first of no such kind.

    Slurm tries that once, when the step's manager ends, and leaves for good what is in use then.
    `kinds` are how names begin. With "job_" no step of their job may begin meanwhile.
    """
    for group in groups:
        for one in (group, *group.parents):
            if not one.name.startswith(tuple(kinds)):
                break
            with contextlib.suppress(OSError):  # it is in use, or gone
                one.rmdir()


def has_child_owned_by(pid: int, uid: int) -> bool:
    """Whether a process has a child that this user owns: of a step's manager, a task that runs."""
    for one in _list_children(Path("/proc") / str(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if os.stat(f"/proc/{one}").st_uid == uid:  # noqa: PTH116
                return True
    return False


def is_task_cgroup(path: str) -> bool:
    """Pure: whether one of Slurm's cgroups is where tasks run.

    JOB/step_0/task_0 with v1, JOB/step_0/user/task_0 with v2; a step manager is in JOB, and in
    JOB/step_0/slurm. What is no job's at all counts: slurmd.service of a hierarchy that Slurm does
    not use.
    """
    parts = path.split("/")
    if any(part.startswith("step_") for part in parts):
        return parts[-1] not in ("slurm", "user")
    return not any(part.startswith("job_") for part in parts)


def read_job_memory_limit(pid: int, root: Path = Path("/")) -> int | None:
    """The bytes of memory that the job of a process in one of its steps may have, by its cgroups.

    A step may have less. None where Slurm limits none: v1 has a number above all memory for that,
    v2 a word. Raises OSError.
    """
    found = _list_slurm_cgroups(root, str(pid))
    return _find_least_memory_limit((top, path.partition("/step_")[0]) for top, path in found)


def find_own_memory_limit(root: Path = Path("/")) -> int | None:
    """The bytes of memory that this process may have, by its cgroups; None where none limits it."""
    with contextlib.suppress(OSError):
        return _find_least_memory_limit(_list_cgroups(root, "self"))
    return None


def count_own_processors() -> int:
    """The processors that this process may use: Slurm's, of a task's cpuset or binding."""
    return len(os.sched_getaffinity(0))


def _find_least_memory_limit(groups: Iterable[tuple[Path, str]]) -> int | None:
    """The least limit of these cgroups and of those above them."""
    limits = []
    for top, path in groups:
        group = Path(path.lstrip("/"))
        for at in (group, *group.parents):
            for name in ("memory.limit_in_bytes", "memory.max"):
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((top / at / name).read_text()))
    least = min(limits, default=NO_LIMIT)
    return least if least < NO_LIMIT else None


def _list_slurm_cgroups(
    root: Path, pid: str, names: Sequence[str] = SLURM_CGROUP_NAMES
) -> list[tuple[Path, str]]:
    """Those of its cgroups that are Slurm's."""
    return [
        (top, path)
        for top, path in _list_cgroups(root, pid)
        if any(fnmatchcase(part, name) for part in path.split("/") for name in names)
    ]


def _list_cgroups(root: Path, pid: str) -> list[tuple[Path, str]]:
    """The cgroups that a process is in: where each hierarchy may be, and the path in that."""
    cgroups, found = root / "sys/fs/cgroup", []
    for line in (root / "proc" / pid / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        name = controllers.removeprefix("name=")
        for top in (cgroups / name,) if name else (cgroups, cgroups / "unified"):
            found.append((top, path))
    return found


def detach_session(name: str) -> None:
    """Leaves the session and the directory of who started this process; it has this name then."""
    os.setsid()
    os.chdir("/")  # nobody's directory is to be busy because of it
    Path("/proc/self/comm").write_text(name)


def call_prctl(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    libc.call_libc("prctl", option, value, 0, 0, 0)


def reap_ended_children() -> None:
    """Lets go of all children that have ended; waits for none."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _list_children(proc: Path) -> list[int]:
    with contextlib.suppress(OSError):
        texts = [(task / "children").read_text() for task in (proc / "task").iterdir()]
        return [int(pid) for text in texts for pid in text.split()]
    return []
