"""Imports that steps wait for, as `status` sees them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from forestage.paths import Places
from forestage.registry import imports_now
from forestage.registry.imports_now import UnderWay
from forestage.system import processes


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path)
    found.images.mkdir(parents=True)
    return found


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> UnderWay:
    """This process is who starts workers."""
    name = Path("/proc/self/comm").read_text().strip()
    monkeypatch.setattr(imports_now, "PROCESS_NAME", name)
    return UnderWay(7, 2, "alice", "nvcr.io#a/b:1", 100.0, os.getpid())


def test_import_is_there_until_it_ends(places: Places, one: UnderWay) -> None:
    older = msgspec.structs.replace(one, step=1, since=50.0)
    for noted in (one, msgspec.structs.replace(one, said="writes"), older):
        imports_now.note(places, noted)
    assert [(found.step, found.said) for found in imports_now.gather(places)] == [
        (1, ""),
        (2, "writes"),
    ]
    imports_now.forget(places, one)
    assert imports_now.gather(places) == (older,)


def test_what_a_killed_process_left_is_none(places: Places, one: UnderWay) -> None:
    imports_now.note(places, msgspec.structs.replace(one, pid=1))  # a number that is another's now
    imports_now.note(places, msgspec.structs.replace(one, step=3, pid=1 << 22))
    (places.images / "7.4.json").write_text("{")
    (places.images / "7.5.json").mkdir()
    assert imports_now.gather(places) == ()


def test_pid_that_is_a_users_process_of_any_name_by_now_is_none(
    places: Places, one: UnderWay
) -> None:
    imports_now.note(places, one)
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        comm.write_bytes(b"\xff\xfe")
        assert imports_now.gather(places) == ()
    finally:
        comm.write_bytes(before.strip())


def test_pid_that_is_a_users_process_of_that_name_by_now_is_none(
    places: Places, one: UnderWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports_now.note(places, one)
    monkeypatch.setattr(processes, "is_trusted", lambda process: False)
    assert imports_now.gather(places) == ()


def test_record_is_roots_alone(places: Places, one: UnderWay) -> None:
    imports_now.note(places, one)
    assert (places.images / "7.2.json").stat().st_mode & 0o777 == 0o600


def test_node_without_images_has_none(tmp_path: Path, one: UnderWay) -> None:
    places = Places(tmp_path / "node")
    imports_now.note(places, one)
    assert imports_now.gather(places) == ()
