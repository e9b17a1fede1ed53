"""The open source: every change is seen, and nothing needs root's rights on the file server."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.cache.node import Node
from forestage.cache.source_image import FileIdentity, SourceImage
from forestage.errors import Declined, Failed
from forestage.sources import opening, source
from forestage.sources.source import (
    COARSE_TICK_NS,
    FINE_TICK_NS,
    SKEW_NS,
    OpenImage,
    ReadableSource,
    SourceUnreadable,
)
from forestage.system import mounts
from forestage.system.mounts import MountInfo

Patch = pytest.MonkeyPatch
Look = Callable[[Path], OpenImage]

SECOND = 1_000_000_000
NOW = 1_700_000_000
FINE, COARSE = FINE_TICK_NS / SECOND, COARSE_TICK_NS / SECOND
SKEW = SKEW_NS // SECOND


@pytest.fixture
def on_disk(monkeypatch: Patch) -> None:
    """The source is on a disk of this node, not on a tmpfs."""
    monkeypatch.setattr(os, "major", lambda _: 254)


@pytest.mark.parametrize(
    ("mtime", "ctime", "seconds"),
    [
        # Full seconds: the server's clock may tick in seconds. However old the change seems, within
        # what clocks may differ by, it may have been made just now.
        (0, 0, COARSE),
        (-1, -1, COARSE),
        (-1000, -SKEW, COARSE),
        (-1000, -SKEW - 2, 0.0),
        # The server's clock is ahead, or ours was set back by an hour: no longer than that.
        (0, 3600, COARSE),
        (3600, -9000, COARSE),
        # Fractions: a fine clock. Who sets mtime, to full seconds or not, changes nothing of that.
        (0.005, 0.005, FINE),
        (0, 0.005, FINE),
        (0.005, 0, COARSE),
        (-9000.5, -9000, 0.0),
        (-9000.5, -9000.5, 0.0),
    ],
)
def test_copy_starts_only_when_a_later_change_would_show_in_mtime_or_ctime(
    make_image: Callable[..., SourceImage], mtime: float, ctime: float, seconds: float
) -> None:
    times = {"mtime_ns": int((NOW + mtime) * SECOND), "ctime_ns": int((NOW + ctime) * SECOND)}
    assert source.seconds_to_settle(make_image(**times), float(NOW)) == seconds


# Major 0 is no disk of this node: a network file system, or a tmpfs.
@pytest.mark.parametrize(("device", "past"), [(254, True), (0, False)])
def test_source_is_opened_with_direct_io_only_on_a_block_device(
    shared: Path, look: Look, monkeypatch: Patch, device: int, past: bool
) -> None:
    (shared / "a").write_bytes(b"12345")
    opened = look(shared / "a")
    monkeypatch.setattr(os, "major", lambda _: device)
    found = source.open_source(opened)
    assert found == ReadableSource(
        opened.fd, found.direct, 5, opened.image.path, map_chunks=found.map_chunks
    )
    assert (found.direct is not None) == past
    if found.direct is not None:
        os.close(found.direct)
    opened.close()


def test_source_that_changed_since_it_was_inspected_is_declined(shared: Path, look: Look) -> None:
    (shared / "a").write_bytes(b"12345")
    opened = look(shared / "a")
    (shared / "a").write_bytes(b"123")
    with pytest.raises(Declined) as caught:
        source.open_source(opened)
    assert caught.value.reason == "changed"
    assert not isinstance(caught.value, Failed)
    opened.close()


def test_error_of_the_source_raises_source_unreadable(
    shared: Path, look: Look, monkeypatch: Patch
) -> None:
    (shared / "a").write_bytes(b"12345")
    opened = look(shared / "a")

    real = os.fstat

    def gone(fd: int) -> os.stat_result:
        if fd == opened.fd:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return real(fd)

    monkeypatch.setattr(os, "fstat", gone)
    with pytest.raises(SourceUnreadable) as caught:
        source.check_same_file(opened)
    assert caught.value.error.errno == errno.ENOTCONN
    opened.close()


def test_changed_inode_with_equal_size_and_times_is_explained_as_unstable_inode_numbers() -> None:
    was = FileIdentity("/a", 1, 2, 3, 4)
    assert "inode number" in source.explain_difference(was, msgspec.structs.replace(was, inode=9))
    for field in ("size", "mtime_ns", "ctime_ns"):
        other = msgspec.structs.replace(was, inode=9, **{field: 9})
        assert source.explain_difference(was, other) == ""


def test_direct_descriptor_of_a_source_is_the_same_open_file_though_the_path_changed(
    shared: Path, look: Look, on_disk: None
) -> None:
    folder = shared / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"12345")
    opened = look(folder / "a")
    folder.rename(shared / "old")
    folder.mkdir()
    (folder / "a").write_bytes(b"other")
    direct = source.open_source(opened).direct
    assert direct is not None
    assert os.path.sameopenfile(direct, opened.fd)
    flags = fcntl.fcntl(direct, fcntl.F_GETFL)
    assert flags & os.O_DIRECT
    assert flags & os.O_ACCMODE == os.O_RDONLY
    os.close(direct)
    opened.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.ESTALE])
def test_source_that_cannot_be_opened_with_direct_io_is_read_through_the_page_cache(
    shared: Path, look: Look, on_disk: None, monkeypatch: Patch, number: int
) -> None:
    (shared / "a").write_bytes(b"12345")
    opened = look(shared / "a")
    opens = os.open

    def refusing(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return opens(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    assert source.open_source(opened).direct is None
    opened.close()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/lustre/a.sqsh", "/lustre"),
        ("/lustre//x/../a.sqsh", "/lustre"),
        ("/lustre/redirected.sqsh", "/lustre"),  # over it lies a bind of the cache's
        ("/lustre/hers/a.sqsh", None),  # hangs as its user likes, and would keep root's process
    ],
)
def test_file_server_of_a_path_is_probed_only_if_mounted_by_root(
    node: Node, monkeypatch: Patch, path: str, asked: str | None
) -> None:
    table = [
        MountInfo(1, 0, "8:1", "/", "/", "rw - ext4 x rw"),
        MountInfo(2, 1, "0:40", "/", "/lustre", "rw - lustre mgs rw"),
        MountInfo(3, 2, "259:1", "/entries/0a/image", "/lustre/redirected.sqsh", "ro - xfs x rw"),
        MountInfo(4, 2, "0:41", "/", "/lustre/hers", "rw - fuse.x x rw,user_id=1000"),
    ]
    monkeypatch.setattr(mounts, "list_mounts", lambda: table)
    found = opening._find_file_server(node.places, path)
    assert (found.point if found else None) == asked
    assert found is None or found.file == node.places.probes / "source-0-40"
