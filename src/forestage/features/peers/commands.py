"""`forestage peer`: the service that gives chunks to other nodes."""

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext


@click.command()
@click.option("--node", metavar="NAME", help="This node as Slurm names it; else its host name.")
@click.pass_obj
def peer(world: "CommandContext", node: str | None) -> None:
    """Serve chunks to the other nodes until it is ended.

    Started by forestage-peer.service; it ends at once where `peers.enabled` is false.
    """
    from forestage.features.peers import server
    from forestage.slurm.slurm_client import SlurmClient

    slurm = SlurmClient.from_environ(os.environ)
    server.run_service(world.make_node(), node or slurm.node, slurm)


COMMANDS = (peer,)
