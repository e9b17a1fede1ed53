"""`forestage evict`: entries make room."""

import click

from forestage.cli.entries import pick_entries, some_words
from forestage.cli.world import Exit, as_json, show


@click.command()
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
        done = evict.exactly(node, pick_entries(inventory.gather(node).items, words), dry_run)
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


COMMANDS = (evict,)
