"""Events that the log could not take: since when, until when, and which jobs may lack some."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from forestage.events import EventRecord, ReleaseOutcome, RequestOutcome, losses
from forestage.events.losses import LostEvents
from forestage.system import records

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/log/forestage/events.jsonl")


def test_lost_events_are_recorded_with_the_first_and_the_last_time(tmp_path: Path) -> None:
    file = tmp_path / "lost"
    assert losses.find_loss(file) is None
    losses.record_loss(file, 10.0, OSError(errno.EROFS, "first"))
    losses.record_loss(file, 20.0, FULL)
    lost = losses.find_loss(file)
    assert lost is not None
    assert (lost.since, lost.until) == (10.0, 20.0)
    assert lost.why.endswith("No space left on device: '/var/log/forestage/events.jsonl'")


def test_lost_events_that_cannot_be_recorded_raise_no_error(tmp_path: Path) -> None:
    losses.record_loss(tmp_path / "missing/lost", 10.0, FULL)
    assert losses.find_loss(tmp_path / "missing/lost") is None


@pytest.mark.parametrize(
    ("times", "is_over", "expected"),
    [
        ((), False, True),
        ((5.0,), False, True),
        ((5.0, 9.0), True, False),
        ((5.0, 12.0), True, True),
        ((15.0, 30.0), True, True),
        ((21.5, 30.0), True, True),  # its hook began at 20.5
        ((25.0, 30.0), True, False),
        ((25.0,), False, False),
        ((25.0,), True, True),  # no event of its Prolog
    ],
)
def test_job_may_lack_events_if_its_hooks_ran_while_events_were_lost(
    times: tuple[float, ...], is_over: bool, expected: bool
) -> None:
    own = [EventRecord(time, "prolog", 7, RequestOutcome("hit"), total=1.0) for time in times]
    if is_over:
        own[-1] = EventRecord(times[-1], "epilog", 7, ReleaseOutcome("released"), total=1.0)
    assert losses.may_lack_events(LostEvents(10.0, 21.0, "full"), own) is expected


def test_failed_write_of_a_record_names_its_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        records.write(tmp_path / "record", b"x")
    assert caught.value.filename == str(tmp_path / "record")
    assert list(tmp_path.iterdir()) == []
