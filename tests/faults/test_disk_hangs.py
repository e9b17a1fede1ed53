"""The cache's disk stops answering, as with a controller that resets: nobody waits for it long.

The disks are real: a file system on a loop device that is frozen (who writes hangs in D), or on a
device of the device mapper that is suspended (who reads hangs, too).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault import Beside, beside, image

from forestage.admin import evict, status, sweep
from forestage.cache import disk as cache_disk
from forestage.errors import Declined
from forestage.slurm.queue import Slurm
from forestage.system import lock, probe
from node import Node, comm, until
from through import here

Stop = Callable[[], None]


class Hangs:
    """The node's NVMe, which `stop` lets hang and `go` has answer again."""

    def __init__(self, node: Node, stop: Stop, go: Stop) -> None:
        self.node = node
        self._stop = stop
        self._go = go
        self.hangs = False

    def stop(self) -> None:
        self._stop()
        self.hangs = True

    def go(self) -> None:
        """Returns once nobody hangs any more."""
        if self.hangs:
            self._go()
        self.hangs = False
        until(lambda: not self.asking(), "the probe to get its answer")

    def asking(self) -> list[int]:
        """The processes that ask this disk now: the test's own, as their hooks have ended."""
        pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        return [pid for pid in pids if comm(pid) == probe.PROCESS_NAME and self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            return namespace == os.readlink("/proc/self/ns/mnt")
        return False


def run(*argv: object) -> None:
    subprocess.run([str(word) for word in argv], check=True)


@pytest.fixture(autouse=True)
def nobody_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is asked each time: else the next hook may go by an answer of this second."""
    monkeypatch.setattr(probe, "GOOD", 0.0)


@pytest.fixture(params=["ext4", "xfs"])
def frozen(
    node: Node, disk: Callable[..., Path], request: pytest.FixtureRequest
) -> Iterator[Hangs]:
    disk(request.param, "320M" if request.param == "xfs" else "64M")
    found = Hangs(
        node,
        lambda: run("fsfreeze", "--freeze", node.nvme),
        lambda: run("fsfreeze", "--unfreeze", node.nvme),
    )
    yield found
    found.go()


def ended(node: Node, *jobs: int) -> list[tuple[int, str, str]]:
    return [beside(lambda job=job: node.epilog(job)).ended for job in jobs]  # type: ignore[misc]


def test_frozen_disk_gives_hits_and_copies_nothing(node: Node, frozen: Hangs) -> None:
    path, other = node.put("alice/image.sqsh", image()), node.put("alice/other.sqsh", image(2))
    assert node.prolog(1, path).said == ("copied", "")
    assert node.epilog(1).said == ("released", "")
    frozen.stop()
    for job in (2, 3):
        assert beside(lambda job=job: node.prolog(job, path)).ended == (0, "hit", "")  # type: ignore[misc]
    assert path.read_bytes() == image()
    assert beside(lambda: node.prolog(4, other)).ended == (0, "declined", "cache-hangs")
    assert node.shows_source(other)
    assert len(frozen.asking()) == 1, "one process waits for the node"
    assert ended(node, 2, 3, 4) == [(0, "released", "cache-hangs")] * 3
    assert (node.binds(), node.leases.jobs()) == ({}, ())
    frozen.go()
    assert node.prolog(5, other).said == ("copied", "")
