"""One module at a time, in a process that starts no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import properties  # noqa: F401  (how many examples)
from fixtures import *  # noqa: F403  (fixtures)

STARTS = frozenset(("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"))
"""What Python tells its audit hooks (sys.audit) of processes that are started."""

_started: list[str] = []


def _note(event: str, _: tuple[object, ...]) -> None:
    if event in STARTS:
        _started.append(event)


sys.addaudithook(_note)  # for ever: of tests elsewhere nobody asks


@pytest.fixture(autouse=True)
def _starts_no_process() -> Iterator[None]:
    """A test that does lies in tests/processes, or where it is about a hook or a fault."""
    _started.clear()
    yield
    assert not _started, f"this test starts processes: {_started}"
