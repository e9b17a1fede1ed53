"""The memory of nodes that did not answer: how long it lasts, how much it holds, what ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.features.peers import silent_nodes
from forestage.features.peers.silent_nodes import SILENCE_LASTS
from forestage.paths import NodePaths


def test_silent_record_of_a_node_expires_after_its_lifetime(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    assert not silent_nodes.is_silent(places, "n1", 50.0)
    silent_nodes.record_silence(places, "n1", 50.0)
    for now, counts in (
        (50.0, True),
        (50.0 + SILENCE_LASTS, True),
        (51.0 + SILENCE_LASTS, False),
        (49.0, False),
    ):
        assert silent_nodes.is_silent(places, "n1", now) == counts
        assert silent_nodes.list_silent_nodes(places, now) == ({"n1"} if counts else set())
    assert not silent_nodes.is_silent(places, "n2", 50.0)


def test_answer_deletes_the_silent_record_of_a_node(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    for node in ("n1", "n2"):
        silent_nodes.record_silence(places, node, 50.0)
    silent_nodes.delete_silence(places, "n1")
    silent_nodes.delete_silence(places, "n3")
    assert silent_nodes.list_silent_nodes(places, 50.0) == {"n2"}


def test_silent_records_are_limited_and_expired_records_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_nodes, "MAX_NODES", 2)
    places = NodePaths(tmp_path)
    for node in ("n1", "n2", "n3", "n1"):
        silent_nodes.record_silence(places, node, 50.0)
    assert silent_nodes.list_silent_nodes(places, 50.0) == {"n1", "n2"}
    silent_nodes.record_silence(places, "n2", 60.0)
    silent_nodes.record_silence(places, "n3", 55.0 + SILENCE_LASTS)
    assert silent_nodes.list_silent_nodes(places, 55.0 + SILENCE_LASTS) == {"n2", "n3"}
    assert len(list(places.silent_nodes.iterdir())) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../etc/passwd", "-n", "n" * 64])
def test_silent_record_is_not_written_for_an_invalid_node_name(tmp_path: Path, name: str) -> None:
    places = NodePaths(tmp_path)
    silent_nodes.record_silence(places, name, 50.0)
    silent_nodes.delete_silence(places, name)
    assert not silent_nodes.is_silent(places, name, 50.0)
    assert list(tmp_path.rglob("*")) == []


def test_damaged_silent_records_are_ignored_and_replaced(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    silent_nodes.record_silence(places, "n1", 50.0)
    (places.silent_nodes / "n1").write_text("")
    (places.silent_nodes / "n2").mkdir()
    os.mkfifo(places.silent_nodes / "n3")
    (places.silent_nodes / "n4").symlink_to("n1")
    (places.silent_nodes / "n5").write_bytes(b"\xff")
    (places.silent_nodes / "n6").write_text("nan")
    assert silent_nodes.list_silent_nodes(places, 50.0) == frozenset()
    for node in ("n1", "n2", "n3", "n4"):
        silent_nodes.record_silence(places, node, 50.0)
    assert silent_nodes.list_silent_nodes(places, 50.0) == {"n1"}
    places.run.joinpath("else").write_text("")
    elsewhere = NodePaths(places.run / "else")
    silent_nodes.record_silence(elsewhere, "n1", 50.0)
    silent_nodes.delete_silence(elsewhere, "n1")
    assert not silent_nodes.is_silent(elsewhere, "n1", 50.0)
