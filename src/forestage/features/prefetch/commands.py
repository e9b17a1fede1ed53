"""`forestage prefetch`: what `tend` runs each minute."""

import errno
import os
from functools import partial
from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import as_json, print_result

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext


@click.command()
@as_json
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: copy and write nothing.")
@click.option("--node", metavar="NAME", help="This node as Slurm names it; else its host name.")
@click.pass_obj
def prefetch(world: "CommandContext", node: str | None, dry_run: bool, as_json: bool) -> None:
    """Copy images before the jobs begin which wait for a node.

    Run by `tend`. On the host that `prefetch.host` names it reads Slurm's queue and writes the list
    of what is expected. Everywhere else it asks that host for the list, and begins to copy here
    what it expects most. Ends at once while another one is at work.
    """
    from forestage.errors import ConfigError, ConfigProblem
    from forestage.features.peers import auth
    from forestage.features.prefetch import expected_list, prefetch_host, prefetch_node
    from forestage.features.prepare.stage_images import decide_redirect
    from forestage.slurm.slurm_client import SlurmClient
    from forestage.system import folders, lock

    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "the queue's list and the cache are root's")
    here, slurm = world.make_node(), SlurmClient.from_environ(os.environ)
    slurm = slurm._replace(node=node or slurm.node)
    host, peers = prefetch_host.find_host(here.config), here.config.peers
    if host is None:
        raise ConfigError((ConfigProblem("", "prefetch.host", "is null: nobody reads the queue"),))
    folders.ensure_directory_with_mode(world.places.locks)
    try:
        with lock.held_for_work(world.places.locks / "prefetch.lock", 0):
            if prefetch_host.is_prefetch_host(host.host, slurm):
                made = prefetch_host.run_host_pass(world.places, slurm, world.clock, dry_run)
                print_result(made, prefetch_host.format_output(made), as_json)
                return
            here = decide_redirect(here, os.environ.get("SLURM_CONF", ""))
            ask = partial(
                expected_list.fetch_list,
                host,
                auth.make_authenticator(peers.key_file, world.places),
            )
            done = prefetch_node.run_node_pass(here, slurm, ask, dry_run)
            print_result(done, prefetch_node.format_output(done), as_json)
    except lock.LockTimeout:
        return


COMMANDS = (prefetch,)
