"""The page of `forestage report`: numbers first, then plots and tables, then where they are from.

One file without scripts, fonts or pictures from elsewhere. Pure.
"""

from forestage import report_method, report_plots, report_tables
from forestage import report_words as say
from forestage.report import Report
from forestage.report_markup import Markup, tag
from forestage.report_plots import Plot, Series
from forestage.report_style import SHEET
from forestage.report_tables import Column

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""For the browser: even if a name got through as markup, nothing is run and nothing is fetched."""

STARTS = Plot(
    "starts",
    "Starts",
    (
        Series("hit", "hit", "hit"),
        Series("joined", "joined", "joined"),
        Series("cold", "cold", "cold"),
        Series("original", "original", "original path"),
    ),
    lambda value: say.number(round(value)),
    report_plots.count_top,
)
BYTES = Plot(
    "bytes",
    "The shared file system",
    (Series("kept_off", "hit", "kept off it"), Series("read", "cold", "read from it")),
    say.size,
    report_plots.size_top,
)
EVICTIONS = Plot(
    "evictions",
    "Entries evicted",
    (Series("evicted", "original", "evicted"),),
    lambda value: say.number(round(value)),
    report_plots.count_top,
)


def page(found: Report) -> bytes:
    title = f"forestage report, {span(found)}"
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        tag("style", Markup(SHEET)),
    )
    parts = [numbers(found), *report_method.warnings(found)]
    if found.periods:
        parts += [plots(found), *report_tables.sections(found)]
    parts.append(report_method.method(found))
    body = tag("body", header(found), tag("main", *parts), report_method.footer(found))
    html = tag("html", head, body, lang="en")
    return f"<!DOCTYPE html>\n{html}\n".encode("utf-8", "backslashreplace")


def span(found: Report) -> str:
    if found.first is None or found.last is None:
        return "no events"
    first = say.minute(found.first, found).partition(",")[0]
    last = say.minute(found.last, found).partition(",")[0]
    return first if first == last else f"{first} to {last}"


def header(found: Report) -> Markup:
    asked = sum(found.starts.values())
    about = f"{say.plural(asked, 'image start')} on {say.plural(found.nodes, 'node')}"
    return tag("header", tag("p", "forestage report"), tag("h1", span(found)), tag("p", about))


def numbers(found: Report) -> Markup:
    kept = sum(found.kept_off.values())
    hits = f"{say.number(found.starts['hit'])} of {say.plural(found.served, 'start')}"
    return tag(
        "dl",
        *_number(*_saved(found)),
        *_number("Hit ratio", say.share(found.hit_ratio), f"{hits} found the image on the node."),
        *_number(
            "Kept off the shared file system",
            say.size(kept),
            f"{say.size(found.read_bytes)} were read from it, to be copied.",
        ),
        *_number("A hit takes", say.seconds(found.warm.median), _waits(found)),
        class_="numbers",
    )


def _number(name: str, value: str, about: str) -> list[Markup]:
    inside = (
        tag("dt", name), tag("dd", value, class_="figure"), tag("dd", about, class_="about")
    )  # fmt: skip
    return [tag("div", *inside)]


def _waits(found: Report) -> str:
    told = []
    if found.warm.number:
        told.append(f"The median of {say.number(found.warm.number)}.")
    if found.cold.number:
        told.append(
            f"Where a copy was waited for: {say.seconds(found.cold.median)}, the median of"
            f" {say.number(found.cold.number)}."
        )
    return " ".join(told)


def _saved(found: Report) -> tuple[str, str, str]:
    name = "Start-up time saved"
    if found.saved is None:
        return name, say.NONE, "No copy in these events tells how long one takes."
    net = found.saved.seconds
    if net < 0:
        more = "Jobs waited longer for staging than the copies spared them would have taken."
        return "Start-up time lost", say.node_time(-net), f"{more} An estimate."
    return name, say.node_time(net), "of the nodes' time: an estimate, all waiting taken off."


def plots(found: Report) -> Markup:
    each = f"One step or bar is {_a(say.period(found.width))}; times are {say.zone(found.offset)}."
    names = ("hit", "joined", "cold", "original", "kept_off", "read", "evicted")
    columns = [Column("From"), Column("Hit ratio"), *(Column(_heading(name)) for name in names)]
    rows = [
        (
            say.minute(period.start, found),
            say.share(period.hit_ratio),
            *(_cell(name, getattr(period, name)) for name in names),
        )
        for period in found.periods
    ]
    return tag(
        "section",
        tag("h2", "Over time"),
        tag("p", each, class_="note"),
        tag(
            "div",
            report_plots.ratio(found),
            *(report_plots.bars(plot, found) for plot in (STARTS, BYTES, EVICTIONS)),
            class_="plots",
        ),
        tag(
            "details", tag("summary", "These plots as a table"), report_tables.table(columns, rows)
        ),
    )


def _a(period: str) -> str:
    return period if period[0] in "sf5" else f"{'an' if period == 'hour' else 'a'} {period}"


def _heading(name: str) -> str:
    named = {"original": "Original path", "kept_off": "Kept off", "cold": "Cold"}
    return named.get(name, name.capitalize())


def _cell(name: str, value: int) -> str:
    return say.size(value) if name in ("kept_off", "read") else say.number(value)
