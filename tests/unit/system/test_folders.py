"""Directories in which hooks make names: made once, and never one that users can list."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.system import folders


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_created_directory_has_its_mode_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folders.ensure_directory_with_mode(tmp_path / "run/images", folders.PASSABLE)
    finally:
        os.umask(before)
    assert mode(tmp_path / "run/images") == 0o711
    assert mode(tmp_path / "run") & 0o044 == 0


def test_existing_directory_gets_the_wanted_mode(tmp_path: Path) -> None:
    (tmp_path / "through").mkdir(mode=0o755)
    folders.ensure_directory_with_mode(tmp_path / "through")
    assert mode(tmp_path / "through") == 0o700


def test_existing_directory_is_not_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mkdir(2) would wait for the lock of the directory above, which a user may hold."""
    (tmp_path / "log").mkdir(mode=0o750)
    monkeypatch.setattr(os, "mkdir", pytest.fail)
    folders.ensure_directory(tmp_path / "log", 0o700)
    assert mode(tmp_path / "log") == 0o750


def test_directory_created_by_another_hook_at_the_same_moment_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def twice(path: str, mode: int) -> None:
        real(path, mode)
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", twice)
    folders.ensure_directory_with_mode(tmp_path / "a", folders.PASSABLE)
    assert mode(tmp_path / "a") == 0o711


def test_file_instead_of_a_directory_raises(tmp_path: Path) -> None:
    (tmp_path / "run").touch(mode=0o600)
    with pytest.raises(NotADirectoryError):
        folders.ensure_directory_with_mode(tmp_path / "run", folders.PASSABLE)
    assert mode(tmp_path / "run") == 0o600
