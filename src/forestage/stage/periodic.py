"""Something done again and again, beside a piece of work, until that has ended."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def meanwhile(act: Callable[[], None], every: float, name: str) -> Iterator[None]:
    """Calls `act` every so many seconds, first after that long, in a thread of that name.

    The thread has ended when the block is left, however it is left. What `act` raises ends the
    thread and not the work.
    """
    over = threading.Event()

    def again() -> None:
        while not over.wait(every):
            act()

    thread = threading.Thread(target=again, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
