"""`forestage check`: whether the node is set up well."""

import os

import click

from forestage.commands.command_context import as_json, print_result


@click.command()
@as_json
@click.option("--login", is_flag=True, help="Only whether jobs can be submitted with --stage.")
@click.option(
    "--accept-disk", is_flag=True, help="First have the cache use the disk that is there now."
)
@click.pass_context
def check(ctx: click.Context, login: bool, accept_disk: bool, as_json: bool) -> None:
    """Check the setup of this node, Slurm and pyxis, and print the lines to change.

    Without --accept-disk it changes nothing. The exit status is that of a Nagios plugin: 0 all is
    well, 1 warning, 2 critical, 3 unknown.
    """
    from forestage import check as work
    from forestage.slurm.slurm_client import SlurmClient

    world, slurm = ctx.obj, SlurmClient.from_environ(os.environ)
    is_root = os.geteuid() == 0
    if accept_disk:
        node = world.make_node()
        there = node.cache.accept_disk(node.config.require_mount)
        click.echo(f"The cache {there.root} uses the disk at {there.point} from now on.", err=True)
    target = work.CheckTarget(world.places, world.clock, slurm.conf, is_root, login, slurm)
    done = work.run_checks(target)
    print_result(done, work.format_report(done), as_json)
    ctx.exit(done.code)


COMMANDS = (check,)
