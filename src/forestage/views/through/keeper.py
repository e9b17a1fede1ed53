"""Starts the process that holds an image's read-through file, and knows which of them live.

/run/forestage/through/<key>/lock   held as long as the keeper lives
                             sock   where it listens
                             state  whose it is; its mtime: the keeper was well then

What such a process does is in views/through/keeper_process.py, which it alone imports: its hook
does not wait for that.
"""

import contextlib
import os
import socket
import time
from functools import partial
from pathlib import Path

import msgspec

from forestage import events, trace
from forestage.errors import Declined
from forestage.stage.task import CopyTask
from forestage.system import daemon, folders, forked_child, fuse, lock, records
from forestage.system.daemon import OOM_EXEMPT, DaemonSpec, StartChannel, StartReport

MOST, MOST_OF_USER = 7, 4
"""Images of a node, and of one user on it, that are read through at once.

A keeper and its server take 17 MiB, 33 once all threads have read: no more than 256 for the node.
"""

PROCESS_NAME = "forestage-keep"  # in ps(1); its servers are SERVER_NAME
SERVER_NAME = "forestage-read"
KEEPER = DaemonSpec(PROCESS_NAME, oom_score_adj=OOM_EXEMPT)
START = 10.0  # seconds until the first server answers
PROBED = 0.2  # seconds for which somebody who only looks may hold the lock
ANSWER = 1.0  # seconds for a connection: a keeper that is stopped takes none once its queue is full


class KeeperState(msgspec.Struct, frozen=True):
    """The file `state`: the keeper, for people; the user it was started for, the file's st_dev."""

    pid: int
    uid: int
    device: int


def start_keeper(task: CopyTask, wait: bool = True) -> Path:
    """Returns the socket of the image's keeper, which is started if there is none.

    Without `wait` it listens there soon, or never: for a Prolog for which the job's start waits,
    and which a source that hangs must not hold up. Raises Declined (no-through) where there can be
    none, OSError.
    """
    spot = task.node.places.through / task.key
    folders.ensure_directory_with_mode(spot.parent)
    folders.ensure_directory_with_mode(spot)
    trace.reach_point("keeper place")
    if is_listening(spot / "sock"):
        return spot / "sock"
    if (
        forked_child.is_in_job_namespace()
    ):  # others may come to read, and it would take them with it
        raise Declined("no-through", "the step is in its job's own PID or user namespace")
    check_keeper_allowed(spot, task.opened.user.uid)
    about = f"keeper image={events.quote_field(task.image.path)}"
    with daemon.start_daemon(KEEPER, about, partial(_run_keeper, task, spot)) as channel:
        there = not wait or channel.wait_until_ready(START, "no-through")
    if not there and not _wait_until_listening(spot / "sock"):
        raise Declined("no-through", "another keeper of it does not answer")
    return spot / "sock"


def is_listening(path: Path) -> bool:
    """Whether a keeper takes connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(ANSWER)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def check_keeper_allowed(spot: Path, uid: int) -> None:
    if not os.path.exists(fuse.DEVICE):
        raise Declined("no-through", f"this node has no {fuse.DEVICE}")
    owners = [state.uid for other, state in list_keepers(spot.parent) if other != spot]
    if len(owners) >= MOST or owners.count(uid) >= MOST_OF_USER:
        raise Declined("no-through", f"{len(owners)} images are read through on this node already")


def list_keepers(through: Path) -> list[tuple[Path, KeeperState]]:
    """The keepers that live, by their directories. Raises OSError."""
    found = []
    for spot in through.iterdir() if through.exists() else ():
        with contextlib.suppress(FileNotFoundError, records.DamagedRecord):
            if not lock.is_free(spot / "lock"):
                found.append((spot, records.load(spot / "state", KeeperState)))
    return found


def _wait_until_listening(path: Path) -> bool:
    """Whether the keeper that another hook has just started listens in time."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        if is_listening(path):
            return True
        time.sleep(0.02)
    return False


def _run_keeper(task: CopyTask, spot: Path, hook: StartChannel) -> None:
    """The keeper's whole life."""
    task = task.with_descriptor()
    hook.release_hook(task.opened.fd)
    from forestage.views.through.keeper_process import Keeper

    try:
        with lock.held(spot / "lock", PROBED):
            Keeper(task, spot, check_keeper_allowed).run(hook)
    except lock.LockTimeout:
        hook.send(StartReport("busy"))
