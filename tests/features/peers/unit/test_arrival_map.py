"""What peers alone do to the arrival map of a copy: clear a chunk, and request one."""

from __future__ import annotations

from pathlib import Path

import pytest

from arrivals import *  # noqa: F403  (fixtures)
from arrivals import SIZE
from forestage.cache import arrival_map
from forestage.cache.arrival_map import NOW, PIECE, ArrivalMap


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
