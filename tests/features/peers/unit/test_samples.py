"""Pieces that are compared with the source: few, within their chunks, not to be foreseen."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.features.peers import peer_copy

MIB, GIB = 1 << 20, 1 << 30


@given(
    size=st.integers(1, 40 * GIB),
    chunk=st.sampled_from((MIB, 16 * MIB)),
    nodes=st.integers(2, 10_000),
    seed=st.integers(),
)
def test_comparison_samples_lie_within_their_chunks_and_are_two_percent_at_most(
    size: int, chunk: int, nodes: int, seed: int
) -> None:
    numbers = range(-(-size // chunk))
    drawn = peer_copy.draw_samples(numbers, size, chunk, nodes, Random(seed))
    found = [(number, *piece) for number, pieces in drawn.items() for piece in pieces]
    assert len(found) <= peer_copy.SAMPLES
    for number, at, length in found:
        assert number * chunk <= at < at + length <= min(size, (number + 1) * chunk)
        assert length <= 64 * 1024
    if len(found) > 1:  # all nodes together
        assert nodes * sum(length for _, _, length in found) <= 0.02 * size


@pytest.mark.parametrize(
    ("size", "nodes", "count", "length"),
    [(23 * GIB, 64, 64, 64 * 1024), (23 * GIB, 1000, 64, 4096), (8 * MIB, 2, 20, 4096)],
)
def test_comparison_samples_are_as_many_and_as_large_as_the_share_allows(
    size: int, nodes: int, count: int, length: int
) -> None:
    drawn = peer_copy.draw_samples(range(size // MIB), size, MIB, nodes, Random(1))
    pieces = [piece for of_chunk in drawn.values() for piece in of_chunk]
    assert (len(pieces), {each for _, each in pieces}) == (count, {length})


def test_some_nodes_draw_one_comparison_sample_if_the_share_is_smaller_than_a_sample() -> None:
    dice = Random(7)
    drawn = [len(peer_copy.draw_samples(range(1), MIB, MIB, 10, dice)) for _ in range(1000)]
    assert set(drawn) == {0, 1}
    assert sum(drawn) * peer_copy.SMALLEST / 1000 <= 1.2 * 0.02 * MIB / 10


def test_complete_copy_draws_no_comparison_samples() -> None:
    assert peer_copy.draw_samples([], GIB, MIB, 2, Random(1)) == {}
