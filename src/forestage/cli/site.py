"""`forestage enable`, `disable`, `unredirect`: how Slurm calls us, and what jobs see of us."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forestage.cli.exits import Exit

if TYPE_CHECKING:
    from forestage.activate import Plan
    from forestage.activation import Site

SLURM_CONF = "/etc/slurm/slurm.conf"

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
yes = click.option("-y", "--yes", is_flag=True, help="Do it; else it is only told.")
slurm_conf = click.option(
    "--slurm-conf",
    metavar="FILE",
    default=lambda: os.environ.get("SLURM_CONF") or SLURM_CONF,
    help=f"Instead of $SLURM_CONF or {SLURM_CONF}.",
)


@click.command()
@as_json
@yes
@slurm_conf
@click.pass_context
def enable(ctx: click.Context, slurm_conf: str, yes: bool, as_json: bool) -> None:
    """Have Slurm call forestage: Prolog=, Epilog=, the companion.

    Changes slurm.conf, or the directory that Prolog= names, and plugstack.conf; restarts nothing.
    """
    from forestage import activate

    _change(ctx, slurm_conf, activate.to_enable, yes, as_json)
    if yes:
        said = activate.start_timer(ctx.obj.places)
        if said:
            click.echo(said, err=as_json)


@click.command()
@as_json
@yes
@slurm_conf
@click.pass_context
def disable(ctx: click.Context, slurm_conf: str, yes: bool, as_json: bool) -> None:
    """Have Slurm call forestage no longer.

    Takes out what `enable` has put in. Refuses what would drain nodes, with exit status 9.
    """
    from forestage import activate

    _change(ctx, slurm_conf, activate.to_disable, yes, as_json)


def _change(
    ctx: click.Context,
    slurm_conf: str,
    decide: "Callable[[Site], Plan]",
    yes: bool,
    as_json: bool,
) -> None:
    """Tells the plan, and does it with `yes`. Ends the command where it is refused."""
    from forestage import activate, activated, activation
    from forestage.system import terminal

    plan = decide(activation.gather(ctx.obj.places, Path(slurm_conf)))
    done = yes and not plan.refusals
    if done:
        activate.apply(plan, ctx.obj.places)
    enabling = decide is activate.to_enable
    told = activated.pieces(plan, done, enabling)
    terminal.show(activated.document(plan, done), told, as_json)
    if plan.refusals:
        ctx.exit(Exit.REFUSED)


@click.command()
@as_json
@click.pass_context
def unredirect(ctx: click.Context, as_json: bool) -> None:
    """Unmount every redirect of this node, now.

    What jobs have open they keep. New jobs get new redirects, unless staging is switched off.
    """
    from forestage.admin import unredirect as work
    from forestage.cache.node import Node
    from forestage.config import Config
    from forestage.errors import ConfigError
    from forestage.system import terminal

    try:
        node = ctx.obj.node()
    except ConfigError:  # the leases name the caches
        node = Node.of(Config(), ctx.obj.places, ctx.obj.clock)
    done = work.unredirect(node)
    terminal.show(done, work.pieces(done), as_json)
    if done.problems:
        ctx.exit(Exit.FAILED)


def add_to(main: click.Group) -> None:
    """The commands of this file."""
    for command in (enable, disable, unredirect):
        main.add_command(command)
