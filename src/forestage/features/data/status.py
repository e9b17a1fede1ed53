"""What `forestage status` says of data: the room that jobs' own directories take on the disk."""

from typing import TYPE_CHECKING

from forestage.cache.layout import DiskUsage
from forestage.features.contexts import StatusPart
from forestage.features.data import job_dir
from forestage.system.terminal import format_count
from forestage.units import format_size

if TYPE_CHECKING:
    from forestage.features.contexts import StatusFacts


def read_status(facts: "StatusFacts") -> StatusPart:
    """Return how many directories there are, and what they take. Raises OSError."""
    found = job_dir.measure_disk_usage(facts.node.cache) if facts.has_cache else DiskUsage()
    room = []
    if found.number:
        number = format_count(found.number, "job directory", "job directories")
        room.append(("job directories", f"{format_size(found.bytes)} in {number}"))
    return StatusPart({"job_dirs": found}, after="through", room=tuple(room))
