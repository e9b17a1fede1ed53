"""Evicting and pinning by hand: `forestage evict`, `pin`, `unpin`.

A pin is the plain file `pinned` beside an entry's image. It is made and removed under the space
lock, which evicting holds while it reads pins and leases: a pinned entry is never evicted for room.
"""

from collections.abc import Iterable

import msgspec

from forestage.admin import inventory
from forestage.admin.inventory import Item
from forestage.cache import evict
from forestage.cache.layout import Cache
from forestage.cache.node import Node
from forestage.errors import NotFound
from forestage.system import atomic, lock
from forestage.system.terminal import Column, Line, Piece, Table, count, short
from forestage.units import format_size


class Verdict(msgspec.Struct, frozen=True):
    """One entry: evicted (or, in a dry run, to be evicted), else `why_not`."""

    key: str
    path: str
    bytes: int
    evicted: bool
    why_not: str = ""


class Evictions(msgspec.Struct, frozen=True):
    """What one command did; `room` is what it left, None where the cache does not exist yet."""

    dry_run: bool
    verdicts: tuple[Verdict, ...] = ()
    room: evict.Room | None = None

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(one.bytes for one in self.verdicts if one.evicted)

    @property
    def left_out(self) -> int:
        """How many entries stay."""
        return sum(1 for one in self.verdicts if not one.evicted)


class Pinned(msgspec.Struct, frozen=True):
    """One entry after `pin` or `unpin`; `changed` is False where it was so before."""

    key: str
    path: str
    pinned: bool
    changed: bool


def exactly(node: Node, items: Iterable[Item], dry_run: bool) -> Evictions:
    """Evicts these, but none that is leased or pinned. Raises Failed for a damaged lease."""
    wanted = tuple(items)
    # A lease that cannot be read may protect any entry: then a dry run may not promise anything.
    node.leases.keys()
    if not wanted:  # nor, maybe, a cache
        return Evictions(dry_run)
    if dry_run:
        evictable = frozenset(item.key for item in wanted if not why_not(item))
        return Evictions(True, verdicts(wanted, evictable))
    evicted = frozenset(evict.evict_keys(node.cache, node.leases, [item.key for item in wanted]))
    if len(evicted) == len(wanted):
        return Evictions(False, verdicts(wanted, evicted))
    # Leases and pins may have come or gone since `items` was gathered.
    now = {item.key: item for item in inventory.gather(node).items}
    return Evictions(False, verdicts([now.get(item.key, item) for item in wanted], evicted))


def to_watermark(node: Node, dry_run: bool) -> Evictions:
    """Evicts to the low watermark, as the Epilog does. Raises Failed for a damaged lease."""
    if not inventory.is_made(node):
        return Evictions(dry_run)
    leased = node.leases.keys()  # a damaged lease is reported also where there is nothing to evict
    before = {item.key: item for item in inventory.gather(node).items}
    if not dry_run:
        victims = evict.tidy(node.cache, node.leases, node.config)
        return Evictions(False, _evicted(before, victims), measured(node))
    planned = plan_at_rest(node, leased)
    room = measured(node)
    after = msgspec.structs.replace(
        room, free=room.free + planned.freed, used=room.used - planned.freed
    )
    return Evictions(True, _evicted(before, planned.victims), after)


def plan_at_rest(node: Node, leased: frozenset[str]) -> evict.Plan:
    """What evicting to the low watermark would evict now, with these keys leased."""
    room = measured(node)
    return evict.plan(node.cache.stored(), leased, room, evict.room_at_rest(room))


def measured(node: Node) -> evict.Room:
    """The room of the cache, measured entry by entry."""
    return evict.measure(node.cache, node.cache.stored(), node.config)


def _evicted(before: dict[str, Item], victims: Iterable[str]) -> tuple[Verdict, ...]:
    known = [(key, before.get(key)) for key in victims]
    return tuple(
        Verdict(key, item.path if item else "", item.bytes if item else 0, True)
        for key, item in known
    )


def why_not(item: Item) -> str:
    """Pure: why an entry is not evicted, or ""."""
    if item.jobs:
        word = "job" if len(item.jobs) == 1 else "jobs"
        return f"leased by {word} {', '.join(map(str, item.jobs))}"
    return "pinned" if item.pinned else ""


def verdicts(items: Iterable[Item], evicted: frozenset[str]) -> tuple[Verdict, ...]:
    """Pure: each entry with what became of it."""
    return tuple(
        Verdict(item.key, item.path, item.bytes, True)
        if item.key in evicted
        else Verdict(item.key, item.path, item.bytes, False, why_not(item) or "was gone already")
        for item in items
    )


def pin(cache: Cache, item: Item) -> Pinned:
    """Keeps the entry from being evicted. Raises NotFound where it is gone or damaged."""
    if item.damaged:
        raise NotFound(f"{item.key} is damaged and never served", "evict it")
    return Pinned(item.key, item.path, True, _set_pin(cache, item.key, True))


def unpin(cache: Cache, item: Item) -> Pinned:
    """Lets the entry be evicted again. Raises NotFound where it is gone."""
    return Pinned(item.key, item.path, False, _set_pin(cache, item.key, False))


def _set_pin(cache: Cache, key: str, pinned: bool) -> bool:
    """Returns whether anything changed."""
    directory = cache.entry_dir(key)
    file = directory / "pinned"
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        if not directory.exists():
            raise NotFound(f"{key} was evicted just now")
        if file.exists() == pinned:
            return False
        if pinned:
            file.touch(mode=0o600)
        else:
            file.unlink()
        atomic.sync_directory(directory)
    return True


def pieces(done: Evictions) -> list[Piece]:
    """Pure: what `evict` prints."""
    would = "would be evicted" if done.dry_run else "evicted"
    columns = (
        Column("key"),
        Column("size", right=True),
        Column("result", folds=True),
        Column("path", folds=True),
    )
    rows = tuple(
        (
            short(one.key),
            format_size(one.bytes),
            would if one.evicted else f"stays: {one.why_not}",
            one.path or "-",
        )
        for one in done.verdicts
    )
    number = count(len(rows) - done.left_out, "entry", "entries")
    table: list[Piece] = [Table(columns, rows)] if rows else []
    return [*table, Line(f"{number} {would}, {format_size(done.freed)}."), *_missed(done.room)]


def _missed(room: evict.Room | None) -> list[Piece]:
    """A sentence where the cache still takes more than it should."""
    if room is None:
        return []
    if room.used > room.low:
        problem = f"The cache still takes {format_size(room.used)}, above {format_size(room.low)}"
    elif room.free < room.min_free:
        problem = (
            f"Still only {format_size(room.free)} are free, below {format_size(room.min_free)}"
        )
    else:
        return []
    return [Line(f"{problem}: the rest is leased, pinned, being copied, or not the cache's.")]


def pin_pieces(done: Iterable[Pinned]) -> list[Piece]:
    """Pure: what `pin` and `unpin` print."""
    columns = (Column("key"), Column("result"), Column("path", folds=True))
    rows = tuple((short(one.key), _pin_result(one), one.path or "-") for one in done)
    return [Table(columns, rows)]


def _pin_result(one: Pinned) -> str:
    if one.pinned:
        return "pinned" if one.changed else "was pinned already"
    return "unpinned" if one.changed else "was not pinned"
