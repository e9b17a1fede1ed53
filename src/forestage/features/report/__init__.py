"""Savings report: what staging saved, computed from the event logs of one node or many.

`from_logs` adds up the events; `pieces`, `as_page` and `as_json` render the result. Event logs are
all that is read and nothing is written. Jinja2 is imported only when a page is made.
"""

from collections.abc import Iterable

from forestage.features.report.figures import SavingsReport, compute
from forestage.features.report.figures import as_json as as_json
from forestage.features.report.logs import of_node as of_node
from forestage.features.report.logs import read
from forestage.features.report.sums import ReportSums
from forestage.features.report.sums import TimeWindow as TimeWindow
from forestage.features.report.text import pieces as pieces


def from_logs(
    logs: Iterable[str], window: TimeWindow, now: float, utc_offset: int
) -> SavingsReport:
    """Reads event logs, `-` for standard input, and returns their figures.

    `now` is in seconds since the epoch; days begin `utc_offset` seconds before those of UTC.
    Raises NotFoundError for a log that does not exist and OSError for one that cannot be read.
    """
    sums = ReportSums(window, now)
    return compute(sums, read(logs, sums), utc_offset)


def as_page(report: SavingsReport) -> bytes:
    """Returns one HTML file that needs no script and no other file."""
    from forestage.features.report.page import render

    return render(report)
