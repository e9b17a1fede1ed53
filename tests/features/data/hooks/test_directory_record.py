"""The record by which the companion shows a job's own directory where no helper answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import jobdir
from forestage.cache.part import boot_id
from forestage.clock import Clock
from forestage.errors import Declined
from forestage.features.data import directory_record, job_dir
from forestage.features.data import requests as data
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.step_protocol import LineFields
from jobdir import Dirs
from node import ALICE, Node


@pytest.fixture
def dirs(node: Node, tmp_path: Path) -> Iterator[Dirs]:
    with jobdir.made(node, tmp_path / "disk") as made:
        yield made
        job_dir.remove_job_dirs(node.cache, 7)


def file_of(dirs: Dirs) -> Path:
    return dirs.on.leases.directory_record_file(7)


def record(dirs: Dirs) -> list[str]:
    return file_of(dirs).read_text().splitlines()


def own(dirs: Dirs) -> list[LineFields]:
    """The lines that a step gets for its directory alone."""
    line = job_dir.prepare_mount_for_step(dirs.on, dirs.job(7, "")).line
    return [("env", "FORESTAGE_DIR", str(dirs.node.places.job_dir)), line]


def expected(*lines: LineFields) -> list[str]:
    first = f"directory {directory_record.DIRECTORY_RECORD_FORMAT}"
    head = [first, f"boot\t{boot_id()}", f"owner\t{ALICE.uid}"]
    return [*head, *map("\t".join, lines)]


def test_prolog_writes_the_directory_record_once_and_steps_keep_the_same_file(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    assert sorted(record(dirs)) == sorted(expected(*own(dirs)))
    facts = file_of(dirs).stat()
    dirs.step(7)
    dirs.step(7)
    after = file_of(dirs)
    assert sorted(record(dirs)) == sorted(expected(*own(dirs)))
    assert facts.st_mode & 0o777 == after.stat().st_mode & 0o777
    before = after.stat().st_ino
    dirs.step(7)
    assert after.stat().st_ino == before  # it says so already


def test_directory_record_lists_a_seed_once_it_was_copied(dirs: Dirs) -> None:
    (dirs.source / "cache").mkdir()
    (dirs.source / "cache/file").write_text("x")
    dirs.prolog(7, f"stage-dir=32M stage={dirs.source}/cache@seed:CACHE,{dirs.source}/no@seed:NO")
    seed = ("env", "CACHE", f"{dirs.node.places.job_dir}/seed/CACHE")
    assert "\t".join(seed) not in record(dirs)
    dirs.step(7)
    assert sorted(record(dirs)) == sorted(expected(*own(dirs), seed))


def test_directory_record_of_a_memory_job_directory_is_written_by_the_first_step(
    dirs: Dirs,
) -> None:
    dirs.prolog(7, "stage-dir=32M,ram")
    assert not file_of(dirs).exists()
    dirs.step(7)
    assert sorted(record(dirs)) == sorted(expected(*own(dirs)))


def test_step_does_not_rewrite_a_directory_record_of_another_format(
    dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that a companion of either release reads."""
    dirs.prolog(7, "stage-dir=32M")
    before = record(dirs)
    monkeypatch.setattr(
        directory_record, "DIRECTORY_RECORD_FORMAT", directory_record.DIRECTORY_RECORD_FORMAT + 1
    )
    dirs.step(7)
    assert record(dirs) == before


def test_step_writes_a_missing_directory_record_on_a_switched_off_node(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    file_of(dirs).unlink()
    off = Declined("disabled", "INC-1")
    asked = dirs.job(7, "", SLURM_STEP_ID="0")
    shown = data.show_job_data(dirs.on, asked, HookDeadlines.from_seconds(Clock(), 60.0, None), off)
    assert shown.lines == own(dirs)
    assert sorted(record(dirs)) == sorted(expected(*own(dirs)))


def test_directory_record_is_removed_by_the_epilog_and_by_a_requeued_run(dirs: Dirs) -> None:
    dirs.prolog(7, "stage-dir=32M")
    dirs.node.epilog(7)
    assert not file_of(dirs).exists()
    dirs.prolog(7, "stage-dir=32M")
    shutil.copy(file_of(dirs), dirs.source / "kept")
    dirs.prolog(7, "stage-dir=4K", restart=1)  # too small: this run has none
    assert not file_of(dirs).exists()
    dirs.prolog(7, "stage-dir=32M", restart=2)
    assert sorted(record(dirs)) == sorted(expected(*own(dirs)))
    assert dirs.step(7).lines == own(dirs)
