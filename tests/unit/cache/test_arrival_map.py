"""The shared memory of a copy and its readers: marks, wishes, and what is left on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from arrivals import *  # noqa: F403  (fixtures)
from arrivals import CHUNK, SIZE
from forestage.cache import arrival_map
from forestage.cache.arrival_map import NOW, PIECE, SOON, ArrivalMap

TAIL = 2 * CHUNK  # where the last chunk begins


def has(server: ArrivalMap, image: Path) -> list[int]:
    """The pieces that are in."""
    inode = image.stat().st_ino
    return [
        n for n in range(10) if server.has_arrived(n * PIECE, min(PIECE, SIZE - n * PIECE), inode)
    ]


@pytest.mark.parametrize(
    ("start", "length", "pieces"),
    [
        (0, CHUNK, [0, 1, 2, 3]),
        (PIECE, PIECE, [1]),
        (PIECE, PIECE + 1, [1]),
        (1, PIECE, []),
        (1, 2 * PIECE, [1]),
        (TAIL, PIECE + 5, [8, 9]),
        (TAIL + PIECE, 5, [9]),
        (TAIL + PIECE, 4, []),
    ],
)
def test_only_completely_arrived_pieces_can_be_read(
    stager: ArrivalMap, server: ArrivalMap, image: Path, start: int, length: int, pieces: list[int]
) -> None:
    stager.mark_arrived(start, length)
    assert has(server, image) == pieces


def test_pieces_of_another_part_file_cannot_be_read(
    stager: ArrivalMap, server: ArrivalMap, tmp_path: Path
) -> None:
    stager.mark_arrived(0, SIZE)
    other = tmp_path / "other"
    other.touch()
    assert has(server, other) == []


def test_arrival_map_of_the_next_stager_is_empty(
    stager: ArrivalMap, server: ArrivalMap, directory: Path, image: Path
) -> None:
    stager.mark_arrived(0, SIZE)
    assert arrival_map.create_map(directory, SIZE, CHUNK, image) is not None
    assert has(server, image) == []


def test_end_of_a_copy_clears_and_deletes_the_arrival_map(
    stager: ArrivalMap, server: ArrivalMap, directory: Path, image: Path
) -> None:
    stager.mark_arrived(0, SIZE)
    stager.remove_map()
    assert has(server, image) == []
    assert not directory.exists()


def test_socket_of_the_keeper_outlives_the_copy(stager: ArrivalMap, directory: Path) -> None:
    assert not stager.is_served()
    (directory / "sock").touch()
    assert stager.is_served()
    stager.remove_map()
    assert os.listdir(directory) == ["sock"]


def test_chunks_wanted_now_come_before_chunks_wanted_soon(
    stager: ArrivalMap, server: ArrivalMap
) -> None:
    server.request_chunk(0, SOON)
    server.request_chunk(2, NOW)
    server.request_chunk(2, SOON)
    assert (stager.list_wanted(), stager.list_wanted((NOW,))) == ([2, 0], [2])
    stager.clear_wanted(2)
    assert stager.list_wanted() == [0]


def test_stager_sees_a_readers_activity_for_30_ms(stager: ArrivalMap, server: ArrivalMap) -> None:
    now, calm = 1_000_000_000, 30_000_000
    assert not stager.has_recent_source_read(now, calm)
    server.mark_source_read(now)
    later = (
        stager.has_recent_source_read(now + calm - 1, calm),
        stager.has_recent_source_read(now + calm, calm),
    )
    assert later == (True, False)


def test_arrival_map_on_a_full_run_is_not_created_and_leaves_no_files(
    directory: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert arrival_map.create_map(directory, SIZE, CHUNK, image) is None
    assert not directory.exists()


def test_server_reads_the_chunk_size_from_the_stagers_arrival_map(
    stager: ArrivalMap, directory: Path, image: Path
) -> None:
    server = ArrivalMap(directory, SIZE)
    assert server.chunk == CHUNK
    server.request_chunk(1, NOW)
    again = arrival_map.create_map(directory, SIZE, PIECE, image)
    assert again is not None
    assert again.list_wanted() == []
    assert ArrivalMap(directory, SIZE).chunk == PIECE
    assert server.has_arrived(0, PIECE, 1) is False  # its files are gone, and still mapped


def test_bytes_read_through_are_counted_in_all_and_of_the_source(
    stager: ArrivalMap, directory: Path
) -> None:
    server = ArrivalMap(directory, SIZE)
    server.count_read(100, of_source=False)
    server.count_read(30, of_source=True)
    assert stager.read_totals() == (130, 30)
    assert (server.chunk, stager.list_wanted()) == (CHUNK, [])
