"""The pieces of system/terminal.py on a terminal: folded to its width; nothing is cut off."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from forestage.system.terminal import (
    FOLDED,
    RIGHT,
    NamedValues,
    Piece,
    TextLine,
    TextTable,
    harmless,
    printed,
)

FOLD = 16  # the least width of a column that is FOLDED


def draw(pieces: Iterable[Piece], console: Console | None = None) -> None:
    console = console or _console()
    for piece in map(printed, pieces):
        for part in _narrow(piece, console.width):
            console.print(_indented(part), soft_wrap=isinstance(part, TextLine) and part.whole)


def follow(views: Iterable[Iterable[Piece]]) -> None:
    """Draws each in the place of the one before."""
    with Live(console=_console(), auto_refresh=False) as live:
        for pieces in views:
            safe = map(printed, pieces)
            parts = (part for piece in safe for part in _narrow(piece, live.console.width))
            live.update(Group(*map(_indented, parts)), refresh=True)


@contextlib.contextmanager
def busy() -> Iterator[Callable[[str], None]]:
    """Shows on stderr that something is under way; gives what to call with each new sentence."""
    with _console(stderr=True).status("") as shown:
        yield lambda text: shown.update(Text(harmless(text), overflow="ellipsis", no_wrap=True))


def _console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def _narrow(piece: Piece, width: int) -> Iterable[Piece]:
    """Pure: a table that does not fit the terminal as names and values, row by row."""
    if not isinstance(piece, TextTable):
        return [piece]
    cells = zip(piece.columns, *piece.rows, strict=True)
    needs = [FOLD if name in FOLDED else max(map(len, (name, *rest))) for name, *rest in cells]
    if piece.indent + sum(needs) + 2 * (len(needs) - 1) <= width:
        return [piece]
    blank = TextLine("")
    rows = (
        NamedValues(tuple(zip(piece.columns, row, strict=True)), piece.indent) for row in piece.rows
    )
    return [one for row in rows for one in (row, blank)]


def _indented(piece: Piece) -> RenderableType:
    body = _rich(piece)
    return Padding(body, (0, 0, 0, piece.indent), expand=False) if piece.indent else body


def _rich(piece: Piece) -> RenderableType:
    if isinstance(piece, TextLine):
        return Text(piece.text, style="bold" if piece.heading else "", overflow="fold")
    return _grid(piece)


def _grid(piece: NamedValues | TextTable) -> RenderableType:
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if isinstance(piece, NamedValues):
        grid.show_header = False
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for name, value in piece.facts:
            grid.add_row(Text(name), Text(value))
        return grid
    for column in piece.columns:
        grid.add_column(
            column.upper(),
            justify="right" if column in RIGHT else "left",
            overflow="fold",
            no_wrap=column not in FOLDED,
        )
    for row in piece.rows:
        grid.add_row(*map(Text, row))
    return grid
