"""`forestage pin` and `unpin`: which entries stay."""

from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import as_json, print_result
from forestage.commands.entry_arguments import entry_words, pick_entries

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext


@click.command()
@as_json
@entry_words
@click.pass_obj
def pin(world: "CommandContext", words: tuple[str, ...], as_json: bool) -> None:
    """Keep entries from being evicted; of a PATH, its newest."""
    _set_pin(world, words, True, as_json)


@click.command()
@as_json
@entry_words
@click.pass_obj
def unpin(world: "CommandContext", words: tuple[str, ...], as_json: bool) -> None:
    """Let entries be evicted again; of a PATH, all of them."""
    _set_pin(world, words, False, as_json)


def _set_pin(world: "CommandContext", words: tuple[str, ...], pinned: bool, as_json: bool) -> None:
    from forestage.commands import evict, inventory

    node = world.make_node()
    picked = pick_entries(inventory.read_inventory(node).items, words, newest=pinned)
    done = [evict.set_pin(node.cache, item, pinned) for item in picked]
    print_result(done, evict.format_pins(done), as_json)


COMMANDS = (pin, unpin)
