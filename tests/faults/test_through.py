"""The read-through file as jobs see it: the source's bytes and rights, in every way to read."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fault import source_bytes

from forestage.system.as_user import User
from node import ALICE, BOB, Node, read_as, until
from through import MIB, SIZE, Aside, Copy, Shown, read_fresh, reading


def test_read_through_file_has_the_sources_bytes_and_attributes_and_is_read_only(
    node: Node, shown: Shown
) -> None:
    path = node.put("alice/image.sqsh", source_bytes(), mode=0o640)
    source = path.stat()
    shown(path)
    facts = path.stat()
    for name in ("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns", "st_uid", "st_gid", "st_mode"):
        assert getattr(facts, name) == getattr(source, name), name
    assert path.read_bytes() == source_bytes()
    for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(OSError, match="Read-only"):
            os.open(path, flags)


GROUP = User("", 4711, ALICE.gid)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("mode", "acl", "readers"),
    [
        (0o644, "", {ALICE, BOB, GROUP}),
        (0o640, "", {ALICE, GROUP}),
        (0o600, "", {ALICE}),
        # The mask shows in the mode as the group's right, which the group has not.
        (0o600, f"u:{BOB.uid}:r", {ALICE, BOB}),
        (0o644, f"u:{BOB.uid}:-", {ALICE, GROUP}),
    ],
)
def test_read_through_file_is_readable_only_for_readers_of_the_source(
    node: Node, shown: Shown, mode: int, acl: str, readers: set[User]
) -> None:
    path = node.put("alice/image.sqsh", source_bytes(), mode=mode)
    if acl:
        subprocess.run(["setfacl", "-m", acl, path], check=True)
    assert {user for user in (ALICE, BOB, GROUP) if read_as(user, path)} == readers
    shown(path)
    found = {user: read_as(user, path) for user in (ALICE, BOB, GROUP)}
    assert found == {user: source_bytes() if user in readers else None for user in found}


def mapped(path: Path, flags: int) -> bytes:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ) as memory:
        return memory[:]


def direct(path: Path) -> bytes:
    fd, buffer, found = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 2 * MIB), b""
    while count := os.preadv(fd, [buffer], len(found)):
        found += buffer[:count]
    os.close(fd)
    return found


def sent(path: Path) -> bytes:
    target = os.memfd_create("target")
    with path.open("rb") as file:
        while os.sendfile(target, file.fileno(), None, MIB):
            pass
    with open(target, "rb") as file:
        file.seek(0)
        return file.read()


def looped(path: Path) -> bytes:
    argv = ["losetup", "--find", "--show", "--read-only", path]
    device = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    try:
        found = Path(device).read_bytes()
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
    # The device ends with the last whole sector; what follows is read from the file.
    assert len(found) == SIZE // 512 * 512
    return found + path.read_bytes()[len(found) :]


@pytest.mark.parametrize(
    "way",
    [
        lambda path: mapped(path, mmap.MAP_SHARED),
        lambda path: mapped(path, mmap.MAP_PRIVATE),
        direct,
        sent,
        looped,
    ],
    ids=["shared", "private", "direct", "sendfile", "loop"],
)
def test_each_way_to_read_gives_the_sources_bytes_during_and_after_the_copy(
    shown: Shown, way: Callable[[Path], bytes]
) -> None:
    through = shown()
    copy = Copy(through, source_bytes())
    copy.bring(0, 3 * MIB)
    assert way(through.path) == source_bytes()
    fd = os.open(through.path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    copy.bring(0, SIZE)
    copy.publish()
    assert way(through.path) == source_bytes()


def test_thousand_open_descriptors_read_right_bytes_also_after_the_unmount(shown: Shown) -> None:
    through = shown()

    def open_all() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        opened = [os.open(through.path, os.O_RDONLY) for _ in range(1000)]
        for number, fd in enumerate(opened):
            start = number * 8191 % SIZE
            assert os.pread(fd, 4096, start) == source_bytes()[start : start + 4096]

    assert Aside(open_all).ended() == 0
    fd = os.open(through.path, os.O_RDONLY)  # never closed, and the mount is taken off below it
    through.take_off()
    through.kill_server()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(fd, SIZE, 0) == source_bytes()
    os.close(fd)


def test_read_through_uses_pieces_of_a_part_only_while_marked(shown: Shown) -> None:
    through = shown()
    copy = Copy(through, source_bytes())
    wrong = copy.bring_marked()
    until(lambda: read_fresh(through.path) == wrong, "the part to be found")
    copy.readers.clear_arrived(2)
    found = read_fresh(through.path)
    assert found[2 * MIB : 3 * MIB] == source_bytes()[2 * MIB : 3 * MIB]
    copy.drop()
    until(lambda: read_fresh(through.path) == source_bytes(), "the source to answer")
    # Another part by another stager: its marks are empty.
    copy = Copy(through, source_bytes())
    with reading(through.path, source_bytes(), 2) as readers:
        for start in range(0, SIZE, MIB):
            copy.bring(start, MIB)
        copy.publish()
        until(lambda: readers[0].count > 20, "reads")
    copy.cache.evict_entry(copy.image.key)
    assert read_fresh(through.path) == source_bytes()
