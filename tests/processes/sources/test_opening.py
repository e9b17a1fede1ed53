"""Opening a path as the user: what is found there, and what is never opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import squashfs
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage, check_image
from forestage.sources import opening
from forestage.system.as_user import User

PATIENCE = 600.0  # seconds; what hangs, pytest ends sooner
HEAD = squashfs.beginning(bytes(96))


@pytest.mark.parametrize(
    ("data", "copied", "head"),
    [
        (b"12345", None, b""),
        (b"12345", b"", b"12345"),
        (HEAD, b"", HEAD[:48]),
        (b"12345", HEAD[:32], HEAD[:32]),
        (b"12345", bytes(32), b"12345"),
    ],
)
def test_file_head_is_read_from_the_copy_or_else_from_the_source(
    shared: Path, me: User, data: bytes, copied: bytes | None, head: bytes
) -> None:
    (shared / "a").write_bytes(data)
    wanted = None if copied is None else lambda _: copied
    found, line = opening.open_as_user(
        str(shared / "a"), me, [str(shared)], None, PATIENCE, read_copy_head=wanted
    )
    line.close()
    assert found.head == head


@pytest.mark.parametrize("new", [True, False])
def test_file_head_of_an_image_already_in_the_cache_is_not_read(
    shared: Path, me: User, new: bool
) -> None:
    (shared / "a").write_bytes(HEAD)
    found, line = opening.open_as_user(
        str(shared / "a"), me, [str(shared)], None, PATIENCE, is_not_in_cache=lambda _: new
    )
    line.close()
    assert found.head == (HEAD[:48] if new else b"")


def test_opening_finds_identity_and_rights_through_a_symlink(shared: Path, me: User) -> None:
    (shared / "a").write_bytes(b"12345")
    (shared / "a").chmod(0o640)
    (shared / "link").symlink_to("a")
    found, fd = opening.open_descriptor_as_user(
        str(shared / "link"), me, [str(shared)], None, PATIENCE
    )
    assert fd is not None
    facts = (shared / "a").stat()
    assert os.read(fd, 9) == b"12345"
    os.close(fd)
    assert found.image == SourceImage(
        FileIdentity(str(shared / "a"), facts.st_ino, 5, facts.st_mtime_ns, facts.st_ctime_ns),
        AccessRights(facts.st_uid, facts.st_gid, 0o640),
    )


def test_file_below_a_symlinked_source_directory_is_accepted_by_its_real_path(
    shared: Path, me: User
) -> None:
    (shared / "a").write_bytes(b"1")
    (shared.parent / "lustre").symlink_to(shared)
    found, fd = opening.open_descriptor_as_user(
        f"{shared.parent}/lustre/a", me, [f"{shared.parent}/lustre"], None, PATIENCE
    )
    assert fd is not None
    os.close(fd)
    assert check_image(found, None).path == str(shared / "a")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _outside(path: Path) -> None:
    (path.parent.parent / "secret").write_bytes(b"1")
    path.symlink_to("../secret")


@pytest.mark.parametrize("make", [_fifo, _outside, Path.mkdir])
def test_fifo_directory_or_file_outside_the_sources_is_not_opened(
    shared: Path, me: User, make: Callable[[Path], None]
) -> None:
    """Opening a FIFO would block, opening a device or a file outside could do something."""
    make(shared / "a")
    found, fd = opening.open_descriptor_as_user(
        str(shared / "a"), me, [str(shared)], None, PATIENCE
    )
    assert fd is None
    assert found.image is None


def test_path_that_resolves_to_a_non_utf8_name_is_not_opened(shared: Path, me: User) -> None:
    (shared / "\udcff").write_bytes(b"1")
    (shared / "a").symlink_to("\udcff")
    found, fd = opening.open_descriptor_as_user(
        str(shared / "a"), me, [str(shared)], None, PATIENCE
    )
    assert (found.path, fd) == ("", None)


@pytest.mark.parametrize(
    ("path", "error"),
    [("nothing", FileNotFoundError), ("a/b", NotADirectoryError), ("x" * 256, OSError)],
)
def test_opening_a_missing_or_invalid_path_raises_the_users_error(
    shared: Path, me: User, path: str, error: type[OSError]
) -> None:
    (shared / "a").write_bytes(b"1")
    with pytest.raises(error):
        opening.open_descriptor_as_user(str(shared / path), me, [str(shared)], None, PATIENCE)
