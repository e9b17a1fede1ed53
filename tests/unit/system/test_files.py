"""Files by descriptor: what is deleted, and what takes its place meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.system import files


def test_link_that_takes_a_directorys_place_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns what is deleted may rename in it all the time."""
    own, victim = tmp_path / "own", tmp_path / "victim"
    (own / "folder").mkdir(parents=True)
    victim.mkdir()
    (victim / "file").touch()
    chmod = os.chmod

    def swapped(name: str, mode: int, *, dir_fd: int) -> None:
        chmod(name, mode, dir_fd=dir_fd)
        (own / "folder").rename(tmp_path / "away")
        (own / "folder").symlink_to(victim)

    monkeypatch.setattr(os, "chmod", swapped)
    with files.opened(own, os.O_RDONLY) as directory, pytest.raises(OSError, match="folder"):
        files.remove(directory, "folder", ".")
    assert (victim / "file").exists()
