"""Who imports: leases of several workers on one store, with clocks and hosts of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forestage.clock import Clock
from forestage.registry import import_lease
from forestage.registry.import_lease import Flight, Lease
from forestage.registry.store import Store

NAME = "ab" * 32 + "-x86_64-0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, Clock())


def test_process_that_is_gone_is_followed_at_once(store: Store) -> None:
    program = subprocess.Popen(["sleep", "inf"])
    me = import_lease.of_this_process("n1")
    lease = Lease("a", "n1", me.boot, me.pids, program.pid, import_lease._start(program.pid))
    a, b = Flight(store, NAME, lease, Clock()), Flight(store, NAME, me, Clock())
    assert a.take()
    assert not b.take()
    program.kill()
    program.wait()
    assert b.take()
