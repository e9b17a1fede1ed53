"""Commands for images before any job wants them: `forestage warm`, `stage`, `publish`, `pack` …"""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import (
    ExitStatus,
    as_json,
    parse_duration_option,
    print_result,
    raise_signals_as_interrupt,
)
from forestage.features.doors import COMMANDS_IMPORT_REFERENCE, load_doors

if TYPE_CHECKING:
    from forestage.commands.command_context import CommandContext

force = click.option("-f", "--force", is_flag=True, help="Replace an existing file.")


def _check_duration_option(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    parse_duration_option(ctx, parameter, value or "0")  # which refuses what is none
    return value


def _resolve_image(world: "CommandContext", image: str) -> str:
    """Return where an image lies; one of a registry is imported before."""
    if image.startswith("docker://"):
        for import_reference in load_doors(COMMANDS_IMPORT_REFERENCE):
            return import_reference(world, image)
    return os.path.abspath(image)


@click.command()
@as_json
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@click.option("-w", "--nodes", metavar="NODESET", help="As ClusterShell reads it.")
@click.option(
    "-p", "--partition", metavar="NAME", help="The jobs' partition; without -w, all its nodes."
)
@click.option("--reservation", metavar="NAME", help="The jobs' reservation.")
@click.option("--srun", "more", multiple=True, metavar="OPTION", help="One more option for srun.")
@click.option(
    "--busy",
    default="5m",
    callback=parse_duration_option,
    metavar="TIME",
    help="How long a node may be busy; 5m.",
)
@click.option(
    "--stage-wait",
    default="",
    callback=_check_duration_option,
    metavar="TIME",
    help="For the hint.",
)
@click.option("--at-once", default=64, type=click.IntRange(1), help="Nodes at once; 64.")
@click.pass_context
def warm(
    ctx: click.Context,
    images: tuple[str, ...],
    nodes: str | None,
    partition: str | None,
    reservation: str | None,
    more: tuple[str, ...],
    busy: float,
    stage_wait: str,
    at_once: int,
    as_json: bool,
) -> None:
    """Have nodes copy images before a job wants them.

    Runs a tiny job with the hint on each node, as the user who asks. May be run again: what is
    there is a hit. Ends with status 1 if an image is not on each of the nodes. docker://REF is
    imported into the store first.
    """
    import secrets

    from forestage.features.prepare import warm as work
    from forestage.slurm.slurm_client import SlurmClient
    from forestage.system import terminal as screen

    if len(images) > work.MAX_IMAGES:
        raise click.UsageError(f"a job can name {work.MAX_IMAGES} images, not {len(images)}")
    slurm = SlurmClient.from_environ(os.environ)
    if nodes is not None:
        try:
            where = work.expand_nodes(nodes)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--nodes") from None
    elif partition is not None:
        where = work.list_partition_nodes(partition, slurm)
    else:
        raise click.UsageError("name the nodes with --nodes, or their --partition")
    named = (("partition", partition), ("reservation", reservation))
    order = work.WarmRequest(
        tuple(dict.fromkeys(_resolve_image(ctx.obj, image) for image in images)),
        where,
        (*(f"--{name}={value}" for name, value in named if value), *more),
        stage_wait,
        busy,
        at_once,
    )
    with raise_signals_as_interrupt(), screen.show_busy_status() as progress:
        done = work.warm_nodes(order, slurm, ctx.obj.clock, secrets.token_hex(4), progress)
    print_result(done, work.format_output(done), as_json)
    if done.failed:
        ctx.exit(ExitStatus.NOT_FOUND)


@click.command()
@as_json
@click.argument("images", nargs=-1, metavar="[IMAGE...]")
@click.option("--user", metavar="NAME", help="Open the images as this user; else as who asks.")
@click.option(
    "--within",
    default="1h",
    callback=parse_duration_option,
    metavar="TIME",
    help="How long to wait for the copies; 1h.",
)
@click.pass_context
def stage(
    ctx: click.Context, images: tuple[str, ...], user: str | None, within: float, as_json: bool
) -> None:
    """Copy images into this node's cache, without a job and without Slurm.

    As root; for nodes that boot, are drained, or are set up. Without IMAGE, those of
    `warm_at_boot:` in the configuration. Ends with status 1 if one is not here; a copy that is
    under way then goes on.
    """
    from forestage.commands import entry_sources
    from forestage.features.prepare import stage_images as work
    from forestage.slurm.slurm_client import read_own_node_name
    from forestage.system import terminal as screen

    if os.geteuid() != 0:  # else the cache is said to be nobody's, and to be removed
        raise PermissionError(errno.EPERM, "the cache is root's")
    try:
        who = work.read_user(user) if user else entry_sources.invoking_user()
    except KeyError:
        raise click.BadParameter(f"{user!r} is no user of this node", param_hint="--user") from None
    node = work.decide_redirect(ctx.obj.make_node(), os.environ.get("SLURM_CONF", ""))
    paths = tuple(dict.fromkeys(_resolve_image(ctx.obj, image) for image in images))
    job = work.make_placeholder_job(who, read_own_node_name(os.environ))
    with screen.show_busy_status() as progress:
        wanted = paths or node.config.warm_at_boot
        done = work.copy_images(node, job, wanted, within, progress)
    print_result(done, work.format_output(done), as_json)
    if done.failed:
        ctx.exit(ExitStatus.NOT_FOUND)


@click.command()
@as_json
@force
@click.argument("image", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--stripes", default=-1, type=int, help="Lustre: over so many OSTs; -1, all.")
@click.option("--stripe-size", default="1M", metavar="SIZE", help="Lustre: pieces of SIZE; 1M.")
@click.pass_obj
def publish(
    world: "CommandContext",
    image: Path,
    folder: Path,
    stripes: int,
    stripe_size: str,
    force: bool,
    as_json: bool,
) -> None:
    """Copy IMAGE into DIR, on Lustre spread over all OSTs.

    The copy gets its name when it is whole, read back and compared.
    """
    from forestage.features.prepare import publish as work
    from forestage.system import terminal as screen
    from forestage.system.striping import StripeLayout
    from forestage.system.tree import RootedTree

    layout = StripeLayout(stripes, stripe_size)
    files = RootedTree(world.places.root)
    source, target = Path(os.path.abspath(image)), Path(os.path.abspath(folder))
    with raise_signals_as_interrupt(), screen.show_busy_status() as progress:
        done = work.publish_image(source, target, layout, force, files, world.clock, progress)
    print_result(done, work.format_output(done), as_json)


@click.command()
@as_json
@force
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("-o", "--output", "image", type=click.Path(path_type=Path), help="The image's file.")
@click.option("--here", is_flag=True, help="For use in the place of DIR: print a job's option.")
@click.pass_obj
def pack(
    world: "CommandContext",
    folder: Path,
    image: Path | None,
    here: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Make one squashfs image of all that is in DIR.

    For virtual environments and other trees of many small files. With --here it is published, as
    DIR.sqsh if not told otherwise, and the option printed by which a job sees it at DIR.
    """
    import msgspec

    from forestage.features.prepare import pack as work
    from forestage.features.prepare import publish as publishing
    from forestage.system import terminal as screen
    from forestage.system.striping import StripeLayout
    from forestage.system.tree import RootedTree

    at = Path(os.path.abspath(folder))
    if image is None and not here:
        raise click.UsageError("name the image with -o, or say --here")
    image = Path(os.path.abspath(image or f"{at}.sqsh"))
    option = work.format_job_option(at, image) if here else ""
    layout = None
    if (
        here
        and publishing.read_file_system_type(image.parent, RootedTree(world.places.root))
        == "lustre"
    ):
        layout = StripeLayout()
    with raise_signals_as_interrupt(), screen.show_busy_status() as progress:
        done = work.pack_directory(
            folder, image, force, world.clock, progress, layout, world.places.root
        )
    done = msgspec.structs.replace(done, option=option)
    print_result(done, work.format_output(done), as_json)


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="WORD...")
@click.pass_context
def hints(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Say what is wrong with --stage options, as srun, sbatch and salloc do.

    A WORD is an option without its dashes: `stage=/lustre/a.sqsh`, `stage-wait=5m`. No file is
    looked at. Ends with status 65 if one is refused.
    """
    from forestage.features.prepare import hints as work

    ctx.exit(work.main(words))


@click.command("images")
@as_json
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR...]")
@click.pass_obj
def list_images(world: "CommandContext", folders: tuple[Path, ...], as_json: bool) -> None:
    """List the images below DIR, or below the site's sources: name, size, owner, label.

    As the user who asks, a few directories deep. A label is the first line of IMAGE.label.
    """
    from forestage.features.prepare import images as view

    named = tuple(os.path.abspath(folder) for folder in folders)
    found = view.list_images_below(named or world.load_config().config.sources)
    print_result(found, view.format_output(found), as_json)


COMMANDS = (warm, stage, publish, pack, hints, list_images)
