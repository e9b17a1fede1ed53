"""What pending jobs have this node expect, and what of it is here: for `status` and the metrics."""

from collections.abc import Sequence

import msgspec

from forestage.cache.layout import DiskUsage
from forestage.commands.inventory import InventoryItem
from forestage.features.prefetch import expected_list, prefetch_record
from forestage.paths import NodePaths
from forestage.system.terminal import format_age, format_count
from forestage.units import format_size


class PrefetchState(msgspec.Struct, frozen=True):
    """`made`: when the host made the list, in seconds since the epoch; 0 where none counts.

    Of it the last pass has looked at so many `images` of `bytes`; of these so many are `here`, and
    `refused` ones cannot be copied. `unused` are entries that were copied and that no job has used
    so far. `silent` and `idle` as in features/prefetch/prefetch_record.
    """

    made: float = 0.0
    images: int = 0
    bytes: int = 0
    here: int = 0
    refused: int = 0
    unused: DiskUsage = DiskUsage()
    silent: str = ""
    idle: str = ""


def find_prefetch_state(
    places: NodePaths, items: Sequence[InventoryItem], now: float
) -> PrefetchState | None:
    """Reads the records; None where neither is there. Raises OSError."""
    listed, known = expected_list.find_list(places), prefetch_record.read_record(places)
    if listed is None and known == prefetch_record.PrefetchRecord():
        return None
    entries, unused = {one.key for one in items}, [one.bytes for one in items if one.unused]
    sizes = {one.key: one.size for one in known.looks if not one.why}
    opened = {one.image for one in known.looks if not one.why}
    return PrefetchState(
        made=listed.made if listed and expected_list.is_valid(listed, now) else 0.0,
        images=len(sizes),
        bytes=sum(sizes.values()),
        here=len(sizes.keys() & entries),
        refused=len({one.image for one in known.looks} - opened),
        unused=DiskUsage(len(unused), sum(unused)),
        silent=known.silent,
        idle=known.idle,
    )


def format_rows(found: PrefetchState, now: float) -> list[tuple[str, str]]:
    """Pure: what `status` says of it."""
    images = f"{format_count(found.images, 'image')} of pending jobs ({format_size(found.bytes)})"
    words = [images, f"{found.here} here"]
    words += [f"{found.refused} refused"] if found.refused else []
    old = f"{format_age(now - found.made)} old" if found.made else "none that counts"
    told = [("expected", ", ".join(words)), ("list", old)]
    told += [("not copied", found.idle)] if found.idle else []
    if found.unused.number:
        number = format_count(found.unused.number, "entry", "entries")
        told += [("ahead", f"{format_size(found.unused.bytes)} in {number} that no job has used")]
    return told
