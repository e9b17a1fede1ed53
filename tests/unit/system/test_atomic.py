"""Atomic writes of small files: the old file or the new one, durable and private."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.system import records


def test_record_is_written_and_replaced_with_mode_600(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for data in (b"one", b"two, longer", b""):
        records.write(file, data)
        assert file.read_bytes() == data
    assert file.stat().st_mode & 0o777 == 0o600
    records.write(file, b"", mode=0o644)
    assert file.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["a"]


def test_record_gets_owner_then_mode_then_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else there is a moment at which nobody may read it; and chown(2) clears bits of the mode."""
    steps: list[object] = []
    fchmod, replace = os.fchmod, os.replace
    monkeypatch.setattr(os, "fchown", lambda fd, uid, gid: steps.append((uid, gid)))
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: (steps.append(mode), fchmod(fd, mode)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), replace(a, b)))
    records.write(tmp_path / "a", b"new", 0o640, (1, 2))
    assert steps == [(1, 2), 0o640, "rename"]


@pytest.mark.parametrize("step", ["fsync", "fchmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_of_a_record_leaves_the_old_file_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    records.write(tmp_path / "a", b"old")

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(error)):
            records.write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_record_is_synced_before_and_its_directory_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting_sync(fd: int) -> None:
        steps.append("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def noting_replace(source: str, target: str) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(os, "replace", noting_replace)
    records.write(tmp_path / "a", b"new")
    assert steps == ["file", "rename", "directory"]


def test_record_write_replaces_a_symlink_without_following(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"keep")
    (tmp_path / "a").symlink_to("victim")
    records.write(tmp_path / "a", b"new")
    assert (tmp_path / "victim").read_bytes() == b"keep"
    assert not (tmp_path / "a").is_symlink()
