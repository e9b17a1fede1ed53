"""The report's tables: images, copies by size, reasons, evictions. Pure."""

from collections.abc import Iterable

import msgspec

from forestage import report_words as say
from forestage.events.reasons import REASONS
from forestage.report import TOP, Image, Report, Size
from forestage.report_markup import Markup, join, tag


class Column(msgspec.Struct, frozen=True):
    name: str
    words: bool = False


def sections(found: Report) -> list[Markup]:
    return [images(found), sizes(found), declined(found), evictions(found)]


def table(columns: list[Column], rows: Iterable[tuple[str, ...]], folds: bool = False) -> Markup:
    """The first cell of a row is its heading. `folds`: rows become blocks where it is narrow.

    The roles are told, as a browser forgets them where rows are blocks.
    """

    def cell(at: int, value: str) -> Markup:
        column = columns[at]
        kind = {"class_": "words"} if column.words else {}
        if at == 0:
            return tag("th", value, scope="row", role="rowheader", **kind)
        return tag("td", value, role="cell", data_name=column.name, **kind)

    head = [
        tag("th", one.name, scope="col", role="columnheader", class_="words" if one.words else "")
        for one in columns
    ]
    body = [tag("tr", *(cell(*one) for one in enumerate(row)), role="row") for row in rows]
    made = tag(
        "table",
        tag("thead", tag("tr", *head, role="row"), role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",
        class_="folds" if folds else "",
    )
    return made if folds else tag("div", made, class_="wide", tabindex=0)


def images(found: Report) -> Markup:
    shown = [one for one in found.images if one.path][:TOP]
    if not shown:
        return Markup("")
    most = max(one.kept_off for one in shown) or 1
    columns = [Column("Image", words=True)]
    columns += map(Column, ("Size", "Starts", "Hits", "Copies", "Kept off", "Saved"))
    rest = len(found.images) - len(shown)
    more = f" {say.plural(rest, 'more is', 'more are')} in --json." if rest else ""
    note = (
        "Those first of which most was kept off the shared file system. What was waited for an"
        f" image is taken off the time it saved.{more}"
    )
    rows = [_image(one, most) for one in shown]
    return _section("Images", note, table(columns, rows, folds=True))


def _image(one: Image, most: int) -> tuple[str, ...]:
    directory, _, name = one.path.rpartition("/")
    return (
        join(name or one.path, tag("small", f"{directory}/")),
        say.size(one.size),
        say.number(one.starts),
        say.number(one.hits),
        say.number(one.copies),
        join(say.size(one.kept_off), _bar(one.kept_off / most, "hit")),
        say.NONE if one.saved is None else say.node_time(one.saved),
    )


def _bar(share: float, colour: str) -> Markup:
    style = f"width:{100 * min(1.0, share):.1f}%"
    return tag("span", class_=f"bar {colour}", style=style, aria_hidden="true")


def sizes(found: Report) -> Markup:
    shown = [one for one in found.sizes if one.copies]
    if not shown:
        return Markup("")
    most = max(one.copies for one in shown)
    names = ("Image", "Copies", "Median time", "95 of 100 within", "Median rate")
    rows = [
        (
            _class(one),
            join(say.number(one.copies), _bar(one.copies / most, "cold")),
            say.seconds(one.took),
            say.seconds(one.took_most),
            say.rate(one.rate),
        )
        for one in shown
    ]
    note = (
        "An image that a node does not have is copied once, however many jobs wait for it. The time"
        " is that of the whole copy, from the request to the entry, in the queue too."
    )
    return _section("Cold starts by size", note, table([*map(Column, names)], rows, folds=True))


def _class(one: Size) -> str:
    if one.below is None:
        return f"{say.size(one.above)} and more"
    return f"below {say.size(one.below)}" if not one.above else (
        f"{say.size(one.above)} to {say.size(one.below)}"
    )  # fmt: skip


def declined(found: Report) -> Markup:
    if not found.reasons:
        return Markup("")
    columns = [Column("Reason"), Column("Starts"), Column("What it means", words=True)]
    other = "A reason of another release."
    rows = [
        (reason, say.number(number), _code(REASONS.get(reason, other)))
        for reason, number in found.reasons.items()
    ]
    note = (
        f"{say.plural(found.starts['original'], 'start')} for which staging was tried had to use"
        f" the original path; for {say.number(found.starts['aside'])} more there was nothing to"
        " stage, by a rule or the job's own wish: these are not in the hit ratio."
    )
    return _section("Starts from the original path", note, table(columns, rows, folds=True))


def _code(words: str) -> Markup:
    """What stands between backticks is what people type."""
    return join(*(tag("code", one) if at % 2 else one for at, one in enumerate(words.split("`"))))


def evictions(found: Report) -> Markup:
    if not found.evicted:
        return Markup("")
    why = {
        "stager": "to make room for a copy",
        "epilog": "at the end of a job, down to the low watermark",
        "sweep": "by the timer, bad entries too",
    }
    rows = [
        (say.number(number), why.get(hook, hook)) for hook, number in sorted(found.evicted.items())
    ]
    columns = [Column("Entries"), Column("When", words=True)]
    note = "Many that make room for copies mean that the cache is small for what jobs use."
    return _section("Evictions", note, table(columns, rows))


def _section(title: str, note: str, body: Markup) -> Markup:
    return tag("section", tag("h2", title), tag("p", note, class_="note"), body)
