"""What a node remembers of the images that pending jobs name: its looks at them.

    /run/forestage/prefetched.json   root's; gone after a reboot

A look is kept for INSPECT_INTERVAL, so that no pass asks the file server for all images. What was
in vain (no access, no such user, a mount that hangs, a new file, a copy that fails, or is evicted
before a job has used it) is tried MAX_TRIES times, and again once a job has used it, or the list
has not named it for FORGET_AFTER: else one who submits and cancels by turns would have it copied
for ever.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from forestage.paths import NodePaths
from forestage.system import folders, records

INSPECT_INTERVAL = 600.0  # seconds
MAX_TRIES = 3
FORGET_AFTER = 3600.0  # seconds


class ImageInspection(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an image was for a user, `at` a time; `why` it is nothing, if so.

    `since`: when the list first named it here; times are in seconds since the epoch. `tries`: how
    often it was refused, or copied, since a job last used such a copy. `begun`: when a copy was
    begun of which no pass has seen the end; 0 if there is none.
    """

    image: str
    user: int
    at: float
    since: float
    key: str = ""
    size: int = 0
    why: str = ""
    tries: int = 0
    begun: float = 0.0


class PrefetchRecord(msgspec.Struct, frozen=True):
    """The record. Of the last pass: `silent` is why there was no new list, `idle` why no copy."""

    looks: tuple[ImageInspection, ...] = ()
    silent: str = ""
    idle: str = ""

    def find_inspection(self, image: str, user: int) -> ImageInspection | None:
        return next((one for one in self.looks if (one.image, one.user) == (image, user)), None)

    def with_inspection(self, look: ImageInspection) -> "PrefetchRecord":
        others = (one for one in self.looks if (one.image, one.user) != (look.image, look.user))
        return msgspec.structs.replace(self, looks=(*others, look))

    def without_unnamed(self, named: Iterable[tuple[str, int]], now: float) -> "PrefetchRecord":
        """The looks of images and users that are named now, or were tried in vain lately."""
        kept = frozenset(named)
        looks = tuple(
            one for one in self.looks if is_inspection_kept(one, (one.image, one.user) in kept, now)
        )
        return msgspec.structs.replace(self, looks=looks)


def is_inspection_kept(look: ImageInspection, is_named: bool, now: float) -> bool:
    """Pure: whether a look is remembered; copies that no job has used are forgotten in time."""
    is_late = 0 <= now - look.at < FORGET_AFTER
    if look.tries >= MAX_TRIES and not look.why:
        return is_late
    return is_named or (bool(look.tries or look.begun) and is_late)


def is_inspection_due(look: ImageInspection | None, now: float) -> bool:
    """Pure: whether an image is to be looked at (again)."""
    return look is None or (look.tries < MAX_TRIES and not 0 <= now - look.at < INSPECT_INTERVAL)


def locate_record(places: NodePaths) -> Path:
    """Return where the record is. Pure."""
    return places.run / "prefetched.json"


def read_record(places: NodePaths) -> PrefetchRecord:
    """What is remembered; nothing where the record is damaged. Raises OSError."""
    return records.find(locate_record(places), PrefetchRecord) or PrefetchRecord()


def write_record(places: NodePaths, marks: PrefetchRecord) -> None:
    """Replaces the record. Raises OSError."""
    folders.ensure_directory(places.run, folders.PASSABLE)
    records.write(locate_record(places), msgspec.json.encode(marks))


def record_pass(places: NodePaths, silent: str, idle: str) -> None:
    """Says for `status` what a pass is like. Raises OSError."""
    known = read_record(places)
    if (known.silent, known.idle) != (silent, idle):
        write_record(places, msgspec.structs.replace(known, silent=silent, idle=idle))
