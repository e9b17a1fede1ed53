"""The service's counts: they reach the disk, and strangers cannot fill the log."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from forestage.features.peers.upload_counts import (
    KEYS,
    UploadCounts,
    UploadCountWriter,
    find_upload_counts,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run/peer.json"


def test_flushed_upload_counts_are_read_back(file: Path) -> None:
    counted = UploadCountWriter(file, since=5.0)
    counted.count_session()
    counted.count_chunk("a", 100)
    counted.count_chunk("a", 23)
    counted.count_refusal("10.0.0.9", "no")
    counted.flush()
    found = find_upload_counts(file)
    assert found is not None
    assert (found.since, found.sessions, found.chunks, found.bytes) == (5.0, 1, 2, 123)
    assert found.refused == 1
    assert file.stat().st_mode & 0o022 == 0


def test_unchanged_upload_counts_are_not_written_again(file: Path) -> None:
    counted = UploadCountWriter(file, since=5.0)
    counted.flush()
    before = file.stat().st_ino
    counted.flush()
    assert file.stat().st_ino == before
    counted.count_chunk("a", 1)
    counted.flush()
    assert file.stat().st_ino != before


def test_upload_bytes_by_key_are_kept_for_the_most_recent_keys(file: Path) -> None:
    counted = UploadCountWriter(file, since=5.0)
    for number in range(KEYS + 10):
        counted.count_chunk("steady", 1)
        counted.count_chunk(f"{number}", 2)
    counted.flush()
    found = find_upload_counts(file)
    assert found is not None
    assert len(found.keys) == KEYS
    assert (found.key_bytes("steady"), found.key_bytes(f"{KEYS + 9}"), found.key_bytes("0")) == (
        KEYS + 10,
        2,
        0,
    )


def test_many_refused_peer_requests_give_one_log_line(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    counted = UploadCountWriter(file, since=5.0)
    for number in range(1000):
        counted.count_refusal("10.0.0.9", f"line\nbreak {number}")
    counted.flush()
    counted.flush()
    assert capfd.readouterr().err == (
        "forestage: peer refused=1000 last: client=10.0.0.9 why='line\\\\nbreak 999'\n"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.write_text("{"),
        os.mkfifo,  # and nobody waits for a writer
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.mkdir(),
    ],
    ids=["missing", "cut", "fifo", "dangling", "directory"],
)
def test_missing_or_damaged_upload_counts_file_is_none(
    file: Path, make: Callable[[Path], None]
) -> None:
    file.parent.mkdir()
    make(file)
    assert find_upload_counts(file) is None


VALUE = st.integers(-(1 << 50), 1 << 50) | st.text() | st.none()


@given(st.dictionaries(st.sampled_from(UploadCounts.__struct_fields__), VALUE))
@example({"since": float("inf")})
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_upload_counts_file_with_any_values_is_read_or_none(
    tmp_path: Path, values: dict[str, object]
) -> None:
    file = tmp_path / "peer.json"
    file.write_bytes(json.dumps(values).replace("Infinity", "1e999").encode())
    found = find_upload_counts(file)
    assert found is None or msgspec.to_builtins(found).items() >= values.items()
