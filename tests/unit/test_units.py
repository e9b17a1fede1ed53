"""Sizes, durations and shares: a text is the number it means, or a ValueError."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.units import (
    MAX_DURATION,
    MAX_SIZE,
    SizeOrShare,
    format_duration,
    format_exact_size,
    format_rate,
    format_rough_duration,
    format_size,
    is_number,
    parse_duration,
    parse_share,
    parse_size,
    quote_value,
)

HUGE = 10**5000  # more digits than str() takes
NO_NUMBER = [
    "", " ", "-1", "+1", "nan", "inf", "1e3", "1_000", "0x10", ".5", "5.", "1,5", "½", "²",
    "١٢", "１２", "12\n", " 12", "9" * 5000, None, True, False, [], {}, b"1", object(),
    "1000000000000000000PiB", -1, math.nan, math.inf, -math.inf, HUGE,
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (1024, 1024),
        ("1024", 1024),
        ("1K", 1 << 10),
        ("500M", 500 << 20),
        ("23GiB", 23 << 30),
        ("23g", 23 << 30),
        ("1.5T", 3 << 39),
        ("0.3K", 307),
        (str(MAX_SIZE), MAX_SIZE),
    ],
)
def test_size_is_parsed_with_binary_prefixes(text: object, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0.0),
        (15, 15.0),
        (1.5, 1.5),
        ("1.5", 1.5),
        ("90s", 90.0),
        ("10m", 600.0),
        ("1d1h1m1s1ms", 90061.001),
        ("250ms", 0.25),
    ],
)
def test_duration_is_parsed_in_seconds(text: object, expected: float) -> None:
    assert parse_duration(text) == expected
    assert type(parse_duration(text)) is float


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0%", 0), ("80%", 0.8), ("100%", 1), ("12.5%", 0.125), ("0.0001%", 1e-6)],
)
def test_percentage_is_parsed_as_a_share_from_0_to_1(text: str, expected: float) -> None:
    assert parse_share(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("80%", 1000, 800),
        ("29%", 100, 29),  # not 28, as 28.999999999999996 cut
        ("100%", MAX_SIZE, MAX_SIZE),  # not more, as a float rounded up
        ("5%", 0, 0),
        ("500M", 10, 500 << 20),
    ],
)
def test_size_or_share_of_a_total_is_in_bytes(text: str, total: int, expected: int) -> None:
    assert SizeOrShare.parse(text).resolve_bytes(total) == expected


SIZE, DURATION, SHARE = "a size such as .*", "a duration such as .*", "a share such as 80%"
NO_SIZE = ["1.5", 1.5, "5iB", "5X", "5 GiBi", "5\u212a", "1m30s", "8192P", MAX_SIZE + 1]
NO_DURATION = ["soon", "10M", "10 m", "30m1h", "1m1m", "m", "ms", "5G", "4000d", 1e300]
NO_SHARE = ["80", 80, 0.8, "%", "80%%", "80 %", "-5%", "101%", "100.1%", "٨%", "1e1%"]


@pytest.mark.parametrize(
    ("parse", "expected", "wrong"),
    [
        (parse_size, SIZE, NO_SIZE),
        (parse_duration, DURATION, NO_DURATION),
        (parse_share, SHARE, NO_SHARE),
        (SizeOrShare.parse, f"{SIZE}, or {SHARE}", ["101%", "80 %", "5X"]),
    ],
    ids=["size", "duration", "share", "amount"],
)
def test_malformed_size_duration_or_share_is_refused_with_the_expected_form(
    parse: Callable[[object], object], expected: str, wrong: list[object]
) -> None:
    for value in (*NO_NUMBER, *wrong):
        with pytest.raises(ValueError, match=f"^expected {expected}, got ") as caught:
            parse(value)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536 << 20, "1.5 GiB"),
        ((1 << 30) - 1, "1 GiB"),  # not 1024 MiB
        (5000 << 50, "5000 PiB"),
    ],
)
def test_size_is_formatted_with_few_digits(size: int, expected: str) -> None:
    assert format_size(size) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (0.00001, "0s"),
        (0.035, "0.035s"),
        (0.1234, "0.123s"),
        (59.96, "1m"),  # not 60s
        (90, "1m30s"),
        (5400, "1h30m"),
        (86400 + 61, "1d1m1s"),
    ],
)
def test_duration_is_formatted_with_few_digits(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_rate_is_formatted_per_second_and_as_a_dash_without_time() -> None:
    assert format_rate(3 << 30, 2) == "1.5 GiB/s"
    assert format_rate(3 << 30, 0) == "-"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\nb", r"'a\nb'"),
        ("x" * 1000, f"'{'x' * 59}…'"),
        (None, "null"),
        (False, "false"),
        (15, "15"),
        pytest.param(HUGE, "a huge number", id="huge"),
        (["secret"], "a list"),
        ({"secret": 1}, "a mapping"),
    ],
)
def test_quoted_configuration_value_is_short_and_on_one_line(value: object, expected: str) -> None:
    assert quote_value(value) == expected


@given(st.integers(0, MAX_SIZE))
def test_shown_size_reads_back_as_the_same_bytes(size: int) -> None:
    assert parse_size(format_exact_size(size)) == size
    assert parse_size(format_size(size % (1 << 60))) == pytest.approx(size % (1 << 60), rel=0.05)


@given(st.floats(0.001, MAX_DURATION))
def test_shown_duration_reads_back_nearly_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.01)


@given(st.integers(0, 1_000_000), st.integers(0, MAX_SIZE))
def test_shown_size_or_share_reads_back_as_the_same_amount(millionths: int, size: int) -> None:
    share = SizeOrShare.parse(f"{millionths // 10000}.{millionths % 10000:04d}%")
    for amount in (share, SizeOrShare(size=size)):
        assert SizeOrShare.parse(str(amount)) == amount


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, ""),
        (0.049, ""),
        (0.05, "0.1s"),
        (0.26, "0.3s"),
        (9.96, "10s"),
        (12.34, "12s"),
        (59.7, "1m"),
        (90.0, "1m30s"),
    ],
)
def test_seconds_for_users_are_formatted_in_tenths(seconds: float, expected: str) -> None:
    assert format_rough_duration(seconds) == expected


def test_is_number_accepts_only_digits_that_int_accepts() -> None:
    assert not any(is_number(text) for text in NO_NUMBER if isinstance(text, str))
    numbers = ["0", "007", "4242", str(2**64 - 1)]
    assert all(is_number(text) and int(text) >= 0 for text in numbers)
