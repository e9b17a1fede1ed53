"""Root's list of nodes: good for a day, and nobody is asked by anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.paths import Places
from forestage.peers import node_list

DAY = 86400.0


def test_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    places = Places(tmp_path)
    node_list.write(places, 1000.0, ("n2", "n1"))
    assert node_list.read(places, 1000.0 + DAY) == ("n1", "n2")
    assert node_list.age(places, 1500.0) == 500.0


@pytest.mark.parametrize("now", [1001.0 + DAY, 999.0])
def test_list_older_than_a_day_or_of_the_future_names_nobody(tmp_path: Path, now: float) -> None:
    places = Places(tmp_path)
    node_list.write(places, 1000.0, ("n1", "n2"))
    assert node_list.read(places, now) == ()


@pytest.mark.parametrize("text", [None, "", "n1 n2", '{"written": 1000, "nodes": "n1"}'])
def test_no_list_or_a_damaged_one_names_nobody(tmp_path: Path, text: str | None) -> None:
    places = Places(tmp_path)
    if text is not None:
        places.nodes.parent.mkdir(parents=True)
        places.nodes.write_text(text)
    assert node_list.read(places, 1000.0) == ()
    assert node_list.age(places, 1000.0) is None
