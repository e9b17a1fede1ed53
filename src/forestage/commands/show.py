"""Views of `forestage ls`, `show` and `config`: entries and settings as tables."""

from collections.abc import Iterable

import click
import msgspec

from forestage.cache.layout import Cache
from forestage.cache.lease import Lease
from forestage.commands import entry_sources, inventory
from forestage.commands.command_context import (
    CommandContext,
    as_json,
    complete_entries,
    print_result,
)
from forestage.commands.entry_sources import SourceState
from forestage.commands.inventory import CacheInventory, InventoryItem, LeaseHolder, make_holder
from forestage.system.terminal import (
    NamedValues,
    OutputBlock,
    TextLine,
    TextTable,
    format_age,
    format_count,
    format_local_time,
    short_key,
)
from forestage.units import format_size


class EntryDetails(msgspec.Struct, frozen=True):
    """All about one entry; `source` is what became of the file that was copied."""

    item: InventoryItem
    copy: str
    leases: tuple[LeaseHolder, ...]
    source: SourceState


def format_entry_state(item: InventoryItem) -> str:
    """Pure: who or what keeps it, and what is wrong with it."""
    words = [f"leased by {format_count(len(item.jobs), 'job')}"] if item.jobs else []
    words += [word for word in ("pinned", "superseded", "damaged") if getattr(item, word)]
    return ", ".join(words)


def format_listing(holdings: CacheInventory, now: float) -> list[OutputBlock]:
    """Pure: what `ls` prints."""
    if not holdings.items:
        return [TextLine("The cache holds no entry."), *_list_problem_lines(holdings)]
    columns = ("key", "kind", "size", "used", "state", "path")
    rows = []
    for item in holdings.items:
        size, used = format_size(item.bytes), format_age(now - item.used)
        key, kind = short_key(item.key), item.kind or "-"
        rows.append((key, kind, size, used, format_entry_state(item) or "-", item.path or "-"))
    return [TextTable(columns, rows), *_list_problem_lines(holdings)]


def _list_problem_lines(holdings: CacheInventory) -> list[OutputBlock]:
    return [TextLine(f"Problem: {problem}") for problem in holdings.problems]


def read_entry_details(
    cache: Cache, items: Iterable[InventoryItem], leases: Iterable[Lease]
) -> list[EntryDetails]:
    """Entries with the state of their sources, which are opened as the user who asks."""
    user, held = entry_sources.invoking_user(), tuple(leases)
    damaged = SourceState("not-checked", "the entry is damaged")
    return [
        EntryDetails(
            item,
            str(cache.image_path(item.key)),
            tuple(make_holder(one, {item.key: item.path}) for one in held if one.job in item.jobs),
            entry_sources.read_source_state(cache, item.entry, user) if item.entry else damaged,
        )
        for item in items
    ]


def format_settings(rows: Iterable[tuple[str, str, str]]) -> list[OutputBlock]:
    """Pure: what `config` prints of keys, values and origins."""
    columns = ("key", "value", "origin")
    return [TextTable(columns, tuple(map(tuple, rows)))]


def format_output(shown: Iterable[EntryDetails], now: float) -> list[OutputBlock]:
    """Pure: what `forestage show` prints."""
    separated: list[OutputBlock] = []
    for one in shown:
        separated += [TextLine(""), _format_details(one, now)]
    return separated[1:]


def _format_details(found: EntryDetails, now: float) -> NamedValues:
    item = found.item
    facts = [("key", item.key), ("state", format_entry_state(item) or "may be evicted")]
    if item.entry is None:
        facts.append(("path", "unknown: its record cannot be read, or is not of this image"))
    else:
        identity, access = item.entry.identity, item.entry.access
        facts += [
            ("kind", item.kind),
            ("path", identity.path),
            ("size", f"{format_size(identity.size)} ({identity.size} bytes)"),
            ("inode", str(identity.inode)),
            ("written", format_local_time(identity.mtime_ns / 1e9)),
            ("access", f"uid {access.uid}, gid {access.gid}, mode {access.mode:04o}"),
            ("ACL", "yes" if access.acl else "none"),
            ("copied", f"{format_local_time(item.created)} by {item.entry.engine}"),
            ("checksum", item.entry.digest or "none"),
        ]
    state_of_source = found.source.state.replace("-", " ")
    facts += [
        ("last use", f"{format_local_time(item.used)} ({format_age(now - item.used)} ago)"),
        ("on disk", format_size(item.bytes)),
        ("local copy", found.copy),
        ("source", ": ".join(filter(None, (state_of_source, found.source.detail)))),
    ]
    for one in found.leases:
        is_redirected = any(use.redirected for use in one.images if use.key == item.key)
        held = f"job {one.job} of {one.user}, for {format_age(now - one.since)}"
        held += ", redirected" * is_redirected
        facts.append(("lease", held))
    return NamedValues(tuple(facts))


@click.command("show")
@as_json
@click.argument("word", metavar="KEY|PATH", shell_complete=complete_entries)
@click.pass_obj
def show_entry(world: CommandContext, word: str, as_json: bool) -> None:
    """All about an entry, and whether its source is unchanged.

    A PATH may have several entries, of which the first is the newest.
    """
    node = world.make_node()
    held = inventory.read_inventory(node)
    picked = inventory.pick_items(held.items, word, entry_sources.resolve_path)
    shown = read_entry_details(node.cache, picked, held.leases)
    print_result(shown, format_output(shown, world.clock.wall()), as_json)


COMMANDS = (show_entry,)
