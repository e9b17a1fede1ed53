"""`forestage show`: all about an entry."""

from typing import TYPE_CHECKING

import click

from forestage.cli.world import as_json, complete_entries, show

if TYPE_CHECKING:
    from forestage.cli.world import World


@click.command("show")
@as_json
@click.argument("word", metavar="KEY|PATH", shell_complete=complete_entries)
@click.pass_obj
def show_entry(world: "World", word: str, as_json: bool) -> None:
    """All about an entry, and whether its source is unchanged.

    A PATH may have several entries, of which the first is the newest.
    """
    from forestage.admin import inventory, sources
    from forestage.admin import show as view

    node = world.node()
    held = inventory.gather(node)
    picked = inventory.pick(held.items, word, sources.resolve)
    found = view.found(node.cache, picked, held.leases)
    show(found, view.pieces(found, world.clock.wall()), as_json)


COMMANDS = (show_entry,)
