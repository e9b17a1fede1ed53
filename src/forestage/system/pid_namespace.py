"""A PID namespace for a program of a user's, with an init of root's: with that, all in it ends.

What runs for a user is theirs to trace, and so to have it be anything: it forks, and leaves its
session, faster than anybody follows. Here the kernel ends all of it with the init, which the user
can neither signal nor trace (pid_namespaces(7)).

    who starts it     root's
      the init        root's, in no cgroup of a step's; ends with who has started it, or when the
                      program does
        the program   the user's, and what it starts: in a task's cgroups
                      (forked_child.enter_task_cgroups)

One of them that is in the kernel for good, as a disk hangs, keeps the init: who has started it sees
that it has not ended. /proc is the node's in here, too: its numbers are not those of kill(2).
"""

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from forestage.system import forked_child, libc

PROCESS_NAME = "forestage-init"  # in ps(1)
_CLONE_NEWPID = 0x20000000
_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def unshare_pid_namespace(enter_cgroups: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Has the one process that is forked meanwhile be an init; it calls what this returns.

    That forks the program, which calls `enter_cgroups`, and goes on; the init does not return. It
    ends as the program did, as a shell says it. Raises OSError, also in a process with threads.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    alive, ours = os.pipe()
    try:
        libc.call_libc("unshare", _CLONE_NEWPID)
        try:
            yield partial(_become_init, enter_cgroups, alive, ours)
        finally:
            libc.call_libc("setns", own, _CLONE_NEWPID)
    finally:
        for fd in (own, alive, ours):
            os.close(fd)


def signal_other_processes(number: int) -> None:
    """Sends a signal to all in this process' PID namespace but itself and the init.

    For a process that is apart: elsewhere, it would be all that its user has on the node.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def has_other_processes() -> bool:
    """Return whether `signal_other_processes` reaches any process.

    One that has ended counts until its parent has reaped it.
    """
    try:
        os.kill(-1, 0)
    except ProcessLookupError:
        return False
    return True


def _become_init(enter_cgroups: Callable[[], None], alive: int, starter: int) -> None:
    os.close(starter)
    forked_child.call_prctl(_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:  # who has started us died before that
        os._exit(1)
    program = os.fork()
    if program == 0:
        enter_cgroups()
        # As any of a user's, not last, as who has started it may be.
        Path("/proc/self/oom_score_adj").write_text("0")
        return
    code = 1
    try:
        Path("/proc/self/comm").write_text(PROCESS_NAME)
        forked_child.close_descriptors_except(set())
        code = _reap_until_program_ends(program)
    finally:
        os._exit(code)


def _reap_until_program_ends(program: int) -> int:
    """Reaps all that is left to the init until the program ends."""
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
