"""`forestage ls`: the entries."""

from typing import TYPE_CHECKING

import click

from forestage.commands.entries import pick_entries, some_words
from forestage.commands.world import as_json, show

if TYPE_CHECKING:
    from forestage.commands.world import CommandContext


@click.command()
@as_json
@some_words
@click.pass_obj
def ls(world: "CommandContext", words: tuple[str, ...], as_json: bool) -> None:
    """List the entries, last used first: all, or those named."""
    from forestage.commands import inventory
    from forestage.commands import show as view

    found = inventory.gather(world.node())
    if words:
        keys = {item.key for item in pick_entries(found.items, words)}
        found = found.only(keys)
    show(found.items, view.listing(found, world.clock.wall()), as_json)


COMMANDS = (ls,)
