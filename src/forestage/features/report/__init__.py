"""Savings report: what staging saved, computed from the event logs of one node or many.

`make_report_from_logs` adds up the events; `format_text`, `format_page` and `format_json` render
the result. Event logs are all that is read and nothing is written. Jinja2 is imported only when a
page is made.
"""

from collections.abc import Iterable

from forestage.features.report.figures import SavingsReport, compute_report
from forestage.features.report.figures import format_json as format_json
from forestage.features.report.logs import list_node_logs as list_node_logs
from forestage.features.report.logs import read_logs
from forestage.features.report.sums import ReportSums
from forestage.features.report.sums import TimeWindow as TimeWindow
from forestage.features.report.text import format_text as format_text


def make_report_from_logs(
    logs: Iterable[str], window: TimeWindow, now: float, utc_offset: int
) -> SavingsReport:
    """Reads event logs, `-` for standard input, and returns their figures.

    `now` is in seconds since the epoch; days begin `utc_offset` seconds before those of UTC.
    Raises NotFoundError for a log that does not exist and OSError for one that cannot be read.
    """
    sums = ReportSums(window, now)
    return compute_report(sums, read_logs(logs, sums), utc_offset)


def format_page(report: SavingsReport) -> bytes:
    """Returns one HTML file that needs no script and no other file."""
    from forestage.features.report.page import render_page

    return render_page(report)
