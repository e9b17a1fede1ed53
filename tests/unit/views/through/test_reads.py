from __future__ import annotations

import pytest

from forestage.system.fuse import MAX_READ
from forestage.views.through.reads import (
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


def test_reader_is_straight_once_it_has_read_a_run() -> None:
    streams = ReadStreams()
    found = [streams.straight(at, MIB // 2) for at in range(0, RUN + MIB, MIB // 2)]
    assert found == [False] * 2 + [True] * 2


def test_what_the_kernel_reads_ahead_at_once_is_not_straight() -> None:
    streams = ReadStreams()
    assert not any(streams.straight(start * 17 * MIB, MAX_READ) for start in range(10))


def test_read_ahead_out_of_order_is_still_straight() -> None:
    streams = ReadStreams()
    for start in (0, 2, 1, 3):
        streams.straight(start * MIB, MIB)
    assert streams.straight(5 * MIB, MIB)
    assert streams.straight(4 * MIB, MIB)


def test_reader_that_hops_is_not_straight_and_spoils_no_other() -> None:
    streams = ReadStreams()
    for start in range(4):
        streams.straight(start * MIB, MIB)
        assert not streams.straight((100 + start * 17) * MIB, MIB)
    assert streams.straight(4 * MIB, MIB)


def test_reader_that_hops_about_in_one_place_is_not_straight() -> None:
    streams = ReadStreams()
    hops = [(number * 7 % 13) * MIB for number in range(100)]
    assert not any(streams.straight(at, 128 * 1024) for at in hops)
    found = [streams.straight(at * MIB, MIB) for at in range(12, 20)]
    assert found[-4:] == [True] * 4


def test_more_streams_than_can_be_told_apart_forget_the_oldest() -> None:
    streams = ReadStreams()
    for start in range(4):
        streams.straight(start * MIB, MIB)
    for number in range(STREAMS):
        streams.straight((100 + number * 10) * MIB, MIB)
    assert not streams.straight(4 * MIB, MIB)


@pytest.mark.parametrize(
    ("last", "wanted"), [(0.0, PATIENCE), (PATIENCE, 4 * PATIENCE), (100.0, LONGEST)]
)
def test_patience_grows_with_the_time_that_a_piece_takes(last: float, wanted: float) -> None:
    assert piece_timeout(last) == wanted


def test_copy_counts_as_coming_until_a_reader_has_waited_in_vain() -> None:
    arrivals = ArrivalMonitor(100.0)
    arrivals.look(0, waits=True, now=100.0 + PATIENCE / 2)
    assert arrivals.come
    arrivals.look(0, waits=True, now=100.0 + PATIENCE)
    assert not arrivals.come
    arrivals.look(1, waits=False, now=200.0)
    assert arrivals.come


def test_copy_that_has_not_begun_is_waited_for_a_moment_and_again_once_it_has() -> None:
    arrivals = ArrivalMonitor(100.0)
    arrivals.look(-1, waits=True, now=100.0)
    arrivals.look(-1, waits=True, now=100.0 + BEGIN / 2)
    assert arrivals.come
    arrivals.look(-1, waits=True, now=100.0 + BEGIN)
    assert not arrivals.come
    arrivals.look(0, waits=True, now=101.0)
    assert arrivals.come


def test_time_in_which_nobody_waits_does_not_count() -> None:
    arrivals = ArrivalMonitor(100.0)
    arrivals.look(0, waits=False, now=200.0)  # a stager that has nothing to hurry for
    arrivals.look(0, waits=True, now=200.0 + PATIENCE / 2)
    assert arrivals.come
    arrivals.look(1, waits=True, now=200.0 + PATIENCE / 2)
    arrivals.look(1, waits=True, now=200.0 + 1.5 * PATIENCE)
    assert arrivals.come  # one that takes half a second is waited for two
