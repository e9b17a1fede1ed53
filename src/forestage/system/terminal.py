"""How the command line speaks: tables for eyes, plain lines for pipes, one JSON document for tools.

What is shown was written by users: paths, names, comments. Here, and only here, it is made harmless
for a terminal; `rich` gets it as text, never as markup.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import IO, TypeAlias, TypeVar

import msgspec

from forestage.units import MAX_TEXT, format_duration, make_printable

SHORT_KEY = 12  # hex digits
RIGHT_ALIGNED = frozenset(("age", "job", "left", "rate", "size", "staged", "took", "used"))
# Long values, which go on in the next line where the terminal is too narrow.
FOLDED = frozenset(
    ("for", "image", "image or reason", "jobs", "origin", "path", "result", "state", "value")
)

T = TypeVar("T")


class TextLine(msgspec.Struct, frozen=True):
    """A sentence, or a heading for what follows; `whole`: it is to be copied, so never folded."""

    text: str
    indent: int = 0
    heading: bool = False
    whole: bool = False


class NamedValues(msgspec.Struct, frozen=True):
    """Names and values, one a line."""

    facts: tuple[tuple[str, str], ...]
    indent: int = 0


class TextTable(msgspec.Struct, frozen=True):
    """Rows below the names of their columns; a column of one name looks the same everywhere."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    indent: int = 0


OutputBlock: TypeAlias = TextLine | NamedValues | TextTable


def print_document(document: object, pieces: Iterable[OutputBlock], as_json: bool) -> None:
    """Prints the document as JSON, or else its pieces as stdout likes them."""
    if as_json:
        sys.stdout.write(msgspec.json.format(_encode_json(document), indent=2).decode())
        sys.stdout.write("\n")
    elif sys.stdout.isatty():
        _load_renderer().draw_blocks(pieces)
    else:
        write_plain(pieces, sys.stdout)


def is_interactive(as_json: bool) -> bool:
    """Whether people look on while it happens."""
    return sys.stdout.isatty() and not as_json


def print_updates(
    documents: Iterable[T], view: Callable[[T], Iterable[OutputBlock]], as_json: bool
) -> None:
    """Shows each as it comes: on a terminal in the place of the one before, else after it.

    As JSON, each is one line.
    """
    if not is_interactive(as_json):
        for document in documents:
            if as_json:
                sys.stdout.write(_encode_json(document).decode() + "\n")
            else:
                write_plain(view(document), sys.stdout)
            sys.stdout.flush()
        return
    _load_renderer().draw_updates(map(view, documents))


@contextlib.contextmanager
def show_busy_status() -> Iterator[Callable[[str], None]]:
    """While somebody waits at a terminal, what for: gives what to call with each new sentence."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with _load_renderer().show_busy_status() as say:
        yield say


def _load_renderer() -> ModuleType:
    """What draws on terminals: rich takes some 50 ms, which nobody else needs to pay."""
    from forestage.system import render

    return render


def write_plain(pieces: Iterable[OutputBlock], out: IO[str]) -> None:
    """For pipes: one row a line, however long, and nothing but text."""
    for piece in map(escape_block, pieces):
        for line in _plain_lines(piece):
            out.write(" " * piece.indent + line.rstrip() + "\n")


def escape_block(piece: OutputBlock) -> OutputBlock:
    """Pure: a piece with all its text made harmless."""
    if isinstance(piece, TextLine):
        return msgspec.structs.replace(piece, text=escape_control_characters(piece.text))
    if isinstance(piece, NamedValues):
        facts = tuple(
            (escape_control_characters(name), escape_control_characters(value))
            for name, value in piece.facts
        )
        return msgspec.structs.replace(piece, facts=facts)
    rows = [tuple(map(escape_control_characters, row)) for row in piece.rows]
    return msgspec.structs.replace(piece, rows=rows)


def escape_control_characters(text: str) -> str:
    """Pure: a user's text without control characters, in full length."""
    step = MAX_TEXT
    return "".join(make_printable(text[at : at + step]) for at in range(0, len(text), step))


def _encode_json(document: object) -> bytes:
    """Return a document as JSON, which has no word for bytes that are no UTF-8: "\\udcfc". Pure."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_undecodable(msgspec.to_builtins(document)))


def _escape_undecodable(value: object) -> object:
    """Return plain values with each undecodable byte in their texts escaped. Pure."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_undecodable(key): _escape_undecodable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escape_undecodable(one) for one in value]
    return value


def short_key(key: str) -> str:
    """Pure: as much of a key as people see; enough for any node's cache."""
    return key[:SHORT_KEY]


def format_local_time(when: float) -> str:
    """Local time, for the eye; `when` in seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def format_age(seconds: float) -> str:
    """Pure: a duration in its two largest units: "12s", "3h12m", "2d4h"."""
    whole = max(0, round(seconds))
    for above, unit in ((86400, 3600), (3600, 60)):
        if whole >= above:
            whole -= whole % unit
    return format_duration(whole)


def format_count(number: int, one: str, many: str = "") -> str:
    """Pure: "1 entry", "2 entries"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_jobs(numbers: Sequence[int], most: int | None = None) -> str:
    """Pure: "job 24", "jobs 24, 26"; of many only the first `most`."""
    word = "job" if len(numbers) == 1 else "jobs"
    named = f"{word} {', '.join(map(str, numbers[:most]))}"
    more = len(numbers) - len(numbers[:most])
    return f"{named} and {more} more" if more else named


def _plain_lines(piece: OutputBlock) -> Iterator[str]:
    if isinstance(piece, TextLine):
        yield piece.text
    elif isinstance(piece, NamedValues):
        width = max((len(name) for name, _ in piece.facts), default=0)
        for name, value in piece.facts:
            yield f"{name:<{width}}  {value}"
    else:
        names = tuple(column.upper() for column in piece.columns)
        rows = [names, *piece.rows]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(
                f"{cell:>{width}}" if column in RIGHT_ALIGNED else f"{cell:<{width}}"
                for cell, width, column in zip(row, widths, piece.columns, strict=True)
            )
