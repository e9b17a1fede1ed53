"""How the command line speaks: tables for eyes, plain lines for pipes, one JSON document for tools.

What is shown was written by users: paths, names, comments. Here, and only here, it is made harmless
for a terminal; `rich` gets it as text, never as markup.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import msgspec

from forestage.units import MAX_TEXT, format_duration, printable

SHORT_KEY = 12  # hex digits
RIGHT = frozenset(("age", "job", "left", "rate", "size", "staged", "took", "used"))
# Long values, which go on in the next line where the terminal is too narrow.
FOLDED = frozenset(
    ("for", "image", "image or reason", "jobs", "origin", "path", "result", "state", "value")
)

FOLD = 16  # the least width of these

T = TypeVar("T")

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Line(NamedTuple):
    """A sentence, or a heading for what follows; `whole`: it is to be copied, so never folded."""

    text: str
    indent: int = 0
    heading: bool = False
    whole: bool = False


class Facts(NamedTuple):
    """Names and values, one a line."""

    facts: tuple[tuple[str, str], ...]
    indent: int = 0


class Table(NamedTuple):
    """Rows below the names of their columns; a column of one name looks the same everywhere."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    indent: int = 0


Piece: TypeAlias = Line | Facts | Table


def show(document: object, pieces: Iterable[Piece], as_json: bool) -> None:
    """Prints the document as JSON, or else its pieces as stdout likes them."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        sys.stdout.write("\n")
    elif sys.stdout.isatty():
        draw(pieces, _console())
    else:
        write(pieces, sys.stdout)


def is_live(as_json: bool) -> bool:
    """Whether people look on while it happens."""
    return sys.stdout.isatty() and not as_json


def follow(documents: Iterable[T], view: Callable[[T], Iterable[Piece]], as_json: bool) -> None:
    """Shows each as it comes: on a terminal in the place of the one before, else after it.

    As JSON, each is one line.
    """
    if not is_live(as_json):
        for document in documents:
            if as_json:
                sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
            else:
                write(view(document), sys.stdout)
            sys.stdout.flush()
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=_console(), auto_refresh=False) as live:
        for document in documents:
            parts = (
                part for piece in view(document) for part in _narrow(piece, live.console.width)
            )
            live.update(Group(*map(_indented, parts)), refresh=True)


@contextlib.contextmanager
def busy() -> Iterator[Callable[[str], None]]:
    """While somebody waits at a terminal, what for: gives what to call with each new sentence."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.text import Text

    console = _console(stderr=True)
    with console.status("") as shown:
        yield lambda text: shown.update(Text(harmless(text), overflow="ellipsis", no_wrap=True))


def _console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def write(pieces: Iterable[Piece], out: IO[str]) -> None:
    """For pipes: one row a line, however long, and nothing but text."""
    for piece in pieces:
        for line in _plain(piece):
            out.write(" " * piece.indent + line.rstrip() + "\n")


def draw(pieces: Iterable[Piece], console: "Console") -> None:
    """For a terminal: folded to its width; nothing is cut off."""
    for piece in pieces:
        for part in _narrow(piece, console.width):
            console.print(_indented(part), soft_wrap=isinstance(part, Line) and part.whole)


def _narrow(piece: Piece, width: int) -> Iterable[Piece]:
    """Pure: a table that does not fit the terminal as names and values, row by row."""
    if not isinstance(piece, Table):
        return [piece]
    cells = zip(piece.columns, *piece.rows, strict=True)
    needs = [FOLD if name in FOLDED else max(map(len, (name, *rest))) for name, *rest in cells]
    if piece.indent + sum(needs) + 2 * (len(needs) - 1) <= width:
        return [piece]
    blank = Line("")
    rows = (Facts(tuple(zip(piece.columns, row, strict=True)), piece.indent) for row in piece.rows)
    return [one for row in rows for one in (row, blank)]


def _indented(piece: Piece) -> "RenderableType":
    from rich.padding import Padding

    body = _rich(piece)
    return Padding(body, (0, 0, 0, piece.indent), expand=False) if piece.indent else body


def harmless(text: str) -> str:
    """Pure: a user's text without control characters, in full length."""
    step = MAX_TEXT
    return "".join(printable(text[at : at + step]) for at in range(0, len(text), step))


def short(key: str) -> str:
    """Pure: as much of a key as people see; enough for any node's cache."""
    return key[:SHORT_KEY]


def moment(when: float) -> str:
    """Local time, for the eye; `when` in seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def age(seconds: float) -> str:
    """Pure: a duration in its two largest units: "12s", "3h12m", "2d4h"."""
    whole = max(0, round(seconds))
    for above, unit in ((86400, 3600), (3600, 60)):
        if whole >= above:
            whole -= whole % unit
    return format_duration(whole)


def count(number: int, one: str, many: str = "") -> str:
    """Pure: "1 entry", "2 entries"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def jobs(numbers: Sequence[int], most: int | None = None) -> str:
    """Pure: "job 24", "jobs 24, 26"; of many only the first `most`."""
    word = "job" if len(numbers) == 1 else "jobs"
    named = f"{word} {', '.join(map(str, numbers[:most]))}"
    more = len(numbers) - len(numbers[:most])
    return f"{named} and {more} more" if more else named


def _plain(piece: Piece) -> Iterator[str]:
    if isinstance(piece, Line):
        yield harmless(piece.text)
    elif isinstance(piece, Facts):
        width = max((len(name) for name, _ in piece.facts), default=0)
        for name, value in piece.facts:
            yield f"{harmless(name):<{width}}  {harmless(value)}"
    else:
        names = tuple(column.upper() for column in piece.columns)
        rows = [names, *(tuple(map(harmless, row)) for row in piece.rows)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(
                f"{cell:>{width}}" if column in RIGHT else f"{cell:<{width}}"
                for cell, width, column in zip(row, widths, piece.columns, strict=True)
            )


def _rich(piece: Piece) -> "RenderableType":
    from rich.text import Text

    if isinstance(piece, Line):
        return Text(harmless(piece.text), style="bold" if piece.heading else "", overflow="fold")
    return _grid(piece)


def _grid(piece: Facts | Table) -> "RenderableType":
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if isinstance(piece, Facts):
        grid.show_header = False
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for name, value in piece.facts:
            grid.add_row(Text(harmless(name)), Text(harmless(value)))
        return grid
    for column in piece.columns:
        grid.add_column(
            column.upper(),
            justify="right" if column in RIGHT else "left",
            overflow="fold",
            no_wrap=column not in FOLDED,
        )
    for row in piece.rows:
        grid.add_row(*(Text(harmless(cell)) for cell in row))
    return grid
