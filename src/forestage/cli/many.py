"""The options of commands that can ask many nodes: `-w NODESET`."""

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from forestage.cli.world import Exit, ending_as_interrupt, seconds, show

Command = Callable[..., None]

# Options that are not the nodes': whom to ask, and how to show it.
_HERE = ("nodes", "by", "within", "at_once", "more", "as_json", "watch")
_PATHS = ("word", "words", "image")  # arguments that may be a path of this directory


at_once = click.option("--at-once", default=64, type=click.IntRange(1), help="Nodes at once; 64.")
more = click.option(
    "--srun", "more", multiple=True, metavar="OPTION", help="One more option for srun."
)


def on_nodes(within: str = "1m") -> Callable[[Command], Command]:
    """Gives a command -w and what goes with it; `within` is how long a node may take."""

    def decorate(local: Command) -> Command:
        @click.option("-w", "--nodes", metavar="NODESET", help="Ask these nodes, not this one.")
        @click.option(
            "--by",
            type=click.Choice(("ssh", "srun")),
            default="ssh",
            help="How nodes of -w are reached; ssh.",
        )
        @click.option(
            "--within",
            default=within,
            callback=seconds,
            metavar="TIME",
            help=f"How long a node of -w may take; {within}.",
        )
        @at_once
        @more
        @functools.wraps(local)
        def command(nodes: str | None, **given: Any) -> None:
            if nodes is not None:
                _ask(click.get_current_context(), nodes, given)
                return
            for name in ("by", "within", "at_once", "more"):
                del given[name]
            local(**given)

        return command

    return decorate


def expanded(nodes: str) -> tuple[str, ...]:
    """The nodes of --nodes. Raises click.BadParameter."""
    from forestage.admin import fleet

    try:
        return fleet.expand(nodes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--nodes") from None


def _ask(ctx: click.Context, named: str, given: dict[str, Any]) -> None:
    import secrets

    from forestage.admin import fleet
    from forestage.slurm.queue import Slurm
    from forestage.system import terminal as screen

    if given.get("watch"):
        raise click.UsageError("--watch is for one node")
    words = (ctx.command.name or "", *_words(ctx, given))
    known = (given["by"], given["within"], given["at_once"], given["more"])
    question = fleet.Question(expanded(named), words, *known)
    with ending_as_interrupt(), screen.busy() as progress:
        replies = fleet.ask(question, Slurm.of(os.environ), secrets.token_hex(4), progress)
    show(fleet.document(replies), fleet.pieces(replies), given["as_json"])
    ctx.exit(fleet.exit_code(replies, Exit.UNREACHED))


def _words(ctx: click.Context, given: dict[str, Any]) -> list[str]:
    """The command line for the nodes: what this one has, but what is for us."""
    options, arguments = [], []
    for one in ctx.command.params:
        value = given.get(one.name or "")
        if one.name in _HERE or not value:
            continue
        if isinstance(one, click.Argument):
            values = value if isinstance(value, tuple) else (value,)
            arguments += [_absolute(word) if one.name in _PATHS else str(word) for word in values]
        else:
            flag = isinstance(one, click.Option) and one.is_flag
            options += [one.opts[-1]] if flag else [one.opts[-1], str(value)]
    return [*options, "--", *arguments] if arguments else options


def _absolute(word: str) -> str:
    """KEY|PATH as the nodes have it: they have no directory of ours."""
    from forestage.admin import inventory

    return word if inventory.is_key(word) else os.path.abspath(word)
