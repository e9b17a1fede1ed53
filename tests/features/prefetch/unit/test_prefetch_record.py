"""What a node remembers: looks that are not repeated, and what was in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.prefetch import prefetch_record
from forestage.features.prefetch.prefetch_record import (
    FORGET_AFTER,
    INSPECT_INTERVAL,
    MAX_TRIES,
    ImageInspection,
    PrefetchRecord,
)
from forestage.paths import NodePaths

LOOK = ImageInspection("/a", 7, at=1000.0, since=900.0, why="missing", tries=1)


def test_prefetch_record_is_read_back_and_a_damaged_record_is_empty(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    found = PrefetchRecord((LOOK,), "silent", "idle")
    prefetch_record.write_record(places, found)
    assert prefetch_record.read_record(places) == found
    prefetch_record.locate_record(places).write_text("{")
    assert prefetch_record.read_record(places) == PrefetchRecord()


@pytest.mark.parametrize(
    ("tries", "later", "due"),
    [
        (1, INSPECT_INTERVAL - 1, False),
        (1, INSPECT_INTERVAL, True),
        (1, -5.0, True),
        (MAX_TRIES, 9 * INSPECT_INTERVAL, False),
    ],
)
def test_refused_image_is_due_again_after_a_delay_until_its_tries_are_used_up(
    tries: int, later: float, due: bool
) -> None:
    look = ImageInspection("/a", 7, at=1000.0, since=900.0, why="missing", tries=tries)
    assert prefetch_record.is_inspection_due(look, 1000.0 + later) is due


def test_prefetch_record_drops_an_inspection_that_the_list_no_longer_names() -> None:
    found = (
        PrefetchRecord().with_inspection(LOOK).with_inspection(ImageInspection("/b", 7, 0.0, 0.0))
    )
    named, late = [("/b", 7), ("/a", 8)], LOOK.at + FORGET_AFTER
    assert found.without_unnamed(named, late).looks == (ImageInspection("/b", 7, 0.0, 0.0),)


def test_prefetch_record_keeps_a_failed_inspection_for_a_while_without_its_list_row() -> None:
    found = PrefetchRecord().with_inspection(LOOK)
    assert found.without_unnamed([], LOOK.at + FORGET_AFTER - 1) == found
    assert found.without_unnamed([], LOOK.at - 1) == PrefetchRecord(), "the clock was set back"


def test_prefetch_record_forgets_unused_copies_in_time_but_keeps_listed_refusals() -> None:
    late, named = 1000.0 + FORGET_AFTER, [("/a", 7)]
    copied = ImageInspection("/a", 7, 1000.0, 900.0, "k", 5, tries=MAX_TRIES)
    assert PrefetchRecord((copied,)).without_unnamed(named, late - 1).looks == (copied,)
    assert PrefetchRecord((copied,)).without_unnamed(named, late) == PrefetchRecord()
    refused = ImageInspection("/a", 7, 1000.0, 900.0, why="missing", tries=MAX_TRIES)
    assert PrefetchRecord((refused,)).without_unnamed(named, late).looks == (refused,)


def test_prefetch_record_replaces_an_earlier_inspection_of_the_same_image_and_user() -> None:
    found = (
        PrefetchRecord()
        .with_inspection(LOOK)
        .with_inspection(ImageInspection("/a", 7, 2000.0, 900.0))
    )
    assert found.find_inspection("/a", 7) == ImageInspection("/a", 7, 2000.0, 900.0)
    assert found.find_inspection("/a", 8) is None


def test_prefetch_record_stores_silent_and_idle_and_is_not_rewritten_if_unchanged(
    tmp_path: Path,
) -> None:
    places = NodePaths(tmp_path)
    prefetch_record.write_record(places, PrefetchRecord((LOOK,)))
    prefetch_record.record_pass(places, "silent", "")
    assert prefetch_record.read_record(places) == PrefetchRecord((LOOK,), silent="silent")
    before = prefetch_record.locate_record(places).stat().st_ino
    prefetch_record.record_pass(places, "silent", "")
    assert prefetch_record.locate_record(places).stat().st_ino == before
