"""`forestage unredirect`: every redirect of the node goes."""

import click

from forestage.cli.world import Exit, as_json, show


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


COMMANDS = (unredirect,)
