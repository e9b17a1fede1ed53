"""The off switch: which file counts, until when, and what is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.config import switch
from forestage.paths import NodePaths

NOW = 1_800_000_000.0


@pytest.fixture
def places(tmp_path: Path) -> NodePaths:
    places = NodePaths(tmp_path)
    for file in (places.lasting_off_file, places.disabled):
        file.parent.mkdir(parents=True, exist_ok=True)
    return places


def test_node_without_a_switch_file_is_not_switched_off(tmp_path: Path) -> None:
    assert switch.find_off_file_reason(NodePaths(tmp_path), NOW) == ""


@pytest.mark.parametrize("name", ["lasting_off_file", "disabled"])
def test_either_switch_file_switches_off_and_its_first_line_is_the_reason(
    places: NodePaths, name: str
) -> None:
    file: Path = getattr(places, name)
    file.write_text("INC-42: wrong bytes?\nsee the ticket\n")
    assert switch.find_off_file_reason(places, NOW) == f"{file}: INC-42: wrong bytes?"
    file.write_text("")
    assert switch.find_off_file_reason(places, NOW) == f"{file} is there"


def test_switch_file_with_a_past_time_is_ignored_and_the_other_file_still_counts(
    places: NodePaths,
) -> None:
    places.lasting_off_file.write_text(f"until {int(NOW)}\nINC-42\n")
    assert switch.find_off_file_reason(places, NOW - 1).startswith(
        f"{places.lasting_off_file}: INC-42 (until 2027-01-"
    )
    assert switch.find_off_file_reason(places, NOW) == ""
    places.disabled.write_text("forestage is being upgraded\n")
    assert (
        switch.find_off_file_reason(places, NOW)
        == f"{places.disabled}: forestage is being upgraded"
    )


@pytest.mark.parametrize(
    "text",
    [
        "until\n",
        "until tomorrow\n",
        "until -1\n",
        "until 1.5\n",
        "until ٣\n",
        "\0\n",
        "until 9" * 99,
    ],
)
def test_switch_file_with_an_unreadable_time_never_expires(places: NodePaths, text: str) -> None:
    places.lasting_off_file.write_text(text)
    assert switch.find_off_file_reason(places, NOW).startswith(str(places.lasting_off_file))


def test_switch_files_time_in_the_far_future_is_shown_in_seconds(places: NodePaths) -> None:
    places.lasting_off_file.write_text(f"until {'9' * 20}\nx\n")
    assert (
        switch.find_off_file_reason(places, NOW)
        == f"{places.lasting_off_file}: x (until {'9' * 20})"
    )


@pytest.mark.parametrize("name", ["lasting_off_file", "disabled"])
@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_unreadable_switch_file_switches_off_without_blocking(
    places: NodePaths, name: str, kind: str
) -> None:
    file: Path = getattr(places, name)
    made = {"directory": file.mkdir, "link": lambda: file.symlink_to("/nonexistent")}
    made.get(kind, lambda: os.mkfifo(file))()
    assert switch.find_off_file_reason(places, NOW) == f"{file} is there"
