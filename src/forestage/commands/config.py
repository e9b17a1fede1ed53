"""`forestage config`: every setting."""

from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import as_json, print_result

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext


@click.command()
@as_json
@click.option("-p", "--partition", metavar="NAME", help="As it holds for this partition's jobs.")
@click.pass_obj
def config(world: "CommandContext", partition: str | None, as_json: bool) -> None:
    """Print every setting, and the file that it comes from."""
    from forestage.commands import show as view
    from forestage.system.terminal import escape_control_characters

    settings = world.load_config()
    if partition is not None and partition not in settings.partitions:
        known = ", ".join(sorted(settings.partitions)) or "none"
        text = f"partition {partition!r} has no settings of its own (these have: {known})"
        click.echo(f"forestage: {escape_control_characters(text)}", err=True)
    rows = settings.list_rows(partition)
    print_result([row._asdict() for row in rows], view.format_settings(rows), as_json)


COMMANDS = (config,)
