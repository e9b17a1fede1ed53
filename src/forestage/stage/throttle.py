"""How much may be read in a second? One measure for all threads of a copy."""

import threading
import time


class Throttle:
    """Holds all threads together to a number of bytes per second."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.free_at = time.monotonic()
        self.lock = threading.Lock()

    def take(self, size: int, stop: threading.Event) -> None:
        """Returns when `size` more bytes may flow, or the copy is to stop."""
        if self.rate is None:
            return
        with self.lock:
            start = max(self.free_at, time.monotonic())
            self.free_at = start + size / self.rate
        stop.wait(max(0.0, start - time.monotonic()))
