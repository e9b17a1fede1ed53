"""`forestage pin` and `unpin`: which entries stay."""

from typing import TYPE_CHECKING

import click

from forestage.commands.entries import pick_entries, words
from forestage.commands.world import as_json, show

if TYPE_CHECKING:
    from forestage.commands.world import CommandContext


@click.command()
@as_json
@words
@click.pass_obj
def pin(world: "CommandContext", words: tuple[str, ...], as_json: bool) -> None:
    """Keep entries from being evicted; of a PATH, its newest."""
    _set_pin(world, words, True, as_json)


@click.command()
@as_json
@words
@click.pass_obj
def unpin(world: "CommandContext", words: tuple[str, ...], as_json: bool) -> None:
    """Let entries be evicted again; of a PATH, all of them."""
    _set_pin(world, words, False, as_json)


def _set_pin(world: "CommandContext", words: tuple[str, ...], pinned: bool, as_json: bool) -> None:
    from forestage.commands import evict, inventory

    node = world.node()
    picked = pick_entries(inventory.gather(node).items, words, newest=pinned)
    done = [evict.set_pin(node.cache, item, pinned) for item in picked]
    show(done, evict.pin_pieces(done), as_json)


COMMANDS = (pin, unpin)
