"""`forestage off` and `on`: switch staging off on this node at once, and on again."""

import click
import msgspec

from forestage.clock import Clock
from forestage.commands.command_context import (
    ExitStatus,
    as_json,
    parse_duration_option,
    print_result,
)
from forestage.config import load_config, switch
from forestage.errors import ConfigError
from forestage.paths import NodePaths
from forestage.system.terminal import OutputBlock, TextLine, format_count

DEFAULT_REASON = "forestage off"  # the reason of who gives none


class SwitchResult(msgspec.Struct, frozen=True):
    """Whether staging is off now, and by what; `files` are those written, or removed.

    `why` is what switches it off, "" while it is on; `kept`: that outlives a reboot. `error` says
    why the file that does so was not written, or may still be there.
    """

    off: bool
    files: tuple[str, ...]
    why: str = ""
    kept: bool = False
    error: str = ""


def switch_off(places: NodePaths, clock: Clock, reason: str, seconds: float | None) -> SwitchResult:
    """Switch staging off, for so many seconds or until `forestage on`; as root. Raises OSError."""
    now = clock.wall()
    done = switch.turn_off(places, reason, None if seconds is None else now + seconds)
    why = switch.find_off_file_reason(places, now)
    return SwitchResult(True, _file_names(done), why, not done.error, done.error)


def switch_on(places: NodePaths, clock: Clock) -> SwitchResult:
    """Removes what switches staging off, an upgrade's own file too; as root. Raises OSError."""
    done = switch.turn_on(places)
    if done.error:  # nothing else looks into that directory now: it would wait as well
        return SwitchResult(True, _file_names(done), done.error, True, done.error)
    why = switch.find_off_file_reason(places, clock.wall()) or _find_config_reason(places)
    return SwitchResult(bool(why), _file_names(done), why, bool(why))


def _file_names(done: switch.SwitchChange) -> tuple[str, ...]:
    return tuple(map(str, done.files))


def _find_config_reason(places: NodePaths) -> str:
    """What the configuration switches off: all jobs, those of some partitions, or nothing."""
    try:
        settings = load_config(places.etc)
    except ConfigError as error:
        return f"the configuration cannot be used: {error.one_line}"
    off = [name for name, config in settings.list_configs() if not config.enabled]
    named = [name for name in off if name is not None]
    if None in off:
        on = len(off) < len(settings.list_configs())
        return f"`enabled: false` in {places.etc}{' (not for all partitions)' if on else ''}"
    return (
        f"`enabled: false` for {format_count(len(named), 'partition')}: {', '.join(named)}"
        * bool(named)
    )


def format_output(done: SwitchResult, turned: str) -> list[OutputBlock]:
    """Pure: what `forestage off` and `on` print; `turned` is which of the two it was."""
    if turned == "on":
        lines = [f"{file} removed." for file in done.files]
        state = f"Staging stays switched off: {done.why}" if done.off else "Staging is on."
        if done.error:
            state = f"Staging may stay switched off: {done.error}. Repeat `forestage on`."
        return [TextLine(line) for line in [*lines, state]]
    until = "`forestage on`" if done.kept else f"the next reboot: {done.error}"
    return [
        TextLine(f"Staging is switched off on this node. {done.why}"),
        TextLine(f"From the next Prolog and step on, jobs read the original path, until {until}."),
        TextLine(
            "Running jobs keep what they have; `forestage unredirect` takes it from them, too."
        ),
    ]


def _parse_until(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of a duration that is not zero, or None if none was given."""
    lasts = None if value is None else parse_duration_option(ctx, parameter, value)
    if lasts == 0:
        raise click.BadParameter("expected a duration such as 6h or 30m")
    return lasts


@click.command("off")
@as_json
@click.option("--until", metavar="TIME", callback=_parse_until, help="For so long: 6h, 30m.")
@click.argument("reason", required=False)
@click.pass_context
def off_command(ctx: click.Context, reason: str | None, until: float | None, as_json: bool) -> None:
    """Switch staging off on this node, now: `forestage off "INC-42"`.

    From the next Prolog and step on, jobs read the original path. It is kept over reboots, and
    works with a broken configuration. `forestage on` ends it.
    """
    done = switch_off(ctx.obj.places, ctx.obj.clock, reason or DEFAULT_REASON, until)
    print_result(done, format_output(done, "off"), as_json)


@click.command("on")
@as_json
@click.pass_context
def on_command(ctx: click.Context, as_json: bool) -> None:
    """Switch staging on again, after `forestage off`.

    Says what else keeps it off.
    """
    done = switch_on(ctx.obj.places, ctx.obj.clock)
    print_result(done, format_output(done, "on"), as_json)
    if done.error:
        ctx.exit(ExitStatus.FAILED)


COMMANDS = (off_command, on_command)
