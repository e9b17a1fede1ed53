"""`forestage path`: where an image's copy lies."""

from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import as_json, print_result

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext


@click.command()
@as_json
@click.argument("image")
@click.pass_obj
def path(world: "CommandContext", image: str, as_json: bool) -> None:
    """Print the path of IMAGE's local copy.

    Only if the copy is exactly what IMAGE is now; else it says why not and ends with status 1.
    """
    from forestage.commands import entry_sources, inventory
    from forestage.system import terminal as screen

    node = world.make_node()
    inventory.is_cache_made(node)  # what cannot be used or read says so first
    wanted = entry_sources.read_source_image(
        node.cache, entry_sources.absolute_path(image), entry_sources.invoking_user()
    )
    copy = inventory.locate_local_copy(node, wanted)
    print_result(copy, [screen.TextLine(copy.copy, whole=True)], as_json)


COMMANDS = (path,)
