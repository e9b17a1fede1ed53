"""Digests of chunks and images: a flipped bit changes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forestage.cache.digest import MISSING, digest_chunk, digest_image, split_map
from forestage.cache.part import ENTRY_BYTES


def test_digests_are_the_same_in_every_release() -> None:
    """Published by XXH3's author for the empty input; another one would damn every entry."""
    assert digest_chunk(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert (
        digest_image(digest_chunk(b"a") + digest_chunk(b"b")) == "3bfe8429da7744aac85b1a9196fe3ac6"
    )


def test_chunk_digest_has_the_length_of_a_map_entry() -> None:
    assert len(digest_chunk(b"x")) == ENTRY_BYTES == len(MISSING)
    assert not any(MISSING)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_flipped_bit_changes_the_chunks_digest(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    assert digest_chunk(bytes(other)) != digest_chunk(data)
    assert digest_chunk(memoryview(data)) == digest_chunk(data) != MISSING


@given(st.lists(st.binary(max_size=9), min_size=2, unique=True))
def test_image_digest_depends_on_the_order_of_chunks(chunks: list[bytes]) -> None:
    each = [digest_chunk(chunk) for chunk in chunks]
    assert split_map(b"".join(each)) == each
    assert digest_image(b"".join(each)) != digest_image(b"".join(each[::-1]))
