"""Copies under way on this node: progress, rate, place in the queue, and which jobs wait.

Read from the parts of live stagers and from the leases, without a lock. A part is live while its
key's lock is held; it has no `owner` file any more from the moment on at which it is published.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from forestage.admin import inventory
from forestage.cache.image import Identity
from forestage.cache.layout import Entry
from forestage.cache.lease import Lease
from forestage.cache.node import Node
from forestage.cache.part import Owner, Part, boot_id
from forestage.peers import stats
from forestage.system import lock, records
from forestage.system.terminal import Bar, Column, Line, Piece, Table, age, count, moment
from forestage.units import format_rate, format_size

EVERY = 1.0  # seconds between two snapshots of `watch`
MAX_NAMED = 4  # waiting jobs of a copy that are printed; JSON has all

Phase = Literal["queued", "copying", "publishing"]


class Copy(msgspec.Struct, frozen=True):
    """A copy under way; sizes are bytes, times seconds.

    `copied` of `size` are in; `rate` is per second, without resumed bytes. `job` asked first (0: no
    longer known). `age` counts since the copy began, or while it is queued since it was asked for;
    `left` until it ends. `rate` and `left` are None until they are known. `place` in the queue
    counts from 1; 0 is not queued. `waiting` are the jobs that hold a lease on it. `from_peers`
    bytes came from other nodes; `served` went to others, earlier copies of the key included.
    """

    key: str
    image: str
    engine: str
    phase: Phase
    job: int
    copied: int
    size: int
    percent: float
    age: float
    rate: float | None
    left: float | None
    place: int
    waiting: tuple[int, ...]
    from_peers: int = 0
    served: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """All copies at one moment, `time` in seconds since the epoch; in the order of asking."""

    time: float
    copies: tuple[Copy, ...]


class LivePart(msgspec.Struct, frozen=True):
    """What a live part says; `owner` is None while it is being published.

    `key` is that of the part's directory, `copied` in bytes.
    """

    key: str
    identity: Identity
    engine: str
    copied: int
    owner: Owner | None
    from_peers: int = 0
    served: int = 0


def gather(node: Node) -> tuple[Copy, ...]:
    """Every copy of this node. Raises PermissionError for users who may not read the cache."""
    leases = inventory.read_leases(node.leases).leases
    boot = boot_id()
    served = stats.read(node.places.peer)
    live = []
    for directory in sorted(node.cache.parts.iterdir()):
        # Whoever copies holds the key's lock; other parts wait for somebody to resume them.
        if not lock.is_free(node.cache.key_lock(directory.name)):
            part = _live_part(Part(directory), boot)
            to_others = served.of(directory.name) if served else 0
            live += [msgspec.structs.replace(part, served=to_others)] if part else []
    return under_way(live, leases, node.clock.monotonic())


def watch(node: Node, for_ever: bool) -> Iterator[Snapshot]:
    """A snapshot each second; unless `for_ever`, the last one is the first without a copy."""
    while True:
        copies = gather(node) if inventory.is_made(node) else ()
        yield Snapshot(round(node.clock.wall(), 3), copies)
        if not (copies or for_ever):
            return
        node.clock.sleep(EVERY)


def _live_part(part: Part, boot: str) -> LivePart | None:
    """None where the stager has not claimed the part yet, or has just published it."""
    key = part.directory.name
    owner = part.owner()
    if owner is not None:
        if owner.boot != boot:
            return None
        copied = part.copied(owner)
        # Published meanwhile: the map was no longer where it was counted.
        if not part.directory.exists():
            return None
        return LivePart(key, owner.image.identity, owner.engine, copied, owner, part.of_peers())
    try:
        entry = records.load(part.directory / "entry.json", Entry)
    except (FileNotFoundError, NotADirectoryError, records.Damaged):
        return None
    return LivePart(key, entry.identity, entry.engine, entry.identity.size, None)


def under_way(live: Iterable[LivePart], leases: Iterable[Lease], now: float) -> tuple[Copy, ...]:
    """Pure: the copies, those being published first, then in the order of asking.

    `now` is in monotonic seconds, as an owner's times.
    """
    waiting: dict[str, list[int]] = {}
    for lease in leases:
        for key in dict.fromkeys(use.key for use in lease.uses):
            waiting.setdefault(key, []).append(lease.job)
    ordered = sorted(live, key=lambda one: (one.owner.since if one.owner else 0.0, one.key))
    queue = [one.key for one in ordered if one.owner and one.owner.phase == "queued"]
    return tuple(
        _copy(
            one,
            queue.index(one.key) + 1 if one.key in queue else 0,
            tuple(sorted(waiting.get(one.key, ()))),
            now,
        )
        for one in ordered
    )


def _copy(part: LivePart, place: int, waiting: tuple[int, ...], now: float) -> Copy:
    owner, size = part.owner, part.identity.size
    began = (owner.began if owner.phase == "copying" else owner.since) if owner else now
    took = max(0.0, now - began)
    moved = part.copied - owner.resumed if owner and owner.phase == "copying" else 0
    rate = moved / took if moved > 0 and took > 0 else None
    return Copy(
        key=part.key,
        image=part.identity.path,
        engine=part.engine,
        phase=owner.phase if owner else "publishing",
        job=owner.job if owner else 0,
        copied=part.copied,
        size=size,
        percent=round(100 * part.copied / size, 1) if size else 100.0,
        age=round(took, 3),
        rate=round(rate, 1) if rate else None,
        left=round((size - part.copied) / rate, 3) if rate else None,
        place=place,
        waiting=waiting,
        from_peers=part.from_peers,
        served=part.served,
    )


def summary(copies: Iterable[Copy]) -> str:
    """Pure: "2 copies under way, 1 of them queued"."""
    found = list(copies)
    queued = sum(1 for one in found if one.phase == "queued")
    of_them = f", {queued} of them queued" if queued else ""
    return f"{count(len(found), 'copy', 'copies')} under way{of_them}" if found else "no copy"


def table(copies: tuple[Copy, ...]) -> list[Piece]:
    """Pure: what `status` prints of them."""
    if not copies:
        return [Line("No copy is under way.")]
    columns = (
        Column("state"),
        Column("size", right=True),
        Column("rate", right=True),
        Column("left", right=True),
        Column("jobs", folds=True),
        Column("image", folds=True),
    )
    rows = tuple(
        (state(c), format_size(c.size), _rate(c) or "-", _left(c) or "-", jobs(c) or "-", c.image)
        for c in copies
    )
    return [Line(f"{summary(copies)}:", heading=True), Table(columns, rows, indent=2)]


def bars(found: Snapshot) -> list[Piece]:
    """Pure: what `status --watch` draws on a terminal."""
    drawn: list[Piece] = [Line(f"{moment(found.time)}  {summary(found.copies)}", heading=True)]
    for one in found.copies:
        drawn += [Line(""), Line(one.image), Bar(one.percent / 100, _progress(one), indent=2)]
        drawn.append(Line(_who(one), 2))
    return drawn


def lines(found: Snapshot) -> list[Piece]:
    """Pure: what `status --watch` prints into a pipe: a line for each copy."""
    when = moment(found.time)
    if not found.copies:
        return [Line(f"{when}  no copy is under way")]
    return [Line(f"{when}  {_progress(one)}  {_who(one)}  {one.image}") for one in found.copies]


def state(one: Copy) -> str:
    """Pure: how far it is, in two words."""
    if one.phase == "queued":
        return f"queued {one.place}"
    return "publishing" if one.phase == "publishing" else f"{int(one.percent)}%"


def jobs(one: Copy) -> str:
    """Pure: who waits; of many only the first."""
    named = ", ".join(map(str, one.waiting[:MAX_NAMED]))
    more = len(one.waiting) - MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _who(one: Copy) -> str:
    return f"waiting: {jobs(one)}" if one.waiting else "no job waits"


def _progress(one: Copy) -> str:
    amount = f"{format_size(one.copied)} of {format_size(one.size)}"
    left = f"{_left(one)} left" if _left(one) else ""
    peers = f"{format_size(one.from_peers)} from other nodes" if one.from_peers else ""
    served = f"{format_size(one.served)} to other nodes" if one.served else ""
    return "  ".join(filter(None, (f"{state(one):>4}", amount, _rate(one), left, peers, served)))


def _rate(one: Copy) -> str:
    return format_rate(one.rate, 1.0) if one.rate else ""


def _left(one: Copy) -> str:
    return "" if one.left is None else age(one.left)
