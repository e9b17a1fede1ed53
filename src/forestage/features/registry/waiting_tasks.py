"""Who waits for an image of a registry: the tasks of a step, each at its connection to a socket.

They hear lines (slurm/step_protocol.py), a packet each (src/spank/import_wait.c).
"""

import socket
import time
from pathlib import Path

from forestage.errors import Declined
from forestage.slurm.step_protocol import PROTOCOL_GREETING, encode_line
from forestage.system import daemon
from forestage.system.daemon import TaskConnections
from forestage.system.processes import ProcessIdentity
from forestage.units import make_printable

LAST = 5.0  # seconds from the last task's end; another may come a little later
TURN = 0.25  # seconds between two looks who waits
ALL_TASKS_ENDED = "the step has ended, nobody waits for its image"


class WaitingTasks:
    """The tasks that wait at a socket. Each hears all that was said, whenever it came."""

    def __init__(self, path: Path, first: float, manager: ProcessIdentity | None = None) -> None:
        """`first` is how many seconds the first one may take to come.

        No further one comes once the step's `manager` has ended, if that is known.
        """
        self.path = path
        self.manager = manager
        # One of a step of that number before a requeue gives way.
        self.clients = TaskConnections(
            daemon.listen_for_clients(path), self._ignore_request, self._send_past_lines
        )
        self.lines = [encode_line(PROTOCOL_GREETING)]
        self.alone_since, self.limit = time.monotonic(), first
        self.has_any_come = False  # a task, ever

    def __enter__(self) -> "WaitingTasks":
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        self.clients.close()

    @property
    def have_tasks_gone(self) -> bool:
        """Whether nobody waits any more, or nobody came."""
        if self.clients.connections:
            return False
        return self.can_none_come or time.monotonic() - self.alone_since > self.limit

    @property
    def can_none_come(self) -> bool:
        """Whether the step has ended, also before it had any task."""
        return self.is_job_over or (self.manager is not None and not self.manager.is_running)

    @property
    def is_any_waiting(self) -> bool:
        """Whether a task waits at this moment: its job is not over then."""
        self._serve_connections(-1, 0.0)
        return bool(self.clients.connections)

    @property
    def is_job_over(self) -> bool:
        """Whether the job's Epilog has been here: it deletes the socket before the lease."""
        return not self.path.exists()

    def check_any_waiting(self) -> None:
        """Raises Declined where the last task has ended and no other comes.

        Returns as soon as a task waits; before the first, unless the step has ended.
        """
        while not self.is_any_waiting and (self.has_any_come or self.can_none_come):
            if self.have_tasks_gone:
                raise Declined("stopped", ALL_TASKS_ENDED)
            self.wait(-1)

    def wait(self, fd: int) -> None:
        """Waits a moment for something to read at `fd`, if that is one, or for another task."""
        self._serve_connections(fd, TURN)

    def _serve_connections(self, fd: int, seconds: float) -> None:
        self.clients.serve_for(seconds, fd)
        if self.clients.connections:
            self.alone_since, self.limit, self.has_any_come = time.monotonic(), LAST, True

    def send_user_line(self, text: str) -> None:
        """A line for the user, which the first task on the node writes."""
        self.broadcast_line("say", f"forestage: {make_printable(text)}")

    def broadcast_line(self, *fields: str) -> None:
        """A line for all of them."""
        line = encode_line(*fields)
        self.lines.append(line)
        for task in [*self.clients.connections.values()]:
            self._send(task, line)

    def _send_past_lines(self, task: socket.socket) -> None:
        for line in self.lines:
            self._send(task, line)

    def _ignore_request(self, task: socket.socket, asked: bytes) -> None:
        """A task says nothing."""

    def _send(self, task: socket.socket, line: bytes) -> None:
        try:
            task.send(line, socket.MSG_NOSIGNAL)
        except OSError:  # it has ended, or reads nothing
            self.clients.disconnect(task)
