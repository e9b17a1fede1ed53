"""Who read which chunk, and what may go to other jobs' nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.peers import origins
from forestage.features.peers.origins import NAME, ChunkReaderRecorder, ChunkReaders

ALL = 0b11111


def of_copy(folder: Path) -> ChunkReaderRecorder:
    """Of n1: chunk 0 was here, 1 it read itself, 2 its job's n2 gave, 3 n9 of another job."""
    noted = ChunkReaderRecorder(folder, "n1", [0])
    noted.note(1)
    noted.note(2, "n2")
    noted.note(3, "n8", outside=True)
    return noted


def read(folder: Path) -> ChunkReaders:
    found = origins.read(folder)
    assert found is not None
    return found


def test_chunk_is_known_by_who_read_it(tmp_path: Path) -> None:
    of_copy(tmp_path).write()
    assert [read(tmp_path).reader(number) for number in range(5)] == ["n1", "n1", "n2", "n8", ""]


def test_what_another_job_gave_goes_to_no_third_while_it_is_copied(tmp_path: Path) -> None:
    of_copy(tmp_path).write()
    assert read(tmp_path).may_leave(ALL, is_whole=False) == 0b00111, "4 is not noted yet"
    assert read(tmp_path).may_leave(0b00101, is_whole=False) == 0b00101


@pytest.mark.parametrize(("compared", "leaves"), [(False, 0b10111), (True, ALL)])
def test_what_another_job_gave_goes_on_once_it_was_compared(
    tmp_path: Path, compared: bool, leaves: int
) -> None:
    of_copy(tmp_path).write(compared)
    assert read(tmp_path).may_leave(ALL, is_whole=True) == leaves


def test_struck_chunk_that_comes_again_has_its_new_reader(tmp_path: Path) -> None:
    noted = of_copy(tmp_path)
    assert noted.of("n8") == [3]
    noted.strike([3])
    assert noted.of("n8") == []
    noted.note(3)
    noted.write()
    assert (read(tmp_path).reader(3), read(tmp_path).outside) == ("n1", "0")


def test_chunks_of_ones_own_are_nobodys_to_strike(tmp_path: Path) -> None:
    assert of_copy(tmp_path).of("n1") == []


def test_resumed_copy_knows_what_came_before(tmp_path: Path) -> None:
    of_copy(tmp_path).write()
    again = ChunkReaderRecorder(tmp_path, "n1", [0, 1, 2, 3])
    again.note(4, "n2")
    again.write()
    assert read(tmp_path).may_leave(ALL, is_whole=False) == 0b10111
    assert read(tmp_path).reader(3) == "n8"


@pytest.mark.parametrize("text", ["", '{"by": {"n1"', '{"outside": "zz"}', '{"by": {"n1": 3}}'])
@pytest.mark.parametrize("is_whole", [False, True])
def test_nothing_leaves_by_a_damaged_file(tmp_path: Path, text: str, is_whole: bool) -> None:
    (tmp_path / NAME).write_text(text)
    assert read(tmp_path).may_leave(ALL, is_whole) == 0


def test_copy_without_peers_has_no_file(tmp_path: Path) -> None:
    assert origins.read(tmp_path) is None
