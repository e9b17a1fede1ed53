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
        self.guests = TaskConnections(daemon.listen_for_clients(path), self._answer, self._greet)
        self.lines = [encode_line(PROTOCOL_GREETING)]
        self.alone, self.limit = time.monotonic(), first
        self.came = False  # a task, ever

    def __enter__(self) -> "WaitingTasks":
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        self.guests.close()

    @property
    def have_gone(self) -> bool:
        """Whether nobody waits any more, or nobody came."""
        if self.guests.connections:
            return False
        return self.none_can_come or time.monotonic() - self.alone > self.limit

    @property
    def none_can_come(self) -> bool:
        """Whether the step has ended, also before it had any task."""
        return self.are_over or (self.manager is not None and not self.manager.is_running)

    @property
    def are_there(self) -> bool:
        """Whether a task waits at this moment: its job is not over then."""
        self._look(-1, 0.0)
        return bool(self.guests.connections)

    @property
    def are_over(self) -> bool:
        """Whether the job's Epilog has been here: it deletes the socket before the lease."""
        return not self.path.exists()

    def must_wait(self) -> None:
        """Raises Declined where the last task has ended and no other comes.

        Returns as soon as a task waits; before the first, unless the step has ended.
        """
        while not self.are_there and (self.came or self.none_can_come):
            if self.have_gone:
                raise Declined("stopped", ALL_TASKS_ENDED)
            self.wait(-1)

    def wait(self, fd: int) -> None:
        """Waits a moment for something to read at `fd`, if that is one, or for another task."""
        self._look(fd, TURN)

    def _look(self, fd: int, seconds: float) -> None:
        self.guests.serve_for(seconds, fd)
        if self.guests.connections:
            self.alone, self.limit, self.came = time.monotonic(), LAST, True

    def speak(self, text: str) -> None:
        """A line for the user, which the first task on the node writes."""
        self.say("say", f"forestage: {make_printable(text)}")

    def say(self, *fields: str) -> None:
        """A line for all of them."""
        line = encode_line(*fields)
        self.lines.append(line)
        for task in [*self.guests.connections.values()]:
            self._send(task, line)

    def _greet(self, task: socket.socket) -> None:
        for line in self.lines:
            self._send(task, line)

    def _answer(self, task: socket.socket, asked: bytes) -> None:
        """A task says nothing."""

    def _send(self, task: socket.socket, line: bytes) -> None:
        try:
            task.send(line, socket.MSG_NOSIGNAL)
        except OSError:  # it has ended, or reads nothing
            self.guests.disconnect(task)
