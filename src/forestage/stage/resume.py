"""What a killed copy left: has each of its chunks the bytes that the map says?

Within one boot the two belong together, unless something else has written to them: a bad disk, a
careless hand. A resumed copy would publish that, so each chunk is read once more. From this node's
disk that is quicker than from the source.
"""

import os

from forestage.cache import digest, space
from forestage.cache.part import ENTRY_BYTES, Part, chunk_count
from forestage.config import Config
from forestage.stage import chunks, engines
from forestage.stage.chunks import Truncated, Unreadable


def believe(part: Part, size: int, config: Config) -> int:
    """Strikes from the map what is not so; gives the number of chunks struck. Raises OSError.

    `size` of the image in bytes. The caller holds the key's lock.
    """
    tuning = engines.tuning(config)
    count = chunk_count(size, tuning.chunk)
    known = digest.split(part.digests()[: count * ENTRY_BYTES].ljust(count * ENTRY_BYTES, b"\0"))
    told = [number for number, one in enumerate(known) if one != digest.MISSING]
    if not told:
        return 0
    try:
        found = digest.split(chunks.digests(part.image, size, tuning, told))
    except (Unreadable, Truncated):
        found = [digest.MISSING] * len(told)
    wrong = [number for number, one in zip(told, found, strict=True) if known[number] != one]
    with space.opened(part.map) as fd:
        for number in wrong:
            os.pwrite(fd, digest.MISSING, number * ENTRY_BYTES)
    return len(wrong)
