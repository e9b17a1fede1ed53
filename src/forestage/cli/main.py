"""The command `forestage`: its node's commands are here, all others in the modules beside.

Each command gathers facts, makes a view of them and shows it. What a command needs is imported when
it runs, so that `forestage --help` and completion stay quick.
"""

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING

import click

from forestage.cli import site
from forestage.cli.world import (
    Commands,
    Exit,
    as_json,
    complete_entries,
    complete_jobs,
    ending_as_interrupt,
    show,
)
from forestage.cli.world import World as World
from forestage.features.metrics import commands as metrics
from forestage.features.peers import commands as peers
from forestage.features.prefetch import commands as prefetch
from forestage.features.prepare import commands as prepare
from forestage.features.registry import commands as registry
from forestage.features.report import commands as report

if TYPE_CHECKING:
    from forestage.admin.inventory import Item
    from forestage.admin.sweep import Only

words = click.argument(
    "words",
    nargs=-1,
    required=True,
    metavar="KEY|PATH...",
    shell_complete=complete_entries,
)
some_words = click.argument(
    "words", nargs=-1, metavar="[KEY|PATH...]", shell_complete=complete_entries
)
STATUSES = "\n".join(f"  {member.value:>3}  {member.meaning}" for member in Exit)


def _job_id(ctx: click.Context, parameter: click.Parameter, value: str) -> int:
    """Slurm's numeric id, also in front of a step's; `12_3` is a name that only Slurm can tell."""
    named = re.fullmatch(r"([0-9]{1,10})(\.[0-9a-z]+)?", value, re.ASCII)
    if named:
        return int(named[1])
    if re.fullmatch(r"[0-9]{1,10}[_+][0-9]{1,10}", value, re.ASCII):
        raise click.BadParameter(
            f"{value} is part of an array or a het job, and has an id of its own:"
            f" squeue -h -j {value} -o %A   (sacct -n -X -j {value} -o JobIDRaw, once it is over)"
        )
    raise click.BadParameter(f"{value!r} is no job id: expected a number such as 4242")


@click.group(
    cls=Commands,
    epilog=f"\b\nExit status:\n{STATUSES}",  # \b keeps click from filling the lines
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="forestage")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Look after the container images that forestage keeps on this node.

    KEY is an entry's key or its beginning, PATH the image's path as `forestage ls` prints it or a
    link to it.
    """
    if ctx.obj is None:
        ctx.obj = World.real()


for module in (site, metrics, peers, prefetch, prepare, registry, report):
    for command in module.COMMANDS:
        main.add_command(command)


@main.command()
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
    if oneline:
        show(found, [screen.Line(view.oneline(found), whole=True)], as_json)
    else:
        show(found, view.pieces(found, ctx.obj.clock.wall()), as_json)
    if found.unusable:
        ctx.exit(Exit.CACHE)


@main.command()
@as_json
@some_words
@click.pass_obj
def ls(world: World, words: tuple[str, ...], as_json: bool) -> None:
    """List the entries, last used first: all, or those named."""
    from forestage.admin import inventory
    from forestage.admin import show as view

    found = inventory.gather(world.node())
    if words:
        keys = {item.key for item in _picked(found.items, words)}
        found = found.only(keys)
    show(found.items, view.listing(found, world.clock.wall()), as_json)


@main.command("show")
@as_json
@click.argument("word", metavar="KEY|PATH", shell_complete=complete_entries)
@click.pass_obj
def show_entry(world: World, word: str, as_json: bool) -> None:
    """All about an entry, and whether its source is unchanged.

    A PATH may have several entries, of which the first is the newest.
    """
    from forestage.admin import inventory, sources
    from forestage.admin import show as view

    node = world.node()
    held = inventory.gather(node)
    picked = inventory.pick(held.items, word, sources.resolve)
    found = view.found(node.cache, picked, held.leases)
    show(found, view.pieces(found, world.clock.wall()), as_json)


@main.command()
@as_json
@click.argument("job", callback=_job_id, metavar="JOBID", shell_complete=complete_jobs)
@click.pass_obj
def explain(world: World, job: int, as_json: bool) -> None:
    """What a job asked for, what was done, why, and how long it took.

    Finished jobs too, as far back as the event log goes. Of an array, JOBID is the task's own id.
    Users see their own jobs, on a node of the job.
    """
    from forestage.admin import explain as view

    found = view.gather(world.places, job, os.geteuid())
    show(found, view.pieces(found, world.clock.wall()), as_json)


@main.command()
@as_json
@click.argument("image")
@click.pass_obj
def path(world: World, image: str, as_json: bool) -> None:
    """Print the path of IMAGE's local copy.

    Only if the copy is exactly what IMAGE is now; else it says why not and ends with status 1.
    """
    from forestage.admin import inventory, sources
    from forestage.system import terminal as screen

    node = world.node()
    inventory.is_made(node)  # what cannot be used or read says so first
    wanted = sources.find(node.cache, sources.absolute_path(image), sources.invoking_user())
    copy = inventory.copy_of(node, wanted)
    show(copy, [screen.Line(copy.copy, whole=True)], as_json)


@main.command()
@as_json
@some_words
@click.option("--all", "everything", is_flag=True, help="All that is not leased or pinned.")
@click.option(
    "--cache", metavar="DIR", help="With --all: of a cache configured before, and remove it."
)
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: print what would be evicted.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing if nothing is to be evicted.")
@click.pass_context
def evict(
    ctx: click.Context,
    words: tuple[str, ...],
    everything: bool,
    cache: str | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Evict entries: exactly those named, or down to the low watermark.

    Leased and pinned entries stay. Ends with status 1 if one that was named stays.
    """
    from forestage.admin import evict, inventory
    from forestage.errors import UNMOUNTED, Failed

    if words and everything:
        raise click.UsageError("KEY|PATH and --all exclude each other")
    if cache is not None and not everything:
        raise click.UsageError("--cache needs --all")
    node = ctx.obj.node()
    if cache is not None:
        done = evict.of_earlier(node, cache, dry_run)
        show(done, evict.pieces(done), as_json)
        ctx.exit(Exit.OK if done.removed or dry_run else Exit.NOT_FOUND)
    if everything:
        done = evict.everything(node, inventory.gather(node).items, dry_run)
    elif words:
        done = evict.exactly(node, _picked(inventory.gather(node).items, words), dry_run)
    else:
        try:
            done = evict.to_watermark(node, dry_run)
        except Failed as failed:
            if quiet and failed.reason in UNMOUNTED:  # `status`, `check` and the metrics tell that
                ctx.exit(Exit.UNMOUNTED)
            raise
    show(done, () if quiet and done.is_empty else evict.pieces(done), as_json)
    if words and done.left_out:
        ctx.exit(Exit.NOT_FOUND)


@main.command()
@as_json
@some_words
@click.option("--all", "everything", is_flag=True, help="Every entry.")
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: verify, but evict nothing.")
@click.pass_context
def verify(
    ctx: click.Context, words: tuple[str, ...], everything: bool, dry_run: bool, as_json: bool
) -> None:
    """Compare entries with their sources, or with the checksums of their copying.

    A bad entry is evicted, even if it is leased or pinned, and the exit status is 7.
    """
    from forestage.admin import inventory
    from forestage.admin import verify as view
    from forestage.system import terminal as screen

    if bool(words) == everything:
        raise click.UsageError("either KEY|PATH, or --all")
    node = ctx.obj.node()
    items = inventory.gather(node).items
    with screen.busy() as progress:
        done = view.verify(node, items if everything else _picked(items, words), dry_run, progress)
    show(done, view.pieces(done), as_json)
    if done.bad:
        ctx.exit(Exit.BAD)
    if done.failed:
        ctx.exit(Exit.FAILED)


@main.command()
@as_json
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: change nothing, verify nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing if nothing was done.")
@click.option(
    "--only",
    type=click.Choice(("leftovers", "entries", "nodes")),
    help="Only what crashes left, the entries that are due to be read, or the list of nodes.",
)
@click.pass_context
def sweep(
    ctx: click.Context, dry_run: bool, quiet: bool, only: "Only | None", as_json: bool
) -> None:
    """Clean up what crashes left: leases of jobs that are over, redirects, parts.

    Asks Slurm about the jobs that hold a lease here; if it does not answer, no lease is released
    and the exit status is 8. Then reads the entries that are due, as after a restart. Run by
    `tend`.
    """
    from forestage.admin import sweep as work
    from forestage.slurm.queue import Slurm
    from forestage.system import terminal as screen

    with screen.busy() as progress:
        slurm = Slurm.of(os.environ).bind()
        done = work.sweep(ctx.obj.node(), slurm, dry_run, progress, only)
    show(done, () if quiet and done.is_empty else work.pieces(done), as_json)
    ctx.exit(work.exit_code(done))


@main.command()
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
    from forestage.features.peers import node_list
    from forestage.features.prefetch import prefetch_host
    from forestage.slurm.queue import Slurm

    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "the cache is root's")
    places, clock = ctx.obj
    config, wrong = None, None
    try:
        config = ctx.obj.settings().of_node
    except ConfigError as error:
        wrong = error
    host = config.prefetch_host if config else None
    is_apart = host is not None and prefetch_host.is_here(host.host, Slurm.of(os.environ))
    is_apart = is_apart and not places.called("prolog").exists()
    is_doubted = bool(disk_errors.known(places).since)
    lacks_nodes = config is not None and node_list.is_wanted(config, places, clock)
    parts = work.list_parts(places, config, is_apart, is_doubted, lacks_nodes)
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


@main.command()
@as_json
@words
@click.pass_obj
def pin(world: World, words: tuple[str, ...], as_json: bool) -> None:
    """Keep entries from being evicted; of a PATH, its newest."""
    _set_pin(world, words, True, as_json)


@main.command()
@as_json
@words
@click.pass_obj
def unpin(world: World, words: tuple[str, ...], as_json: bool) -> None:
    """Let entries be evicted again; of a PATH, all of them."""
    _set_pin(world, words, False, as_json)


def _set_pin(world: World, words: tuple[str, ...], pinned: bool, as_json: bool) -> None:
    from forestage.admin import evict, inventory

    node = world.node()
    picked = _picked(inventory.gather(node).items, words, newest=pinned)
    done = [evict.set_pin(node.cache, item, pinned) for item in picked]
    show(done, evict.pin_pieces(done), as_json)


def _picked(
    items: "tuple[Item, ...]", words: tuple[str, ...], newest: bool = False
) -> "list[Item]":
    """The entries that all the words mean, each once. Raises NotFound before anything is done."""
    from forestage.admin import inventory, sources

    found: dict[str, Item] = {}
    for word in words:
        picked = inventory.pick(items, word, sources.resolve)
        found |= {item.key: item for item in (picked[:1] if newest else picked)}
    return list(found.values())


@main.command()
@as_json
@click.option("-p", "--partition", metavar="NAME", help="As it holds for this partition's jobs.")
@click.pass_obj
def config(world: World, partition: str | None, as_json: bool) -> None:
    """Print every setting, and the file that it comes from."""
    from forestage.admin import show as view
    from forestage.system.terminal import harmless

    settings = world.settings()
    if partition is not None and partition not in settings.partitions:
        known = ", ".join(sorted(settings.partitions)) or "none"
        text = f"partition {partition!r} has no settings of its own (these have: {known})"
        click.echo(f"forestage: {harmless(text)}", err=True)
    rows = settings.rows(partition)
    show([row._asdict() for row in rows], view.settings(rows), as_json)


@main.command()
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
    from forestage.slurm.queue import Slurm

    world, slurm = ctx.obj, Slurm.of(os.environ)
    is_root = os.geteuid() == 0
    if accept_disk:
        node = world.node()
        there = node.cache.accept_disk(node.config.require_mount)
        click.echo(f"The cache {there.root} uses the disk at {there.point} from now on.", err=True)
    target = work.Target(world.places, world.clock, slurm.conf, is_root, login, slurm)
    done = work.check(target)
    show(done, work.pieces(done), as_json)
    ctx.exit(done.code)
