"""kill -9 of the stager, wherever it is: the next goes on or starts anew, the bytes are right."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault import CHUNKS, Beside, Points, image, kill_stager, served, untouched

from forestage.cache import evict
from forestage.stage import stager
from node import Node, until

SOURCES = Path(stager.__file__).parent
POINT = re.compile(r'trace\.reach_point\("(\w+)"\)')
FOUND = {name for file in SOURCES.glob("*.py") for name in POINT.findall(file.read_text())}
NAMES = sorted(FOUND - {"looking"})  # hooks alone pass that one
CASES = [("chunks", name) for name in NAMES] + [
    ("rsync", name) for name in NAMES if name != "chunk"
]


def test_trace_points_of_the_stager_are_found_in_its_code() -> None:
    assert {"claimed", "chunk", "published"} <= set(NAMES)


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_job_gets_its_copy_though_one_stager_is_killed(
    node: Node, points: Points, engine: str, name: str
) -> None:
    node.configure(engine=engine)
    path = node.put("alice/image.sqsh", image())
    points.at(name, kill_stager)
    ran = node.prolog(1, path)
    assert (ran.code, *ran.said) == (0, "copied", "")
    assert served(node, path, image())
    assert points.count("published") == 1


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_job_reads_the_source_if_each_of_its_stagers_is_killed(
    node: Node, points: Points, engine: str, name: str
) -> None:
    # One thread: more of them may bring the last chunks in between the signal and its effect.
    node.configure(engine=engine, threads=1)
    path = node.put("alice/image.sqsh", image())
    points.at(name, kill_stager, nth=None)

    ran = node.prolog(1, path)

    if name == "published":  # killed too late to matter
        assert (ran.code, *ran.said) == (0, "copied", "")
    else:
        assert (ran.code, *ran.said) == (1, "failed", "copy")
        assert untouched(node, path, 1)
        assert node.entries() == set()
    points.calm()
    ran = node.prolog(2, path)
    assert ran.outcome.result == ("hit" if name == "published" else "copied")
    assert served(node, path, image())


@pytest.mark.cases(2)
@pytest.mark.parametrize("done", [1, 3, CHUNKS])
def test_resumed_copy_does_not_read_completed_chunks_again(
    node: Node, points: Points, done: int
) -> None:
    node.configure(threads=1)
    path = node.put("alice/image.sqsh", image())
    points.at("chunk", kill_stager, nth=done)
    assert node.prolog(1, path).outcome.result == "copied"
    assert served(node, path, image())
    chunks = [pid for name, pid in points.passed() if name == "chunk"]
    assert len(chunks) == CHUNKS
    assert chunks.count(chunks[0]) == done


def _rsync_of(node: Node, key: str) -> int | None:
    """The pid of the rsync that copies into a part, once it has begun to."""
    part = node.cache.part(key)
    owner = part.find_record()
    if owner is None or not part.image.exists() or part.image.stat().st_size == 0:
        return None
    threads = Path(f"/proc/{owner.pid}/task").glob("*/children")  # any may have started it
    for child in " ".join(thread.read_text() for thread in threads).split():
        # Another may be one that looked at the source, and has not quite ended yet.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{child}/comm").read_text() == "rsync\n":
                return int(child)
    return None


@pytest.fixture
def rsync_left_behind(node: Node) -> Iterator[Path]:
    """The source of an rsync in the middle of its copy, whose hook and stager were killed."""
    node.configure(engine="rsync", bandwidth="300K")  # 20 seconds
    path = node.put("alice/image.sqsh", image())
    key = node.identity(path).key
    hook = Beside(lambda: node.prolog(1, path))
    program = os.pidfd_open(until(lambda: _rsync_of(node, key), "rsync to copy") or 0)
    hook.kill()
    node.shut_down()
    yield path
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(program, signal.SIGKILL)
    until(lambda: select.select([program], [], [], 0)[0], "rsync's end")
    os.close(program)


def test_rsync_of_a_killed_stager_does_not_write_into_the_entry(
    node: Node, rsync_left_behind: Path
) -> None:
    path = rsync_left_behind
    node.configure(engine="rsync")
    key = node.prolog(2, path).outcome.key
    assert path.read_bytes() == image()
    with (node.server / "alice/image.sqsh").open("r+b") as source:
        source.write(image(2))
    end = time.monotonic() + 3  # it would go on for longer than that
    while time.monotonic() < end and node.cache.image_path(key).read_bytes() == image():
        time.sleep(0.05)
    assert node.cache.image_path(key).read_bytes() == image()


def test_copy_by_rsync_is_resumed_after_its_stager_was_killed(
    node: Node, points: Points, rsync_left_behind: Path, tmp_path: Path
) -> None:
    (part,) = node.parts()
    begun = part.image.stat().st_size
    assert 0 < begun < len(image())

    def note() -> None:
        owner = part.find_record()
        assert owner is not None
        (tmp_path / "resumed").write_text(str(owner.resumed))

    points.at("copied", note)
    node.configure(engine="rsync")
    assert node.prolog(2, rsync_left_behind).outcome.result == "copied"
    assert int((tmp_path / "resumed").read_text()) >= begun
    assert served(node, rsync_left_behind, image())


def test_stager_killed_fifty_times_at_random_moments_leaves_right_bytes(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"seed={seed}")  # shown if it fails
    moments = random.Random(seed)
    node.configure(bandwidth="400M")  # a few milliseconds for each chunk
    path = node.put("alice/image.sqsh", image())
    key = node.identity(path).key
    kills = tmp_path / "kills"
    kills.touch()
    live = stager._run_stager

    def die() -> None:
        with kills.open("ab") as file:
            file.write(b".")
        os.kill(os.getpid(), signal.SIGKILL)

    def doomed(*args: object) -> None:
        timer = threading.Timer(moment, die)
        timer.daemon = True
        timer.start()
        live(*args)  # type: ignore[arg-type]

    job = 0
    while kills.stat().st_size < 50:
        job += 1
        moment = moments.uniform(0, 0.04)
        monkeypatch.setattr(stager, "_run_stager", doomed)
        ran = node.prolog(job, path)
        assert ran.outcome.result in ("copied", "joined", "failed"), ran
        assert path.read_bytes() == image()
        if ran.outcome.result == "failed":
            assert ran.outcome.reason == "copy"
            assert untouched(node, path, job)
            monkeypatch.setattr(stager, "_run_stager", live)
            job += 1
            assert node.prolog(job, path).outcome.result == "copied"
        assert served(node, path, image())
        for ended in range(job + 1):
            node.epilog(ended)
        evict.evict_keys(node.cache, node.leases, [key])
        assert node.entries() == set()
