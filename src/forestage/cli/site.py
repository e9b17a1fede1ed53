"""`forestage enable`, `off`, `unredirect` …: how Slurm calls us, and what jobs see of us."""

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from forestage.cli.world import Exit, as_json, seconds, show
from forestage.errors import ForestageError

if TYPE_CHECKING:
    from forestage.admin.site import Site
    from forestage.check.enable import Plan

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
    from forestage.check import enable as work
    from forestage.config import directories
    from forestage.system.tree import Files

    config, disk = None, None
    with contextlib.suppress(ForestageError, OSError):  # that is for other commands to say
        config = ctx.obj.node().config
        disk = work.disk_of(ctx.obj.node())
    files = Files(ctx.obj.places.root)
    _change(ctx, slurm_conf, lambda site: work.to_enable(files, site, disk), True, yes, as_json)
    if yes:
        with contextlib.suppress(OSError):  # the sweep, which is switched on now, does it as well
            directories.keep_unlisted(ctx.obj.places)
    units = work.wanted_units(config)
    _print(
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
    from forestage.check import enable as work
    from forestage.system.tree import Files

    files = Files(ctx.obj.places.root)
    _change(ctx, slurm_conf, work.to_disable, False, yes, as_json)
    _print(work.stop_units(files) if yes else work.list_units_to_stop(files), as_json)


def _print(sentences: list[str], as_json: bool) -> None:
    """Prints what was done with units; beside a document on stderr."""
    for sentence in sentences:
        click.echo(sentence, err=as_json)


def _change(
    ctx: click.Context,
    slurm_conf: str,
    decide: "Callable[[Site], Plan]",
    enabling: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Shows the plan, and changes links with `yes`. Ends the command where it is refused."""
    import msgspec

    from forestage.admin import site as sites
    from forestage.check import enable as work
    from forestage.system.tree import Files

    files = Files(ctx.obj.places.root)
    path = os.path.abspath(slurm_conf)
    if files.mode(path) is None:
        raise click.BadParameter(f"{path} is not there", param_hint="--slurm-conf")
    plan = decide(sites.read(files, path))
    done = yes and not plan.refusals
    if done:
        work.apply(plan, files)
    shown = work.pieces(plan, done, enabling)
    show({"done": done, **msgspec.structs.asdict(plan)}, shown, as_json)
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

    try:
        node = ctx.obj.node()
    except ConfigError:  # the leases name the caches
        node = Node.of(Config(), ctx.obj.places, ctx.obj.clock)
    done = work.unredirect(node)
    show(done, work.pieces(done), as_json)
    if done.problems:
        ctx.exit(Exit.FAILED)


def _lasting(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of a duration that is not zero, or None if none was given."""
    lasts = None if value is None else seconds(ctx, parameter, value)
    if lasts == 0:
        raise click.BadParameter("expected a duration such as 6h or 30m")
    return lasts


@click.command()
@as_json
@click.option("--until", metavar="TIME", callback=_lasting, help="For so long: 6h, 30m.")
@click.argument("reason", required=False)
@click.pass_context
def off(ctx: click.Context, reason: str | None, until: float | None, as_json: bool) -> None:
    """Switch staging off on this node, now: `forestage off "INC-42"`.

    From the next Prolog and step on, jobs read the original path. It is kept over reboots, and
    works with a broken configuration. `forestage on` ends it.
    """
    from forestage.admin import switching as work

    done = work.off(ctx.obj.places, ctx.obj.clock, reason or work.BY_HAND, until)
    show(done, work.pieces(done, "off"), as_json)


@click.command()
@as_json
@click.pass_context
def on(ctx: click.Context, as_json: bool) -> None:
    """Switch staging on again, after `forestage off`.

    Says what else keeps it off.
    """
    from forestage.admin import switching as work

    done = work.on(ctx.obj.places, ctx.obj.clock)
    show(done, work.pieces(done, "on"), as_json)
    if done.error:
        ctx.exit(Exit.FAILED)


COMMANDS = (enable, disable, off, on, unredirect)
