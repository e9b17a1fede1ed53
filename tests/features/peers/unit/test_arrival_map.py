"""What peers alone do to the arrival map of a copy: clear a chunk, and request one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.cache import arrival_map
from forestage.cache.arrival_map import NOW, PIECE, ArrivalMap

CHUNK = 4 * PIECE
SIZE = 2 * CHUNK + PIECE + 5


@pytest.fixture
def image(tmp_path: Path) -> Path:
    file = tmp_path / "image"
    file.touch()
    return file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "through/key"


@pytest.fixture
def stager(directory: Path, image: Path) -> ArrivalMap:
    made = arrival_map.create_map(directory, SIZE, CHUNK, image)
    assert made is not None
    return made


@pytest.fixture
def server(stager: ArrivalMap, directory: Path) -> Iterator[ArrivalMap]:
    mapped = ArrivalMap(directory, SIZE)
    yield mapped
    mapped.close()


@pytest.mark.parametrize(("number", "left"), [(1, [0, 1, 2, 3, 8, 9]), (2, list(range(8)))])
def test_forgotten_chunk_cannot_be_read(
    stager: ArrivalMap, server: ArrivalMap, image: Path, number: int, left: list[int]
) -> None:
    stager.mark_arrived(0, SIZE)
    stager.clear_arrived(number)
    inode = image.stat().st_ino
    here = [
        n for n in range(10) if server.has_arrived(n * PIECE, min(PIECE, SIZE - n * PIECE), inode)
    ]
    assert here == left


def test_chunks_requested_by_other_nodes_come_after_those_that_jobs_wait_for(
    stager: ArrivalMap, server: ArrivalMap, directory: Path
) -> None:
    server.request_chunk(1, NOW)
    for number in (0, 1, 3, 10**9):  # the last two are beyond the image
        arrival_map.request_chunk_soon(directory, number)
    assert stager.list_wanted() == [1, 0]
    stager.remove_map()
    arrival_map.request_chunk_soon(directory, 0)
    assert not directory.exists()
