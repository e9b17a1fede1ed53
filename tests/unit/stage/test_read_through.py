"""A copy that jobs read through: what they want comes first, and their own reads do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage import trace
from forestage.cache import allocation, arrival_map, digest
from forestage.cache.arrival_map import NOW, PIECE, SOON, ArrivalMap
from forestage.cache.part import Part, list_missing_chunks
from forestage.errors import CopyStopped
from forestage.sources.source import ReadableSource
from forestage.stage import chunks, source_reader
from forestage.stage.chunks import CopyTuning, order_chunks

CHUNK = 2 * PIECE
COUNT = 5
SIZE = (COUNT - 1) * CHUNK + PIECE + 5
TUNING = CopyTuning(threads=1, chunk=CHUNK)

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("missing", "hot", "expected"),
    [
        ([0, 1, 2, 3, 4], [], [0, 4, 1, 2, 3]),
        ([0, 1, 2, 3, 4], [3, 0, 9, 3], [0, 4, 3, 1, 2]),
        ([1, 2, 3], [2], [2, 1, 3]),
        ([4], [], [4]),
        ([], [1], []),
    ],
)
def test_chunks_are_copied_in_the_order_head_tail_hot_and_rest(
    missing: list[int], hot: list[int], expected: list[int]
) -> None:
    assert order_chunks(missing, 5, hot) == expected


class Scene:
    """A copy under way: what it reads, in order, and what happens at each read."""

    def __init__(self, folder: Path, monkeypatch: Patch) -> None:
        self.data = os.urandom(SIZE)
        (folder / "source").write_bytes(self.data)
        self.fd = os.open(folder / "source", os.O_RDONLY)
        self.part = Part(folder / "part")
        self.part.directory.mkdir()
        allocation.reserve_part(self.part, SIZE, CHUNK, set(range(COUNT)))
        made = arrival_map.create_map(folder / "key", SIZE, CHUNK, self.part.image)
        assert made is not None
        self.readers: ArrivalMap = made
        self.stop = threading.Event()
        self.read: list[int] = []
        self.sizes: list[int] = []
        self.reading = self.most = 0  # threads that read the source
        self.then: Callable[[], None] = lambda: None
        real = source_reader.read_piece

        def read_piece(
            source: ReadableSource, start: int, want: memoryview, buffer: memoryview
        ) -> None:
            self.reading += 1
            self.most = max(self.most, self.reading)
            real(source, start, want, buffer)
            self.reading -= 1
            self.sizes.append(len(want))
            if self.read[-1:] != [start // PIECE]:  # gently, a piece takes several reads
                self.read.append(start // PIECE)
            self.then()

        monkeypatch.setattr(source_reader, "read_piece", read_piece)

    def serve(self) -> None:
        (self.readers.directory / "sock").touch()

    def copy(self, **tuning: object) -> None:
        source = ReadableSource(self.fd, None, SIZE)
        known = msgspec.structs.replace(TUNING, **tuning)
        self.pace = chunks.copy_chunks(source, self.part, known, self.stop, self.readers)

    def check(self) -> None:
        assert self.part.image.read_bytes() == self.data
        each = (self.data[at : at + CHUNK] for at in range(0, SIZE, CHUNK))
        assert self.part.read_digests() == b"".join(digest.digest_chunk(one) for one in each)
        assert self.readers.has_arrived(0, SIZE, self.part.image.stat().st_ino)
        assert self.readers.list_wanted() == []


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: Patch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.readers.remove_map()
    os.close(made.fd)


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("served", [False, True])
def test_copy_is_complete_with_readers_and_any_number_of_threads(
    scene: Scene, served: bool, threads: int
) -> None:
    if served:
        scene.serve()
    for number in range(COUNT):
        scene.readers.request_chunk(number, SOON)
    scene.copy(threads=threads)
    scene.check()


def test_chunks_of_an_earlier_stager_are_readable_from_the_start_of_the_resumed_copy(
    scene: Scene, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(trace, "listener", lambda _: scene.stop.set())
    with pytest.raises(CopyStopped):
        scene.copy()
    monkeypatch.setattr(trace, "listener", None)
    made = arrival_map.create_map(scene.readers.directory, SIZE, CHUNK, scene.part.image)
    assert made is not None
    scene.stop.clear()
    inode = scene.part.image.stat().st_ino
    seen: list[bool] = []
    scene.then = lambda: seen.append(made.has_arrived(0, CHUNK, inode))
    scene.copy()
    assert all(seen)


def test_wanted_chunks_are_copied_first_and_awaited_chunks_before_all(scene: Scene) -> None:
    scene.readers.request_chunk(2, SOON)
    scene.readers.request_chunk(3, NOW)
    scene.copy()
    assert [piece * PIECE // CHUNK for piece in scene.read] == [3, 2, 0, 4, 1]
    scene.check()


def test_copy_continues_after_the_wanted_chunk(scene: Scene) -> None:
    scene.readers.request_chunk(2, NOW)
    scene.copy()
    assert [piece * PIECE // CHUNK for piece in scene.read] == [2, 3, 4, 0, 1]


def test_chunk_that_a_job_waits_for_interrupts_another_chunk(scene: Scene) -> None:
    scene.serve()
    scene.then = lambda: scene.readers.request_chunk(3, NOW) if len(scene.read) == 1 else None
    scene.copy()
    assert scene.read[:4] == [0, 6, 7, 1]
    scene.check()


def test_piece_is_readable_before_its_chunk_is_complete(scene: Scene) -> None:
    scene.serve()
    inode = scene.part.image.stat().st_ino
    seen: list[tuple[bool, bool]] = []
    scene.then = lambda: seen.append(
        (scene.readers.has_arrived(0, PIECE, inode), scene.readers.has_arrived(PIECE, PIECE, inode))
    )
    scene.copy()
    assert seen[:3] == [(False, False), (True, False), (True, True)]


@pytest.fixture
def until_a_chunk_is_in(scene: Scene, monkeypatch: Patch) -> None:
    monkeypatch.setattr(trace, "listener", lambda _: scene.stop.set())


@pytest.mark.usefixtures("until_a_chunk_is_in")
@pytest.mark.parametrize("tuning", [{}, {"bandwidth": 1}], ids=["read", "bandwidth"])
def test_chunk_that_a_job_waits_for_is_not_delayed_by_reads_or_bandwidth_limit(
    scene: Scene, monkeypatch: Patch, tuning: dict[str, object]
) -> None:
    monkeypatch.setattr(chunks, "PAUSE", 1e9)
    monkeypatch.setattr(ArrivalMap, "has_recent_source_read", lambda *_: not tuning)
    scene.serve()
    scene.then = lambda: scene.readers.request_chunk(3, NOW)
    with pytest.raises(CopyStopped):
        scene.copy(**tuning)
    assert scene.read == [0, 6, 7]
    assert list_missing_chunks(scene.part.read_digests(), SIZE, CHUNK) == [0, 1, 2, 4]


def test_chunk_that_a_job_waits_for_is_exempt_from_the_bandwidth_limit(
    scene: Scene, monkeypatch: Patch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        source_reader.RateLimiter, "acquire", lambda self, size, stop: taken.append(size)
    )
    scene.readers.request_chunk(0, NOW)
    scene.copy()
    assert taken == [CHUNK, CHUNK, CHUNK, PIECE + 5]


@pytest.mark.parametrize("served", [False, True])
def test_copy_pauses_while_a_job_reads(scene: Scene, monkeypatch: Patch, served: bool) -> None:
    monkeypatch.setattr(chunks, "PAUSE", 1e9)

    # It waits after the one read of so long a pause.
    monkeypatch.setattr(scene.stop, "wait", lambda _: scene.stop.set())
    monkeypatch.setattr(ArrivalMap, "has_recent_source_read", lambda *_: True)
    if served:
        scene.serve()
    with pytest.raises(CopyStopped):
        scene.copy()
    assert scene.sizes == [chunks.GENTLE]


@pytest.mark.parametrize("served", [False, True])
def test_copy_uses_one_thread_and_small_reads_while_a_job_starts(
    scene: Scene, monkeypatch: Patch, served: bool
) -> None:
    monkeypatch.setattr(
        ArrivalMap, "has_recent_source_read", lambda _, now, calm: calm == chunks.BETWEEN_NS
    )
    if served:
        scene.serve()
    scene.copy(threads=4)
    assert max(scene.sizes) == chunks.GENTLE
    assert scene.most == 1
    assert scene.pace.bytes_per_second(1) == 0.0, "that is not how fast the source is"
    scene.check()


def test_copy_for_a_job_that_reads_through_pauses_until_the_jobs_first_read(
    scene: Scene, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(chunks, "PAUSE", 1e9)
    monkeypatch.setattr(scene.stop, "wait", lambda _: scene.stop.set())
    with pytest.raises(CopyStopped):
        scene.copy(through=True)
    assert scene.sizes == [chunks.GENTLE]


def test_copy_continues_at_full_size_after_the_jobs_first_read(
    scene: Scene, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(chunks, "PAUSE", 0.0)
    scene.then = lambda: scene.readers.mark_source_read(1) if len(scene.sizes) == 3 else None
    scene.copy(through=True)
    assert scene.sizes[:4] == [chunks.GENTLE] * 3 + [CHUNK - 3 * chunks.GENTLE]
    scene.check()


def test_job_start_that_lasts_too_long_no_longer_slows_the_copy(
    scene: Scene, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(chunks, "START_NS", 0)
    monkeypatch.setattr(ArrivalMap, "has_recent_source_read", lambda *_: True)
    scene.copy()
    assert min(scene.sizes[:4]) > chunks.GENTLE
    scene.check()


def test_job_that_reads_all_the_time_does_not_starve_the_copy(
    scene: Scene, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(chunks, "PAUSE", 0.001)
    monkeypatch.setattr(ArrivalMap, "has_recent_source_read", lambda *_: True)
    scene.serve()
    scene.copy()
    scene.check()


def test_copy_threads_that_share_a_large_chunk_share_one_buffer(
    scene: Scene, monkeypatch: Patch
) -> None:
    made: list[int] = []
    real = source_reader.allocate_aligned_memory

    def noting(size: int) -> memoryview:
        made.append(size)
        return real(size)

    monkeypatch.setattr(chunks, "SHARED_CHUNK", CHUNK - 1)
    monkeypatch.setattr(source_reader, "allocate_aligned_memory", noting)
    scene.serve()
    scene.copy()
    assert made == [CHUNK]  # one thread's own
    scene.check()
