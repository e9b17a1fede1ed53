"""Imports that steps wait for, as `status` sees them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from forestage.paths import Places
from forestage.registry import under_way
from forestage.registry.under_way import UnderWay


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path)
    found.images.mkdir(parents=True)
    return found


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> UnderWay:
    """This process is who starts workers."""
    name = Path("/proc/self/comm").read_text().strip()
    monkeypatch.setattr(under_way, "PROCESS_NAME", name)
    return UnderWay(7, 2, "alice", "nvcr.io#a/b:1", 100.0, os.getpid())


def test_import_is_there_until_it_ends(places: Places, one: UnderWay) -> None:
    older = msgspec.structs.replace(one, step=1, since=50.0)
    for noted in (one, msgspec.structs.replace(one, said="writes"), older):
        under_way.note(places, noted)
    assert [(found.step, found.said) for found in under_way.gather(places)] == [
        (1, ""),
        (2, "writes"),
    ]
    under_way.forget(places, one)
    assert under_way.gather(places) == (older,)


def test_what_a_killed_process_left_is_none(places: Places, one: UnderWay) -> None:
    under_way.note(places, msgspec.structs.replace(one, pid=1))  # a number that is another's now
    under_way.note(places, msgspec.structs.replace(one, step=3, pid=1 << 22))
    (places.images / "7.4.json").write_text("{")
    (places.images / "7.5.json").mkdir()
    assert under_way.gather(places) == ()


def test_pid_that_is_a_users_process_of_any_name_by_now_is_none(
    places: Places, one: UnderWay
) -> None:
    under_way.note(places, one)
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        comm.write_bytes(b"\xff\xfe")
        assert under_way.gather(places) == ()
    finally:
        comm.write_bytes(before.strip())


def test_record_is_roots_alone(places: Places, one: UnderWay) -> None:
    under_way.note(places, one)
    assert (places.images / "7.2.json").stat().st_mode & 0o777 == 0o600


def test_node_without_images_has_none(tmp_path: Path, one: UnderWay) -> None:
    places = Places(tmp_path / "node")
    under_way.note(places, one)
    assert under_way.gather(places) == ()
