"""The `forestage report` command: options, time range, and where the report is written."""

import contextlib
import os
import time
from datetime import datetime
from pathlib import Path

import click

LATEST = 4_102_444_800  # 2100 in epoch seconds: later times are typing errors, and may overflow
EXPECTED = "2026-05-01, 2026-05-01T12:00 or 7d (ago)"


def _parse_time_option(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> float | None:
    """Seconds since the epoch of a date, in local time if it names no zone, or of an age."""
    from forestage.units import parse_duration

    if value is None:
        return None
    # 20260501 is more likely a date than an age in seconds, so it is neither.
    if not value.isdigit():
        with contextlib.suppress(ValueError):
            return float(ctx.obj.clock.wall() - parse_duration(value))
        # fromisoformat() accepts Z only since Python 3.11.
        text = f"{value[:-1]}+00:00" if value.endswith("Z") else value
        with contextlib.suppress(ValueError, OverflowError, OSError):
            seconds = datetime.fromisoformat(text).timestamp()
            if 0 <= seconds < LATEST:
                return seconds
    unit = f"{value} has no unit: {value}d is days, {value}h hours ago"
    is_age = value.isdigit() and len(value) < len("2026")
    raise click.BadParameter(unit if is_age else f"{value!r} is not a time: expected {EXPECTED}")


@click.command()
@click.argument("logs", nargs=-1, metavar="[LOG...]")
@click.option(
    "--since",
    metavar="TIME",
    callback=_parse_time_option,
    help=f"Count events from then on: {EXPECTED}.",
)
@click.option(
    "--until", metavar="TIME", callback=_parse_time_option, help="Count events before then."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead.")
@click.option(
    "-o", "--output", metavar="FILE", help="The HTML page, or JSON, to FILE; - is standard output."
)
@click.pass_context
def report(
    ctx: click.Context,
    logs: tuple[str, ...],
    since: float | None,
    until: float | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Report what staging saved: as a text, or with -o as an HTML page.

    Reads the event LOGs of any number of nodes (- is standard input), or else this node's. It shows
    start-up time saved, the hit ratio, bytes kept off the shared file system, what starts waited,
    what reading through was worth, failures, and images, users, partitions and nodes.
    """
    from forestage.errors import NotFoundError
    from forestage.features import report as reports
    from forestage.system.terminal import print_document

    now = ctx.obj.clock.wall()
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--since is not before --until")
    names = logs or reports.list_node_logs(ctx.obj.places.events)
    window = reports.TimeWindow(since, until)
    found = reports.make_report_from_logs(names, window, now, time.localtime(now).tm_gmtoff)
    if output is None:
        print_document(found, reports.format_text(found), as_json)
        return
    if not Path(output).parent.is_dir():
        raise NotFoundError(f"{Path(output).parent} is not there", "-o names a file in it")
    # A file is replaced once it is whole; a link, or a device such as /dev/null, never is.
    file = Path(output)
    is_replaced = file.is_file() or not os.path.lexists(file)
    with click.open_file(output, "wb", atomic=is_replaced and not file.is_symlink()) as out:
        out.write(reports.format_json(found) if as_json else reports.format_page(found))


COMMANDS = (report,)
