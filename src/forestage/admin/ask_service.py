"""Service of a node for users without root: `forestage answer`.

    /run/forestage/ask.sock    one line, `job 4242`, `images 4242` or `status`; one JSON
                               document (admin/ask_answer.py)

The kernel says who asks (SO_PEERCRED). systemd listens, and starts us for the first who asks; when
nobody has asked for IDLE seconds we end. Every user of the node can connect, so all is bounded: the
connections of one user and of all, the bytes and the seconds of a question, the answers at once,
the bytes and the seconds of an answer.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from forestage import log
from forestage.admin import ask_answer
from forestage.admin.ask_answer import Answer
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import load_settings
from forestage.errors import ForestageError
from forestage.paths import Places
from forestage.system import event_loop, folders

PER_USER = 4  # connections
MOST = 64  # connections of all users
LINE = 64  # bytes of a question
QUESTION_SECONDS = 2.0
ANSWER_SECONDS = 10.0  # for a client to take the answer
IDLE = 60.0  # seconds without a connection until the service ends, where systemd would start it
FRESH = 10.0  # seconds for which one look at the node's state is good
FIRST_FD = 3  # sd_listen_fds(3)

_JOB = re.compile(rb"(job|images) ([1-9][0-9]{0,9})\n")
_KINDS = "a question is `job ID`, `images ID` or `status`, and a line end"


class Desk:
    """Answers one connection after the other. `now` is monotonic."""

    def __init__(self, places: Places, clock: Clock) -> None:
        self.places = places
        self.clock = clock
        self.now = clock.monotonic
        self.connections: Counter[int] = Counter()
        self.last = self.now()
        self.turn = asyncio.Lock()
        self._refused = 0
        self._why = ""
        self._public = b""
        self._public_until = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its question to its end. Never raises."""
        uid = peer(writer.get_extra_info("socket"))
        self.connections[uid] += 1
        try:
            writer.write(await self._answer(reader, uid))
        finally:
            writer.close()
            # Who does not take it by then does not get it.
            with contextlib.suppress(asyncio.TimeoutError, OSError):
                await asyncio.wait_for(writer.wait_closed(), ANSWER_SECONDS)
            writer.transport.abort()
            self.connections[uid] -= 1
            self.last = self.now()

    def note_refused(self, why: str) -> None:
        """Count a connection that could not be accepted, for the next line of the log."""
        self._refused, self._why = self._refused + 1, why

    def log_refused(self) -> None:
        """Log what was refused since the last call. To be called once a second."""
        if self._refused:
            log.say(f"answer refused={self._refused} last: {self._why}", by_slurm=False)
            self._refused = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody has asked for a while."""
        return not self.connections.total() and self.now() - self.last > IDLE

    async def _answer(self, reader: asyncio.StreamReader, uid: int) -> bytes:
        # Root has not to wait for anybody's sake.
        if uid and (self.connections[uid] > PER_USER or self.connections.total() > MOST):
            return problem("too many questions at once: ask again in a moment")
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), QUESTION_SECONDS)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return problem(_KINDS)
        async with self.turn:
            try:
                return await asyncio.to_thread(self._told, line, uid)
            except (ForestageError, OSError):  # its text may hold paths
                return problem("the node could not answer: root sees why with the same command")

    def _told(self, line: bytes, uid: int) -> bytes:
        about = _JOB.fullmatch(line)
        if about is not None and about[1] == b"job":
            return ask_answer.about_job(self.places, int(about[2]), uid)
        if about is not None:
            return ask_answer.about_images(self._node(), int(about[2]), uid)
        if line != b"status\n":
            return problem(_KINDS)
        if self.now() > self._public_until:
            self._public = ask_answer.encoded(Answer(public=ask_answer.public(self._node())))
            self._public_until = self.now() + FRESH
        return self._public

    def _node(self) -> Node:
        # Read each time: while users ask we do not end, and one that is wrong must not end us, as
        # systemd gives a socket up whose service fails a few times.
        return Node.of(load_settings(self.places.etc).of_node, self.places, self.clock)


def problem(text: str) -> bytes:
    return ask_answer.encoded(Answer(problem=text))


def peer(connected: socket.socket) -> int:
    """The uid of who has connected, by the kernel's word."""
    facts = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, uid, _ = struct.unpack("iII", facts)
    return int(uid)


def run(places: Places, clock: Clock, environ: Mapping[str, str]) -> None:
    """Answers until SIGTERM or, where systemd listens, until nobody asks any more.

    Raises OSError.
    """
    passed = environ.get("LISTEN_PID") == str(os.getpid()) and environ.get("LISTEN_FDS") == "1"
    listening = socket.socket(fileno=FIRST_FD) if passed else listen(places)
    with listening:
        asyncio.run(_serve(Desk(places, clock), listening, passed))


def listen(places: Places) -> socket.socket:
    """The socket, where nobody else has made it."""
    path = places.ask
    folders.keep(path.parent, folders.PASSABLE)
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(os.fspath(path))
    path.chmod(0o666)
    made.listen(MOST)
    return made


async def _serve(desk: Desk, listening: socket.socket, ends: bool) -> None:
    event_loop.report_errors(asyncio.get_running_loop(), desk.note_refused)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # From 3.13 on asyncio would remove the socket's name with the server, which systemd, who has
    # made it, does not see: nobody could ask any more.
    stays: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
    server = await asyncio.start_unix_server(desk.serve, sock=listening, limit=LINE, **stays)
    while not stop.is_set() and not (ends and desk.is_idle):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
        desk.log_refused()
    server.close()
