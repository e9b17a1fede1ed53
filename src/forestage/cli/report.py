"""`forestage report`: what staging saved, on this node or on many."""

import contextlib
import os
import stat
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import click

CENTURY = 4_102_444_800  # 2100: what is later is a typing error, and may be no date elsewhere
MOMENT = "2026-05-01, 2026-05-01T12:00 or 7d (ago)"


class When(NamedTuple):
    """Seconds since the epoch, or before now."""

    seconds: float
    is_ago: bool = False

    def at(self, now: float) -> float:
        return now - self.seconds if self.is_ago else self.seconds


def _moment(ctx: click.Context, parameter: click.Parameter, value: str | None) -> When | None:
    """A date, in local time if it names no zone, or how long ago."""
    from forestage.units import parse_duration

    if value is None:
        return None
    # 20260501 would be a duration of seconds.
    if not value.isdigit():
        with contextlib.suppress(ValueError):
            return When(parse_duration(value), is_ago=True)
        # Z is understood since Python 3.11 only.
        told = f"{value[:-1]}+00:00" if value.endswith("Z") else value
        with contextlib.suppress(ValueError, OverflowError, OSError):
            seconds = datetime.fromisoformat(told).timestamp()
            if 0 <= seconds < CENTURY:
                return When(seconds)
    raise click.BadParameter(f"{value!r} is no time: expected {MOMENT}")


@click.command()
@click.argument("logs", nargs=-1, metavar="[LOG...]")
@click.option("--since", metavar="TIME", callback=_moment, help=f"Only from then on: {MOMENT}.")
@click.option("--until", metavar="TIME", callback=_moment, help="Only before then.")
@click.option("--json", "form", flag_value="json", help="Print one JSON document, no page.")
@click.option("--csv", "form", flag_value="csv", help="A row for each period, no page.")
@click.option("-o", "--output", metavar="FILE", help="Write it to FILE; - is standard output.")
@click.pass_context
def report(
    ctx: click.Context,
    logs: tuple[str, ...],
    since: When | None,
    until: When | None,
    form: str | None,
    output: str | None,
) -> None:
    """A page (HTML) on start-up time saved, hits, bytes, images.

    Reads the event LOGs of any number of nodes (- is standard input), or else this node's.
    """
    from forestage import report as work
    from forestage import report_logs
    from forestage.report_sums import Sums, Window

    if form is None and output is None and sys.stdout.isatty():
        raise click.UsageError("a page is for a browser: name its file with -o")
    now = ctx.obj.clock.wall()
    window = Window(since and since.at(now), until and until.at(now))
    if window.since is not None and window.until is not None and window.since >= window.until:
        raise click.UsageError("--since is not before --until")
    sums = Sums(window, now)
    read = report_logs.read(logs or report_logs.of_node(ctx.obj.places.events), sums)
    found = work.report(sums, read, time.localtime(now).tm_gmtoff)
    if form is None:
        from forestage import report_html

        _put(report_html.page(found), output)
    else:
        _put(work.as_json(found) if form == "json" else work.as_csv(found), output)


def _put(made: bytes, output: str | None) -> None:
    if output in (None, "-"):
        sys.stdout.buffer.write(made)
        return
    from forestage.system import atomic

    file = Path(output or "")
    try:
        is_plain = stat.S_ISREG(file.lstat().st_mode)
    except FileNotFoundError:
        is_plain = True
    if is_plain:
        os.umask(mask := os.umask(0o077))
        atomic.write(file, made, 0o666 & ~mask)
    else:
        # A device or a link would be replaced: /dev/null, for one.
        file.write_bytes(made)


def add_to(main: click.Group) -> None:
    """The command of this file."""
    main.add_command(report)
