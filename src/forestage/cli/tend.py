"""`forestage tend`: the work of each minute."""

import errno
import os

import click

from forestage.cli.world import Exit, ending_as_interrupt


@click.command()
@click.pass_context
def tend(ctx: click.Context) -> None:
    """Do the minute's work: room, metrics, prefetch, the sweep, proofs of entries.

    Run by forestage.timer. Each part is a command in a process of its own; one that hangs is left
    out until it ends, and holds up no other. Ends within 50 s; sweep and proofs may go on.
    """
    from functools import partial

    from forestage.admin import tend as work
    from forestage.cache import disk_errors
    from forestage.errors import ConfigError
    from forestage.features.contexts import TendFacts
    from forestage.features.doors import having, load
    from forestage.slurm.queue import Slurm

    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "the cache is root's")
    places, clock = ctx.obj
    config, wrong = None, None
    try:
        config = ctx.obj.settings().of_node
    except ConfigError as error:
        wrong = error
    is_apart = config is not None and any(
        load(name, "tend.works_for_others")(config, Slurm.of(os.environ))
        for name in having("tend.works_for_others")
    )
    is_apart = is_apart and not places.called("prolog").exists()
    is_doubted = bool(disk_errors.known(places).since)
    parts = work.list_parts(TendFacts(places, clock, config, is_apart), is_doubted)
    has_failed = is_told = False
    with ending_as_interrupt():
        for end in work.tend(places, clock, parts, partial(work.start, os.environ)):
            has_failed |= end.has_failed
            is_told |= end.code == Exit.CONFIG  # by the part itself
            if text := work.sentence(end):
                click.echo(text)
    if wrong and not is_told:
        raise wrong
    if wrong:
        ctx.exit(Exit.CONFIG)
    if has_failed:
        ctx.exit(Exit.FAILED)


COMMANDS = (tend,)
