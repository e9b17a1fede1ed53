"""Which list a node takes: newer than its own, not too old, and of users."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.prefetch import expected_list, service
from forestage.features.prefetch.expected_list import (
    LIST_LASTS,
    MAX_CLOCK_AHEAD,
    MAX_ROWS,
    ExpectedImageList,
)
from forestage.features.prefetch.policy import ExpectedStarts
from forestage.paths import NodePaths

NOW = 1_000_000.0


def listed(
    sequence: int = 1,
    age: float = 0.0,
    lasts: float = LIST_LASTS,
    user: int = 7,
    image: str = "/a",
    rows: int = 1,
    parts: int = 1,
) -> ExpectedImageList:
    made = NOW - age
    partitions = {f"gpu{number}": "n[1-2]" for number in range(parts)}
    row = ExpectedStarts("gpu0", image, user, 1.0)
    return ExpectedImageList(sequence, made, made + lasts, partitions, (row,) * rows)


def test_stored_prefetch_list_is_private_and_read_back_or_none_if_damaged(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    assert expected_list.find_list(places) is None
    expected_list.write_list(places, listed())
    assert expected_list.find_list(places) == listed()
    assert service.locate_list(places).stat().st_mode & 0o777 == 0o600
    service.locate_list(places).write_text("[" * 100_000)
    assert expected_list.find_list(places) is None


def test_prefetch_list_with_the_same_or_a_newer_sequence_is_accepted() -> None:
    assert expected_list.explain_list_refusal(listed(2), listed(1), NOW) == ""
    assert expected_list.explain_list_refusal(listed(1), listed(1), NOW) == ""


def test_older_prefetch_list_is_refused_while_the_stored_list_is_valid() -> None:
    assert "older" in expected_list.explain_list_refusal(listed(1), listed(2), NOW)
    assert expected_list.explain_list_refusal(listed(1), listed(2, age=LIST_LASTS), NOW) == ""


@pytest.mark.parametrize(
    "told",
    [
        listed(9, age=LIST_LASTS),
        listed(9, age=LIST_LASTS, lasts=1e9),
        listed(9, lasts=0.0),
        listed(9, age=-MAX_CLOCK_AHEAD - 1),
        listed(9, user=-1),
        listed(9, user=0),
        listed(9, user=1 << 32),
        listed(9, image="a"),
        listed(9, image="/a\0b"),
        listed(9, image=f"/{'x' * 4096}"),
        listed(9, rows=MAX_ROWS + 1),
        listed(9, parts=MAX_ROWS + 1),
    ],
)
def test_prefetch_list_with_an_invalid_time_user_or_path_is_refused(
    told: ExpectedImageList,
) -> None:
    assert expected_list.explain_list_refusal(told, None, NOW) != ""


def test_prefetch_list_expires_after_the_longest_validity_whatever_end_the_list_claims() -> None:
    assert expected_list.is_valid(listed(age=LIST_LASTS - 1, lasts=1e9), NOW)
    assert not expected_list.is_valid(listed(age=LIST_LASTS, lasts=1e9), NOW)
    assert not expected_list.is_valid(listed(lasts=0.0), NOW)
    assert not expected_list.is_valid(listed(age=-MAX_CLOCK_AHEAD - 1), NOW)


def test_prefetch_list_sequence_grows_even_if_the_clock_is_set_back() -> None:
    first = expected_list.next_sequence(None, NOW)
    before = ExpectedImageList(first, NOW, NOW + LIST_LASTS)
    assert expected_list.next_sequence(before, NOW - 5000) == first + 1
    assert expected_list.next_sequence(before, NOW + 60) == first + 60_000
