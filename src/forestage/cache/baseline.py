"""What a start would take without its copy: its bytes, at the rate at which this node read them.

The rate is that at which the copy read the source (stage/source_reader.RateMeter): the only time
that this node reads an image as fast as it can. A job reads it with fewer threads and beside other
nodes, so what is computed of it is rather too low. Where nothing was measured, nothing is known.
"""

from forestage.cache.layout import Cache
from forestage.cache.part import HOT_PIECE
from forestage.config import Config
from forestage.system import records


def estimate_read_seconds(cache: Cache, config: Config, key: str) -> float:
    """Seconds that a start needs to read its image from the source; 0 where that is not known.

    What jobs read in the first minute, where that was seen to be a small part
    (cache/hot_pieces.py). Else all of it, as they do who unpack it; with `unpack_ratio: 0` nobody
    does.
    """
    entry = cache.find_entry_by_key(key)
    if entry is None or not entry.rate:
        return 0.0
    read = entry.identity.size if config.unpack_ratio else 0
    pieces = records.find(cache.entry_dir(key) / "hot", list[int])
    if pieces is not None:
        read = min(entry.identity.size, len(pieces) * HOT_PIECE)
    return round(read / entry.rate, 4)
