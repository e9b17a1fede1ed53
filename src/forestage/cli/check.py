"""The command `forestage check`."""

import os

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def check(ctx: click.Context, as_json: bool) -> None:
    """Whether this node, Slurm and pyxis are set up well, and the line to change if not.

    Changes nothing. The exit status is that of a Nagios plugin: 0 all is well, 1 warning, 2
    critical, 3 unknown.
    """
    from forestage import check as work
    from forestage.system import terminal

    world = ctx.obj
    conf = os.environ.get("SLURM_CONF", "")
    target = work.Target(world.places, world.clock, conf, is_root=os.geteuid() == 0)
    done = work.check(target)
    terminal.show(done, work.pieces(done), as_json)
    ctx.exit(done.code)


def add_to(main: click.Group) -> None:
    """The command of this file."""
    main.add_command(check)
