"""Both engines through their interface: a part with all bytes of the source and a complete map."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from forestage.cache import digest
from forestage.cache.part import Part, chunk_count, list_missing_chunks
from forestage.config import Config
from forestage.errors import CopyStopped, Failed
from forestage.sources.source import ReadableSource, SourceTruncated
from forestage.stage import engines
from forestage.stage.chunks import CopyTuning
from forestage.stage.engines import ChunkEngine, Engine, RsyncEngine
from forestage.system import run

Patch = pytest.MonkeyPatch

CHUNK = 1 << 20
TUNING = CopyTuning(threads=2, chunk=CHUNK)
SIZES = [1, 4095, 4096, 4097, CHUNK, (2 << 20) + 7]


@pytest.fixture(params=[ChunkEngine, RsyncEngine], ids=["chunks", "rsync"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param(TUNING)


def of(source: int) -> ReadableSource:
    return ReadableSource(source, None, os.fstat(source).st_size)


def bring(engine: Engine, source: int, part: Part) -> None:
    engine.reserve(of(source), part)
    engine.copy(of(source), part, threading.Event())


@pytest.mark.parametrize("size", SIZES)
def test_engine_copies_all_bytes_and_writes_a_complete_map(
    engine: Engine, source: int, part: Part, size: int
) -> None:
    data = os.urandom(size)
    os.write(source, data)
    bring(engine, source, part)
    assert part.image.read_bytes() == data
    assert not list_missing_chunks(part.read_digests(), size, CHUNK)
    sums = [digest.digest_chunk(data[at : at + CHUNK]) for at in range(0, size, CHUNK)]
    assert digest.split_map(part.read_digests()) == sums


def test_engine_copies_holes_as_zero_bytes(engine: Engine, source: int, part: Part) -> None:
    os.pwrite(source, b"start", 0)
    os.pwrite(source, b"end", 3 << 20)
    bring(engine, source, part)
    assert part.image.read_bytes() == b"start" + bytes((3 << 20) - 5) + b"end"


def test_engine_copies_the_open_file_though_its_path_was_replaced(
    tmp_path: Path, engine: Engine, source: int, part: Part
) -> None:
    os.write(source, b"right")
    (tmp_path / "source").rename(tmp_path / "old")
    (tmp_path / "source").write_bytes(b"wrong")
    bring(engine, source, part)
    assert part.image.read_bytes() == b"right"


def test_engine_writes_into_the_reserved_file_and_creates_no_other(
    engine: Engine, source: int, part: Part
) -> None:
    """A new file in its place would need the space twice, and lose the reservation."""
    os.write(source, b"right")
    engine.reserve(of(source), part)
    assert part.allocated_bytes() >= len(b"right")
    inode = part.image.stat().st_ino
    engine.copy(of(source), part, threading.Event())
    assert part.image.stat().st_ino == inode
    assert sorted(os.listdir(part.directory)) == ["image", "map", "spare"]


def test_stopped_engine_raises_copy_stopped_and_the_copy_can_be_resumed(
    engine: Engine, source: int, part: Part
) -> None:
    os.write(source, b"x" * 100)
    engine.reserve(of(source), part)
    stop = threading.Event()
    stop.set()
    with pytest.raises(CopyStopped):
        engine.copy(of(source), part, stop)
    bring(engine, source, part)
    assert part.image.read_bytes() == b"x" * 100


DATA = os.urandom(3 * CHUNK + 11)


@pytest.mark.parametrize("wrong", [0, 1, 500_000, CHUNK])
def test_wrong_bytes_of_a_killed_rsync_are_copied_again(
    source: int, part: Part, wrong: int
) -> None:
    os.write(source, DATA)
    RsyncEngine(TUNING).reserve(of(source), part)
    beginning = bytearray(DATA[: CHUNK + 5])
    beginning[wrong] ^= 1
    with part.image.open("r+b") as file:
        file.write(beginning)
    bring(RsyncEngine(TUNING), source, part)
    assert part.image.read_bytes() == DATA


class Door:
    """Stands for the door to other programs; notes what was to be run."""

    def __init__(self, monkeypatch: Patch, code: int = 0) -> None:
        self.argv: list[str] = []
        self.fds: list[int] = []
        self.code = code
        monkeypatch.setattr(run, "run_program", self.run)

    def run(self, argv: list[str], pass_fds: list[int], stop: threading.Event) -> run.ProcessResult:
        self.argv, self.fds = argv, pass_fds
        return run.ProcessResult(tuple(argv), self.code, "", "rsync: error: no luck")


@pytest.mark.parametrize(
    ("bandwidth", "argument"),
    [(None, "0"), (1, "1"), (1024, "1"), (1025, "2"), (500 << 20, "512000")],
)
def test_bandwidth_limit_is_passed_to_rsync_in_kib_rounded_up(
    monkeypatch: Patch, source: int, part: Part, bandwidth: int | None, argument: str
) -> None:
    door = Door(monkeypatch)
    os.write(source, b"x")
    part.image.write_bytes(b"x")
    tuning = msgspec.structs.replace(TUNING, bandwidth=bandwidth)
    RsyncEngine(tuning).copy(of(source), part, threading.Event())
    assert f"--bwlimit={argument}" in door.argv


@pytest.mark.parametrize(
    ("there", "option", "other"),
    [(b"", "--whole-file", "--append-verify"), (b"x", "--append-verify", "--whole-file")],
)
def test_rsync_copies_whole_or_resumes_and_gets_only_the_open_descriptor(
    monkeypatch: Patch, source: int, part: Part, there: bytes, option: str, other: str
) -> None:
    door = Door(monkeypatch)
    os.write(source, b"xy")
    part.image.write_bytes(there)
    with pytest.raises(SourceTruncated):  # this rsync only says that it was there
        RsyncEngine(TUNING).copy(of(source), part, threading.Event())
    assert option in door.argv
    assert other not in door.argv
    assert {"--inplace", "--partial"} <= set(door.argv)
    assert door.argv[-2:] == [f"/proc/self/fd/{source}", str(part.image)]
    assert door.fds == [source]


def test_failed_rsync_raises_its_exit_status_and_message_and_writes_no_map(
    monkeypatch: Patch, source: int, part: Part
) -> None:
    Door(monkeypatch, code=23)
    part.image.write_bytes(b"")
    with pytest.raises(Failed, match="rsync: exit 23 rsync: error: no luck") as caught:
        RsyncEngine(TUNING).copy(of(source), part, threading.Event())
    assert caught.value.reason == "copy"
    assert part.read_digests() == b""


def test_missing_rsync_raises_an_error_that_says_not_installed(
    tmp_path: Path, source: int, part: Part, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(run, "PATH", str(tmp_path))
    os.write(source, b"right")
    with pytest.raises(Failed, match="rsync is not installed") as caught:
        bring(RsyncEngine(TUNING), source, part)
    assert caught.value.reason == "program"


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [(1, None, 4), (2, None, 4), (3, None, 6), (64, None, 8), (None, None, 4), (64, 1, 1)],
)
def test_copy_threads_follow_the_number_of_cores_unless_configured(
    monkeypatch: Patch, cores: int | None, threads: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert engines.derive_tuning(Config(threads=threads), CHUNK).threads == expected


def test_engine_and_its_tuning_follow_the_configuration() -> None:
    asked = Config(threads=3, chunk_size=CHUNK, bandwidth=7)
    assert engines.derive_tuning(asked, CHUNK) == CopyTuning(threads=3, chunk=CHUNK, bandwidth=7)
    assert isinstance(engines.choose_engine(Config(), CHUNK), ChunkEngine)
    assert isinstance(engines.choose_engine(Config(engine="rsync"), CHUNK), RsyncEngine)
    assert chunk_count(1, Config().chunk_bytes_for(1)) == 1
