"""Evicting and pinning by hand: `forestage evict`, `pin`, `unpin`.

A pin is the plain file `pinned` beside an entry's image. It is made and removed under the space
lock, which evicting holds while it reads pins and leases: a pinned entry is never evicted for room.
"""

from collections.abc import Iterable, Mapping, Sequence

import click
import msgspec

from forestage.cache import disk_probe, earlier_caches, evict
from forestage.cache.layout import Cache, DiskUsage
from forestage.cache.node import Node
from forestage.commands import copies, inventory
from forestage.commands.command_context import ExitStatus, as_json, print_result
from forestage.commands.entry_arguments import optional_entry_words, pick_entries
from forestage.commands.inventory import InventoryItem
from forestage.errors import UNMOUNTED_REASONS, Failed, NotFoundError
from forestage.features.contexts import SweepFacts
from forestage.features.doors import SWEEP_IN_EACH_CACHE, load_doors
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import lock, records
from forestage.system.terminal import (
    OutputBlock,
    TextLine,
    TextTable,
    format_count,
    format_jobs,
    short_key,
)
from forestage.units import format_size


class EntryEviction(msgspec.Struct, frozen=True):
    """One entry: evicted (or, in a dry run, to be evicted), else `why_not`."""

    key: str
    path: str
    bytes: int
    evicted: bool
    why_not: str = ""


class EvictionReport(msgspec.Struct, frozen=True):
    """What one command did; `stopped` are the copies that were deleted before they were whole.

    `earlier` is the root of the cache whose entries they were, "" for the one that is configured;
    `removed` says that nothing of it is left.
    """

    dry_run: bool
    verdicts: tuple[EntryEviction, ...] = ()
    stopped: DiskUsage = DiskUsage()
    earlier: str = ""
    removed: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to evict."""
        return not (self.verdicts or self.stopped.number)

    @property
    def left_out(self) -> int:
        """How many entries stay."""
        return sum(1 for one in self.verdicts if not one.evicted)


class PinResult(msgspec.Struct, frozen=True):
    """One entry after `pin` or `unpin`."""

    key: str
    path: str
    pinned: bool


def evict_unused(node: Node, items: Iterable[InventoryItem], dry_run: bool) -> EvictionReport:
    """Evicts all that is neither leased nor pinned, stopped copies too. Raises as `evict_named`."""
    done = evict_named(node, items, dry_run)
    if not inventory.is_cache_made(node):
        return done
    leased = node.leases.leased_keys()  # such a copy is about to go on
    sizes = {
        key: size for key, size in copies.list_stopped_parts(node).items() if key not in leased
    }
    gone: Iterable[str] = sizes
    if not dry_run:
        disk_probe.check_writable(node.places, node.cache)
        gone = evict.drop_dead_parts(node.cache, lambda part: part.directory.name in sizes)
    taken = [sizes[key] for key in gone]
    return msgspec.structs.replace(done, stopped=DiskUsage(len(taken), sum(taken)))


def evict_earlier_cache(node: Node, root: str, dry_run: bool) -> EvictionReport:
    """Evicts all of a cache that was configured before and removes it, but for what jobs use.

    Pins do not count there. Raises NotFoundError for any other directory; Failed, Declined where it
    must not be touched.
    """
    found = {str(cache.root): cache for cache in earlier_caches.list_earlier_caches(node)}
    if root not in found:
        raise NotFoundError(
            f"{root} is no cache that was configured here before", _format_roots(found)
        )
    cache = found[root]
    earlier_caches.check_exclusive_use(node, cache)
    there = msgspec.structs.replace(node.with_config(require_mount=False), cache=cache)
    items = [
        msgspec.structs.replace(one, pinned=False) for one in inventory.read_inventory(there).items
    ]
    if not dry_run:
        # Slurm is not asked: what has no lease is over.
        over = SweepFacts(there, SlurmClient(""), frozenset(node.leases.list_jobs()), dry_run)
        for clean_up in load_doors(SWEEP_IN_EACH_CACHE):
            clean_up(over)
        for item in items:
            (cache.entry_dir(item.key) / "pinned").unlink(missing_ok=True)
    done = evict_unused(there, items, dry_run)
    removed = not dry_run and earlier_caches.remove_if_empty(cache)
    return msgspec.structs.replace(done, earlier=root, removed=removed)


def _format_roots(roots: Iterable[str]) -> str:
    return f"there is: {', '.join(roots)}" if roots else "there is none"


def evict_named(node: Node, items: Iterable[InventoryItem], dry_run: bool) -> EvictionReport:
    """Evicts these, but none that is leased or pinned.

    Raises Failed for a damaged lease, Declined while the disk hangs.
    """
    wanted = tuple(items)
    # A lease that cannot be read may protect any entry: then a dry run may not promise anything.
    node.leases.leased_keys()
    if not wanted:  # nor, maybe, a cache
        return EvictionReport(dry_run)
    disk_probe.check_writable(node.places, node.cache)
    if dry_run:
        evicted = frozenset(item.key for item in wanted if not _find_keep_reason(item))
    else:
        keys = [item.key for item in wanted]
        evicted = frozenset(evict.evict_keys(node.cache, node.leases, keys))
        if len(evicted) < len(wanted):  # leases and pins may have come since `items` was gathered
            holders = inventory.group_jobs_by_key(inventory.read_leases(node.leases).leases)
            wanted = tuple(
                item if item.key in evicted else _refresh_item(node.cache, item, holders)
                for item in wanted
            )
    return EvictionReport(
        dry_run,
        tuple(
            EntryEviction(item.key, item.path, item.bytes, True)
            if item.key in evicted
            else EntryEviction(
                item.key, item.path, item.bytes, False, _find_keep_reason(item) or "was gone"
            )
            for item in wanted
        ),
    )


def _refresh_item(
    cache: Cache, item: InventoryItem, holders: Mapping[str, Sequence[int]]
) -> InventoryItem:
    """Return the entry with the jobs that lease it now and its pin; no other entry is read."""
    held_by = tuple(holders.get(item.key, ()))
    return msgspec.structs.replace(item, jobs=held_by, pinned=cache.is_pinned(item.key))


def _find_keep_reason(item: InventoryItem) -> str:
    return f"leased by {format_jobs(item.jobs)}" if item.jobs else "pinned" if item.pinned else ""


def evict_to_watermark(node: Node, dry_run: bool) -> EvictionReport:
    """Evicts to the low watermark, as the Epilog does.

    Raises Failed for a damaged lease, Declined while the disk hangs.
    """
    held, stored = inventory.read_inventory_and_entries(node)
    if stored is None:
        return EvictionReport(dry_run)
    disk_probe.check_writable(node.places, node.cache)
    leased = (
        node.leases.leased_keys()
    )  # a damaged lease is reported also where there is nothing to evict
    before = {item.key: item for item in held.items}
    if dry_run:
        made = evict.plan_to_watermark(node.cache, lambda: leased, node.config, lambda: stored)
        victims = made.victims
    else:
        victims = evict.evict_to_watermark(node.cache, node.leases, node.config, known=stored)
    known = [(key, before.get(key)) for key in victims]
    return EvictionReport(
        dry_run,
        tuple(
            EntryEviction(key, item.path if item else "", item.bytes if item else 0, True)
            for key, item in known
        ),
    )


def set_pin(cache: Cache, item: InventoryItem, pinned: bool) -> PinResult:
    """Keeps an entry from being evicted, or lets it be evicted again.

    Raises NotFoundError where it is gone, or damaged and to be pinned.
    """
    if item.damaged and pinned:
        raise NotFoundError(f"{item.key} is damaged and never served", "evict it")
    directory = cache.entry_dir(item.key)
    file = directory / "pinned"
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        if not directory.exists():
            raise NotFoundError(f"{item.key} was evicted just now")
        if pinned:
            file.touch(mode=0o600)
        else:
            file.unlink(missing_ok=True)
        records.sync_directory(directory)
    return PinResult(item.key, item.path, pinned)


def format_output(done: EvictionReport) -> list[OutputBlock]:
    """Pure: what `evict` prints."""
    would = "would be evicted" if done.dry_run else "evicted"
    rows = [
        (
            short_key(one.key),
            format_size(one.bytes),
            would if one.evicted else f"stays: {one.why_not}",
            one.path or "-",
        )
        for one in done.verdicts
    ]
    number = format_count(len(rows) - done.left_out, "entry", "entries")
    freed = format_size(sum(one.bytes for one in done.verdicts if one.evicted))
    table: list[OutputBlock] = [TextTable(("key", "size", "result", "path"), rows)] if rows else []
    lines = [f"{number} {would}, {freed}."]
    if done.stopped.number:
        number = format_count(done.stopped.number, "unfinished copy", "unfinished copies")
        would = "would be deleted" if done.dry_run else "deleted"
        lines.append(f"{number} {would}, {format_size(done.stopped.bytes)}.")
    if done.earlier and not done.dry_run:
        stays = "removed" if done.removed else "in use, and stays: run this again later"
        lines.append(f"The cache {done.earlier} is {stays}.")
    return [*table, *map(TextLine, lines)]


def format_pins(done: Iterable[PinResult]) -> list[OutputBlock]:
    """Pure: what `pin` and `unpin` print."""
    columns = ("key", "result", "path")
    rows = tuple(
        (short_key(one.key), "pinned" if one.pinned else "not pinned", one.path or "-")
        for one in done
    )
    return [TextTable(columns, rows)]


@click.command("evict")
@as_json
@optional_entry_words
@click.option("--all", "is_all", is_flag=True, help="All that is not leased or pinned.")
@click.option(
    "--cache", metavar="DIR", help="With --all: of a cache configured before, and remove it."
)
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: print what would be evicted.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing if nothing is to be evicted.")
@click.pass_context
def evict_command(
    ctx: click.Context,
    words: tuple[str, ...],
    is_all: bool,
    cache: str | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Evict entries: exactly those named, or down to the low watermark.

    Leased and pinned entries stay. Ends with status 1 if one that was named stays.
    """
    if words and is_all:
        raise click.UsageError("KEY|PATH and --all exclude each other")
    if cache is not None and not is_all:
        raise click.UsageError("--cache needs --all")
    node = ctx.obj.make_node()
    if cache is not None:
        done = evict_earlier_cache(node, cache, dry_run)
        print_result(done, format_output(done), as_json)
        ctx.exit(ExitStatus.OK if done.removed or dry_run else ExitStatus.NOT_FOUND)
    if is_all:
        done = evict_unused(node, inventory.read_inventory(node).items, dry_run)
    elif words:
        done = evict_named(node, pick_entries(inventory.read_inventory(node).items, words), dry_run)
    else:
        try:
            done = evict_to_watermark(node, dry_run)
        except Failed as failed:
            if (
                quiet and failed.reason in UNMOUNTED_REASONS
            ):  # `status`, `check` and the metrics tell that
                ctx.exit(ExitStatus.UNMOUNTED)
            raise
    print_result(done, () if quiet and done.is_empty else format_output(done), as_json)
    if words and done.left_out:
        ctx.exit(ExitStatus.NOT_FOUND)


COMMANDS = (evict_command,)
