"""What the commands share: the node they work on, their options, and how they end."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from forestage.errors import ForestageError

if TYPE_CHECKING:
    from forestage.cache.node import Node
    from forestage.clock import Clock
    from forestage.config import LoadedConfig
    from forestage.features.doors import CommandsDoor
    from forestage.paths import NodePaths
    from forestage.system.terminal import OutputBlock

T = TypeVar("T")

SIGNAL_REPEAT_SECONDS = 1.0  # seconds between two signals that come from one cause
MAX_COMPLETIONS = 50  # that a shell is offered; who has more has to type a digit

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def parse_duration_option(ctx: click.Context, parameter: click.Parameter, value: str) -> float:
    """A duration on the command line, in seconds."""
    from forestage.units import parse_duration

    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@contextlib.contextmanager
def raise_signals_as_interrupt() -> Iterator[None]:
    """Treat a closed terminal and `kill` as ^C: for commands that make anything outside the cache.

    Else the files and jobs that it has begun stay. What is ignored (nohup) stays ignored.
    """

    last = -SIGNAL_REPEAT_SECONDS

    def interrupt(number: int, frame: object) -> None:
        # A terminal that closes sends SIGHUP, and so does its shell: the second one would interrupt
        # the clean-up. A later one counts: Python loses an exception that is raised beside a fork.
        nonlocal last
        now = time.monotonic()
        if now - last >= SIGNAL_REPEAT_SECONDS:
            last = now
            raise KeyboardInterrupt

    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    before = {one: found for one, found in handlers.items() if found is not signal.SIG_IGN}
    for one in before:
        signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class CommandContext(NamedTuple):
    """What the commands work on; tests pass places and a clock of their own as click's `obj`."""

    places: "NodePaths"
    clock: "Clock"

    @classmethod
    def from_environ(cls) -> "CommandContext":
        from forestage import clock, paths

        conf = os.environ.get("SLURM_CONF", "")
        return cls(paths.NodePaths(slurm_conf=conf), clock.Clock())

    def load_config(self, is_quiet: bool = False) -> "LoadedConfig":
        """The configuration; says on stderr what a user's command could not read of it.

        Raises ConfigError.
        """
        from forestage.config import load_config
        from forestage.system.terminal import escape_control_characters

        settings = load_config(self.places.etc)
        if settings.unread and not is_quiet:
            click.echo(f"forestage: {escape_control_characters(settings.unread)}", err=True)
        return settings

    def make_node(self, is_quiet: bool = False) -> "Node":
        """The node by its configuration. Raises ConfigError."""
        from forestage.cache import node

        return node.Node.from_config(
            self.load_config(is_quiet).node_config, self.places, self.clock
        )


class ExitStatus(IntEnum):
    """Exit statuses of `forestage`; `meaning` is what the help and the manual page say."""

    meaning: str

    def __new__(cls, value: int, meaning: str = "") -> "ExitStatus":
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    OK = 0, "It was done."
    NOT_FOUND = 1, "What was named is not here, or is in use and stays."
    USAGE = 2, "The command line is wrong."
    CONFIG = 3, "The configuration cannot be used."
    PERMISSION = 4, "This user may not see or do it: run as root."
    CACHE = 5, "The cache is not in use: forestage status says why."
    FAILED = 6, "The node is at fault: a damaged lease, a lock that stays held, a port in use, I/O."
    BAD = 7, "A bad entry was found: its bytes or rights are not those of its source."
    SLURM = 8, "Slurm did not answer, or not clearly: no lease was released."
    REFUSED = 9, "Slurm's configuration was not changed: the manual steps were printed."
    TRIED = 10, "enroot tried to import the image, and failed."
    UNMOUNTED = 12, "The cache's disk is not mounted: it may come later."
    HINT = 65, "A word given to hints is refused."
    INTERRUPTED = 130, "It was interrupted from the keyboard."
    PIPE = 141, "The reader of the output went away."


class FullSummaryGroup(click.Group):
    """A group whose help has each command's whole summary."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # A summary that is cut off would not say what the command does.
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        rows = [(one.name or "", one.get_short_help_str(limit=1000)) for one in commands]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class LazyCommandGroup(click.Group):
    """All commands, each imported when it is needed; and the boundary around them.

    Expected errors become a line on stderr and an exit status, no traceback. `commands` has a
    stand-in for each, which can tell no more than its name and its summary.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.headings: dict[str, list[tuple[str, str]]] = {}
        self.modules: dict[str, Callable[[], CommandsDoor]] = {}

    def add_lazy_command(
        self, heading: str, name: str, summary: str, load_module: "Callable[[], CommandsDoor]"
    ) -> None:
        """Add a command, and what imports the module that has it."""
        self.add_command(click.Command(name, help=summary))
        self.headings.setdefault(heading, []).append((name, summary))
        self.modules[name] = load_module

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        return next(one for one in self.modules[cmd_name]().COMMANDS if one.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rows in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer commands by their stand-ins; click's own method would import each."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(one, help=self.commands[one].get_short_help_str()) for one in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # commands/console_script.py
                signal.signal(signal.SIGINT, signal.default_int_handler)
            result = super().invoke(ctx)
            # Here, where it is caught: at exit the interpreter would only complain.
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # What is still buffered is nobody's any more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(ExitStatus.PIPE)
        except KeyboardInterrupt:
            ctx.exit(ExitStatus.INTERRUPTED)
        except (ForestageError, OSError) as error:
            from forestage.system.terminal import escape_control_characters

            for line in format_error(error, os.geteuid() == 0):
                click.echo(f"forestage: {escape_control_characters(line)}", err=True)
            ctx.exit(choose_exit_status(error))


def choose_exit_status(error: Exception) -> ExitStatus:
    """Pure: the exit status for an expected error."""
    from forestage.errors import UNMOUNTED_REASONS, Declined, Failed

    if isinstance(error, PermissionError):
        return ExitStatus.PERMISSION
    if isinstance(error, Declined) and error.reason.startswith("cache-"):
        return ExitStatus.UNMOUNTED if error.reason in UNMOUNTED_REASONS else ExitStatus.CACHE
    if isinstance(error, Failed):
        return ExitStatus.FAILED
    if isinstance(error, ForestageError):
        return ExitStatus(error.exit_code)
    return ExitStatus.FAILED


def format_error(error: Exception, is_root: bool) -> list[str]:
    """Pure: what to print about an expected error."""
    from forestage.errors import ConfigError

    if isinstance(error, ConfigError):
        return [str(problem) for problem in error.problems]
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        hint = " (run as root)" if isinstance(error, PermissionError) and not is_root else ""
        return [what + hint]
    return [str(error)]


def insert_after(own: dict[str, T], added: Sequence[tuple[str, dict[str, T]]]) -> dict[str, T]:
    """Return `own` with what is added after the item that it names, or at the end. Pure."""
    found: dict[str, T] = {}
    for name, item in own.items():
        found[name] = item
        for after, items in added:
            found |= items if after == name else {}
    for after, items in added:
        found |= items if after not in own else {}
    return found


def print_result(document: object, pieces: "Iterable[OutputBlock]", as_json: bool) -> None:
    """Print the document as JSON, or else its pieces."""
    from forestage.system import terminal

    terminal.print_document(document, pieces, as_json)


def complete_entries(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Offer the paths of entries once a slash was typed, else their keys with the paths as help.

    Whatever is wrong with the node, completion offers nothing and says nothing.
    """
    from forestage.commands import inventory
    from forestage.system.terminal import escape_control_characters, short_key

    try:
        items = inventory.read_inventory(
            (ctx.find_object(CommandContext) or CommandContext.from_environ()).make_node(
                is_quiet=True
            )
        ).items
    except (ForestageError, OSError):
        return []
    if "/" in typed:
        paths = dict.fromkeys(item.path for item in items if item.path.startswith(typed))
        # One that would do something in the shell, or in the terminal, is not offered.
        found = [CompletionItem(path) for path in paths if escape_control_characters(path) == path]
    else:
        fitting = (item for item in items if item.key.startswith(typed.lower()))
        found = [
            CompletionItem(short_key(item.key), help=escape_control_characters(item.path))
            for item in fitting
        ]
    return found[:MAX_COMPLETIONS]


def complete_jobs(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Offer the jobs with a lease, then those of the latest events."""
    from forestage import events
    from forestage.cache.lease import LeaseDirectory
    from forestage.commands.recent_activity import MAX_LOG_BYTES

    places = (ctx.find_object(CommandContext) or CommandContext.from_environ()).places
    found: dict[int, str] = {}
    try:
        found |= dict.fromkeys(LeaseDirectory(places.leases).list_jobs(), "has a lease")
        latest = {
            event.job: event.user
            for event in events.read_latest_events(places.events, MAX_LOG_BYTES)
        }
        found |= {job: latest[job] for job in reversed(latest) if job and job not in found}
    except (ForestageError, OSError):
        pass
    fitting = [(job, text) for job, text in found.items() if str(job).startswith(typed)]
    return [CompletionItem(str(job), help=text) for job, text in fitting[:MAX_COMPLETIONS]]
