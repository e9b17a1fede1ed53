"""The one door to other programs: argv lists, no shell, no stdin, a small environment."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from forestage.errors import Declined, Failed
from forestage.system import as_user
from forestage.system.as_user import User

# slurmd starts its hooks without a PATH.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# prctl(2), PR_SET_PDEATHSIG: an rsync that outlives its stager would go on writing into an entry.
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
STOP_POLL = 0.2  # seconds between looks at whether a program should be stopped
ENVIRONMENT = {"PATH": PATH, "LC_ALL": "C"}


class Ran(msgspec.Struct, frozen=True):
    """How a program ended; `code` is negative for a signal, as in subprocess."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    def explained(self) -> str:
        """One line for the log: the program, how it ended, its last words."""
        end = f"signal {-self.code}" if self.code < 0 else f"exit {self.code}"
        last = self.err.strip().splitlines()[-1:] or [""]
        return f"{self.argv[0]}: {end} {last[0]}".strip()


def which(program: str) -> str:
    """Where a program is; "" if it is not installed."""
    return shutil.which(program, path=PATH) or ""


def start_as(
    user: User, argv: Sequence[str], pass_fds: Sequence[int], stderr: int
) -> "subprocess.Popen[bytes]":
    """Starts a program for a user, who could start it as well.

    All three ids are theirs, it has no privilege and gets none. It may outlive us. Raises Failed
    where setpriv is missing.
    """
    return _popen(
        [*_as(user), "--", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=ENVIRONMENT,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
    )


def _popen(argv: Sequence[str], **how: Any) -> "subprocess.Popen[bytes]":
    """Starts setpriv, which starts the program. Raises Failed where it is missing."""
    try:
        return subprocess.Popen(  # noqa: S603 - a list, and never a user's word as the program
            list(argv), cwd="/", **how
        )
    except FileNotFoundError:
        raise Failed("program", "setpriv is not installed", "it is part of util-linux") from None


def _as(user: User) -> tuple[str, ...]:
    ids = (f"--reuid={user.uid}", f"--regid={user.gid}")
    groups = f"--groups={','.join(map(str, as_user.groups(user)))}"
    return ("setpriv", *ids, groups, "--no-new-privs", "--inh-caps=-all")


def run(
    argv: Sequence[str],
    pass_fds: Sequence[int] = (),
    stop: threading.Event | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Ran:
    """Runs a program to its end, or kills it and its process group.

    It is killed once `stop` is set, or after `timeout` seconds. `variables` are added to its
    environment. Raises Failed where the program is missing.
    """
    if not which(argv[0]):
        raise Failed("program", f"{argv[0]} is not installed", "install it on every node")
    process = _popen(
        [*DIES_WITH_US, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, **variables},
        pass_fds=tuple(pass_fds),
        # A group of its own, so that its helpers go with it when it is killed.
        start_new_session=True,
    )
    end = None if timeout is None else time.monotonic() + timeout
    out, err = _finish(process, stop, end)
    return Ran(
        tuple(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
    )


def _finish(
    process: "subprocess.Popen[bytes]", stop: threading.Event | None, end: float | None
) -> tuple[bytes, bytes]:
    while True:
        try:
            return process.communicate(timeout=STOP_POLL)
        except subprocess.TimeoutExpired:
            late = end is not None and time.monotonic() >= end
            if late or (stop is not None and stop.is_set()):
                os.killpg(process.pid, signal.SIGKILL)


class Filter:
    """A program that runs for a user, and what it writes: `out`, a pipe."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        self.out = process.stdout.fileno()
        self.wait = process.wait
        self._process = process  # whose end closes the pipe


def start_filter(user: User, argv: Sequence[str], source: int) -> Filter:
    """Starts a program that reads the open file `source`, for a user who could start it as well.

    All three ids are theirs, it has no privilege and gets none; it ends with this process. Raises
    Declined where it is missing.
    """
    if not which(argv[0]):
        raise Declined("program", f"{argv[0]} is not installed on this node")
    process = _popen(
        [*_as(user), "--pdeathsig", "KILL", "--", *argv],
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    return Filter(process)
