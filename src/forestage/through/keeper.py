"""Starts the process that holds an image's read-through file.

What such a process does is in through/keeping.py, which it alone imports: its hook does not wait
for that.
"""

import os
import socket
import time
from functools import partial
from pathlib import Path

from forestage import events, log
from forestage.errors import Declined
from forestage.stage.task import Task
from forestage.system import child, folders, fuse, lock
from forestage.through import living
from forestage.through.living import PROCESS_NAME, states

MOST, MOST_OF_USER = 7, 4
"""Images of a node, and of one user on it, that are read through at once.

A keeper and its server take 17 MiB, 33 once all threads have read: no more than 256 for the node.
"""

SAFEST = -1000  # oom_score_adj: a killed keeper and server are a job's I/O error
SILENT = "its keeper does not answer"
PROBED = 0.2  # seconds for which somebody who only looks may hold the lock
ANSWER = 1.0  # seconds for a connection: a keeper that is stopped takes none once its queue is full


def start(task: Task, wait: bool = True) -> Path:
    """Returns the socket of the image's keeper, which is started if there is none.

    Without `wait` it listens there soon, or never: for a Prolog for which the job's start waits,
    and which a source that hangs must not hold up. Raises Declined (no-through) where there can be
    none, OSError.
    """
    spot = task.node.places.through / task.key
    folders.keep(spot.parent)
    folders.keep(spot)
    if listens(spot / "sock"):
        return spot / "sock"
    if child.is_in_job():  # others may come to read, and it would take them with it
        raise Declined("no-through", "the step is in its job's own PID or user namespace")
    must_be_allowed(spot, task.opened.user.uid)
    _, ours = child.begin(partial(_live, task, spot), partial(_failed, task.image.path))
    with ours:
        # First that it has left the hook's session, which Slurm will kill.
        said = child.heard(ours, living.START, SILENT)
        if said == "begun" and wait:
            said = child.heard(ours, living.START, SILENT)
    if said == "busy" and _comes(spot / "sock"):
        said = "ready"
    if said not in ("begun", "ready"):
        raise Declined("no-through", said or "its keeper died")
    return spot / "sock"


def listens(path: Path) -> bool:
    """Whether a keeper takes connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(ANSWER)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def must_be_allowed(spot: Path, uid: int) -> None:
    if not os.path.exists(fuse.DEVICE):
        raise Declined("no-through", f"this node has no {fuse.DEVICE}")
    owners = [state.uid for other, state in states(spot.parent) if other != spot]
    if len(owners) >= MOST or owners.count(uid) >= MOST_OF_USER:
        raise Declined("no-through", f"{len(owners)} images are read through on this node already")


def _comes(path: Path) -> bool:
    """Whether the keeper that another hook has just started listens in time."""
    end = time.monotonic() + living.START
    while time.monotonic() < end:
        if listens(path):
            return True
        time.sleep(0.02)
    return False


def _live(task: Task, spot: Path, hook: socket.socket) -> None:
    """The keeper's whole life."""
    child.stand_alone(PROCESS_NAME)
    child.leave_job(SAFEST)
    child.tell(hook, "begun")
    task = task.received()
    child.let_go({hook.fileno(), task.opened.fd})
    from forestage.through.keeping import Keeper

    try:
        with lock.held(spot / "lock", PROBED):
            Keeper(task, spot, must_be_allowed).run(hook)
    except lock.Busy:
        child.tell(hook, "busy")


def _failed(path: str, hook: socket.socket, error: BaseException | None) -> None:
    child.tell(hook, str(error))
    log.say(f"keeper image={events.field(path)} result=failed detail={error!r}", by_slurm=True)
