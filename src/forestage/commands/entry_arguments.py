"""How commands are told which entries are meant: by key or by path."""

from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import complete_entries

if TYPE_CHECKING:
    from forestage.commands.inventory import InventoryItem

entry_words = click.argument(
    "words",
    nargs=-1,
    required=True,
    metavar="KEY|PATH...",
    shell_complete=complete_entries,
)
optional_entry_words = click.argument(
    "words", nargs=-1, metavar="[KEY|PATH...]", shell_complete=complete_entries
)


def pick_entries(
    items: "tuple[InventoryItem, ...]", words: tuple[str, ...], newest: bool = False
) -> "list[InventoryItem]":
    """The entries that all the words mean, each once.

    Raises NotFoundError before anything is done.
    """
    from forestage.commands import entry_sources, inventory

    found: dict[str, InventoryItem] = {}
    for word in words:
        picked = inventory.pick_items(items, word, entry_sources.resolve_path)
        found |= {item.key: item for item in (picked[:1] if newest else picked)}
    return list(found.values())
