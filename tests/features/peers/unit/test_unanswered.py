"""The memory of nodes that did not answer: how long it lasts, how much it holds, what ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.features.peers import unanswered
from forestage.features.peers.unanswered import SILENCE_LASTS
from forestage.paths import NodePaths


def test_silent_record_of_a_node_expires_after_its_lifetime(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    assert not unanswered.is_silent(places, "n1", 50.0)
    unanswered.record_silence(places, "n1", 50.0)
    for now, counts in (
        (50.0, True),
        (50.0 + SILENCE_LASTS, True),
        (51.0 + SILENCE_LASTS, False),
        (49.0, False),
    ):
        assert unanswered.is_silent(places, "n1", now) == counts
        assert unanswered.list_silent_nodes(places, now) == ({"n1"} if counts else set())
    assert not unanswered.is_silent(places, "n2", 50.0)


def test_answer_deletes_the_silent_record_of_a_node(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    for node in ("n1", "n2"):
        unanswered.record_silence(places, node, 50.0)
    unanswered.delete_silence(places, "n1")
    unanswered.delete_silence(places, "n3")
    assert unanswered.list_silent_nodes(places, 50.0) == {"n2"}


def test_silent_records_are_limited_and_expired_records_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanswered, "MAX_NODES", 2)
    places = NodePaths(tmp_path)
    for node in ("n1", "n2", "n3", "n1"):
        unanswered.record_silence(places, node, 50.0)
    assert unanswered.list_silent_nodes(places, 50.0) == {"n1", "n2"}
    unanswered.record_silence(places, "n2", 60.0)
    unanswered.record_silence(places, "n3", 55.0 + SILENCE_LASTS)
    assert unanswered.list_silent_nodes(places, 55.0 + SILENCE_LASTS) == {"n2", "n3"}
    assert len(list(places.unanswered.iterdir())) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../etc/passwd", "-n", "n" * 64])
def test_silent_record_is_not_written_for_an_invalid_node_name(tmp_path: Path, name: str) -> None:
    places = NodePaths(tmp_path)
    unanswered.record_silence(places, name, 50.0)
    unanswered.delete_silence(places, name)
    assert not unanswered.is_silent(places, name, 50.0)
    assert list(tmp_path.rglob("*")) == []


def test_damaged_silent_records_are_ignored_and_replaced(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    unanswered.record_silence(places, "n1", 50.0)
    (places.unanswered / "n1").write_text("")
    (places.unanswered / "n2").mkdir()
    os.mkfifo(places.unanswered / "n3")
    (places.unanswered / "n4").symlink_to("n1")
    (places.unanswered / "n5").write_bytes(b"\xff")
    (places.unanswered / "n6").write_text("nan")
    assert unanswered.list_silent_nodes(places, 50.0) == frozenset()
    for node in ("n1", "n2", "n3", "n4"):
        unanswered.record_silence(places, node, 50.0)
    assert unanswered.list_silent_nodes(places, 50.0) == {"n1"}
    places.run.joinpath("else").write_text("")
    elsewhere = NodePaths(places.run / "else")
    unanswered.record_silence(elsewhere, "n1", 50.0)
    unanswered.delete_silence(elsewhere, "n1")
    assert not unanswered.is_silent(elsewhere, "n1", 50.0)
