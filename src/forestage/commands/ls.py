"""`forestage ls`: the entries."""

from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import as_json, print_result
from forestage.commands.entry_arguments import optional_entry_words, pick_entries

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext


@click.command()
@as_json
@optional_entry_words
@click.pass_obj
def ls(world: "CommandContext", words: tuple[str, ...], as_json: bool) -> None:
    """List the entries, last used first: all, or those named."""
    from forestage.commands import inventory
    from forestage.commands import show as view

    found = inventory.read_inventory(world.make_node())
    if words:
        keys = {item.key for item in pick_entries(found.items, words)}
        found = found.with_keys(keys)
    print_result(found.items, view.format_listing(found, world.clock.wall()), as_json)


COMMANDS = (ls,)
