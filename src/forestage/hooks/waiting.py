"""Who waits for an image of a registry: the tasks of a step, each at its connection to a socket.

They hear lines of the helper's language (hooks/step.py), a packet each (src/spank/later.c).
"""

import contextlib
import os
import select
import socket
import time
from pathlib import Path
from typing import Protocol

from forestage.errors import Declined
from forestage.units import printable

LAST = 5.0  # seconds from the last task's end; another may come a little later
TURN = 0.25  # seconds between two looks who waits
MOST_TASKS = 1024  # that wait at once; others stand in line
GONE = "the step has ended, nobody waits for its image"


class Waiting(Protocol):
    """Who waits for the image."""

    @property
    def have_gone(self) -> bool: ...
    @property
    def are_over(self) -> bool: ...
    def wait(self, fd: int) -> None: ...
    def must_wait(self) -> None: ...
    def speak(self, text: str) -> None: ...


class Nobody:
    """In the place of tasks where none are there yet: for so many seconds."""

    are_over = False

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def have_gone(self) -> bool:
        return time.monotonic() > self.end

    def wait(self, fd: int) -> None:
        select.select([fd], [], [], TURN)

    def must_wait(self) -> None:
        """What comes of it is for later."""

    def speak(self, text: str) -> None:
        """Nobody reads it."""


class Tasks:
    """The tasks that wait at a socket. Each hears all that was said, whenever it came."""

    def __init__(self, path: Path, first: float) -> None:
        """`first` is how many seconds the first one may take to come."""
        self.path = path
        path.unlink(missing_ok=True)  # of a step of that number before a requeue
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mask = os.umask(0o177)
        self.listener.bind(os.fspath(path))
        os.umask(mask)
        self.listener.listen(MOST_TASKS)
        self.listener.setblocking(False)
        self.connections: list[socket.socket] = []
        self.lines: list[bytes] = []
        self.alone, self.limit = time.monotonic(), first
        self.came = False  # a task, ever

    def __enter__(self) -> "Tasks":
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        for one in (*self.connections, self.listener):
            one.close()

    @property
    def have_gone(self) -> bool:
        """Whether nobody waits any more, or nobody came."""
        return not self.connections and time.monotonic() - self.alone > self.limit

    @property
    def are_there(self) -> bool:
        """Whether a task waits at this moment: its job is not over then."""
        self._look(-1, 0.0)
        return bool(self.connections)

    @property
    def are_over(self) -> bool:
        """Whether the job's Epilog has been here: it deletes the socket before the lease."""
        return not self.path.exists()

    def must_wait(self) -> None:
        """Raises Declined where the last task has ended and no other comes; before the first, none.

        Returns as soon as a task waits.
        """
        while not self.are_there and self.came:
            if self.have_gone:
                raise Declined("stopped", GONE)
            self.wait(-1)

    def wait(self, fd: int) -> None:
        """Waits a moment for something to read at `fd`, if that is one, or for another task."""
        self._look(fd, TURN)

    def _look(self, fd: int, seconds: float) -> None:
        poll = select.poll()
        open_to_more = [self.listener] * (len(self.connections) < MOST_TASKS)
        for one in (*self.connections, *open_to_more):
            poll.register(one.fileno(), select.POLLIN)
        if fd >= 0:
            poll.register(fd, select.POLLIN)
        ready = {number for number, _ in poll.poll(seconds * 1000)}
        for one in [one for one in self.connections if one.fileno() in ready]:
            self._drop(one)  # a task says nothing: it has ended
        if self.listener.fileno() in ready:
            self._accept()
        if self.connections:
            self.alone, self.limit, self.came = time.monotonic(), LAST, True

    def speak(self, text: str) -> None:
        """A line for the user, which the first task on the node writes."""
        self.say("say", f"forestage: {printable(text)}")

    def say(self, *fields: str) -> None:
        """A line of the helper's language (hooks/step.py)."""
        line = "\t".join(fields).encode(errors="backslashreplace")
        self.lines.append(line)
        for one in [*self.connections]:
            self._send(one, line)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self.connections) < MOST_TASKS:
                made, _ = self.listener.accept()
                made.setblocking(False)
                self.connections.append(made)
                for line in self.lines:
                    self._send(made, line)

    def _send(self, one: socket.socket, line: bytes) -> None:
        try:
            one.send(line, socket.MSG_NOSIGNAL)
        except OSError:  # it has ended, or reads nothing
            self._drop(one)

    def _drop(self, one: socket.socket) -> None:
        if one in self.connections:
            self.connections.remove(one)
            one.close()
