"""The ring of a job's nodes: all agree on it, all have the same load, all are in reach."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.features.peers.ring import SPAN, NodeRing


def names(count: int) -> list[str]:
    return [f"gpu{number:05}" for number in range(count)]


@given(st.integers(1, 300), st.integers(0, 5000), st.randoms())
def test_ring_does_not_depend_on_the_order_of_its_nodes(
    count: int, number: int, chance: random.Random
) -> None:
    other = [*names(count), names(count)[0]]
    chance.shuffle(other)
    assert NodeRing("key", names(count)).list_reader_and_stand_ins(number) == NodeRing(
        "key", other
    ).list_reader_and_stand_ins(number)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 100])
def test_ring_spreads_readers_and_stand_ins_evenly_over_nodes(count: int) -> None:
    ring = NodeRing("key", names(count))
    rounds = range(2 * 15 * count)
    readers = Counter(ring.find_reader(number) for number in rounds)
    assert set(readers.values()) == {30}
    if count > 1:
        seconds = Counter(ring.list_reader_and_stand_ins(number)[1] for number in rounds)
        assert set(seconds.values()) == {30}
        of_one = {
            ring.list_reader_and_stand_ins(n)[1]
            for n in rounds
            if ring.find_reader(n) == ring.nodes[0]
        }
        assert len(of_one) == min(SPAN, count) - 1, "what a dead node leaves is shared by many"


@given(st.integers(1, 200), st.integers(0, 2000))
def test_ring_order_of_a_chunk_begins_with_its_reader_and_has_no_duplicates(
    count: int, number: int
) -> None:
    ring = NodeRing("key", names(count))
    order = ring.list_reader_and_stand_ins(number)
    assert order[0] == ring.find_reader(number)
    assert len(order) == len(set(order)) == min(SPAN, count)
    assert ring.list_reader_and_stand_ins(number, 3) == order[:3]


def test_rings_of_different_keys_differ() -> None:
    assert NodeRing("one", names(9)).nodes != NodeRing("two", names(9)).nodes


@given(st.integers(1, 5000), st.integers(0, 9999), st.integers(0, 9999))
def test_ring_leads_a_chunk_to_each_node_in_four_hops_at_most(
    count: int, number: int, at: int
) -> None:
    ring = NodeRing("key", names(count))
    here, hops = ring.nodes[at % count], 0
    while here != ring.find_reader(number):
        nearer = ring.list_nearer_neighbours(number, here)
        assert set(nearer) <= set(ring.list_neighbours(here))
        here, hops = nearer[-1], hops + 1
    assert hops <= 4
    assert ring.list_nearer_neighbours(number, ring.find_reader(number)) in ([], [here])


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (31, 30), (256, 60), (10_000, 75)])
def test_ring_neighbours_are_all_nodes_up_to_31_and_at_most_75_of_10000(
    count: int, most: int
) -> None:
    ring = NodeRing("key", names(count))
    around = ring.list_neighbours(ring.nodes[count // 2])
    assert len(around) == len(set(around))
    assert ring.nodes[count // 2] not in around
    assert len(around) <= most
    assert count > 31 or len(around) == count - 1
