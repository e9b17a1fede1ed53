"""The part of a copy: its progress is true, and only the same copy of this boot resumes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.cache.part import (
    ENTRY_BYTES,
    Part,
    PartRecord,
    chunk_count,
    count_done_bytes,
    list_missing_chunks,
)
from forestage.cache.source_image import AccessRights, SourceImage

Make = Callable[..., SourceImage]
IN, OUT = b"\1" + bytes(15), bytes(16)


@pytest.fixture
def part(tmp_path: Path) -> Part:
    return Part(tmp_path / "part")


def owner(wanted: SourceImage, **changes: Any) -> PartRecord:
    one = PartRecord(pid=1, boot="b", image=wanted, chunk=4, engine="chunks", job=7, since=1.0)
    return msgspec.structs.replace(one, **changes)


@pytest.mark.parametrize(
    ("digests", "missing", "done"),
    [
        (b"", [0, 1, 2], 0),
        (OUT * 3, [0, 1, 2], 0),
        (IN + OUT + OUT, [1, 2], 4),
        (OUT + OUT + IN, [0, 1], 1),
        (IN * 3, [], 9),
        # Cut short: what the map does not say is not in.
        (IN, [1, 2], 4),
        (IN + b"\1", [2], 8),
        # Any byte makes an entry.
        (bytes(15) + b"\1" + OUT * 2, [1, 2], 4),
    ],
)
def test_map_of_three_chunks_gives_missing_chunks_and_done_bytes(
    digests: bytes, missing: list[int], done: int
) -> None:
    assert list_missing_chunks(digests, size=9, chunk=4) == missing
    assert count_done_bytes(digests, chunk=4, size=9) == done


@given(st.integers(1, 1000), st.integers(1, 100), st.data())
def test_copied_and_missing_chunks_of_any_map_make_the_whole_image(
    size: int, chunk: int, data: st.DataObject
) -> None:
    count = chunk_count(size, chunk)
    there = data.draw(st.sets(st.integers(0, count - 1)))
    digests = b"".join(IN if number in there else OUT for number in range(count))
    assert set(list_missing_chunks(digests, size, chunk)) == set(range(count)) - there
    lengths = [len(range(number * chunk, min(size, (number + 1) * chunk))) for number in there]
    assert count_done_bytes(digests, chunk, size) == sum(lengths)
    assert len(digests) == count * ENTRY_BYTES


def test_part_record_is_read_back_and_the_part_is_readable_by_root_only(
    part: Part, make_image: Make
) -> None:
    assert part.find_record() is None
    one = owner(make_image(), phase="copying", began=2.5, resumed=3)
    part.write_record(owner(make_image()))
    part.write_record(one)
    assert part.find_record() == one
    assert part.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"\xff", b"{}", b"\0" * 100])
def test_part_with_a_damaged_record_has_no_owner_and_is_not_resumed(
    part: Part, make_image: Make, damage: bytes
) -> None:
    part.write_record(owner(make_image()))
    part.record.write_bytes(damage)
    assert part.find_record() is None
    assert not part.is_beginning_of(owner(make_image()))
    assert not part.is_resumable_in_boot("b")


def test_stray_file_among_the_parts_has_no_owner(part: Part) -> None:
    part.directory.touch()
    assert part.find_record() is None


@pytest.mark.parametrize(
    ("changes", "resumable"),
    [
        ({}, True),
        # Another process, job and time are what a resume is about.
        ({"pid": 2, "job": 8, "since": 9.0, "phase": "copying", "began": 9.0}, True),
        ({"boot": "c"}, False),
        ({"chunk": 8}, False),
        ({"engine": "rsync"}, False),
    ],
)
def test_part_is_resumable_only_by_the_same_copy_in_the_same_boot(
    part: Part, make_image: Make, changes: dict[str, object], resumable: bool
) -> None:
    part.write_record(owner(make_image()))
    part.image.write_bytes(bytes(make_image().size))
    assert part.is_beginning_of(owner(make_image(), **changes)) is resumable


def test_part_without_its_image_file_is_not_resumable(part: Part, make_image: Make) -> None:
    """Whoever deleted the part may have been killed between the image and the map."""
    part.write_record(owner(make_image()))
    assert not part.is_beginning_of(owner(make_image()))


@pytest.mark.parametrize("field", ["path", "inode", "size", "mtime_ns", "ctime_ns", "access"])
def test_part_of_another_source_or_other_rights_is_not_resumable(
    part: Part, make_image: Make, field: str
) -> None:
    part.write_record(owner(make_image()))
    if field == "access":
        other = SourceImage(make_image().identity, AccessRights(0, 0, 0o600))
    else:
        other = make_image(**{field: "/lustre/b" if field == "path" else 9})
    part.image.write_bytes(bytes(other.size))
    assert not part.is_beginning_of(owner(other))


def test_part_is_not_resumable_after_a_reboot(part: Part, make_image: Make) -> None:
    """After a power cut the map may have reached the disk and the bytes not."""
    assert not part.is_resumable_in_boot("b")
    part.write_record(owner(make_image()))
    assert part.is_resumable_in_boot("b")
    assert not part.is_resumable_in_boot("c")


def test_copied_bytes_come_from_the_map_or_for_rsync_from_the_files_size(
    part: Part, make_image: Make
) -> None:
    chunks, rsync = owner(make_image(size=9)), owner(make_image(size=9), engine="rsync")
    assert (part.copied_bytes(chunks), part.copied_bytes(rsync), part.allocated_bytes()) == (
        0,
        0,
        0,
    )
    part.directory.mkdir()
    part.image.write_bytes(b"12345")
    part.map.write_bytes(IN + OUT + IN)
    assert (part.copied_bytes(chunks), part.copied_bytes(rsync)) == (5, 5)
    os.truncate(part.image, 9)
    part.map.write_bytes(IN + OUT + OUT)
    assert (part.copied_bytes(chunks), part.copied_bytes(rsync)) == (4, 9)


def test_next_stager_clears_the_killed_stagers_notes_on_peers_and_source(
    part: Part, make_image: Make
) -> None:
    """Else others would read in the stead of one that can read again."""
    part.write_record(owner(make_image()))
    part.peers.write_bytes(b"7")
    part.source_failed.touch()
    assert part.read_peer_bytes() == 7
    part.write_record(owner(make_image()))
    assert part.read_peer_bytes() == 0
    assert not part.source_failed.exists()


def test_allocated_bytes_of_a_part_exclude_holes(part: Part) -> None:
    part.directory.mkdir()
    with part.image.open("wb") as file:
        file.truncate(1 << 30)
        assert part.allocated_bytes() < 1 << 20
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    assert 1 << 20 <= part.allocated_bytes() < 2 << 20


@pytest.mark.parametrize("step", [-40 * 86400.0, -3600.0, 3600.0, 40 * 86400.0])
def test_copy_with_a_fresh_map_is_not_stalled_after_the_clock_was_set(
    part: Part, step: float
) -> None:
    """Its record is of before."""
    part.directory.mkdir()
    now = 1e9
    part.record.touch()
    os.utime(part.record, (now - step, now - step))
    assert part.idle_seconds(now) == abs(step)
    part.map.touch()
    os.utime(part.map, (now, now))
    assert part.idle_seconds(now) == 0.0


@pytest.mark.parametrize("step", [-40 * 86400.0, -3600.0, 3600.0, 40 * 86400.0])
def test_hook_that_waited_before_the_clock_was_set_no_longer_counts_as_waiting(
    part: Part, step: float
) -> None:
    part.directory.mkdir()
    part.waited.touch()
    part.mark_waited_for(1e9)
    assert part.is_waited_for(1e9)
    assert not part.is_waited_for(1e9 + step)


def test_copy_is_stalled_since_its_last_change_of_map_or_image(part: Part) -> None:
    part.directory.mkdir()
    assert part.idle_seconds(1000.0) == 1000.0
    part.image.touch()
    os.utime(part.image, (900, 900))
    assert part.idle_seconds(1000.0) == 100.0
    part.map.touch()
    os.utime(part.map, (950, 950))
    assert part.idle_seconds(1000.0) == 50.0
    os.utime(part.image, (999, 999))
    assert part.idle_seconds(1000.0) == 1.0
