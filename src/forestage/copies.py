"""What is being copied? Each live stager's part, how fast it goes, and which jobs wait for it."""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from forestage import counters, entries
from forestage.cache.image import Identity
from forestage.cache.layout import Entry
from forestage.cache.lease import Lease
from forestage.cache.node import Node
from forestage.cache.part import Owner, Part, boot_id
from forestage.system import lock, records
from forestage.system.terminal import Bar, Column, Line, Piece, Table, age, count, moment
from forestage.units import format_rate, format_size

EVERY = 1.0  # seconds between two looks of `watch`
NAMED = 4  # jobs of a copy that people are told; scripts get all

Phase = Literal["queued", "copying", "publishing"]


class Copy(msgspec.Struct, frozen=True):
    """A copy under way. Bytes: `copied` of `size` are in; `rate` per second, without resumed ones.

    `job` asked first (0: no longer known). `age` is seconds since the copy began, or while it is
    queued since it was asked for; `left` seconds until it ends. `rate` and `left` are None as long
    as nothing tells them. `place` in the queue counts from 1; 0 is not queued. `waiting` are the
    jobs that hold a lease on it. Of the bytes, `from_peers` came from other nodes; `served` went to
    others, copies of the key before this one included.
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


class Found(msgspec.Struct, frozen=True):
    """What a live part says; it has no `owner` from the moment on at which it is being published.

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
    """Every copy of this node. Raises PermissionError for users who may not look."""
    leases, _ = entries.live(node.leases)
    boot = boot_id()
    given = counters.read(node.places.peer)
    found = []
    for directory in sorted(node.cache.parts.iterdir()):
        # Whoever copies holds the key's lock; other parts wait for somebody to resume them.
        if not lock.is_free(node.cache.key_lock(directory.name)):
            one = _found(Part(directory), boot)
            served = given.of(directory.name) if given else 0
            found += [msgspec.structs.replace(one, served=served)] if one else []
    return under_way(found, leases, node.clock.monotonic())


def watch(node: Node, for_ever: bool) -> Iterator[Snapshot]:
    """A snapshot each second; unless `for_ever`, the last one is the first without a copy."""
    while True:
        copies = gather(node) if entries.is_made(node) else ()
        yield Snapshot(round(node.clock.wall(), 3), copies)
        if not (copies or for_ever):
            return
        node.clock.sleep(EVERY)


def _found(part: Part, boot: str) -> Found | None:
    """None where the stager has not claimed the part yet, or has just published it."""
    key = part.directory.name
    owner = part.owner()
    if owner is not None:
        if owner.boot != boot:
            return None
        copied = part.copied(owner)
        # Renamed meanwhile: then the map was looked for where it is no longer.
        gone = not part.directory.exists()
        if gone:
            return None
        return Found(key, owner.image.identity, owner.engine, copied, owner, part.of_peers())
    try:
        entry = records.load(part.directory / "entry.json", Entry)
    except (FileNotFoundError, NotADirectoryError, records.Damaged):
        return None
    return Found(key, entry.identity, entry.engine, entry.identity.size, None)


def under_way(found: Iterable[Found], leases: Iterable[Lease], now: float) -> tuple[Copy, ...]:
    """Pure: the copies, those that are published first, then as they were asked for.

    `now` is in monotonic seconds, as an owner's times.
    """
    waiting: dict[str, list[int]] = {}
    for lease in leases:
        for key in dict.fromkeys(use.key for use in lease.uses):
            waiting.setdefault(key, []).append(lease.job)
    ordered = sorted(found, key=lambda one: (one.owner.since if one.owner else 0.0, one.key))
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


def _copy(found: Found, place: int, waiting: tuple[int, ...], now: float) -> Copy:
    owner, size = found.owner, found.identity.size
    began = (owner.began if owner.phase == "copying" else owner.since) if owner else now
    took = max(0.0, now - began)
    moved = found.copied - owner.resumed if owner and owner.phase == "copying" else 0
    rate = moved / took if moved > 0 and took > 0 else None
    return Copy(
        key=found.key,
        image=found.identity.path,
        engine=found.engine,
        phase=owner.phase if owner else "publishing",
        job=owner.job if owner else 0,
        copied=found.copied,
        size=size,
        percent=round(100 * found.copied / size, 1) if size else 100.0,
        age=round(took, 3),
        rate=round(rate, 1) if rate else None,
        left=round((size - found.copied) / rate, 3) if rate else None,
        place=place,
        waiting=waiting,
        from_peers=found.from_peers,
        served=found.served,
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
        drawn += [Line(""), Line(one.image), Bar(one.percent / 100, _told(one), indent=2)]
        drawn.append(Line(_who(one), 2))
    return drawn


def lines(found: Snapshot) -> list[Piece]:
    """Pure: what `status --watch` prints into a pipe: a line for each copy."""
    when = moment(found.time)
    if not found.copies:
        return [Line(f"{when}  no copy is under way")]
    return [Line(f"{when}  {_told(one)}  {_who(one)}  {one.image}") for one in found.copies]


def state(one: Copy) -> str:
    """Pure: how far it is, in two words."""
    if one.phase == "queued":
        return f"queued {one.place}"
    return "publishing" if one.phase == "publishing" else f"{int(one.percent)}%"


def jobs(one: Copy) -> str:
    """Pure: who waits; of many only the first."""
    named = ", ".join(map(str, one.waiting[:NAMED]))
    more = len(one.waiting) - NAMED
    return f"{named} and {more} more" if more > 0 else named


def _who(one: Copy) -> str:
    return f"waiting: {jobs(one)}" if one.waiting else "no job waits"


def _told(one: Copy) -> str:
    amount = f"{format_size(one.copied)} of {format_size(one.size)}"
    left = f"{_left(one)} left" if _left(one) else ""
    peers = f"{format_size(one.from_peers)} from other nodes" if one.from_peers else ""
    served = f"{format_size(one.served)} to other nodes" if one.served else ""
    return "  ".join(filter(None, (f"{state(one):>4}", amount, _rate(one), left, peers, served)))


def _rate(one: Copy) -> str:
    return format_rate(one.rate, 1.0) if one.rate else ""


def _left(one: Copy) -> str:
    return "" if one.left is None else age(one.left)
