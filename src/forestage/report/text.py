"""The report as a text for a terminal: its figures, and the rows to look at first. Pure."""

from collections.abc import Iterator, Sequence

from forestage.report import format as fmt
from forestage.report.figures import Group, OneNode, Report
from forestage.system.terminal import Facts, Line, Piece, Table
from forestage.units import format_size

MAX_ROWS = 10  # of each table


def pieces(report: Report) -> list[Piece]:
    if report.first is None or report.last is None:
        return [Line("There are no events in this time.")]
    days = [fmt.day(one, report.utc_offset) for one in (report.first, report.last)]
    starts = fmt.plural(report.total.tried + report.total.excluded, "image start")
    nodes = fmt.plural(len(report.nodes), "node")
    title = f"{' to '.join(dict.fromkeys(days))}: {starts} on {nodes}"
    lines: list[Piece] = [Line(title, heading=True), Facts(tuple(_facts(report)), indent=2)]
    for name, groups in (
        ("image", report.images),
        ("user", report.users),
        ("partition", report.partitions if len(report.partitions) > 1 else ()),
    ):
        lines += _table(name, len(groups), _groups(name, groups[:MAX_ROWS]))
    lines += _table("node", len(report.nodes), _nodes(report.nodes[:MAX_ROWS]))
    return [*lines, Line(""), Line("The whole report: forestage report -o report.html")]


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    total, found, through = report.total, report.all, report.through
    kept_off = format_size(sum(report.kept_off.values()))
    measured = f"{fmt.number(found.measured)} of {fmt.plural(found.local, 'start')} from a copy"
    yield "saved", f"{fmt.duration(found.saved)}, summed over nodes; measured: {measured}"
    yield "hit ratio", f"{fmt.share(report.hit_ratio)}, {total.hit} of {total.tried} starts"
    yield "kept off", f"{kept_off} of the shared file system; {format_size(total.read)} were copied"
    most, median = fmt.duration(report.waits.most), fmt.duration(report.waits.median)
    yield "waits", f"95 of 100 starts at most {most}, half of them {median}"
    cold = (
        f"{total.through} read through, {total.waited} had their copy, {total.shared} read the path"
    )
    yield "not there", f"{fmt.plural(total.cold, 'start')}: {cold}"
    if through.steps:
        began = f"half began {fmt.duration(through.ahead)} before the copy was complete"
        read = f"{format_size(through.straight)} of {format_size(through.read)} from the source"
        yield "through", f"{fmt.plural(through.steps, 'step')}: {began}; read {read}"
    for name, counts in (
        ("failures", report.failed),
        ("in vain", report.original),
        ("not staged", report.excluded),
    ):
        if counts:
            yield name, ", ".join(f"{reason} {count}" for reason, count in counts.items())


def _table(name: str, number: int, table: Table) -> list[Piece]:
    if not number:
        return []
    more = [Line(f"and {number - MAX_ROWS} more", 2)] if number > MAX_ROWS else []
    return [Line(""), table, *more]


def _groups(name: str, groups: Sequence[Group]) -> Table:
    columns = (name, "starts", "hits", "kept off", "saved")
    rows = [
        (
            one.name,
            fmt.number(one.starts),
            fmt.number(one.hits),
            format_size(one.kept_off),
            fmt.duration(one.saved),
        )
        for one in groups
    ]
    return Table(columns, rows, indent=2)


def _nodes(nodes: Sequence[OneNode]) -> Table:
    columns = ("node", "starts", "hits", "kept off", "copies at", "95% wait", "failures")
    rows = [
        (
            one.name,
            fmt.number(one.starts),
            fmt.number(one.hits),
            format_size(one.kept_off),
            fmt.rate(one.rate),
            fmt.duration(one.waits.most),
            fmt.number(one.failed),
        )
        for one in nodes
    ]
    return Table(columns, rows, indent=2)
