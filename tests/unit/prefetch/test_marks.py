"""What a node remembers: looks that are not repeated, and copies that nobody has used."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.paths import Places
from forestage.prefetch import marks
from forestage.prefetch.marks import AGAIN, TRIES, Fresh, Look, Marks

LOOK = Look("/a", 7, at=1000.0, since=900.0, why="missing", tries=1)


def test_record_is_read_as_it_was_written_and_a_damaged_one_is_empty(tmp_path: Path) -> None:
    places = Places(tmp_path)
    found = Marks((LOOK,), (Fresh("k", "/a", 7, 1.0, 2.0, 3.0),))
    marks.write(places, found)
    assert marks.read(places) == found
    places.prefetched.write_text("{")
    assert marks.read(places) == Marks()


@pytest.mark.parametrize(
    ("tries", "later", "due"),
    [(1, AGAIN - 1, False), (1, AGAIN, True), (1, -5.0, True), (TRIES, 9 * AGAIN, False)],
)
def test_refused_image_is_tried_again_later_and_not_for_ever(
    tries: int, later: float, due: bool
) -> None:
    look = Look("/a", 7, at=1000.0, since=900.0, why="missing", tries=tries)
    assert marks.is_due(look, 1000.0 + later) is due


def test_look_that_the_list_does_not_name_is_forgotten() -> None:
    found = Marks().with_look(LOOK).with_look(Look("/b", 7, 0.0, 0.0))
    assert found.naming([("/b", 7), ("/a", 8)]).looks == (Look("/b", 7, 0.0, 0.0),)


def test_look_and_copy_take_the_place_of_earlier_ones() -> None:
    found = Marks().with_look(LOOK).with_look(Look("/a", 7, 2000.0, 900.0))
    assert found.look("/a", 7) == Look("/a", 7, 2000.0, 900.0)
    assert found.look("/a", 8) is None
    fresh = [Fresh("k", "/a", 7, 1.0, 2.0, used) for used in (3.0, 4.0)]
    assert found.with_fresh(fresh[0]).with_fresh(fresh[1]).fresh == (fresh[1],)


def test_copy_is_unused_as_long_as_the_entrys_time_is_the_marks() -> None:
    mark = Fresh("k", "/a", 7, since=1.0, made=2.0, used=2.0)
    assert mark.is_unused(2.0)
    assert not mark.is_unused(5.0)


def test_what_a_pass_is_like_is_noted_beside_the_looks(tmp_path: Path) -> None:
    places = Places(tmp_path)
    marks.write(places, Marks((LOOK,)))
    marks.note(places, "silent", "")
    assert marks.read(places) == Marks((LOOK,), silent="silent")
    before = places.prefetched.stat().st_ino
    marks.note(places, "silent", "")
    assert places.prefetched.stat().st_ino == before
