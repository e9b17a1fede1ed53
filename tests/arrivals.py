"""An arrival map as its stager and a server have it: two whole chunks, a piece and some bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.cache import arrival_map
from forestage.cache.arrival_map import PIECE, ArrivalMap

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
