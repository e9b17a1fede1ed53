"""Copies under way on this node: progress, rate, place in the queue, and which jobs want them.

Read from the parts of live stagers and from the leases, without a lock. A part is live while its
key's lock is held; it has no `owner` file any more from the moment on at which it is published.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import msgspec

from forestage.cache.layout import DiskUsage, Entry, tree_bytes
from forestage.cache.node import Node
from forestage.cache.part import Part, PartRecord, boot_id
from forestage.cache.source_image import ImageKind
from forestage.commands import inventory
from forestage.features.doors import STATUS_READ_SENT, load_doors
from forestage.system import lock, records, terminal
from forestage.system.terminal import (
    OutputBlock,
    TextLine,
    TextTable,
    format_age,
    format_count,
    format_local_time,
)
from forestage.units import format_rate, format_size

SNAPSHOT_INTERVAL = 1.0  # seconds between two snapshots of `watch_copies`
MAX_PRINTED_JOBS = 4  # jobs of a copy that are printed; JSON has all

Phase = Literal["queued", "copying", "publishing"]


class CopyUnderWay(msgspec.Struct, frozen=True):
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
    rate: float | None = None
    left: float | None = None
    place: int = 0
    waiting: tuple[int, ...] = ()
    from_peers: int = 0
    served: int = 0
    kind: ImageKind = "image"


class CopySnapshot(msgspec.Struct, frozen=True):
    """All copies at one moment, `time` in seconds since the epoch; in the order of asking."""

    time: float
    copies: tuple[CopyUnderWay, ...]


def list_copies(node: Node) -> tuple[CopyUnderWay, ...]:
    """Every copy of this node: those being published first, then in the order of asking.

    Raises PermissionError for users who may not read the cache.
    """
    jobs = inventory.group_jobs_by_key(inventory.read_leases(node.leases).leases)
    boot, now = boot_id(), node.clock.monotonic()
    sent: dict[str, int] = {}
    for read_sent in load_doors(STATUS_READ_SENT):
        sent |= read_sent(node.places)
    found: list[tuple[float, CopyUnderWay]] = []
    for directory in sorted(node.cache.parts.iterdir()):
        # Whoever copies holds the key's lock; other parts wait for somebody to resume them.
        if lock.is_free(node.cache.key_lock(directory.name)):
            continue
        part, key = Part(directory), directory.name
        owner = part.find_record()
        if owner is None:
            copy = _make_publishing_copy(part)
        elif owner.boot == boot:
            copy = make_copy(key, owner, part.copied_bytes(owner), now)
        else:  # not claimed yet
            continue
        # Else published meanwhile: the map was no longer where it was counted.
        if copy and directory.exists():
            copy = msgspec.structs.replace(
                copy,
                waiting=tuple(jobs.get(key, ())),
                from_peers=part.read_peer_bytes(),
                served=sent.get(key, 0),
            )
            found.append((owner.since if owner else 0.0, copy))
    found.sort(key=lambda one: (one[0], one[1].key))
    queue = [copy.key for _, copy in found if copy.phase == "queued"]
    return tuple(
        msgspec.structs.replace(copy, place=queue.index(copy.key) + 1)
        if copy.phase == "queued"
        else copy
        for _, copy in found
    )


def measure_stopped_parts(node: Node) -> DiskUsage:
    """The parts without a stager. The next job that asks goes on with them."""
    sizes = list_stopped_parts(node).values()
    return DiskUsage(len(sizes), sum(sizes))


def list_stopped_parts(node: Node) -> dict[str, int]:
    """Their keys, and what each takes of the disk."""
    sizes = {}
    for directory in node.cache.parts.iterdir():
        if lock.is_free(node.cache.key_lock(directory.name)):
            with contextlib.suppress(FileNotFoundError):  # it went on, and is published
                sizes[directory.name] = tree_bytes(directory)
    return sizes


def list_part_paths(node: Node) -> dict[str, str]:
    """By key, the images of all parts, whether they are copied now or to be resumed."""
    owners = ((one.name, Part(one).find_record()) for one in node.cache.parts.iterdir())
    return {key: owner.image.path for key, owner in owners if owner}


def make_copy(key: str, owner: PartRecord, copied: int, now: float) -> CopyUnderWay:
    """Pure: a copy with `copied` bytes in; `now` in monotonic seconds, as the owner's times."""
    size, is_moving = owner.image.size, owner.phase == "copying"
    took = max(0.0, now - (owner.began if is_moving else owner.since))
    moved = copied - owner.resumed if is_moving else 0
    rate = moved / took if moved > 0 and took > 0 else None
    return CopyUnderWay(
        key=key,
        image=owner.image.path,
        engine=owner.engine,
        phase=owner.phase,
        job=owner.job,
        copied=copied,
        size=size,
        percent=round(100 * copied / size, 1) if size else 100.0,
        age=round(took, 3),
        rate=round(rate, 1) if rate else None,
        left=round((size - copied) / rate, 3) if rate else None,
        kind=owner.image.kind,
    )


def _make_publishing_copy(part: Part) -> CopyUnderWay | None:
    """A part that has its entry's record in place of its owner's."""
    entry = records.find(part.directory / "entry.json", Entry)
    if entry is None:
        return None
    size, path = entry.identity.size, entry.identity.path
    name, kind = part.directory.name, entry.kind
    return CopyUnderWay(
        name, path, entry.engine, "publishing", 0, size, size, 100.0, 0.0, kind=kind
    )


def watch_copies(node: Node, for_ever: bool) -> Iterator[CopySnapshot]:
    """A snapshot each second; unless `for_ever`, the last one is the first without a copy."""
    while True:
        copies = list_copies(node) if inventory.is_cache_made(node) else ()
        yield CopySnapshot(round(node.clock.wall(), 3), copies)
        if not (copies or for_ever):
            return
        node.clock.sleep(SNAPSHOT_INTERVAL)


def format_table(copies: tuple[CopyUnderWay, ...]) -> list[OutputBlock]:
    """Pure: what `status` prints of them."""
    if not copies:
        return [TextLine("No copy is under way.")]
    columns = ("state", "kind", "size", "rate", "left", "for", "path")
    rows = tuple(
        (
            format_state(c),
            c.kind,
            format_size(c.size),
            _format_copy_rate(c),
            _format_time_left(c),
            format_waiting_jobs(c) or "-",
            c.image,
        )
        for c in copies
    )
    number = format_count(len(rows), "copy", "copies")
    return [TextLine(f"{number} under way:", heading=True), TextTable(columns, rows, indent=2)]


def format_snapshot(found: CopySnapshot) -> list[OutputBlock]:
    """Pure: what `status --watch` prints: a line for each copy."""
    when = format_local_time(found.time)
    if not found.copies:
        return [TextLine(f"{when}  no copy is under way")]
    return [TextLine(f"{when}  {_format_copy(one)}") for one in found.copies]


def format_state(one: CopyUnderWay) -> str:
    """Pure: how far it is, in two words."""
    if one.phase == "queued":
        return f"queued {one.place}"
    return "publishing" if one.phase == "publishing" else f"{int(one.percent)}%"


def format_waiting_jobs(one: CopyUnderWay) -> str:
    """Pure: which jobs want it; "" for none."""
    return terminal.format_jobs(one.waiting, MAX_PRINTED_JOBS) if one.waiting else ""


def _format_copy(one: CopyUnderWay) -> str:
    words = [f"{format_state(one):>4}", f"{format_size(one.copied)} of {format_size(one.size)}"]
    words += [_format_copy_rate(one), f"{_format_time_left(one)} left"] if one.rate else []
    words += [f"{format_size(one.from_peers)} from other nodes"] if one.from_peers else []
    words += [f"{format_size(one.served)} to other nodes"] if one.served else []
    who = f"for {format_waiting_jobs(one)}" if one.waiting else "for no job"
    return "  ".join([*words, one.image, who])


def _format_copy_rate(one: CopyUnderWay) -> str:
    return format_rate(one.rate, 1.0) if one.rate else "-"


def _format_time_left(one: CopyUnderWay) -> str:
    return "-" if one.left is None else format_age(one.left)
