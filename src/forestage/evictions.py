"""What went, what would go, and why not the rest? The views behind `forestage evict`."""

from collections.abc import Iterable

import msgspec

from forestage import entries
from forestage.cache import evict
from forestage.cache.node import Node
from forestage.entries import Item
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
    """What one command did; `room` is what it left, None where the cache is not made yet."""

    dry_run: bool
    verdicts: tuple[Verdict, ...] = ()
    room: evict.Room | None = None

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(one.bytes for one in self.verdicts if one.evicted)

    @property
    def left_out(self) -> int:
        return sum(1 for one in self.verdicts if not one.evicted)


def exactly(node: Node, items: Iterable[Item], dry_run: bool) -> Evictions:
    """Evicts these, but none that is leased or pinned. Raises Failed for a damaged lease."""
    wanted = tuple(items)
    # A lease that cannot be read may protect any entry: then a dry run may not promise anything.
    node.leases.keys()
    if not wanted:  # nor, maybe, a cache
        return Evictions(dry_run)
    if dry_run:
        gone = frozenset(item.key for item in wanted if not why_not(item))
        return Evictions(True, verdicts(wanted, gone))
    went = evict.evict_keys(node.cache, node.leases, [item.key for item in wanted])
    if len(went) == len(wanted):
        return Evictions(False, verdicts(wanted, frozenset(went)))
    # Leases and pins may have come or gone since `items` was gathered.
    now = {item.key: item for item in entries.gather(node).items}
    fresh = tuple(now.get(item.key, item) for item in wanted)
    return Evictions(False, verdicts(fresh, frozenset(went)))


def to_watermark(node: Node, dry_run: bool) -> Evictions:
    """Evicts to the low watermark, as the Epilog does. Raises Failed for a damaged lease."""
    if not entries.is_made(node):
        return Evictions(dry_run)
    leased = node.leases.keys()  # damage is told also where there is nothing to evict
    before = {item.key: item for item in entries.gather(node).items}
    room = measured(node)
    if dry_run:
        stored = node.cache.stored()
        planned = evict.plan(stored, leased, room, evict.room_at_rest(room))
        after = msgspec.structs.replace(
            room, free=room.free + planned.freed, used=room.used - planned.freed
        )
        return Evictions(True, _went(before, planned.victims), after)
    victims = evict.tidy(node.cache, node.leases, node.config)
    return Evictions(False, _went(before, victims), measured(node))


def measured(node: Node) -> evict.Room:
    return evict.measure(node.cache, node.cache.stored(), node.config)


def _went(before: dict[str, Item], victims: Iterable[str]) -> tuple[Verdict, ...]:
    known = [(key, before.get(key)) for key in victims]
    return tuple(
        Verdict(key, item.path if item else "", item.bytes if item else 0, True)
        for key, item in known
    )


def why_not(item: Item) -> str:
    """Pure: why evicting passes over an entry, or ""."""
    if item.jobs:
        word = "job" if len(item.jobs) == 1 else "jobs"
        return f"leased by {word} {', '.join(map(str, item.jobs))}"
    return "pinned" if item.pinned else ""


def verdicts(items: Iterable[Item], went: frozenset[str]) -> tuple[Verdict, ...]:
    """Pure: each entry with what became of it."""
    return tuple(
        Verdict(item.key, item.path, item.bytes, True)
        if item.key in went
        else Verdict(item.key, item.path, item.bytes, False, why_not(item) or "was gone already")
        for item in items
    )


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
    gone = len(rows) - done.left_out
    total = f"{count(gone, 'entry', 'entries')} {would}, {format_size(done.freed)}."
    told: list[Piece] = [Table(columns, rows)] if rows else []
    return [*told, Line(total), *_left(done.room)]


def _left(room: evict.Room | None) -> list[Piece]:
    if room is None:
        return []
    if room.used > room.low:
        short = f"the cache takes {format_size(room.used)}, above {format_size(room.low)}"
    elif room.free < room.min_free:
        short = f"{format_size(room.free)} are free, below {format_size(room.min_free)}"
    else:
        return []
    return [Line(f"Still, {short}: what is left is leased, pinned, under way, or not ours.")]
