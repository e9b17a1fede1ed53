"""When a directory is tried again that held a file which was open for writing."""

from __future__ import annotations

import shutil

import pytest

from forestage.cache.layout import Cache
from forestage.errors import Declined
from forestage.features.data import retry

NOW = 1_700_000_000.0
WHY = "/lustre/set/db is open for writing on this node"


def test_directory_is_not_tried_again_for_a_while(cache: Cache) -> None:
    retry.note(cache, "/lustre/set", WHY, NOW)
    with pytest.raises(Declined) as caught:
        retry.must_be_due(cache, "/lustre/set", NOW + 60)
    assert caught.value.reason == "written"
    assert str(caught.value) == f"{WHY}; /lustre/set is not tried again for 9m"
    retry.must_be_due(cache, "/lustre/set", NOW + retry.AGAIN)
    retry.must_be_due(cache, "/lustre/other", NOW)


def test_clock_that_was_set_back_keeps_no_directory_from_being_tried(cache: Cache) -> None:
    retry.note(cache, "/lustre/set", WHY, NOW)
    retry.must_be_due(cache, "/lustre/set", NOW - retry.AGAIN)


def test_sweep_deletes_what_says_nothing_any_more(cache: Cache) -> None:
    retry.note(cache, "/lustre/set", WHY, NOW)
    retry.note(cache, "/lustre/later", WHY, NOW + 60)
    retry.tidy(cache, NOW + retry.AGAIN)
    assert len(list(cache.locks.glob("*.written"))) == 1
    with pytest.raises(Declined):
        retry.must_be_due(cache, "/lustre/later", NOW + retry.AGAIN)


def test_disk_that_takes_no_note_is_nobodys_trouble(cache: Cache) -> None:
    shutil.rmtree(cache.locks)
    retry.note(cache, "/lustre/set", WHY, NOW)
    retry.must_be_due(cache, "/lustre/set", NOW)
