"""What a node remembers of the images that pending jobs name: looks, and copies nobody has used.

    /run/forestage/prefetched.json   root's; gone after a reboot

A look is kept for AGAIN, so that no pass asks the file server for all images. One that was refused
(no access, no such user, a mount that hangs, a new file) is tried TRIES times, and again once the
list has named it no more. A copy has a mark until a job has used it: then its entry is one as any.
While the list names the image, the entry counts as just used. Once it does not, it is the first to
be evicted.
"""

from collections.abc import Iterable

import msgspec

from forestage.paths import Places
from forestage.system import folders, records

AGAIN = 600.0  # seconds
TRIES = 3
EXACT = 0.001  # seconds: what a file's time keeps of a float


class Look(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an image was for a user, `at` a time; `why` it is nothing, if so.

    `since`: when the list first named it here; times are in seconds since the epoch.
    """

    image: str
    user: int
    at: float
    since: float
    key: str = ""
    size: int = 0
    why: str = ""
    tries: int = 0


class Fresh(msgspec.Struct, frozen=True):
    """A copy that was made for pending jobs of a user; times since the epoch.

    `since`: when the list first named it here; `made`: when it was here; `used`: the time that the
    entry has as long as no job has used it.
    """

    key: str
    image: str
    user: int
    since: float
    made: float
    used: float

    def is_unused(self, used: float) -> bool:
        """Whether no job has used the entry, whose time of the last use this is."""
        return abs(used - self.used) < EXACT


class Marks(msgspec.Struct, frozen=True):
    """The record. Of the last pass: `silent` is why there was no new list, `idle` why no copy."""

    looks: tuple[Look, ...] = ()
    fresh: tuple[Fresh, ...] = ()
    silent: str = ""
    idle: str = ""

    def look(self, image: str, user: int) -> Look | None:
        return next((one for one in self.looks if (one.image, one.user) == (image, user)), None)

    def with_look(self, look: Look) -> "Marks":
        others = (one for one in self.looks if (one.image, one.user) != (look.image, look.user))
        return msgspec.structs.replace(self, looks=(*others, look))

    def naming(self, named: Iterable[tuple[str, int]]) -> "Marks":
        """The looks of images and users that are named now; the others are forgotten."""
        kept = frozenset(named)
        looks = tuple(one for one in self.looks if (one.image, one.user) in kept)
        return msgspec.structs.replace(self, looks=looks)

    def with_fresh(self, fresh: Fresh) -> "Marks":
        others = (one for one in self.fresh if one.key != fresh.key)
        return msgspec.structs.replace(self, fresh=(*others, fresh))


def is_due(look: Look | None, now: float) -> bool:
    """Pure: whether an image is to be looked at (again)."""
    return look is None or (look.tries < TRIES and not 0 <= now - look.at < AGAIN)


def read(places: Places) -> Marks:
    """What is remembered; nothing where the record is damaged. Raises OSError."""
    return records.find(places.prefetched, Marks) or Marks()


def write(places: Places, marks: Marks) -> None:
    """Replaces the record. Raises OSError."""
    folders.make(places.prefetched.parent, folders.PASSABLE)
    records.write(places.prefetched, msgspec.json.encode(marks))


def note(places: Places, silent: str, idle: str) -> None:
    """Says for `status` what a pass is like. Raises OSError."""
    known = read(places)
    if (known.silent, known.idle) != (silent, idle):
        write(places, msgspec.structs.replace(known, silent=silent, idle=idle))
