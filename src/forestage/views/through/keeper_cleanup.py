"""What keepers leave that were killed, stopped or hang: found and cleaned up by the sweep.

lock held, `state` touched      a keeper that is well
lock held, not for STALE        ended: killed, and where no server of it is well, they too, their
                                connection aborted first, so that who reads gets an error at last
lock free, no stager            the directory is removed; servers without a keeper read on
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.cache.layout import Cache
from forestage.clock import Clock
from forestage.system import as_user, files, lock, mounts, processes
from forestage.views.through.keeper import PROCESS_NAME, SERVER_NAME, KeeperState, list_keepers

STALE = 60.0  # seconds
AGAIN = 1.0  # seconds between two looks at a keeper, which is some of its turns
CONNECTIONS = "/sys/fs/fuse/connections"
ABORT = 10.0  # seconds for it


class LivingKeeper(msgspec.Struct, frozen=True):
    """A keeper that lives: its directory, what it wrote, when it was well (epoch; 0: it ends)."""

    spot: Path
    state: KeeperState
    seen: float


def list_hanging_keepers(through: Path, clock: Clock) -> list[LivingKeeper]:
    """The keepers that live and do not turn. Raises OSError."""
    now = clock.wall()
    living = [
        LivingKeeper(spot, state, _read_last_beat(spot)) for spot, state in list_keepers(through)
    ]
    silent = [one for one in living if one.seen and abs(now - one.seen) > STALE]
    if silent:
        clock.sleep(AGAIN)  # a clock that was just set makes all look silent
    return [one for one in silent if _read_last_beat(one.spot) == one.seen]


def kill_keeper(found: LivingKeeper) -> None:
    """Ends a keeper that hangs. Raises OSError, Failed, ChildTimeout."""
    spot, state = found.spot, found.state
    for pid in _list_keeper_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            process = os.pidfd_open(pid)
            try:
                if _has_open_file(pid, spot / "lock"):
                    _kill_with_servers(pid, process, state.device)
            finally:
                os.close(process)


def _list_keeper_pids() -> Iterator[int]:
    """What keepers wrote of themselves may be of another PID namespace, or of a process no more."""
    for pid in processes.list_pids():
        with contextlib.suppress(OSError):  # it has just ended
            process = Path(f"/proc/{pid}")
            if processes.read_name(process) == PROCESS_NAME and processes.is_trusted(process):
                yield pid


def _kill_with_servers(pid: int, process: int, device: int) -> None:
    """Ends the keeper that this pidfd is of, and its servers where none of them is well."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    servers = [Path("/proc", child) for child in children]
    if not any(map(_is_running_server, servers)):
        if device:
            as_user.run_in_child(lambda: (_abort_connection(os.minor(device)), []), bool, ABORT)
        for server in servers:  # one that is stopped would stay for ever
            os.kill(int(server.name), signal.SIGKILL)
    signal.pidfd_send_signal(process, signal.SIGKILL)


def list_dead_directories(through: Path, cache: Cache, now: float) -> list[Path]:
    """The directories in which nothing was made for STALE, and of no stager. Raises OSError."""
    return [
        spot
        for spot in (through.iterdir() if through.exists() else ())
        if abs(now - spot.stat().st_mtime) > STALE and lock.is_free(cache.key_lock(spot.name))
    ]


def remove_directory(spot: Path) -> None:
    """Removes such a directory, unless a keeper lives there. Raises OSError."""
    with contextlib.suppress(lock.LockTimeout), lock.held(spot / "lock", 0):
        # A server that lost its keeper has it mapped still, and would believe the marks for ever.
        with contextlib.suppress(FileNotFoundError), (spot / "pieces").open("r+b") as marks:
            marks.write(bytes(os.fstat(marks.fileno()).st_size))
        shutil.rmtree(spot)


def _read_last_beat(spot: Path) -> float:
    found = files.lstat_or_none(spot / "state")
    return found.st_mtime if found else 0.0  # it ends


def _has_open_file(pid: int, file: Path) -> bool:
    # By name: to look at a file itself may hang, the keeper has the source open.
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd) == os.path.realpath(file):
                return True
    return False


def _is_running_server(process: Path) -> bool:
    """Whether it is a server whose main thread runs: that one never waits for disk or source."""
    try:
        name, state = processes.read_name(process), processes.read_stat(process).state
    except (FileNotFoundError, ProcessLookupError):
        return False
    return name == SERVER_NAME and state in "RS"


def _abort_connection(minor: int) -> bool:
    """Ends a connection of FUSE, in a mount namespace of this child's own. Raises OSError."""
    mounts.enter_private_namespace()
    mounts.mount("fusectl", CONNECTIONS, 0, "fusectl")
    with contextlib.suppress(FileNotFoundError):  # it is over
        Path(CONNECTIONS, str(minor), "abort").write_text("1")
    return True
