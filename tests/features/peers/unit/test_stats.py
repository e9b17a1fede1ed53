"""The service's counts: they reach the disk, and strangers cannot fill the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.peers.stats import KEYS, Counters, read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run/peer.json"


def test_flushed_counts_can_be_read(file: Path) -> None:
    counted = Counters(file, since=5.0)
    counted.session_opened()
    counted.uploaded("a", 100)
    counted.uploaded("a", 23)
    counted.refused("10.0.0.9", "no")
    counted.flush()
    found = read(file)
    assert found is not None
    assert (found.since, found.sessions, found.chunks, found.bytes) == (5.0, 1, 2, 123)
    assert found.refused == 1
    assert file.stat().st_mode & 0o022 == 0


def test_unchanged_counts_are_not_written_again(file: Path) -> None:
    counted = Counters(file, since=5.0)
    counted.flush()
    before = file.stat().st_ino
    counted.flush()
    assert file.stat().st_ino == before
    counted.uploaded("a", 1)
    counted.flush()
    assert file.stat().st_ino != before


def test_bytes_by_key_are_kept_for_the_last_keys(file: Path) -> None:
    counted = Counters(file, since=5.0)
    for number in range(KEYS + 10):
        counted.uploaded("steady", 1)
        counted.uploaded(f"{number}", 2)
    counted.flush()
    found = read(file)
    assert found is not None
    assert len(found.keys) == KEYS
    assert (found.of("steady"), found.of(f"{KEYS + 9}"), found.of("0")) == (KEYS + 10, 2, 0)


def test_many_refusals_are_one_log_line(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counted = Counters(file, since=5.0)
    for number in range(1000):
        counted.refused("10.0.0.9", f"line\nbreak {number}")
    counted.flush()
    counted.flush()
    assert capfd.readouterr().err == (
        "forestage: peer refused=1000 last: client=10.0.0.9 why='line\\\\nbreak 999'\n"
    )


def test_missing_or_damaged_counts_are_none(file: Path) -> None:
    assert read(file) is None
    file.parent.mkdir()
    file.write_text("{")
    assert read(file) is None
