"""The report as one HTML page, rendered with Jinja2 from page.html.j2 and page.css.

Names in a report were chosen by users. Every value is escaped by Jinja2, control characters and
characters that change the direction of writing are shown as escapes, and a Content-Security-Policy
on the page forbids scripts and requests, should a name ever get through as markup.
"""

from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from forestage.events.reasons import REASONS
from forestage.report import format as fmt
from forestage.report.figures import Report
from forestage.report.plots import HEIGHT, all_plots
from forestage.units import format_size, printable

FOLDER = Path(__file__).parent
MAX_ROWS = 15  # of each table


def render(report: Report) -> bytes:
    offset = report.utc_offset
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": fmt.number,
        "size": format_size,
        "rate": fmt.rate,
        "share": fmt.share,
        "duration": fmt.duration,
        "plural": fmt.plural,
        "period": fmt.period,
        "zone": fmt.zone,
        "day": partial(fmt.day, utc_offset=offset),
        "minute": partial(fmt.minute, utc_offset=offset),
    }
    html = environment.get_template("page.html.j2").render(
        report=report,
        total=report.total,
        images=report.images[:MAX_ROWS],
        users=report.users[:MAX_ROWS],
        partitions=report.partitions[:MAX_ROWS],
        nodes=report.nodes[:MAX_ROWS],
        plots=all_plots(report),
        plot_height=HEIGHT,
        reason_texts=REASONS,
        css=Markup((FOLDER / "page.css").read_text()),  # noqa: S704 - a file of ours
    )
    return html.encode("utf-8", "backslashreplace")


def _visible(value: object) -> object:
    """Applied to the value of every expression in the template, before it is escaped."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
