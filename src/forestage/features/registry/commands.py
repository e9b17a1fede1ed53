"""`forestage registry`: images of registries in the store that all nodes share."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import ExitStatus, FullSummaryGroup, as_json, print_result

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext
    from forestage.config import Config


def import_reference(world: "CommandContext", reference: str) -> str:
    """Import an image if the store has it not yet, and return its path there.

    Raises Declined, NotFoundError.
    """
    from forestage.features.registry import store_commands as work

    return work.import_into_store(_config(world), reference, os.environ, _host(), _say)


def _config(world: "CommandContext") -> "Config":
    return world.load_config().config


def _host() -> str:
    from forestage.slurm.slurm_client import read_own_node_name

    return read_own_node_name(os.environ)


def _say(text: str) -> None:
    from forestage.system.terminal import escape_control_characters

    click.echo(f"forestage: {escape_control_characters(text)}", err=True)


@click.group(cls=FullSummaryGroup)
def registry() -> None:
    """Images of registries in the store that all nodes share."""


@registry.command()
@click.argument("uri")
@click.pass_obj
def get(world: "CommandContext", uri: str) -> None:
    """Print the path of a squashfs file of the image, imported if need be.

    For pyxis' importer, forestage-importer, in a job's step and as its user. Ends with status 10
    where enroot has tried to import it, and failed.
    """
    from forestage.errors import Declined
    from forestage.features.registry import store_commands as work

    try:
        click.echo(work.obtain_for_step(_config(world), uri, os.environ, _host(), _say))
    except Declined as error:
        if error.reason not in work.ENROOT_FAILED_REASONS:
            raise
        _say(str(error))
        raise click.exceptions.Exit(ExitStatus.TRIED) from None


@registry.command("import")
@as_json
@click.argument("reference", metavar="REF")
@click.pass_obj
def import_image(world: "CommandContext", reference: str, as_json: bool) -> None:
    """Import an image into the store before a job wants it, as who you are.

    REF is what a job would name: nvcr.io#nvidia/pytorch:25.01-py3.
    """
    from forestage.system.terminal import TextLine

    path = import_reference(world, reference)
    print_result({"path": path}, [TextLine(path, whole=True)], as_json)


@registry.command("ls")
@as_json
@click.pass_obj
def list_store(world: "CommandContext", as_json: bool) -> None:
    """List the images in the store, last used first: your own; as root, everybody's."""
    from forestage.features.registry import store_commands as work

    store = _config(world).registry.store
    rows = work.list_stored_images(Path(store)) if store else []
    print_result(rows, work.format_listing(rows, world.clock.wall()), as_json)


@registry.command()
@as_json
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: print what would be deleted.")
@click.pass_context
def gc(ctx: click.Context, dry_run: bool, as_json: bool) -> None:
    """Delete images that nobody used for long, and what dead imports left.

    Your own; as root everybody's, as each of them. See `registry:` in forestage.yaml(5).
    """
    from forestage.features.registry import store_commands as work

    done = work.collect_store(_config(ctx.obj), dry_run)
    print_result(done, work.format_results(done, dry_run), as_json)
    if any(one.problem for one in done):
        ctx.exit(ExitStatus.FAILED)


COMMANDS = (registry,)
