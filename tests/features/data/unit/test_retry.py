"""When a directory is tried again that held a file which was open for writing."""

from __future__ import annotations

import shutil

import pytest

from forestage.cache.layout import Cache
from forestage.errors import Declined
from forestage.features.data import retry

NOW = 1_700_000_000.0
WHY = "/lustre/set/db is open for writing on this node"


def test_directory_declined_as_written_is_not_retried_before_its_delay_ends(cache: Cache) -> None:
    retry.record_refusal(cache, "/lustre/set", WHY, NOW)
    with pytest.raises(Declined) as caught:
        retry.check_retry_due(cache, "/lustre/set", NOW + 60)
    assert caught.value.reason == "written"
    assert str(caught.value) == f"{WHY}; /lustre/set is not tried again for 9m"
    retry.check_retry_due(cache, "/lustre/set", NOW + retry.AGAIN)
    retry.check_retry_due(cache, "/lustre/other", NOW)


def test_directory_is_retried_at_once_after_the_clock_was_set_back(cache: Cache) -> None:
    retry.record_refusal(cache, "/lustre/set", WHY, NOW)
    retry.check_retry_due(cache, "/lustre/set", NOW - retry.AGAIN)


def test_sweep_deletes_expired_retry_notes(cache: Cache) -> None:
    retry.record_refusal(cache, "/lustre/set", WHY, NOW)
    retry.record_refusal(cache, "/lustre/later", WHY, NOW + 60)
    retry.delete_old_notes(cache, NOW + retry.AGAIN)
    assert len(list(cache.locks.glob("*.written"))) == 1
    with pytest.raises(Declined):
        retry.check_retry_due(cache, "/lustre/later", NOW + retry.AGAIN)


def test_retry_note_that_cannot_be_written_is_skipped_and_the_directory_retried(
    cache: Cache,
) -> None:
    shutil.rmtree(cache.locks)
    retry.record_refusal(cache, "/lustre/set", WHY, NOW)
    retry.check_retry_due(cache, "/lustre/set", NOW)
