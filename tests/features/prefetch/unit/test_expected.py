"""Which list a node takes: newer than its own, not too old, and of users."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.prefetch import expected, service
from forestage.features.prefetch.expected import AHEAD, LASTS, ROWS, ExpectedImageList
from forestage.features.prefetch.policy import ExpectedStarts
from forestage.paths import NodePaths

NOW = 1_000_000.0


def listed(
    sequence: int = 1,
    age: float = 0.0,
    lasts: float = LASTS,
    user: int = 7,
    image: str = "/a",
    rows: int = 1,
    parts: int = 1,
) -> ExpectedImageList:
    made = NOW - age
    partitions = {f"gpu{number}": "n[1-2]" for number in range(parts)}
    row = ExpectedStarts("gpu0", image, user, 1.0)
    return ExpectedImageList(sequence, made, made + lasts, partitions, (row,) * rows)


def test_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    assert expected.read(places) is None
    expected.write(places, listed())
    assert expected.read(places) == listed()
    assert service.locate_list(places).stat().st_mode & 0o777 == 0o600
    service.locate_list(places).write_text("[" * 100_000)
    assert expected.read(places) is None


def test_newer_list_replaces_the_one_here() -> None:
    assert expected.counts(listed(2), listed(1), NOW) == ""
    assert expected.counts(listed(1), listed(1), NOW) == ""


def test_older_list_is_refused_as_long_as_the_one_here_is_good() -> None:
    assert "older" in expected.counts(listed(1), listed(2), NOW)
    assert expected.counts(listed(1), listed(2, age=LASTS), NOW) == ""


@pytest.mark.parametrize(
    "told",
    [
        listed(9, age=LASTS),
        listed(9, age=LASTS, lasts=1e9),
        listed(9, lasts=0.0),
        listed(9, age=-AHEAD - 1),
        listed(9, user=-1),
        listed(9, user=0),
        listed(9, user=1 << 32),
        listed(9, image="a"),
        listed(9, image="/a\0b"),
        listed(9, image=f"/{'x' * 4096}"),
        listed(9, rows=ROWS + 1),
        listed(9, parts=ROWS + 1),
    ],
)
def test_list_that_is_too_old_or_long_of_the_future_or_of_no_user_or_path_is_refused(
    told: ExpectedImageList,
) -> None:
    assert expected.counts(told, None, NOW) != ""


def test_list_counts_no_longer_than_it_lasts_whatever_it_says() -> None:
    assert expected.is_good(listed(age=LASTS - 1, lasts=1e9), NOW)
    assert not expected.is_good(listed(age=LASTS, lasts=1e9), NOW)
    assert not expected.is_good(listed(lasts=0.0), NOW)
    assert not expected.is_good(listed(age=-AHEAD - 1), NOW)


def test_sequence_grows_whatever_the_clock_does() -> None:
    first = expected.following(None, NOW)
    before = ExpectedImageList(first, NOW, NOW + LASTS)
    assert expected.following(before, NOW - 5000) == first + 1
    assert expected.following(before, NOW + 60) == first + 60_000
