"""State of the node: the cache, its room, copies under way, leases, redirects.

Only reads. Also behind the gauges of `forestage metrics`.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Literal

import click
import msgspec

from forestage.bind import redirect
from forestage.cache import disk_errors, evict
from forestage.cache import disk_probe as cache_disk
from forestage.cache.layout import Cache, DiskUsage
from forestage.cache.node import Node
from forestage.cache.part import ABANDONED_AFTER
from forestage.check import slurm_site as sites
from forestage.commands import copies, inventory, recent_activity
from forestage.commands.command_context import ExitStatus, as_json, insert_after, print_result
from forestage.commands.copies import CopyUnderWay
from forestage.commands.inventory import InventoryItem, LeaseHolder
from forestage.config import switch
from forestage.errors import Declined
from forestage.events import quote_field
from forestage.features.contexts import StatusFacts, StatusPart
from forestage.features.doors import STATUS_READ_STATUS, load_doors
from forestage.system import mounts
from forestage.system import terminal as screen
from forestage.system.mounts import MountInfo
from forestage.system.terminal import (
    NamedValues,
    OutputBlock,
    TextLine,
    TextTable,
    format_age,
    format_count,
    format_local_time,
)
from forestage.units import format_duration, format_size
from forestage.views.through import keeper

STATE_NAMES = (
    *("ok", "hangs", "read-only", "full", "failing", "unusable"),
    *("doubt", "off", "not-called", "no-companion"),
)
COPY_FAILURE_SECONDS = (
    3600.0  # seconds that a copy's error counts, if no other copy has succeeded since
)


class DiskSpace(msgspec.Struct, frozen=True):
    """The file system under the cache, in bytes."""

    mounted_at: str
    total: int
    free: int


class EntryCounts(msgspec.Struct, frozen=True):
    """How many entries there are, and how many of them are what."""

    total: int = 0
    leased: int = 0
    pinned: int = 0
    superseded: int = 0
    damaged: int = 0
    data: int = 0


class DiskDoubt(msgspec.Struct, frozen=True):
    """Errors of the cache's disk, for which no job is served; `since` in seconds of the epoch."""

    since: float
    why: str


class StagingObstacle(msgspec.Struct, frozen=True):
    """Why nothing can be staged though the cache is there: its disk hangs, is read-only or full, or
    copies end with errors."""

    state: Literal["hangs", "read-only", "full", "failing"]
    why: str


class NodeStatus(msgspec.Struct, frozen=True):
    """The node as it was at `time`, in seconds since the epoch. `unusable`: why no cache is used.

    Then, and where the cache does not exist yet, `disk` and `room` are None. `off` says what has
    switched staging off for all jobs, and how to switch it on. `through` are the keys of images
    that jobs read through a server. `doubt` is there while the disk is not trusted. `data` are the
    bytes of directories, copies under way included, of `room.data` at most. `reclaimable` are the
    bytes of entries that may be evicted now. `calls` says who was called since boot, `starts` how
    jobs began lately. `in_steps`: the steps of jobs show copies, and the node sees no redirect.
    `no_companion`: which running Slurm process has not loaded the companion, though it should.
    `stopped` are copies that nobody goes on with now. `parts` are what features add.
    """

    cache: str
    unusable: str
    redirects: tuple[str, ...]
    leases: tuple[LeaseHolder, ...]
    problems: tuple[str, ...]
    disk: DiskSpace | None = None
    room: evict.CacheSpace | None = None
    entries: EntryCounts = EntryCounts()
    copies: tuple[CopyUnderWay, ...] = ()
    off: str = ""
    through: tuple[str, ...] = ()
    doubt: DiskDoubt | None = None
    data: int = 0
    reclaimable: int = 0
    calls: recent_activity.RecentCalls = recent_activity.RecentCalls()
    starts: recent_activity.RecentStarts = recent_activity.RecentStarts()
    in_steps: bool = False
    time: float = 0.0
    blocked: StagingObstacle | None = None
    no_companion: str = ""
    stopped: DiskUsage = DiskUsage()
    parts: tuple[StatusPart, ...] = ()

    def find_field(self, name: str) -> object:
        """Return what a feature has added under this name, None if none has. Pure."""
        return next((part.fields[name] for part in self.parts if name in part.fields), None)


def read_node_status(node: Node, conf: str = "") -> NodeStatus:
    """Reads the node; `conf` is $SLURM_CONF or "".

    Raises PermissionError for users who may not read the cache.
    """
    now = node.clock.wall()
    unusable, blocked = "", None
    try:
        holdings, stored = inventory.read_inventory_and_entries(node)
    except Declined as failed:
        holdings, stored, unusable = inventory.read_leases(node.leases), None, str(failed)
        if failed.reason == "cache-hangs":
            blocked = StagingObstacle("hangs", unusable)
    under_way = copies.list_copies(node) if stored is not None else ()
    paths = copies.list_part_paths(node) if stored is not None else {}
    paths |= {copy.key: copy.image for copy in under_way}
    paths |= {item.key: item.path for item in holdings.items}
    bound = tuple(bind.path for bind in redirect.list_binds(node.cache))
    disk = disk_errors.read_state(node.places)
    calls = recent_activity.read_recent_calls(node.places, now)
    starts = recent_activity.count_recent_starts(node.places.events, now)
    facts = StatusFacts(node, holdings.items, stored is not None, now)
    found = NodeStatus(
        time=now,
        cache=str(node.cache.root),
        unusable=unusable,
        redirects=bound,
        leases=tuple(inventory.make_holder(lease, paths, bound) for lease in holdings.leases),
        problems=holdings.problems,
        off=_format_off_reason(node),
        doubt=DiskDoubt(disk.since, disk.why) if disk.since else None,
        calls=calls,
        in_steps=node.config.redirect in ("auto", "spank") and calls.companion is not None,
        starts=starts,
        blocked=blocked,
        no_companion=calls.without if _should_load_companion(node, calls, conf) else "",
        through=tuple(spot.name for spot, _ in keeper.list_keepers(node.places.through)),
        parts=tuple(read_status(facts) for read_status in load_doors(STATUS_READ_STATUS)),
    )
    if unusable:
        return found
    under = mounts.find_mount_of_path(mounts.list_mounts(), os.path.realpath(node.cache.root))
    if stored is None:
        return msgspec.structs.replace(
            found, blocked=_find_staging_obstacle(node, under, None, starts)
        )
    room = evict.measure_space(node.cache, stored, node.config)
    return msgspec.structs.replace(
        found,
        blocked=_find_staging_obstacle(node, under, room, starts),
        disk=_read_disk_space(node.cache, under),
        room=room,
        data=sum(one.bytes for one in stored if one.is_data) + room.data_under_way,
        entries=count_entries(holdings.items),
        reclaimable=sum(one.bytes for one in holdings.items if not (one.jobs or one.pinned)),
        copies=under_way,
        stopped=copies.measure_stopped_parts(node),
    )


def make_document(status: NodeStatus) -> dict[str, object]:
    """Return the document of `status --json`. Pure."""
    fields = msgspec.structs.asdict(status)
    del fields["parts"]
    return insert_after(fields, [(part.after, part.fields) for part in status.parts])


def _find_staging_obstacle(
    node: Node,
    under: MountInfo | None,
    room: evict.CacheSpace | None,
    starts: recent_activity.RecentStarts,
) -> StagingObstacle | None:
    """Why no copy can be made now, as far as that shows before one; a disk is asked in a child."""
    if hang := cache_disk.probe_disk(node.places, node.cache):
        return StagingObstacle("hangs", str(cache_disk.declined_by_hang(node.cache, hang)))
    if under and under.is_read_only:
        return StagingObstacle("read-only", f"{under.point} is mounted read-only (see `dmesg`)")
    if room is not None and not room.max_cache_bytes:
        others = "the rest is not the cache's"
        free = f"{format_size(room.free)} are free, {format_size(room.min_free)} stay free"
        return StagingObstacle("full", f"the disk has no room for any entry: {free}, {others}")
    failed = starts.copy_failure
    if failed and starts.time - failed.time < COPY_FAILURE_SECONDS:
        ago = f"the last copy failed {format_age(starts.time - failed.time)} ago ({failed.reason})"
        return StagingObstacle("failing", f"{ago}: {failed.detail}".removesuffix(": "))
    return None


def _should_load_companion(node: Node, calls: recent_activity.RecentCalls, conf: str) -> bool:
    """Whether steps are to get the companion: by the configuration, or since it was here before."""
    if node.config.redirect == "spank":
        return True
    if node.config.redirect != "auto" or calls.companion is None:
        return False
    return sites.read_node_companion_state(node.places, conf).state != "absent"


def _format_off_reason(node: Node) -> str:
    by_file = switch.find_off_file_reason(node.places, node.clock.wall())
    if by_file:
        return f"{by_file} (`forestage on` switches it on)"
    return "" if node.config.enabled else "`enabled: false` (set it to true to switch it on)"


def count_entries(items: Iterable[InventoryItem]) -> EntryCounts:
    """Pure: how many entries are in which state; one may be in several."""
    found = list(items)
    return EntryCounts(
        total=len(found),
        leased=sum(1 for item in found if item.jobs),
        pinned=sum(1 for item in found if item.pinned),
        superseded=sum(1 for item in found if item.superseded),
        damaged=sum(1 for item in found if item.damaged),
        data=sum(1 for item in found if item.kind == "data"),
    )


def _read_disk_space(cache: Cache, under: MountInfo | None) -> DiskSpace:
    facts = os.statvfs(cache.root)
    return DiskSpace(
        mounted_at=under.point if under else "?",
        total=facts.f_blocks * facts.f_frsize,
        free=facts.f_bavail * facts.f_frsize,
    )


def format_output(status: NodeStatus, now: float) -> list[OutputBlock]:
    """Pure: what `status` prints."""
    rows = (row for part in status.parts for row in part.rows)
    return [
        NamedValues((*_list_facts(status), *rows, *_list_recent_facts(status, now))),
        *_format_login_node_hint(status),
        *(TextLine(f"Problem: {problem}") for problem in status.problems),
        *copies.format_table(status.copies),
        *(piece for part in status.parts for piece in part.tables),
        *_format_leases(status, now),
    ]


def _list_facts(status: NodeStatus) -> list[tuple[str, str]]:
    facts = [("staging", f"switched off: {status.off}")] if status.off else []
    facts.append(("cache", status.cache))
    if status.unusable:
        facts.append(("state", f"not in use: {status.unusable}"))
    elif status.blocked:
        facts.append(("state", f"{status.blocked.state}: {status.blocked.why}"))
    if status.room is None and not status.unusable:
        facts.append(("state", "does not exist yet: the first job with an image creates it"))
    if status.doubt:
        told = f"since {format_local_time(status.doubt.since)}: {status.doubt.why}"
        facts.append(("disk errors", f"no image is served, {told} (until the sweep has read all)"))
    if status.disk and status.room:
        disk, room = status.disk, status.room
        less = f"; {format_size(room.max_cache_bytes)} now, as others fill the disk"
        less *= room.max_cache_bytes < room.max_size
        of_total = f"{format_size(disk.free)} free of {format_size(disk.total)}"
        numbers = msgspec.structs.asdict(status.entries)
        entries = str(numbers.pop("total"))
        if states := ", ".join(f"{number} {word}" for word, number in numbers.items() if number):
            entries = f"{entries} ({states})"
        facts += [
            ("disk", f"{of_total}, mounted at {disk.mounted_at}"),
            (
                "used",
                f"{format_size(room.used)} by the cache, {room.percent_used}% of what it may take",
            ),
            ("reclaimable", f"{format_size(status.reclaimable)}, neither leased nor pinned"),
            ("data", f"{format_size(status.data)} of that, of {format_size(room.data)} at most"),
            *_list_kept_space(status),
            ("max_size", f"{format_size(room.max_size)}, the most it may take{less}"),
            ("low_watermark", f"{format_size(room.low)}; the Epilog evicts down to this"),
            ("min_free", f"{format_size(room.min_free)} stay free on the disk"),
            ("entries", entries),
        ]
    facts.append(("redirects", str(len(status.redirects))))
    if status.through:
        facts.append(("read through", format_count(len(status.through), "image")))
    return facts


def _format_login_node_hint(status: NodeStatus) -> list[OutputBlock]:
    """Pure: whom to ask, where nothing is in use: this may be a login node."""
    if status.room is not None or status.calls != recent_activity.RecentCalls():
        return []
    return [
        TextLine("On a host that runs no jobs, such as a login node, ask the nodes:"),
        TextLine("clush -bw NODES forestage status    as root", 2),
        TextLine("srun -w NODE forestage status       as a user", 2),
    ]


def _list_recent_facts(status: NodeStatus, now: float) -> list[tuple[str, str]]:
    """Pure: who was called, how jobs began, what failed last."""
    calls, starts = status.calls, status.starts
    named = (("Prolog", calls.prolog), ("Epilog", calls.epilog), ("companion", calls.companion))
    words = [
        f"{name} {format_age(now - one.time)} ago" + (f" (job {one.job})" if one.job else "")
        for name, one in named
        if one
    ]
    facts = [("called", ", ".join(words) or "neither Prolog nor Epilog since the node booted")]
    if status.no_companion:
        facts.append(("no companion", f"{status.no_companion} (see `forestage check`)"))
    if calls.missed:
        jobs = ", ".join(map(str, calls.missed[: copies.MAX_PRINTED_JOBS]))
        more = len(calls.missed) - copies.MAX_PRINTED_JOBS
        jobs += f" and {more} more" if more > 0 else ""
        facts.append(("not called", f"for job {jobs}, which runs here (see `forestage check`)"))
    if starts.hit_ratio is not None:
        since = format_local_time(starts.since)
        of = f"{starts.hits} of {format_count(starts.tried, 'start')} since {since}"
        facts.append(("hit ratio", f"{starts.hit_ratio:.0%}, {of}"))
    if starts.failure:
        failed = starts.failure
        whose = f" (job {failed.job})" if failed.job else ""
        why = f": {failed.detail}" if failed.detail else ""
        facts.append(
            ("last failure", f"{format_local_time(failed.time)} {failed.reason}{whose}{why}")
        )
    return facts


def choose_state(status: NodeStatus) -> tuple[str, str]:
    """Pure: the node in one word, and why it is not "ok"; of several the first counts."""
    if status.blocked:
        return status.blocked.state, status.blocked.why
    if status.unusable:
        return "unusable", status.unusable
    if status.doubt:
        return "doubt", status.doubt.why
    if status.off:
        return "off", status.off
    if status.calls.missed:
        return "not-called", f"no Prolog of forestage ran for job {status.calls.missed[0]}"
    if status.no_companion:
        return "no-companion", status.no_companion
    return "ok", ""


def format_oneline(status: NodeStatus) -> str:
    """Pure: the node in one line of logfmt: state first, then fields that are never renamed.

    New fields come at the end. Only a failure has its age, so healthy nodes print much the same.
    """
    ratio, room = status.starts.hit_ratio, status.room
    failed = status.starts.failure
    word, why = choose_state(status)
    facts = {
        "state": word,
        "full": f"{room.percent_used}%" if room else "-",
        "reclaimable": format_size(status.reclaimable).replace(" ", ""),
        "entries": str(status.entries.total),
        "damaged": str(status.entries.damaged + len(status.problems)),
        "leases": str(len(status.leases)),
        "copies": str(len(status.copies)),
        "hits": f"{ratio:.0%}" if ratio is not None else "-",
        "companion": "yes" if status.calls.companion else "no",
        "failure": f"{failed.reason}@{format_age(status.time - failed.time)}" if failed else "-",
    }

    words = [f"{name}={value}" for name, value in facts.items()]
    return " ".join(["forestage", *words, *([f"why={quote_field(why)}"] if why else [])])


def _list_kept_space(status: NodeStatus) -> Iterator[tuple[str, str]]:
    """Pure: what else takes room on the disk, where there is any."""
    if stopped := status.stopped.number:
        number = format_count(stopped, "stopped copy", "stopped copies")
        kept = f"until a job goes on with it, at most {format_duration(ABANDONED_AFTER)}"
        yield "unfinished", f"{format_size(status.stopped.bytes)} in {number}, kept {kept}"
    for part in status.parts:
        yield from part.room


def _format_leases(status: NodeStatus, now: float) -> list[OutputBlock]:
    holders, elsewhere = status.leases, "in its steps" if status.in_steps else "no"
    if not holders:
        return [TextLine("No job holds a lease.")]
    columns = ("job", "user", "age", "redirected", "image")
    rows: list[tuple[str, ...]] = []
    for one in holders:
        head = (str(one.job), one.user, format_age(now - one.since))
        for image in one.images:
            word = "yes" if image.redirected else elsewhere
            rows.append((*head, word, image.path or image.key))
        if not one.images:
            rows.append((*head, "-", "-"))
    number = format_count(len(holders), "lease")
    return [TextLine(f"{number}:", heading=True), TextTable(columns, rows, indent=2)]


@click.command()
@as_json
@click.option("--watch", is_flag=True, help="Follow the copies; as JSON, one line a second.")
@click.option(
    "--oneline", "is_oneline", is_flag=True, help="One line for health checks; see forestage(1)."
)
@click.pass_context
def status(ctx: click.Context, watch: bool, is_oneline: bool, as_json: bool) -> None:
    """Show the cache, its space, copies under way, leases.

    Ends with status 5 where the cache is not mounted or must not be used. With --watch on a
    terminal, ^C ends it; else it ends when no copy is under way any more.
    """
    node = ctx.obj.make_node()
    if watch:
        for_ever = screen.is_interactive(as_json)
        with contextlib.suppress(KeyboardInterrupt):
            screen.print_updates(
                copies.watch_copies(node, for_ever), copies.format_snapshot, as_json
            )
        return
    found = read_node_status(node, os.environ.get("SLURM_CONF", ""))
    shown = make_document(found)
    if is_oneline:
        print_result(shown, [TextLine(format_oneline(found), whole=True)], as_json)
    else:
        print_result(shown, format_output(found, ctx.obj.clock.wall()), as_json)
    if found.unusable:
        ctx.exit(ExitStatus.CACHE)


COMMANDS = (status,)
