"""The context of the commands, and how a command ends when something is wrong."""

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from forestage.cli import exits
from forestage.cli.exits import Exit
from forestage.errors import ForestageError

if TYPE_CHECKING:
    from forestage.cache.node import Node
    from forestage.clock import Clock
    from forestage.paths import Places


class World(NamedTuple):
    """What the commands work on; tests pass places and a clock of their own as click's `obj`."""

    places: "Places"
    clock: "Clock"

    @classmethod
    def real(cls) -> "World":
        from forestage import clock, paths

        return cls(paths.Places(), clock.Clock())

    def node(self) -> "Node":
        """Raises ConfigError."""
        from forestage.cache import node
        from forestage.config import load_settings

        return node.Node.of(load_settings(self.places.etc).config, self.places, self.clock)


class Commands(click.Group):
    """The boundary: expected errors become a line on stderr and an exit status, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            # Here, where it is caught: at exit the interpreter would only complain.
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # What is still buffered is nobody's any more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(Exit.PIPE)
        except KeyboardInterrupt:
            ctx.exit(Exit.INTERRUPTED)
        except (ForestageError, OSError) as error:
            _complain(ctx, error)


def _complain(ctx: click.Context, error: Exception) -> NoReturn:
    from forestage.system.terminal import harmless

    for line in exits.lines(error, os.geteuid() == 0):
        click.echo(f"forestage: {harmless(line)}", err=True)
    ctx.exit(exits.of(error))
