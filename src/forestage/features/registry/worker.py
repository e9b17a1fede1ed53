"""Root's side of a registry worker: starts it as the user, reads its lines, ends it.

What comes from it is a user's word: so many bytes of lines that are words, or it is killed. It may
outlive who started it no longer than its stdin stays open.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping

import msgspec

from forestage.features.registry import worker_messages
from forestage.features.registry.parent_pipe import GRACE
from forestage.features.registry.worker_messages import (
    ImageReady,
    ImportOrder,
    ImportRefused,
    WorkerMessage,
    WorkerProtocolError,
)
from forestage.system import run
from forestage.system.as_user import User

MODULE = "forestage.features.registry.worker_main"
AT_ONCE = 64 * 1024  # bytes read by one call of `read_messages`; a pipe holds as much
MOST = 4 << 20  # bytes in all: a line each 30 s, for weeks


class RegistryWorker:
    """A worker that runs; `fd` can be read once there may be words."""

    def __init__(self, program: run.PipedProcess) -> None:
        self.pid = program.pid
        self.fd = program.out
        self.ended = False
        self._program = program
        self._read = b""
        self._bytes = 0
        self._killed = False

    def __enter__(self) -> "RegistryWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def read_messages(self) -> list[WorkerMessage]:
        """What it said since the last call; the last word ever is ImageReady or ImportRefused.

        Once `ended` is set there will be no more.
        """
        if self.ended:
            return []
        found: list[WorkerMessage] = []
        try:
            for line in self._read_lines():
                found.append(worker_messages.decode_message(line))
                if isinstance(found[-1], ImageReady | ImportRefused):
                    self.ended = True
                    break
        except WorkerProtocolError as error:
            self.kill()
            found.append(
                ImportRefused("registry-odd", f"the worker gave an invalid answer: {error}")
            )
        return found

    def kill(self) -> None:
        """Ends it and all that it started; takes GRACE at most, and a little more.

        A worker may let go of its lease and its part, and enroot of its temporary files.
        """
        self.ended = True
        if self._killed:  # its number may be another's by now
            return
        self._killed = True
        self._program.close_stdin()
        self._program.wait(GRACE)
        self._program.kill()
        self._program.wait(GRACE)

    def _read_lines(self) -> list[bytes]:
        """The whole lines that can be read now. Raises WorkerProtocolError."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, AT_ONCE)
            if not data:
                raise WorkerProtocolError("it ended without an answer")
        self._bytes += len(data)
        *lines, self._read = (self._read + data).split(b"\n")
        if self._bytes > MOST or len(self._read) >= worker_messages.MAX_LINE_BYTES:
            raise WorkerProtocolError("it says more than any worker has to say")
        return [line + b"\n" for line in lines]


def write_environment_file(variables: Mapping[str, str]) -> int:
    """Returns a descriptor of a job's environment, NUL after each entry, in memory."""
    fd = os.memfd_create("environment")
    with os.fdopen(os.dup(fd), "wb") as file:
        for name, value in variables.items():
            file.write(os.fsencode(f"{name}={value}") + b"\0")
    return fd


def start_worker(
    user: User | None,
    order: ImportOrder,
    environ_fd: int,
    enter_cgroups: Callable[[], None] = run.stay_in_cgroups,
) -> RegistryWorker:
    """Starts a worker for a user, apart, in the cgroups of `enter_cgroups`.

    For None as who we are, so not as root.

    `environ_fd` is open on the job's environment, or -1. Raises Failed, OSError.
    """
    order = msgspec.structs.replace(order, environ_fd=environ_fd, apart=user is not None)
    argv = (sys.executable, "-I", "-m", MODULE, worker_messages.encode_order(order))
    given = (environ_fd,) if environ_fd >= 0 else ()
    return RegistryWorker(run.start_piped_program(user, argv, given, enter_cgroups))
