"""`forestage off` and `on` at their files: what lasts is changed by a child process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from forestage.config import switch
from forestage.config.switch import SwitchChange
from forestage.paths import NodePaths
from forestage.system import records

NOW = 1_800_000_000.0


@pytest.fixture
def places(tmp_path: Path) -> NodePaths:
    places = NodePaths(tmp_path)
    for file in (places.lasting_off_file, places.disabled):
        file.parent.mkdir(parents=True, exist_ok=True)
    return places


def test_turn_off_writes_a_file_in_etc_that_survives_a_reboot(places: NodePaths) -> None:
    assert switch.turn_off(places, "INC-42", NOW + 60) == SwitchChange((places.lasting_off_file,))
    assert places.lasting_off_file.read_text() == f"until {int(NOW) + 60}\nINC-42\n"
    assert not places.disabled.exists()


def test_turn_off_writes_the_file_in_run_if_etc_cannot_be_written(places: NodePaths) -> None:
    places.lasting_off_file.mkdir()
    (places.lasting_off_file / "x").touch()
    done = switch.turn_off(places, "INC-42\nuntil 0", None)
    assert done.files == (places.disabled,)
    assert done.error == f"{places.lasting_off_file} cannot be written: {os.strerror(errno.EISDIR)}"
    assert places.disabled.read_text() == "INC-42\\nuntil 0\n"


def test_turn_off_writes_the_file_in_etc_if_run_cannot_be_written(places: NodePaths) -> None:
    places.disabled.mkdir()
    (places.disabled / "x").touch()
    assert switch.turn_off(places, "INC-42", None).files == (places.lasting_off_file,)
    places.lasting_off_file.unlink()
    places.lasting_off_file.mkdir()
    (places.lasting_off_file / "x").touch()
    with pytest.raises(IsADirectoryError):
        switch.turn_off(places, "INC-42", None)


def test_turn_off_writes_run_before_a_child_process_changes_etc(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(_: NodePaths, __: object) -> tuple[bool, str]:
        seen.append(switch.find_off_file_reason(places, NOW))
        return False, "hangs"

    monkeypatch.setattr(switch, "_change_in_child", noted)
    assert switch.turn_off(places, "INC-42", None) == SwitchChange((places.disabled,), "hangs")
    assert seen == [f"{places.disabled}: INC-42"]
    assert switch.turn_on(places) == SwitchChange((places.disabled,), "hangs")
    assert seen[1:] == [""]


def test_turn_off_and_turn_on_delete_temporary_files_of_a_killed_command(places: NodePaths) -> None:
    for work in (lambda: switch.turn_off(places, "INC-42", None), lambda: switch.turn_on(places)):
        for file in (places.lasting_off_file, places.disabled):
            file.with_name(f".{file.name}.b6a1bf5f60f96726").touch()
        work()
        assert [*places.etc.glob(".*"), *places.run.glob(".*")] == []


def test_turn_off_writes_its_temporary_file_again_after_another_process_deleted_the_file(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, lost = os.replace, []

    def replaced(old: Path, new: Path) -> None:
        if new == places.disabled and not lost:
            lost.append(old)
            old.unlink()
        replace(old, new)

    monkeypatch.setattr(records.os, "replace", replaced)
    assert switch.turn_off(places, "INC-42", None) == SwitchChange((places.lasting_off_file,))
    assert lost


def test_turn_off_does_not_remove_the_file_of_an_upgrade(places: NodePaths) -> None:
    places.disabled.write_text("forestage is being upgraded\n")
    switch.turn_off(places, "INC-42", NOW + 60)
    assert places.disabled.read_text() == places.lasting_off_file.read_text()


def test_off_reason_that_resembles_an_end_time_is_kept_as_text(places: NodePaths) -> None:
    switch.turn_off(places, "until 0", NOW + 60)
    assert "until 0 (until " in switch.find_off_file_reason(places, NOW)


def test_turn_on_removes_and_names_both_files(places: NodePaths) -> None:
    places.disabled.write_text("forestage is being upgraded\n")
    switch.turn_off(places, "INC-42", None)
    assert switch.turn_on(places).files == (places.disabled, places.lasting_off_file)
    assert switch.turn_on(places).files == ()
    assert switch.find_off_file_reason(places, NOW) == ""
