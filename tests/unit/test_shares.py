"""Who reads which chunk: all nodes agree, all bear alike, nobody is out of everybody's reach."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.shares import SPAN, Shares


def names(count: int) -> list[str]:
    return [f"gpu{number:05}" for number in range(count)]


@given(st.integers(1, 300), st.integers(0, 5000), st.randoms())
def test_nodes_agree_in_whatever_order_their_lists_are(
    count: int, number: int, chance: random.Random
) -> None:
    other = [*names(count), names(count)[0]]
    chance.shuffle(other)
    assert Shares("key", names(count)).order(number) == Shares("key", other).order(number)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 100])
def test_nobody_reads_more_than_others_and_nobody_stands_in_for_more(count: int) -> None:
    shares = Shares("key", names(count))
    rounds = range(2 * 15 * count)
    readers = Counter(shares.reader(number) for number in rounds)
    assert set(readers.values()) == {30}
    if count > 1:
        seconds = Counter(shares.order(number)[1] for number in rounds)
        assert set(seconds.values()) == {30}
        of_one = {shares.order(n)[1] for n in rounds if shares.reader(n) == shares.ring[0]}
        assert len(of_one) == min(SPAN, count) - 1, "what a dead node leaves is shared by many"


@given(st.integers(1, 200), st.integers(0, 2000))
def test_an_order_begins_with_the_reader_and_names_nobody_twice(count: int, number: int) -> None:
    shares = Shares("key", names(count))
    order = shares.order(number)
    assert order[0] == shares.reader(number)
    assert len(order) == len(set(order)) == min(SPAN, count)
    assert shares.order(number, 3) == order[:3]


def test_images_have_rings_of_their_own() -> None:
    assert Shares("one", names(9)).ring != Shares("two", names(9)).ring


@given(st.integers(1, 5000), st.integers(0, 9999), st.integers(0, 9999))
def test_a_chunk_reaches_each_node_over_neighbours_in_few_hops(
    count: int, number: int, at: int
) -> None:
    shares = Shares("key", names(count))
    here, hops = shares.ring[at % count], 0
    while here != shares.reader(number):
        nearer = shares.nearer(number, here)
        assert set(nearer) <= set(shares.around(here))
        here, hops = nearer[-1], hops + 1
    assert hops <= 4
    assert shares.nearer(number, shares.reader(number)) in ([], [here])


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (31, 30), (256, 60), (10_000, 75)])
def test_of_many_nodes_each_talks_to_few_and_up_to_thirty_all_to_all(count: int, most: int) -> None:
    shares = Shares("key", names(count))
    around = shares.around(shares.ring[count // 2])
    assert len(around) == len(set(around))
    assert shares.ring[count // 2] not in around
    assert len(around) <= most
    assert count > 31 or len(around) == count - 1


def test_a_thousand_nodes_share_a_large_image_without_effort() -> None:
    """CPU seconds, of which there are ten times as many as are needed."""

    def took() -> float:
        start = time.process_time()
        shares = Shares("key", names(1024))
        me = shares.ring[5]
        for number in range(4000):
            shares.nearer(number, me)
        return time.process_time() - start

    # A virtual machine that stood still may have that on its bill.
    assert min(took() for _ in range(3)) < 1.0
