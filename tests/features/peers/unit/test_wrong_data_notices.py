"""Notices of wrong chunks: whom they concern, and how many are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.features.peers import wrong_data_notices
from forestage.features.peers.chunk_readers import ChunkReaders
from forestage.paths import NodePaths


@pytest.mark.parametrize(
    ("known", "reader", "chunks"),
    [
        (None, "n1", -1),
        (None, "n2", 0),
        (ChunkReaders({"n1": "3", "n2": "c"}), "n2", 0b1100),
        (ChunkReaders({"n1": "3", "n2": "c"}), "n1", 0b11),
        (ChunkReaders({"n1": "3"}), "n9", 0),
    ],
)
def test_notice_of_wrong_bytes_affects_only_chunks_of_its_reader(
    known: ChunkReaders | None, reader: str, chunks: int
) -> None:
    assert wrong_data_notices.chunks_read_by(known, reader, "n1") == chunks


def test_stored_notices_of_wrong_bytes_are_limited_in_keys_and_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrong_data_notices, "MAX_READERS", 2)
    monkeypatch.setattr(wrong_data_notices, "MAX_KEYS", 2)
    places = NodePaths(tmp_path)
    assert list(wrong_data_notices.list_keys_with_notices(places)) == []
    for key in "abc":
        for reader in ("n1", "n2", "n1", "n3"):
            wrong_data_notices.record_notice(places, key, reader)
    assert list(wrong_data_notices.list_keys_with_notices(places)) == ["a", "b"]
    assert [wrong_data_notices.read_wrong_readers(places, key) for key in "abc"] == [
        {"n1", "n2"},
        {"n1", "n2"},
        set(),
    ]
