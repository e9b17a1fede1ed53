"""`forestage off` and `on`: whether anything is staged on the node."""

import click

from forestage.cli.world import Exit, as_json, seconds, show


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


COMMANDS = (off, on)
