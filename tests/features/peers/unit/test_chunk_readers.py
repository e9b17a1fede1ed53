"""Who read which chunk, and what may go to other jobs' nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.peers import chunk_readers
from forestage.features.peers.chunk_readers import NAME, ChunkReaderRecorder, ChunkReaders

ALL = 0b11111


def of_copy(folder: Path) -> ChunkReaderRecorder:
    """Of n1: chunk 0 was here, 1 it read itself, 2 its job's n2 gave, 3 n9 of another job."""
    noted = ChunkReaderRecorder(folder, "n1", [0])
    noted.record_chunk(1)
    noted.record_chunk(2, "n2")
    noted.record_chunk(3, "n8", outside=True)
    return noted


def read(folder: Path) -> ChunkReaders:
    found = chunk_readers.find_chunk_readers(folder)
    assert found is not None
    return found


def test_chunk_readers_record_which_node_read_each_chunk(tmp_path: Path) -> None:
    of_copy(tmp_path).write_file()
    assert [read(tmp_path).find_reader(number) for number in range(5)] == [
        "n1",
        "n1",
        "n2",
        "n8",
        "",
    ]


def test_chunks_from_another_job_may_not_leave_during_the_copy(tmp_path: Path) -> None:
    of_copy(tmp_path).write_file()
    assert read(tmp_path).chunks_for_other_jobs(ALL, is_whole=False) == 0b00111, (
        "4 is not noted yet"
    )
    assert read(tmp_path).chunks_for_other_jobs(0b00101, is_whole=False) == 0b00101


@pytest.mark.parametrize(("compared", "leaves"), [(False, 0b10111), (True, ALL)])
def test_chunks_from_another_job_may_leave_a_complete_copy_only_after_comparison(
    tmp_path: Path, compared: bool, leaves: int
) -> None:
    of_copy(tmp_path).write_file(compared)
    assert read(tmp_path).chunks_for_other_jobs(ALL, is_whole=True) == leaves


def test_invalidated_chunk_that_is_read_again_has_its_new_reader(tmp_path: Path) -> None:
    noted = of_copy(tmp_path)
    assert noted.chunks_read_by("n8") == [3]
    noted.remove_chunks([3])
    assert noted.chunks_read_by("n8") == []
    noted.record_chunk(3)
    noted.write_file()
    assert (read(tmp_path).find_reader(3), read(tmp_path).outside) == ("n1", "0")


def test_chunks_read_by_this_node_itself_are_not_listed_for_invalidation(tmp_path: Path) -> None:
    assert of_copy(tmp_path).chunks_read_by("n1") == []


def test_resumed_copy_keeps_the_recorded_readers_of_its_chunks(tmp_path: Path) -> None:
    of_copy(tmp_path).write_file()
    again = ChunkReaderRecorder(tmp_path, "n1", [0, 1, 2, 3])
    again.record_chunk(4, "n2")
    again.write_file()
    assert read(tmp_path).chunks_for_other_jobs(ALL, is_whole=False) == 0b10111
    assert read(tmp_path).find_reader(3) == "n8"


@pytest.mark.parametrize("text", ["", '{"by": {"n1"', '{"outside": "zz"}', '{"by": {"n1": 3}}'])
@pytest.mark.parametrize("is_whole", [False, True])
def test_damaged_chunk_readers_file_lets_no_chunk_leave(
    tmp_path: Path, text: str, is_whole: bool
) -> None:
    (tmp_path / NAME).write_text(text)
    assert read(tmp_path).chunks_for_other_jobs(ALL, is_whole) == 0


def test_copy_without_peers_has_no_chunk_readers_file(tmp_path: Path) -> None:
    assert chunk_readers.find_chunk_readers(tmp_path) is None
