"""The event loop of a service that anybody can connect to."""

import asyncio
import contextlib
import resource
from collections.abc import Callable
from typing import Any


def report_errors(loop: asyncio.AbstractEventLoop, report: Callable[[str], None]) -> None:
    """Have the loop's own errors reported as text, without a traceback.

    For each connection that it cannot accept for want of descriptors asyncio would write one, and
    it tries as many in a row as its backlog has (_accept_connection of selector_events.py).
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # It tries each of them again after a second: the socket may have been closed by then.
        is_late = isinstance(error, ValueError) and "handle" in context
        if isinstance(error, OSError) or is_late:
            report(str(error))
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def raise_open_files(most: int) -> None:
    """Raise the soft limit of open files to the hard one, to `most` at most: shells have 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft not in (resource.RLIM_INFINITY, max(soft, wanted)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
