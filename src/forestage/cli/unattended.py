"""`forestage metrics` and `forestage peer`: what services and timers run, and nobody types."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from forestage.cli.world import World


@click.command()
@click.option("--print", "is_shown", is_flag=True, help="Print them, too.")
@click.pass_obj
def metrics(world: "World", is_shown: bool) -> None:
    """Write counters and the node's state for Prometheus, through its node exporter.

    Run by forestage-metrics.timer.
    """
    from importlib.metadata import version

    from forestage.admin import metrics as work

    written = work.export(world.places, world.clock, version("forestage"))
    if is_shown:
        click.echo(written, nl=False)


@click.command()
@click.option("--node", metavar="NAME", help="This node as Slurm names it; else its host name.")
@click.pass_obj
def peer(world: "World", node: str | None) -> None:
    """Serve chunks to the other nodes until it is ended.

    Started by forestage-peer.service where `peers.enabled` is true.
    """
    import socket

    from forestage.peers import server

    server.run(world.node(), node or socket.gethostname().partition(".")[0])


def add_to(main: click.Group) -> None:
    """The commands of this file."""
    main.add_command(metrics)
    main.add_command(peer)
