"""The cache's disk stops answering, as with a controller that resets: nobody waits for it long.

The disks are real: a file system on a loop device that is frozen (who writes hangs in D), or whose
loop device lies on a server that stops (who reads hangs).
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far import Far
from fault import Beside, beside, image

from forestage.cache import disk_errors
from forestage.commands import evict, status, sweep
from forestage.errors import Declined
from forestage.slurm.slurm_client import SlurmClient
from forestage.slurm.step_protocol import PROTOCOL_GREETING
from forestage.system import lock, probe
from node import ALICE, HANGS, Node, comm, until
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
def no_remembered_probe(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_frozen_disk_serves_hits_and_declines_copies(node: Node, frozen: Hangs) -> None:
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
    assert (node.binds(), node.leases.list_jobs()) == ({}, ())
    frozen.go()
    assert node.prolog(5, other).said == ("copied", "")


@pytest.fixture
def suspended(node: Node, far: Far) -> Iterator[Hangs]:
    """Reads hang, and nothing tells the file system: it still takes what fits into memory."""
    file = far.put("disk", b"")
    run("truncate", "-s", "64M", far.folder / "disk")
    run("mkfs.ext4", "-q", far.folder / "disk")
    run(
        "mount", "-o", "loop", file, node.nvme
    )  # what far does not answer, the loop device waits for
    found = Hangs(node, far.hang, far.answer)
    yield found
    found.go()
    run("umount", "--lazy", node.nvme)


def test_disk_with_hanging_reads_serves_no_hit(node: Node, suspended: Hangs) -> None:
    """The job would hang with the copy that it is shown: its source is read."""
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path).said == ("copied", "")
    assert node.epilog(1).said == ("released", "")
    suspended.stop()
    for job in (2, 3):
        ran = beside(lambda job=job: node.prolog(job, path))  # type: ignore[misc]
        assert ran.ended == (0, "declined", "cache-hangs")
    assert node.shows_source(path)
    assert len(suspended.asking()) == 1
    suspended.go()
    assert node.prolog(4, path).said == ("hit", "")


def test_raid_with_one_hanging_disk_serves_no_hit(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is only said to be one of it; machine/ has real ones."""
    file = far.put("disk", bytes(1 << 20))
    argv = ["losetup", "--find", "--show", file]
    loop = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setattr(disk_errors, "list_devices", lambda root: {Path(loop).name})
    path = node.put("alice/image.sqsh", image())
    found = Hangs(node, far.hang, far.answer)
    try:
        assert node.prolog(1, path).said == ("copied", "")
        assert node.epilog(1).said == ("released", "")
        found.stop()
        ran = beside(lambda: node.prolog(2, path))
        assert ran.ended == (0, "declined", "cache-hangs")
        assert node.shows_source(path)
    finally:
        found.go()
        run("losetup", "--detach", loop)
    assert node.prolog(3, path).said == ("hit", "")


def test_short_freeze_of_the_disk_does_not_prevent_hits(node: Node, frozen: Hangs) -> None:
    """A snapshot takes less than a second; hooks that begin meanwhile and after it get hits."""
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path).said == ("copied", "")
    frozen.stop()
    hook = Beside(lambda: node.prolog(2, path))
    frozen.go()
    assert hook.ran().ended == (0, "hit", "")
    assert beside(lambda: node.prolog(3, path)).ended == (0, "hit", "")
    assert beside(lambda: node.epilog(3)).ended == (0, "released", "")


def test_hook_does_not_wait_for_a_lock_held_on_a_hanging_disk_and_the_sweep_unmounts(
    node: Node, frozen: Hangs
) -> None:
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path).said == ("copied", "")
    frozen.stop()
    with lock.held(node.cache.space_lock, 60):
        ran = beside(lambda: node.prolog(2, path))
        assert ran.ended == (0, "declined", "cache-hangs")
        assert beside(lambda: node.epilog(1)).ended == (0, "released", "cache-hangs")
    assert node.leases.list_jobs() == ()
    assert node.binds() != {}
    frozen.go()
    sweep.run_sweep(here(node), SlurmClient("", ""), False, lambda text: None)
    assert node.binds() == {}


def test_outdated_redirect_is_unmounted_while_the_disk_hangs(node: Node, frozen: Hangs) -> None:
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path).said == ("copied", "")
    frozen.stop()
    (node.server / "alice/image.sqsh").write_bytes(image(2))
    assert beside(lambda: node.prolog(2, path)).ended == (0, "declined", "cache-hangs")
    assert path.read_bytes() == image(2)


def test_sweep_evict_and_status_end_while_the_disk_hangs(node: Node, frozen: Hangs) -> None:
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path).said == ("copied", "")
    frozen.stop()
    with pytest.raises(Declined, match="writes have hung"):
        sweep.run_sweep(here(node), SlurmClient("", ""), False, lambda text: None)
    with pytest.raises(Declined, match="writes have hung"):
        evict.evict_to_watermark(here(node), False)
    found = status.read_node_status(here(node))
    assert (found.entries.total, len(found.leases)) == (1, 1)
    assert found.blocked is not None
    assert (status.choose_state(found)[0], found.problems) == ("hangs", ())
    assert "writes have hung" in found.blocked.why


def test_status_reports_a_disk_with_hanging_reads(node: Node, suspended: Hangs) -> None:
    node.staged(1)
    suspended.stop()
    found = status.read_node_status(here(node))
    assert "reads have hung" in found.unusable
    assert status.choose_state(found) == ("hangs", found.unusable)
    assert [one.job for one in found.leases] == [1]


# A hook on the test's node, whose child takes the disk for a healthy one, and hangs with it.
SCRIPT = """
import os, sys
from forestage.cache import disk_probe
from forestage.hooks import boundary, prolog, step, hook_worker
from forestage.system import probe
hook, hangs = os.getpid(), disk_probe.probe_disk
probe.LIMIT, hook_worker.PROBE_INTERVAL, hook_worker.HANG_AFTER = 0.2, 0.2, float(sys.argv[3])
def known(*args):
    if os.getpid() != hook:
        return None
    found = hangs(*args)
    if found:
        os.write(2, b"hangs\\n")
    return found
disk_probe.probe_disk = known
def hang(node, *args):
    os.mkdir(node.cache.root / "new")
prolog.serve_prolog = step.serve_step = hang
os._exit(boundary._run_to_exit_status(sys.argv[1], sys.argv[2]))
"""


def hook(node: Node, name: str, path: Path | None, patience: float = 0.3) -> subprocess.Popen[str]:
    """`patience`: the seconds without an answer after which it goes on without the disk."""
    context = {"SLURM_SCRIPT_CONTEXT": "spank_step", "SLURM_STEP_ID": "0"}
    return subprocess.Popen(
        [sys.executable, "-Ic", SCRIPT, name, str(node.places.root), str(patience)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=node.environ(1, path) | (context if name == "step" else {}),
        text=True,
    )


def output(hook: subprocess.Popen[str]) -> str:
    """What a hook has said once it has ended, and nobody has slurmd's pipes any more."""
    assert hook.stdout is not None
    assert hook.stderr is not None
    pipes = select.poll()
    pipes.register(hook.stdout, 0)
    pipes.register(hook.stderr, 0)
    until(lambda: hook.poll() is not None, "a hook to end")
    until(lambda: len(pipes.poll(0)) == 2, "all that have a hook's pipes to close them")
    return hook.communicate()[1]


def test_prolog_and_epilog_end_though_the_disk_hangs_after_its_probe(
    node: Node, frozen: Hangs
) -> None:
    """It stopped after it had been asked. slurmd also waits for their output."""
    path = node.put("alice/image.sqsh", image())
    assert node.prolog(1, path).said == ("copied", "")
    frozen.stop()
    for name, result in (("prolog", "declined"), ("epilog", "released")):
        ran = hook(node, name, path)
        said = output(ran)
        assert ran.returncode == 0
        assert f"{name} job=1" in said
        assert f"result={result} reason=cache-hangs" in said
    assert node.leases.list_jobs() == ()
    assert [one.reason for one in node.outcomes("epilog", 1)] == ["cache-hangs"]


def test_step_is_answered_cache_hangs_though_the_disk_hangs_after_its_probe(
    node: Node, frozen: Hangs
) -> None:
    path = node.staged(1, data=image())
    frozen.stop()
    helper = hook(node, "step", path)
    assert helper.stdout is not None
    assert [helper.stdout.readline() for _ in range(2)] == [
        f"{PROTOCOL_GREETING}\n",
        "leave\tcache-hangs\n",
    ]
    assert helper.wait(HANGS) == 0


def test_step_on_a_hanging_disk_records_an_event_for_the_image_of_the_comment(
    node: Node, frozen: Hangs
) -> None:
    """Else `explain` says that no step asked, and that the SPANK plugin may not be there."""
    path = node.staged(1, data=image())
    node.leases.add_notes(1, ALICE.uid, hinted=(os.fsencode(path),))
    node.leases.set_hints_flag(1)
    frozen.stop()
    helper = hook(node, "step", None)
    assert helper.wait(HANGS) == 0
    (seen,) = node.outcomes("step", 1)
    assert (seen.request, seen.reason) == (str(path), "cache-hangs")


def test_epilog_waits_for_the_end_of_a_short_freeze(node: Node, frozen: Hangs) -> None:
    path = node.staged(1, data=image())
    frozen.stop()
    epilog = hook(node, "epilog", path, patience=600.0)
    assert epilog.stderr is not None
    assert epilog.stderr.readline() == "hangs\n"
    frozen.go()
    said = output(epilog)
    assert "result=released" in said
    assert "cache-hangs" not in said
