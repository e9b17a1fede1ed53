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
    RIGHT_ALIGNED,
    NamedValues,
    OutputBlock,
    TextLine,
    TextTable,
    escape_block,
    escape_control_characters,
)

FOLD = 16  # the least width of a column that is FOLDED


def draw_blocks(pieces: Iterable[OutputBlock], console: Console | None = None) -> None:
    console = console or _make_console()
    for piece in map(escape_block, pieces):
        for part in _fit_to_width(piece, console.width):
            console.print(_indent_block(part), soft_wrap=isinstance(part, TextLine) and part.whole)


def draw_updates(views: Iterable[Iterable[OutputBlock]]) -> None:
    """Draws each in the place of the one before."""
    with Live(console=_make_console(), auto_refresh=False) as live:
        for pieces in views:
            safe = map(escape_block, pieces)
            parts = (part for piece in safe for part in _fit_to_width(piece, live.console.width))
            live.update(Group(*map(_indent_block, parts)), refresh=True)


@contextlib.contextmanager
def show_busy_status() -> Iterator[Callable[[str], None]]:
    """Shows on stderr that something is under way; gives what to call with each new sentence."""
    with _make_console(stderr=True).status("") as shown:
        yield lambda text: shown.update(
            Text(escape_control_characters(text), overflow="ellipsis", no_wrap=True)
        )


def _make_console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def _fit_to_width(piece: OutputBlock, width: int) -> Iterable[OutputBlock]:
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


def _indent_block(piece: OutputBlock) -> RenderableType:
    body = _to_renderable(piece)
    return Padding(body, (0, 0, 0, piece.indent), expand=False) if piece.indent else body


def _to_renderable(piece: OutputBlock) -> RenderableType:
    if isinstance(piece, TextLine):
        return Text(piece.text, style="bold" if piece.heading else "", overflow="fold")
    return _make_grid(piece)


def _make_grid(piece: NamedValues | TextTable) -> RenderableType:
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
            justify="right" if column in RIGHT_ALIGNED else "left",
            overflow="fold",
            no_wrap=column not in FOLDED,
        )
    for row in piece.rows:
        grid.add_row(*map(Text, row))
    return grid
