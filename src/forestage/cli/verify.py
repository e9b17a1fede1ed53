"""`forestage verify`: entries are compared with their sources."""

import click

from forestage.cli.entries import pick_entries, some_words
from forestage.cli.world import Exit, as_json, show


@click.command()
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
        done = view.verify(
            node, items if everything else pick_entries(items, words), dry_run, progress
        )
    show(done, view.pieces(done), as_json)
    if done.bad:
        ctx.exit(Exit.BAD)
    if done.failed:
        ctx.exit(Exit.FAILED)


COMMANDS = (verify,)
