"""`forestage metrics`: what node exporter reads."""

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext


@click.command()
@click.option("--print", "is_shown", is_flag=True, help="Print them, too.")
@click.option("-q", "--quiet", is_flag=True, help="Do nothing if node exporter is not here.")
@click.pass_obj
def metrics(world: "CommandContext", is_shown: bool, quiet: bool) -> None:
    """Write counters and the node's state for Prometheus, through its node exporter.

    Run by `tend`. Node exporter is here if the directory of `metrics: textfile:` is.
    """
    from importlib.metadata import version

    from forestage.features.metrics import export as work

    if quiet and not work.has_textfile_directory(world.places):
        return
    conf = os.environ.get("SLURM_CONF", "")
    written = work.write_metrics(world.places, world.clock, version("forestage"), conf, is_shown)
    if is_shown:
        click.echo(written, nl=False)


COMMANDS = (metrics,)
