"""Whether somebody writes to a file: by a lease, or by what processes have open."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forestage.system import as_user, file_systems, writers


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a file\nof two lines"
    path.write_bytes(bytes(8192))
    return path


@pytest.fixture
def no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system without them."""
    real = fcntl.fcntl

    def refusing(fd: int, what: int, *more: Any) -> Any:
        if what == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, what, *more)

    monkeypatch.setattr(fcntl, "fcntl", refusing)


def found(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:

        def work() -> as_user.ChildResult[bool]:
            return writers.has_writer(fd, str(path)), []

        return as_user.run_in_child(work, bool, 600.0, keep=(fd,))[0]
    finally:
        os.close(fd)


@pytest.fixture
def writer(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, that appends."""
    code = "import sys; f=open(sys.argv[1],'ab'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-Ic", code, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_file_without_a_writer_is_left_without_a_file_lease(file: Path) -> None:
    with file.open("rb"):
        assert not found(file)
    # With a lease left on it this would wait for 45 s, or raise.
    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


def test_process_that_appends_to_a_file_is_found_as_writer(
    file: Path, writer: subprocess.Popen[bytes]
) -> None:
    assert found(file)
    writer.communicate()
    assert not found(file)


def test_writer_through_a_shared_mapping_is_found(file: Path) -> None:
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 4096)
    assert found(file)
    mapped.close()
    assert not found(file)


@pytest.mark.usefixtures("no_leases")
def test_writer_is_found_on_a_file_system_without_file_leases(
    file: Path, writer: subprocess.Popen[bytes]
) -> None:
    with file.open("rb"):
        assert found(file)
        writer.communicate()
        assert not found(file)


@pytest.mark.parametrize("kind", writers._BY_LEAVE)
def test_file_lease_refused_by_a_network_file_system_is_no_writer(
    file: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    def refusing(fd: int, what: int, *more: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    assert found(file)
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda fd: kind)
    assert not found(file)


@pytest.mark.usefixtures("no_leases", "writer")
def test_search_for_writers_is_given_up_at_its_time_limit(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["1"] if path == "/proc" else [])
    monkeypatch.setattr(writers, "LOOK", -1.0)
    assert not found(file)


def by_lease(path: Path) -> bool | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return writers.has_writer_by_lease(fd)
    finally:
        os.close(fd)


def test_file_lease_detects_a_writer_and_is_released_at_once(file: Path) -> None:
    assert by_lease(file) is False
    with file.open("ab"):
        assert by_lease(file) is True
    with file.open("rb") as asked:  # and open on
        assert writers.has_writer_by_lease(asked.fileno()) is False
        os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.usefixtures("no_leases")
def test_writer_by_file_lease_is_unknown_on_a_file_system_without_file_leases(file: Path) -> None:
    with file.open("ab"):
        assert by_lease(file) is None


@pytest.mark.parametrize(
    ("kind", "proves"),
    [(0xEF53, True), (0x58465342, True), (0x65735546, False), (0x794C7630, False), (0x6969, False)],
)
def test_file_lease_is_conclusive_only_on_local_file_systems(
    file: Path, monkeypatch: pytest.MonkeyPatch, kind: int, proves: bool
) -> None:
    """Those of ext4 and XFS; of FUSE, overlayfs and NFS."""
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda fd: kind)
    assert writers.is_lease_conclusive(0) is proves


def test_file_lease_is_inconclusive_if_the_admin_forbids_file_leases(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "read_file_system_type", lambda fd: 0xEF53)
    for said, proves in (("0\n", False), ("1\n", True)):
        file.write_text(said)
        monkeypatch.setattr(writers, "ENABLED", file)
        assert writers.is_lease_conclusive(0) is proves


def test_find_open_for_writing_finds_a_file_written_below_a_directory(
    file: Path, writer: subprocess.Popen[bytes]
) -> None:
    assert writers.find_open_for_writing(str(file.parent), 600.0) == str(file)
    assert writers.find_open_for_writing(str(file.parent / "a"), 600.0) == ""
    writer.communicate()
    assert writers.find_open_for_writing(str(file.parent), 600.0) == ""
