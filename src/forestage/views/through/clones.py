"""Clones of a mount that one process holds in a hidden mount namespace, for the tasks of a job.

Nobody on the node meets such a mount. What is asked and answered, one packet each:

    b"mount"           b"ok", with a detached clone of the mount, for move_mount(2)
    anything else      b"no REASON"
"""

import contextlib
import os
import socket
from pathlib import Path

from forestage.errors import Declined
from forestage.system import mounts

ANSWER = 5.0  # seconds for who holds it
WORDS = 1000  # bytes of an answer


def give(connection: socket.socket, asked: bytes, point: str) -> None:
    """Answers what was asked with the mount at `point` of this process' namespace."""
    with contextlib.suppress(OSError):  # the task is gone
        if asked != b"mount":
            connection.send(b"no such request")
            return
        try:
            clone = mounts.clone(point)
        except OSError as error:
            connection.send(f"no {error.strerror}".encode())
            return
        try:
            socket.send_fds(connection, [b"ok"], [clone])
        finally:
            os.close(clone)


def fetch(name: Path, reason: str) -> int:
    """Returns the descriptor of a clone. Raises Declined for this reason, OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(ANSWER)
        line.connect(os.fspath(name))
        line.send(b"mount")
        said, fds, _, _ = socket.recv_fds(line, WORDS, 1)
    if not fds:
        raise Declined(reason, f"{name} gives no mount: {said.decode(errors='replace')}")
    os.set_inheritable(fds[0], False)
    return fds[0]
