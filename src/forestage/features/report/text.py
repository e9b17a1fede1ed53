"""The report as a text for a terminal: its figures, and the rows to look at first. Pure."""

from collections.abc import Iterator, Sequence

from forestage.features.report import figure_format as fmt
from forestage.features.report.figures import SavingsReport
from forestage.features.report.sums import GroupFigures, NodeFigures
from forestage.system.terminal import NamedValues, OutputBlock, TextLine, TextTable
from forestage.units import format_size

MAX_ROWS = 10  # of each table


def format_text(report: SavingsReport) -> list[OutputBlock]:
    if report.first is None or report.last is None:
        return [TextLine("There are no events in this time.")]
    days = [fmt.format_day(one, report.utc_offset) for one in (report.first, report.last)]
    starts = fmt.format_plural(report.total.tried + report.total.excluded, "image start")
    nodes = fmt.format_plural(len(report.nodes), "node")
    title = f"{' to '.join(dict.fromkeys(days))}: {starts} on {nodes}"
    lines: list[OutputBlock] = [
        TextLine(title, heading=True),
        NamedValues(tuple(_list_facts(report)), indent=2),
    ]
    lines += _make_table("image", report.images) + _make_table("user", report.users)
    if len(report.partitions) > 1:
        lines += _make_table("partition", report.partitions)
    lines += _make_table("node", report.nodes)
    return [*lines, TextLine(""), TextLine("The whole report: forestage report -o report.html")]


def _list_facts(report: SavingsReport) -> Iterator[tuple[str, str]]:
    total, found, through = report.total, report.all, report.through
    kept_off = format_size(sum(report.kept_off.values()))
    starts = fmt.format_plural(found.local, "start")
    measured = f"{fmt.format_number(found.measured)} of {starts} from a copy"
    yield "saved", f"{fmt.format_seconds(found.saved)}, summed over nodes; measured: {measured}"
    yield "hit ratio", f"{fmt.format_share(report.hit_ratio)}, {total.hit} of {total.tried} starts"
    yield "kept off", f"{kept_off} of the shared file system; {format_size(total.read)} were copied"
    most, median = fmt.format_seconds(report.waits.most), fmt.format_seconds(report.waits.median)
    yield "waits", f"95 of 100 starts at most {most}, half of them {median}"
    cold = (
        f"{total.through} read through, {total.waited} had their copy, {total.shared} read the path"
    )
    yield "not there", f"{fmt.format_plural(total.cold, 'start')}: {cold}"
    if through.steps:
        read = f"read {format_size(through.straight)} of {format_size(through.read)}"
        facts = [f"{read} from the source"]
        if through.ahead is not None:  # of a copy that was completed
            began = "half began" if through.steps > 1 else "began"
            facts.insert(
                0, f"{began} {fmt.format_seconds(through.ahead)} before the copy was complete"
            )
        yield "through", f"{fmt.format_plural(through.steps, 'step')}: {'; '.join(facts)}"
    if copied := sum(report.ahead.copied.values()):
        source = format_size(report.ahead.copied["source"])
        used, unused = (sum(one.values()) for one in (report.ahead.used, report.ahead.unused))
        fate = f"jobs used {format_size(used)}, {format_size(unused)} were evicted unused"
        yield "ahead", f"{format_size(copied)} for pending jobs, {source} from the source: {fate}"
    for name, counts in (
        ("failures", report.failed),
        ("in vain", report.original),
        ("not staged", report.excluded),
    ):
        if counts:
            yield name, ", ".join(f"{reason} {count}" for reason, count in counts.items())


def _make_table(name: str, found: Sequence[GroupFigures]) -> list[OutputBlock]:
    if not found:
        return []
    rows = [{name: one.name, **_format_cells(one)} for one in found[:MAX_ROWS]]
    table = TextTable(tuple(rows[0]), [tuple(row.values()) for row in rows], indent=2)
    more = len(found) - MAX_ROWS
    return [TextLine(""), table, *([TextLine(f"and {more} more", 2)] if more > 0 else [])]


def _format_cells(one: GroupFigures) -> dict[str, str]:
    cells = {
        "starts": fmt.format_number(one.starts),
        "hits": fmt.format_number(one.hits),
        "kept off": format_size(one.kept_off),
    }
    if not isinstance(one, NodeFigures):
        return {**cells, "saved": fmt.format_seconds(one.saved)}
    return {
        **cells,
        "copies at": fmt.format_rate(one.rate),
        "95% wait": fmt.format_seconds(one.waits.most),
        "failures": fmt.format_number(one.failed),
    }
