"""Checksums of chunks and images: XXH3-128, one digest for each chunk and one for the whole image.

It finds the faults of disks, memory and networks at the speed of memory. It is no defence against
forgery; nobody but root writes to a cache.
"""

from collections.abc import Sequence

import xxhash

from forestage.cache.part import ENTRY_BYTES

MISSING = bytes(ENTRY_BYTES)
"""In a map: this chunk is not in yet."""

UNKNOWN = b"\x01" + bytes(ENTRY_BYTES - 1)
"""In the map of an entry that was copied with `digest: false`, which an earlier build had."""


def digest_chunk(data: memoryview | bytes) -> bytes:
    """The digest of one chunk. Runs without Python's global lock."""
    return xxhash.xxh3_128(data).digest()


class RunningDigest:
    """The digest of a chunk that comes in pieces, each while it is in the processor's cache."""

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_128()

    def add(self, piece: memoryview) -> None:
        """Runs without Python's global lock."""
        self._sum.update(piece)

    def digest(self) -> bytes:
        return self._sum.digest()


def digest_image(digests: bytes) -> str:
    """The digest of an image, hex: that of its chunks' digests in order."""
    return xxhash.xxh3_128(digests).hexdigest()


def split_map(digests: bytes) -> Sequence[bytes]:
    """A map's entries, in the order of the chunks."""
    return [digests[at : at + ENTRY_BYTES] for at in range(0, len(digests), ENTRY_BYTES)]
