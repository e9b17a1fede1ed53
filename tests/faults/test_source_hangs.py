"""The shared file system is slow, stops answering, or dies: no hook waits beyond its deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from far import Far
from fault import MIB, Beside, Points, Until, beside, image

from forestage import check
from forestage.cache.part import PROCESS_NAME
from forestage.check import CheckReport, CheckTarget
from forestage.clock import Clock, Deadline
from forestage.sources import opening
from forestage.stage import copy_wait, stager
from forestage.system import mounts, probe, tree
from node import Node, children_left, comm, until


def test_source_that_does_not_answer_is_declined_at_the_deadline(node: Node, far: Far) -> None:
    node.configure(deadline="300ms")
    path, other = far.put("image.sqsh", image()), node.put("alice/image.sqsh")
    far.hang()
    ran = beside(lambda: node.prolog(1, path))
    assert (ran.code, *ran.said) == (0, "declined", "source-hangs")
    assert node.lease(1) is None
    assert beside(lambda: node.epilog(1)).code == 0
    # What lies elsewhere is staged all the same.
    node.configure()
    assert beside(lambda: node.prolog(2, other)).outcome.result == "copied"
    far.answer()
    assert beside(lambda: node.prolog(3, path)).outcome.result == "copied"
    assert path.read_bytes() == image()


def test_first_prolog_with_the_companion_does_not_wait_for_a_source(node: Node, far: Far) -> None:
    """It knows the configuration, and who may leave, only once it has begun."""
    node.configure(redirect="spank", cold="shared")
    node.places.loaded.parent.mkdir(parents=True, exist_ok=True)
    node.places.loaded.touch()
    path = far.put("image.sqsh", image())
    far.hang()
    code = "import sys; from forestage.hooks import boundary\n"
    code += "boundary._run_to_exit_status(*sys.argv[1:])"
    script = [sys.executable, "-Ic", code, "prolog", str(node.places.root)]
    subprocess.run(script, env=node.environ(1, path), timeout=60, check=True)
    mark = node.places.leases / "1.prolog"
    assert (mark.exists(), node.outcomes("prolog", 1)) == (True, ())
    far.answer()
    until(lambda: not mark.exists(), "the Prolog's work to end")
    assert node.outcomes("prolog", 1)[0].result in ("started", "declined")


def test_source_with_hanging_reads_is_declined_before_a_copy_starts(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata are answered; the first bytes, which make it an image, are not."""
    monkeypatch.setattr(opening, "HOOK_TIMEOUT", 0.3)
    node.configure(deadline="1h")
    path = far.put("image.sqsh", image())
    far.hang_reads()
    ran = beside(lambda: node.prolog(1, path))
    assert (ran.code, *ran.said) == (0, "declined", "source-hangs")
    assert (node.lease(1), node.parts()) == (None, [])


def test_hit_is_served_while_reads_of_the_source_hang(node: Node, far: Far) -> None:
    path = far.put("image.sqsh", image())
    assert node.prolog(1, path).outcome.result == "copied"
    assert node.epilog(1).outcome.unmounted == 1
    far.hang_reads()
    assert beside(lambda: node.prolog(2, path)).said == ("hit", "")
    assert node.binds() != {}
    assert beside(lambda: node.epilog(2)).code == 0


class Strike:
    """Makes a source hang at a trace point, and shows when it does."""

    def __init__(self, far: Far, hang: Callable[[Far], None], file: Path) -> None:
        self._far = far
        self._hang = hang
        self._file = file

    def __call__(self) -> None:
        self._hang(self._far)
        self._file.touch()

    def done(self) -> bool:
        return self._file.exists()


HANGS = {
    "reads-chunk": Far.hang_reads,
    "all-reserved": Far.hang,
    "all-chunk": Far.hang,
    "all-copied": Far.hang,
}


@pytest.fixture(params=HANGS)
def strike(far: Far, points: Points, tmp_path: Path, request: pytest.FixtureRequest) -> Strike:
    """Comes while the source is copied."""
    strike = Strike(far, HANGS[request.param], tmp_path / "struck")
    points.at(request.param.partition("-")[2], strike)
    return strike


def test_source_that_hangs_during_a_copy_delays_hooks_only_to_their_deadline(
    node: Node, far: Far, points: Points, strike: Strike
) -> None:
    # One thread: more of them may have read all before the source hangs.
    node.configure(threads=1)
    path, other = far.put("image.sqsh", image()), node.put("alice/image.sqsh")

    ran = beside(lambda: node.prolog(1, path, clock=Until(strike.done)))

    assert (ran.code, *ran.said) == (0, "declined", "deadline")
    assert len(node.held(1).uses) == 1
    ran = beside(lambda: node.epilog(1))
    assert (ran.code, *ran.said) == (0, "released", "")
    node.configure(deadline="500ms")
    ran = beside(lambda: node.prolog(2, path))
    assert (ran.code, ran.outcome.result) == (0, "declined")
    assert ran.outcome.reason in ("deadline", "source-hangs")
    node.configure()
    points.calm()
    assert beside(lambda: node.prolog(3, other)).outcome.result == "copied"
    assert beside(lambda: node.epilog(3)).code == 0

    far.answer()
    until(lambda: len(node.entries()) == 2, "the copy to go on and publish")
    node.configure()
    assert beside(lambda: node.prolog(4, path)).outcome.result in ("hit", "joined")
    assert path.read_bytes() == image()
    assert node.parts() == []


def test_source_that_hangs_and_then_dies_ends_its_hook_and_stager(
    node: Node, far: Far, points: Points, strike: Strike
) -> None:
    node.configure(threads=1)  # see above
    path = far.put("image.sqsh", image())
    hook = Beside(lambda: node.prolog(1, path))
    until(strike.done, "the source to hang")
    (part,) = node.parts()

    far.die()

    assert hook.ran().code == 0
    until(lambda: node.is_idle(part.directory.name), "the stager's end")
    assert node.entries() == set()
    ran = beside(lambda: node.prolog(2, path))
    assert (ran.code, *ran.said) == (0, "declined", "source-error")
    # The file system comes back, with another file under that name.
    far.unmount()
    points.calm()
    assert node.put("far/image.sqsh", image(2)) == path
    node.configure()
    assert beside(lambda: node.prolog(3, path)).outcome.result == "copied"
    assert path.read_bytes() == image(2)


def test_entry_is_not_served_while_its_sources_file_system_hangs(node: Node, far: Far) -> None:
    path = far.put("image.sqsh", image())
    node.prolog(1, path)
    node.epilog(1)
    node.configure(deadline="300ms")
    far.hang()
    ran = beside(lambda: node.prolog(2, path))
    assert (ran.code, *ran.said) == (0, "declined", "source-hangs")
    assert node.binds() == {}
    node.configure()
    far.answer()
    assert beside(lambda: node.prolog(3, path)).outcome.result == "hit"


def test_job_stops_waiting_early_for_a_slow_source_and_the_copy_completes(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = image(3, 24 * MIB)
    deadlines: list[Deadline] = []

    def noting(patience: float, clock: Clock) -> Deadline:
        deadlines.append(Deadline(clock.monotonic() + patience, clock))
        return deadlines[-1]

    monkeypatch.setattr(Deadline, "after", noting)
    monkeypatch.setattr(copy_wait, "OBSERVE", 0.5)
    node.configure(deadline="20s", threads=1)
    path = far.put("image.sqsh", data)
    far.behaves(reads=200)  # of up to 128 KiB each

    ran = node.prolog(1, path)

    assert (ran.code, *ran.said) == (0, "declined", "deadline")
    assert "the rest takes" in ran.outcome.detail
    assert deadlines[0].seconds_left() > 0
    (part,) = node.parts()
    assert not node.is_idle(part.directory.name)
    assert [use.key for use in node.held(1).uses] == [part.directory.name]
    far.answer()
    until(node.entries, "the copy to go on and publish")
    assert node.prolog(2, path).outcome.result in ("hit", "joined")
    assert path.read_bytes() == data


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["far", "far/images", "link"])
def test_check_ends_and_finds_the_hanging_source(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also what else leads there is not walked to: enroot's binds, and the cache's own path."""
    monkeypatch.setattr(check.source_findings, "SOURCE_TIMEOUT", 0.3)
    monkeypatch.setattr(tree, "HANGS", 0.3)
    far.put("image.sqsh", image())
    (far.folder / "images").mkdir()
    (node.server / "link").symlink_to("far/images")
    node.configure(sources=[str(node.shared / name)])
    etc = node.places.root / "etc/enroot"
    (etc / "mounts.d").mkdir(parents=True)
    (etc / "mounts.d/a.fstab").write_text(f"{node.shared / name} /x none bind\n")

    def ids() -> list[str]:
        done: CheckReport = check.run_checks(CheckTarget(node.places, Clock()))
        return [one.id for one in done.findings if one.id.startswith(("source", "check"))]

    # All that it looks at is below the node's root.
    seen = node.places.root / str(node.shared).lstrip("/")
    seen.mkdir(parents=True)
    mounts.mount(str(node.shared), str(seen), mounts.MS_BIND | mounts.MS_REC)
    assert "source-hangs" not in ids()
    far.hang()
    assert ids() == ["source-hangs"]
    far.answer()
    until(far.is_left_alone, "the children that were left behind")


def test_check_finds_a_hanging_mount_below_a_source(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.source_findings, "SOURCE_TIMEOUT", 0.3)
    node.configure()
    seen = node.places.root / str(node.shared).lstrip("/")
    seen.mkdir(parents=True)
    mounts.mount(str(node.shared), str(seen), mounts.MS_BIND | mounts.MS_REC)
    listed = node.places.root / "proc/self/mountinfo"
    listed.parent.mkdir(parents=True)
    listed.write_bytes(Path("/proc/self/mountinfo").read_bytes())

    def found() -> list[str]:
        done: CheckReport = check.run_checks(CheckTarget(node.places, Clock()))
        return [one.what for one in done.findings if one.id == "source-hangs"]

    assert found() == []
    far.hang()
    assert found() == [f"{far.point}, which is mounted below a source, does not answer"]
    far.answer()
    until(far.is_left_alone, "the children that were left behind")


def test_check_finds_an_image_with_hanging_reads_after_a_job_was_declined(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server answers all else: a job has met it."""
    monkeypatch.setattr(check.source_findings, "SOURCE_TIMEOUT", 0.5)
    monkeypatch.setattr(opening, "HOOK_TIMEOUT", 0.3)
    node.configure(deadline="1h")
    path = far.put("image.sqsh", image())
    seen = node.places.root / str(node.shared).lstrip("/")
    seen.mkdir(parents=True)
    mounts.mount(str(node.shared), str(seen), mounts.MS_BIND | mounts.MS_REC)
    far.hang_reads()
    assert beside(lambda: node.prolog(1, path)).ended == (0, "declined", "source-hangs")

    def found() -> list[str]:
        done: CheckReport = check.run_checks(CheckTarget(node.places, Clock()))
        return [one.what for one in done.findings if one.id == "source-hangs"]

    (what,) = found()
    assert what.startswith(f"{path} did not answer a job at ")
    far.answer()
    until(far.is_left_alone, "the children that were left behind")
    assert found() == []


def test_hanging_file_server_is_not_waited_for_again_until_the_server_answers(
    node: Node, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prolog, then step, then the next job: one waits, and one process asks on for all."""
    path, other = far.put("image.sqsh", image()), far.put("other.sqsh", image(2))
    node.configure(deadline="300ms")
    far.hang()
    assert beside(lambda: node.prolog(1, path)).ended == (0, "declined", "source-hangs")
    until(lambda: hung(node), "the server to be known as one that hangs")
    node.configure(deadline="1h")
    monkeypatch.setattr(opening, "HOOK_TIMEOUT", 600.0)
    for wanted in (path, other):
        assert beside(lambda wanted=wanted: node.prolog(2, wanted)).ended == (  # type: ignore[misc]
            *(0, "declined", "source-hangs"),
        )
    far.answer()
    until(lambda: not hung(node), "the server's answer")
    assert beside(lambda: node.prolog(3, path)).said == ("copied", "")


def hung(node: Node) -> bool:
    """Whether a server is known to hang."""
    return any(map(probe.find_known_hang, node.places.probes.glob("source-*")))


def test_stager_of_a_directory_with_a_hanging_source_ends_on_sigterm(
    node: Node, far: Far, points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager, "ENDS_WITHIN", 0.1)
    node.configure(redirect="spank")
    (far.folder / "set").mkdir()
    path, hung = far.put("set/weights", image()), node.places.root / "hung"

    def hang() -> None:
        far.hang()
        hung.touch()

    points.at("reserved", hang)
    node.prolog(1, comment=f"stage={path.parent}/")
    until(hung.exists, "the source to hang")
    (pid,) = (pid for pid in children_left() if comm(pid) == PROCESS_NAME)
    threads = Path(f"/proc/{pid}/task")
    until(lambda: len(list(threads.iterdir())) > 2, "the copy to read")
    os.kill(pid, signal.SIGTERM)
    until(lambda: pid not in children_left(), "its end")
    assert node.entries() == set()
    far.answer()
