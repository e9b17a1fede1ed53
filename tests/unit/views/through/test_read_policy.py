from __future__ import annotations

import pytest

from forestage.system.fuse import MAX_READ
from forestage.views.through.read_policy import (
    BEGIN,
    LONGEST,
    PATIENCE,
    RUN,
    STREAMS,
    ArrivalMonitor,
    ReadStreams,
    piece_timeout,
)

MIB = 1024 * 1024


def test_read_stream_is_sequential_after_a_run_of_contiguous_reads() -> None:
    streams = ReadStreams()
    found = [streams.is_sequential(at, MIB // 2) for at in range(0, RUN + MIB, MIB // 2)]
    assert found == [False] * 2 + [True] * 2


def test_single_large_reads_at_random_offsets_are_not_sequential() -> None:
    streams = ReadStreams()
    assert not any(streams.is_sequential(start * 17 * MIB, MAX_READ) for start in range(10))


def test_reads_slightly_out_of_order_are_still_sequential() -> None:
    streams = ReadStreams()
    for start in (0, 2, 1, 3):
        streams.is_sequential(start * MIB, MIB)
    assert streams.is_sequential(5 * MIB, MIB)
    assert streams.is_sequential(4 * MIB, MIB)


def test_random_reads_are_not_sequential_and_leave_another_stream_sequential() -> None:
    streams = ReadStreams()
    for start in range(4):
        streams.is_sequential(start * MIB, MIB)
        assert not streams.is_sequential((100 + start * 17) * MIB, MIB)
    assert streams.is_sequential(4 * MIB, MIB)


def test_random_reads_within_a_small_region_are_not_sequential() -> None:
    streams = ReadStreams()
    hops = [(number * 7 % 13) * MIB for number in range(100)]
    assert not any(streams.is_sequential(at, 128 * 1024) for at in hops)
    found = [streams.is_sequential(at * MIB, MIB) for at in range(12, 20)]
    assert found[-4:] == [True] * 4


def test_too_many_read_streams_forget_the_oldest() -> None:
    streams = ReadStreams()
    for start in range(4):
        streams.is_sequential(start * MIB, MIB)
    for number in range(STREAMS):
        streams.is_sequential((100 + number * 10) * MIB, MIB)
    assert not streams.is_sequential(4 * MIB, MIB)


@pytest.mark.parametrize(
    ("last", "wanted"), [(0.0, PATIENCE), (PATIENCE, 4 * PATIENCE), (100.0, LONGEST)]
)
def test_timeout_for_a_piece_grows_with_the_time_of_the_last_piece(
    last: float, wanted: float
) -> None:
    assert piece_timeout(last) == wanted


def test_copy_counts_as_progressing_until_a_reader_waited_longer_than_the_patience() -> None:
    arrivals = ArrivalMonitor(100.0)
    arrivals.update(0, waits=True, now=100.0 + PATIENCE / 2)
    assert arrivals.is_coming
    arrivals.update(0, waits=True, now=100.0 + PATIENCE)
    assert not arrivals.is_coming
    arrivals.update(1, waits=False, now=200.0)
    assert arrivals.is_coming


def test_copy_not_yet_begun_counts_as_progressing_briefly_and_again_once_begun() -> None:
    arrivals = ArrivalMonitor(100.0)
    arrivals.update(-1, waits=True, now=100.0)
    arrivals.update(-1, waits=True, now=100.0 + BEGIN / 2)
    assert arrivals.is_coming
    arrivals.update(-1, waits=True, now=100.0 + BEGIN)
    assert not arrivals.is_coming
    arrivals.update(0, waits=True, now=101.0)
    assert arrivals.is_coming


def test_time_without_a_waiting_reader_does_not_count_as_lack_of_progress() -> None:
    arrivals = ArrivalMonitor(100.0)
    arrivals.update(0, waits=False, now=200.0)  # a stager that has nothing to hurry for
    arrivals.update(0, waits=True, now=200.0 + PATIENCE / 2)
    assert arrivals.is_coming
    arrivals.update(1, waits=True, now=200.0 + PATIENCE / 2)
    arrivals.update(1, waits=True, now=200.0 + 1.5 * PATIENCE)
    assert arrivals.is_coming  # one that takes half a second is waited for two
