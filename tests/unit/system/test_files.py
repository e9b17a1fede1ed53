"""Files by descriptor: what is deleted, and what takes its place meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from forestage.system import files, libc, records


def test_fifo_instead_of_a_file_blocks_neither_reading_nor_writing(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert files.read_file(fifo) == b""
    with pytest.raises(OSError, match="fifo") as caught:
        files.overwrite_file(fifo, b"new")
    assert caught.value.errno == errno.ENXIO
    with contextlib.suppress(OSError):  # what fsync(2) says of it
        records.sync_file(fifo)


def test_symlink_instead_of_a_file_is_followed_neither_for_reading_nor_writing(
    tmp_path: Path,
) -> None:
    own, victim = tmp_path / "own", tmp_path / "victim"
    files.overwrite_file(victim, b"longer")
    files.overwrite_file(victim, b"its")
    own.symlink_to(victim)
    for use in (lambda: files.overwrite_file(own, b""), lambda: files.read_file(own)):
        with pytest.raises(OSError, match="own") as caught:
            use()
        assert caught.value.errno == errno.ELOOP
    assert victim.read_bytes() == b"its"
    assert victim.stat().st_mode & 0o777 == 0o600


def test_symlink_swapped_in_for_a_directory_is_not_followed_by_remove_tree(
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
    with (
        files.open_descriptor(own, os.O_RDONLY) as directory,
        pytest.raises(OSError, match="folder"),
    ):
        files.remove_tree(directory, "folder", ".")
    assert (victim / "file").exists()


def lacking(monkeypatch: pytest.MonkeyPatch, bit: int) -> None:
    """Has statx(2) say that one of the facts is not known."""
    real = libc.call_libc

    def call(name: str, *arguments: Any, about: str | None = None) -> int:
        done = real(name, *arguments, about=about)
        facts = arguments[4]
        (mask,) = struct.unpack_from("=I", facts)
        struct.pack_into("=I", facts, 0, mask & ~bit)
        return done

    monkeypatch.setattr(libc, "call_libc", call)


@pytest.mark.parametrize("bit", [0x1, 0x2, 0x8, 0x10, 0x40, 0x80, 0x100, 0x200])
def test_statx_from_server_raises_if_the_server_lacks_an_identity_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bit: int
) -> None:
    lacking(monkeypatch, bit)
    with (
        files.open_descriptor(tmp_path, os.O_RDONLY) as directory,
        pytest.raises(OSError, match="does not say which file it is") as caught,
    ):
        files.statx_from_server(directory)
    assert caught.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize("bit", [0x4, 0x20, 0x400, 0x800])
def test_statx_from_server_accepts_unknown_link_count_access_time_and_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bit: int
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.link(tmp_path / "file", tmp_path / "other")
    lacking(monkeypatch, bit)
    with files.open_descriptor(tmp_path, os.O_RDONLY) as directory:
        assert files.statx_from_server(directory, b"file").st_nlink == (1 if bit == 0x4 else 2)
