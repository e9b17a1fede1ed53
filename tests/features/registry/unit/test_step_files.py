"""Files of steps: that over which a copy is bound, and imports that they wait for."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from forestage.features.registry import step_files
from forestage.features.registry.step_files import StepImport
from forestage.paths import NodePaths
from forestage.system import processes

SIZE = 60 << 30


@pytest.fixture
def places(tmp_path: Path) -> NodePaths:
    found = NodePaths(tmp_path)
    found.images.mkdir(parents=True)
    return found


@pytest.fixture
def step_import(monkeypatch: pytest.MonkeyPatch) -> StepImport:
    """This process is who starts workers."""
    name = Path("/proc/self/comm").read_text().strip()
    monkeypatch.setattr(step_files, "PROCESS_NAME", name)
    return StepImport(7, 2, "alice", "nvcr.io#a/b:1", 100.0, os.getpid())


def test_import_record_is_listed_until_the_import_is_forgotten(
    places: NodePaths, step_import: StepImport
) -> None:
    older = msgspec.structs.replace(step_import, step=1, since=50.0)
    for noted in (step_import, msgspec.structs.replace(step_import, said="writes"), older):
        step_files.record_import(places, noted)
    assert [(found.step, found.said) for found in step_files.list_imports(places)] == [
        (1, ""),
        (2, "writes"),
    ]
    step_files.delete_import_record(places, step_import)
    assert step_files.list_imports(places) == (older,)


def test_import_record_of_a_dead_process_is_not_listed(
    places: NodePaths, step_import: StepImport
) -> None:
    # A number that is another's now.
    step_files.record_import(places, msgspec.structs.replace(step_import, pid=1))
    step_files.record_import(places, msgspec.structs.replace(step_import, step=3, pid=1 << 22))
    (places.images / "7.4.json").write_text("{")
    (places.images / "7.5.json").mkdir()
    assert step_files.list_imports(places) == ()


def test_import_record_is_not_listed_if_its_pid_has_another_process_name(
    places: NodePaths, step_import: StepImport
) -> None:
    step_files.record_import(places, step_import)
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        comm.write_bytes(b"\xff\xfe")
        assert step_files.list_imports(places) == ()
    finally:
        comm.write_bytes(before.strip())


def test_import_record_is_not_listed_if_its_pid_is_an_untrusted_process(
    places: NodePaths, step_import: StepImport, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_files.record_import(places, step_import)
    monkeypatch.setattr(processes, "is_trusted", lambda process: False)
    assert step_files.list_imports(places) == ()


def test_import_record_is_private_to_root(places: NodePaths, step_import: StepImport) -> None:
    step_files.record_import(places, step_import)
    assert (places.images / "7.2.json").stat().st_mode & 0o777 == 0o600


def test_import_record_is_skipped_without_the_images_directory(
    tmp_path: Path, step_import: StepImport
) -> None:
    places = NodePaths(tmp_path / "node")
    step_files.record_import(places, step_import)
    assert step_files.list_imports(places) == ()


def test_placeholder_has_the_copys_size_and_no_blocks(tmp_path: Path) -> None:
    made = step_files.make_placeholder(NodePaths(tmp_path), 7, 0, SIZE)
    facts = Path(made.path).stat()
    assert (facts.st_size, facts.st_blocks, facts.st_mode & 0o777) == (SIZE, 0, 0o444)
    assert made.file_stamp == (facts.st_ino, SIZE, facts.st_mtime_ns, facts.st_ctime_ns)


def test_placeholder_reads_as_zeros(tmp_path: Path) -> None:
    with open(step_files.make_placeholder(NodePaths(tmp_path), 7, 0, 100).path, "rb") as file:
        assert file.read() == bytes(100)


def test_placeholder_directory_has_mode_0711(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    step_files.make_placeholder(places, 7, 0, 1)
    assert places.images.stat().st_mode & 0o777 == 0o711


def test_placeholder_of_an_earlier_run_is_replaced_even_if_a_link(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    first = step_files.make_placeholder(places, 7, 0, 1)
    Path(first.path).unlink()
    Path(first.path).symlink_to("/etc/passwd")
    second = step_files.make_placeholder(places, 7, 0, 2)
    assert not Path(second.path).is_symlink()
    assert Path("/etc/passwd").stat().st_size != 2


def test_end_of_a_job_removes_only_its_own_placeholders(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    kept = [step_files.make_placeholder(places, job, 0, 1).path for job in (77, 8)]
    step_files.make_placeholder(places, 7, 0, 1)
    step_files.make_placeholder(places, 7, 1, 1)
    step_files.delete_job_files(places, 7)
    assert sorted(map(str, places.images.iterdir())) == sorted(kept)


def test_placeholders_of_ended_jobs_are_listed_as_leftovers_after_a_time(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    assert step_files.list_leftovers(places, frozenset(), 0.0) == []
    for job in (7, 8):
        step_files.make_placeholder(places, job, 0, 1)
    (places.images / "8.0.sock").touch()
    (places.images / "odd").touch()
    later = (places.images / "odd").stat().st_mtime + step_files.OLD
    assert (
        step_files.list_leftovers(places, frozenset({8}), later - 60) == []
    )  # an import holds no lease
    left = step_files.list_leftovers(places, frozenset({8}), later + 60)
    assert sorted(path.name for path in left) == ["7.0.sqsh", "odd"]
