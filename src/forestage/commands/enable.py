"""`forestage enable` and `disable`: how Slurm calls us."""

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import ExitStatus, as_json, print_result
from forestage.errors import ForestageError

if TYPE_CHECKING:
    from forestage.check.enable_plan import SlurmChangePlan
    from forestage.check.slurm_site import SlurmSite

SLURM_CONF = "/etc/slurm/slurm.conf"

yes = click.option(
    "-y", "--yes", is_flag=True, help="Change links and units; else it is a dry run."
)
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

    Prints the lines to add to slurm.conf and plugstack.conf, and those by which jobs can ask for
    nodes with the cache's disk. Where Prolog= names a directory's files, --yes makes the link
    there. With --yes, the timer is switched on as well, and the service by which nodes get images
    from each other unless `peers.enabled` is false; users can no longer list /etc/forestage on this
    node.
    """
    from forestage.check import enable_plan as work
    from forestage.config import directories
    from forestage.system.tree import RootedTree

    config, disk = None, None
    with contextlib.suppress(ForestageError, OSError):  # that is for other commands to say
        config = ctx.obj.make_node().config
        disk = work.find_cache_disk(ctx.obj.make_node())
    files = RootedTree(ctx.obj.places.root)
    _show_and_apply_plan(
        ctx, slurm_conf, lambda site: work.plan_enable(files, site, disk), True, yes, as_json
    )
    if yes:
        with contextlib.suppress(OSError):  # the sweep, which is switched on now, does it as well
            directories.make_directories_unlistable(ctx.obj.places)
    units = work.list_wanted_units(config)
    _print_sentences(
        work.start_units(files, units) if yes else work.list_units_to_start(files, units), as_json
    )


@click.command()
@as_json
@yes
@slurm_conf
@click.pass_context
def disable(ctx: click.Context, slurm_conf: str, yes: bool, as_json: bool) -> None:
    """Stop Slurm from calling forestage.

    Prints the lines to remove; --yes removes the links that `enable` has made, and stops the peer
    service. Refuses what would drain nodes, with exit status 9. What stops staging at once is
    `forestage off`.
    """
    from forestage.check import enable_plan as work
    from forestage.system.tree import RootedTree

    files = RootedTree(ctx.obj.places.root)
    _show_and_apply_plan(ctx, slurm_conf, work.plan_disable, False, yes, as_json)
    _print_sentences(work.stop_units(files) if yes else work.list_units_to_stop(files), as_json)


def _print_sentences(sentences: list[str], as_json: bool) -> None:
    """Prints what was done with units; beside a document on stderr."""
    for sentence in sentences:
        click.echo(sentence, err=as_json)


def _show_and_apply_plan(
    ctx: click.Context,
    slurm_conf: str,
    decide: "Callable[[SlurmSite], SlurmChangePlan]",
    enabling: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Shows the plan, and changes links with `yes`. Ends the command where it is refused."""
    import msgspec

    from forestage.check import enable_plan as work
    from forestage.check import slurm_site as sites
    from forestage.system.tree import RootedTree

    files = RootedTree(ctx.obj.places.root)
    path = os.path.abspath(slurm_conf)
    if files.find_mode(path) is None:
        raise click.BadParameter(f"{path} is not there", param_hint="--slurm-conf")
    plan = decide(sites.read_site(files, path))
    done = yes and not plan.refusals
    if done:
        work.apply_plan(plan, files)
    shown = work.format_plan(plan, done, enabling)
    print_result({"done": done, **msgspec.structs.asdict(plan)}, shown, as_json)
    if plan.refusals:
        ctx.exit(ExitStatus.REFUSED)


COMMANDS = (enable, disable)
