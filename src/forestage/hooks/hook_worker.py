"""A hook's work in a child: what hangs with the node's disk is the child, not slurmd nor a step.

    hook     forks, passes on what its child says, and ends as soon as that says that it ends
    child    does all the work; tells the hook which cache it works on, and until when at most

Each PROBE_INTERVAL the hook asks a probe (cache/disk_probe.py) whether that cache answers. Where it
has not for HANG_AFTER, or the child's time is over, the hook kills it and goes on without the
cache: the job reads its source. A killed child does nothing any more; one that is stuck in the
kernel does nothing when it wakes. A Prolog that works in the background
(hooks/background_prolog.py) needs none of this.

Nothing is imported here before something hangs.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # as in hooks/boundary.py
if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_TIME_LIMIT = (
    120.0  # seconds until the child must have told its own limit: it reads files on /etc, /run
)
TIME_LIMIT_MARGIN = 60.0  # seconds beyond its limit: a busy node is no hanging one
PROBE_INTERVAL = 3.0  # seconds; nearly all hooks end within a tenth of that
HANG_AFTER = 5.0  # seconds without an answer: a snapshot, or a controller's reset, may take some
CONTROL_PREFIX = b"\0"  # begins a line for the hook; all others are for the log
ENDED_MESSAGE, CACHE_MESSAGE, DEADLINE_MESSAGE = b"ended", b"cache", b"until"
EXIT_POLL_INTERVAL = 0.2  # seconds between two looks at a child that may have died without a word
CLOSED_POLL_INTERVAL = (
    0.0002  # seconds between two, once it has let go of its line: it ends just then
)


class HookPipe:
    """The child's end: what it tells the hook that waits for it."""

    def __init__(self, line: int = -1) -> None:
        self.pipe_fd = line

    def send_message(self, word: bytes, value: str) -> None:
        """Nothing where nobody waits."""
        if self.pipe_fd >= 0:
            try:
                os.write(self.pipe_fd, CONTROL_PREFIX + word + b" " + os.fsencode(value) + b"\n")
            except OSError:  # the hook has been killed, and so this is about to be
                return

    def report_cache(self, cache: str) -> None:
        """From now on it may hang with this cache."""
        self.send_message(CACHE_MESSAGE, cache)

    def report_time_limit(self, seconds: float) -> None:
        """The work is limited to so many seconds; what is over long after that hangs."""
        self.send_message(DEADLINE_MESSAGE, f"{time.monotonic() + seconds + TIME_LIMIT_MARGIN:f}")

    def exit_worker(self) -> None:
        """Ends the child, and so the hook; nothing where nobody waits."""
        if self.pipe_fd >= 0:
            self.send_message(ENDED_MESSAGE, "")
            os._exit(0)


NO_HOOK_PIPE = HookPipe()


class HookWorkerTimeout(Exception):
    """The child did not end: its cache hangs, of which this is the root, or "" for its time."""

    def __init__(self, cache: str) -> None:
        super().__init__(cache)
        self.cache = cache


def fork_worker(keeps_stdout: bool) -> HookWorker | HookPipe | None:
    """Forks the child: returns it to the hook, and its own end of the line to the child.

    None where it cannot be forked: then the caller does the work itself. `keeps_stdout`: a step's
    answer goes there. slurmd waits until nobody has what it gave to a Prolog or an Epilog.
    """
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        return None
    if pid:
        os.close(theirs)
        return HookWorker(pid, ours)
    os.close(ours)
    os.dup2(theirs, 2)
    if not keeps_stdout:
        os.dup2(theirs, 1)
    return HookPipe(theirs)


class HookWorker:
    """The child as the hook knows it: what it works on, until when, and how it ended."""

    def __init__(self, pid: int, line: int) -> None:
        self.pid = pid
        self.pipe_fd = line
        self.cache = ""
        self.deadline = time.monotonic() + FIRST_TIME_LIMIT
        self.status: int | None = None
        self.partial_line = b""
        self.is_closed = False  # nobody has the line any more

    def wait_for_exit(self, seconds_hung: Callable[[str], float]) -> int:
        """Returns its exit status; passes on what it says.

        Raises HookWorkerTimeout, and has killed it then.
        `seconds_hung` asks for how many seconds a cache has not answered.
        """
        from select import POLLIN, poll

        waiting = poll()
        waiting.register(self.pipe_fd, POLLIN)
        look = time.monotonic() + PROBE_INTERVAL
        while self.status is None:
            now = time.monotonic()
            if now >= self.deadline:
                raise self._kill_late("")
            if now >= look:
                if self.cache and seconds_hung(self.cache) >= HANG_AFTER:
                    raise self._kill_late(self.cache)
                look = time.monotonic() + PROBE_INTERVAL
            if self.is_closed:
                time.sleep(CLOSED_POLL_INTERVAL)
                self._poll_exit()
            elif waiting.poll(1000 * min(EXIT_POLL_INTERVAL, max(0.0, look - now))):
                self._read_messages()
            else:
                self._poll_exit()
        return self.status

    def _read_messages(self) -> None:
        """Reads what it says: what is not for the hook goes on to where that writes its log."""
        data = os.read(self.pipe_fd, 1 << 16)
        *lines, self.partial_line = (self.partial_line + data).split(b"\n")
        for said in lines:
            word, _, value = said.removeprefix(CONTROL_PREFIX).partition(b" ")
            if not said.startswith(CONTROL_PREFIX):
                _write_log(said + b"\n")
            elif word == ENDED_MESSAGE:
                self.status = 0
            elif word == CACHE_MESSAGE:
                self.cache = os.fsdecode(value)
            elif word == DEADLINE_MESSAGE:
                self.deadline = float(value)
        if not data and self.status is None:
            _write_log(self.partial_line)
            self.is_closed = True  # killed, it may hang with what else it had open

    def _poll_exit(self) -> None:
        """Sees one that was killed, though others have the line."""
        found, status = os.waitpid(self.pid, os.WNOHANG)
        if found:
            self.status = os.waitstatus_to_exitcode(status)

    def _kill_late(self, cache: str) -> HookWorkerTimeout:
        try:
            os.kill(self.pid, 9)
        except OSError:  # it has just ended
            return HookWorkerTimeout(cache)
        return HookWorkerTimeout(cache)


def _write_log(text: bytes) -> None:
    try:
        os.write(2, text)
    except OSError:
        return
