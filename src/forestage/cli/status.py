"""`forestage status`: the cache, its space, copies under way."""

import contextlib
import os

import click

from forestage.cli.world import Exit, as_json, show


@click.command()
@as_json
@click.option("--watch", is_flag=True, help="Follow the copies; as JSON, one line a second.")
@click.option("--oneline", is_flag=True, help="One line for health checks; see forestage(1).")
@click.pass_context
def status(ctx: click.Context, watch: bool, oneline: bool, as_json: bool) -> None:
    """Show the cache, its space, copies under way, leases.

    Ends with status 5 where the cache is not mounted or must not be used. With --watch on a
    terminal, ^C ends it; else it ends when no copy is under way any more.
    """
    from forestage.admin import copies
    from forestage.admin import status as view
    from forestage.system import terminal as screen

    node = ctx.obj.node()
    if watch:
        for_ever = screen.is_live(as_json)
        with contextlib.suppress(KeyboardInterrupt):
            screen.follow(copies.watch(node, for_ever), copies.lines, as_json)
        return
    found = view.gather(node, os.environ.get("SLURM_CONF", ""))
    document = view.document(found)
    if oneline:
        show(document, [screen.Line(view.oneline(found), whole=True)], as_json)
    else:
        show(document, view.pieces(found, ctx.obj.clock.wall()), as_json)
    if found.unusable:
        ctx.exit(Exit.CACHE)


COMMANDS = (status,)
