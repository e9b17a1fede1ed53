"""`forestage sweep`: what crashes left is cleaned up."""

import os
from typing import TYPE_CHECKING

import click

from forestage.cli.world import as_json, show

if TYPE_CHECKING:
    from forestage.admin.sweep import Only


@click.command()
@as_json
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: change nothing, verify nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing if nothing was done.")
@click.option(
    "--only",
    type=click.Choice(("leftovers", "entries", "nodes")),
    help="Only what crashes left, the entries that are due to be read, or the list of nodes.",
)
@click.pass_context
def sweep(
    ctx: click.Context, dry_run: bool, quiet: bool, only: "Only | None", as_json: bool
) -> None:
    """Clean up what crashes left: leases of jobs that are over, redirects, parts.

    Asks Slurm about the jobs that hold a lease here; if it does not answer, no lease is released
    and the exit status is 8. Then reads the entries that are due, as after a restart. Run by
    `tend`.
    """
    from forestage.admin import sweep as work
    from forestage.slurm.queue import Slurm
    from forestage.system import terminal as screen

    with screen.busy() as progress:
        slurm = Slurm.of(os.environ).bind()
        done = work.sweep(ctx.obj.node(), slurm, dry_run, progress, only)
    show(done, () if quiet and done.is_empty else work.pieces(done), as_json)
    ctx.exit(work.exit_code(done))


COMMANDS = (sweep,)
