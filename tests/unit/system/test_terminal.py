"""What reaches a terminal or a pipe: everything that was to be said, and nothing that commands."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forestage.system.render import draw_blocks
from forestage.system.terminal import (
    NamedValues,
    OutputBlock,
    TextLine,
    TextTable,
    escape_control_characters,
    format_age,
    format_count,
    write_plain,
)

PATH = "/lustre/" + "/".join(f"directory-{number}" for number in range(20)) + "/image.sqsh"
KEY = "0123456789ab"


def drawn(piece: OutputBlock, width: int) -> list[str]:
    out = io.StringIO()
    draw_blocks([piece], Console(file=out, width=width, highlight=False, emoji=False, markup=False))
    return out.getvalue().splitlines()


def written(piece: OutputBlock) -> list[str]:
    out = io.StringIO()
    write_plain([piece], out)
    return out.getvalue().splitlines()


def a_table(path: str) -> TextTable:
    columns = ("key", "size", "path")
    return TextTable(columns, ((KEY, "23 GiB", path),))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "piece",
    [a_table(PATH), NamedValues((("path", PATH),)), TextLine(PATH), TextLine(PATH, indent=2)],
)
def test_long_path_in_the_terminal_is_folded_and_complete(piece: OutputBlock, width: int) -> None:
    lines = drawn(piece, width)
    assert max(map(len, lines)) <= width
    assert len(lines) > 1
    assert PATH in re.sub(r"\s", "", "".join(lines))


@pytest.mark.parametrize("width", [80, 120])
def test_keys_and_sizes_in_the_terminal_are_never_folded(width: int) -> None:
    assert drawn(a_table(PATH), width)[1].startswith(f"{KEY}  23 GiB  /lustre")


@pytest.mark.parametrize("width", [40, 80, 96, 200])
def test_table_wider_than_the_terminal_is_printed_as_names_and_values(width: int) -> None:
    columns = tuple(f"column-{number}" for number in range(8))
    rows = tuple(tuple(f"{row}-{number}" for number in range(8)) for row in range(2))
    lines = drawn(TextTable(columns, rows), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert all(text.count(cell) == 1 for row in rows for cell in row)
    assert (lines[0].split() == [name.upper() for name in columns]) is (width >= 8 * 10 - 2)
    if width < 78:
        assert lines[0].split() == ["column-0", "0-0"]


def test_line_marked_as_whole_is_never_folded() -> None:
    assert drawn(TextLine(PATH, whole=True), 80) == [PATH]


def test_empty_line_is_printed_as_a_line() -> None:
    assert (drawn(TextLine(""), 80), written(TextLine(""))) == ([""], [""])


def test_table_row_in_a_pipe_is_one_line() -> None:
    assert written(a_table(PATH)) == ["KEY             SIZE  PATH", f"{KEY}  23 GiB  {PATH}"]


@pytest.mark.parametrize("text", ["[bold]x[/bold]", ":smile:", "[/]", "[link=http://x]x[/link]"])
def test_markup_in_printed_text_is_shown_literally(text: str) -> None:
    for piece in (TextLine(text), NamedValues(((text, text),)), a_table(text)):
        assert text in "".join(drawn(piece, 80))


@given(st.text(max_size=3000))
def test_escaped_control_characters_are_printable_and_no_text_is_lost(text: str) -> None:
    shown = escape_control_characters(text)
    assert shown.isprintable()
    assert len(shown) >= len(text)
    assert escape_control_characters(shown) == shown


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5, "0s"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.96, "1m"),
        (61, "1m1s"),
        (3599.9, "1h"),
        (11555, "3h12m"),
        (187_201, "2d4h"),
    ],
)
def test_age_is_formatted_with_its_two_largest_units(seconds: float, expected: str) -> None:
    assert format_age(seconds) == expected


def test_count_is_formatted_with_singular_or_plural() -> None:
    assert [format_count(n, "job") for n in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]
    assert format_count(2, "entry", "entries") == "2 entries"
