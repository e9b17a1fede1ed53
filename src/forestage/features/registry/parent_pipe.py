"""The other side of a worker: who started it, reads its words, and ends it."""

import os
import signal
import threading
import time

from forestage.features.registry import worker_messages
from forestage.features.registry.worker_messages import WorkerMessage
from forestage.system import run

GRACE = 12.0  # seconds to clean up once nobody waits any more


class ParentGone(Exception):
    """Nobody waits for the image any more."""


class ParentPipe:
    """The other side: who started this process, and reads what it says."""

    def __init__(self) -> None:
        self.parent_gone = threading.Event()
        self.is_signalled = False
        # In the step's cgroup, where scancel's SIGTERM comes to enroot as well: it dies with us.
        signal.signal(signal.SIGTERM, self._handle_signal)
        threading.Thread(target=self._wait_for_parent_end, daemon=True).start()

    def _handle_signal(self, *_: object) -> None:
        self.is_signalled = True
        self.parent_gone.set()

    def _wait_for_parent_end(self) -> None:
        while os.read(0, worker_messages.MAX_LINE_BYTES):
            pass
        self.parent_gone.set()
        time.sleep(GRACE)
        # It hangs in a file system or a program, which must not go on for nobody.
        if os.getsid(0) == os.getpid():
            run.kill_session(os.getpid(), spare=os.getpid())
        os._exit(1)

    def send_message(self, word: WorkerMessage) -> None:
        """Raises ParentGone, WorkerProtocolError."""
        line = worker_messages.encode_message(word)
        try:
            while line:
                line = line[os.write(1, line) :]
        except BrokenPipeError:
            raise ParentGone from None

    def check_parent(self) -> None:
        """Raises ParentGone."""
        if self.parent_gone.is_set():
            raise ParentGone
