"""A tree as an EROFS image: read again by the format's rules here, and by the kernel."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.clock import Clock
from forestage.errors import Declined
from forestage.features.data import erofs, manifest
from forestage.features.data.directory_source import DirectorySource
from forestage.features.data.erofs import BLOCK, ErofsLayout
from forestage.features.data.manifest import DirectoryManifest, ManifestEntry
from forestage.system import loop, mounts
from forestage.system.as_user import User
from node import ALICE, Node

ROOT = ManifestEntry(b"", stat.S_IFDIR | 0o755, 0, 0, 0, 0, 0, 1)
U32, NS = st.integers(0, 2**32 - 1), st.integers(-(2**62), 2**62)
NAMES = st.binary(min_size=1, max_size=255).filter(
    lambda name: name not in (b".", b"..") and not set(b"/\0") & set(name)
)
ENTRIES = st.integers(0, 400).map(lambda count: struct.pack("<I", 2) + bytes(range(8)) * count)
# What lies below a directory: a size, where a link leads, or a directory.
LEAVES = st.one_of(
    st.integers(0, 2**40),
    st.binary(min_size=1, max_size=4095).filter(lambda link: b"\0" not in link),
)
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=8),
    lambda below: st.dictionaries(NAMES, st.one_of(LEAVES, below), max_size=8),
    max_leaves=60,
)


class Reader:
    """The format by its description, as a second pair of eyes: fs/erofs/erofs_fs.h of Linux."""

    def __init__(self, made: ErofsLayout) -> None:
        self.head, self.size = made.head, made.size
        magic, _, features, blkszbits, _, root, inodes = struct.unpack_from(
            "<IIIBBHQ", made.head, 1024
        )
        assert (magic, features, 1 << blkszbits) == (0xE0F5E1E2, 0, BLOCK)
        (blocks, meta) = struct.unpack_from("<II", made.head, 1024 + 36)
        assert blocks * BLOCK == made.size
        self.meta, self.root, self.inodes = meta * BLOCK, root, inodes
        self.data: list[tuple[int, int, bytes]] = []  # begin, size, path

    def walk(self, number: int, path: bytes, above: int) -> Iterator[tuple[ManifestEntry, bytes]]:
        """What it holds, as files of a manifest, and their ACLs; checks what readers rely on."""
        at = self.meta + 32 * number
        form, count, mode, _, size, block, _, uid, gid, seconds, ns, links = struct.unpack_from(
            "<HHHHQIIIIqII", self.head, at
        )
        assert (form & 1, form >> 1 in (0, 2), links) == (1, True, 1)
        acl, behind = b"", at + 64
        if count:
            length = 12 + 4 * (count - 1)
            name_length, index, value = struct.unpack_from("<BBH", self.head, behind + 12)
            assert (name_length, index) == (0, 2)  # an access ACL
            acl = self.head[behind + 16 : behind + 16 + value]
            behind += length
        begin = behind if form >> 1 == 2 else block * BLOCK
        if form >> 1 == 2:
            assert begin // BLOCK == (begin + size - 1) // BLOCK  # inline: in the inode's block
        mtime = seconds * 1_000_000_000 + ns
        link = self.head[begin : begin + size] if stat.S_ISLNK(mode) else b""
        is_file = stat.S_ISREG(mode)
        yield ManifestEntry(path, mode, uid, gid, size if is_file else 0, mtime, 0, 0, link), acl
        if is_file and size:
            self.data.append((begin, size, path))
        if stat.S_ISDIR(mode):
            names = list(self.names(begin, size))
            assert names == sorted(names)
            assert {name: one for name, one, _ in names[:]}[b"."] == number
            assert {name: one for name, one, _ in names}[b".."] == above
            for name, one, kind in names:
                if name not in (b".", b".."):
                    below = list(self.walk(one, os.path.join(path, name), number))
                    kinds = {1: stat.S_ISREG, 2: stat.S_ISDIR, 7: stat.S_ISLNK}
                    assert kinds[kind](below[0][0].mode)
                    yield from below

    def names(self, begin: int, size: int) -> Iterator[tuple[bytes, int, int]]:
        for start in range(begin, begin + size, BLOCK):
            end = min(start + BLOCK, begin + size)
            (first,) = struct.unpack_from("<H", self.head, start + 8)
            entries = [
                struct.unpack_from("<QHBB", self.head, start + 12 * number)
                for number in range(first // 12)
            ]
            ends = [offset for _, offset, _, _ in entries[1:]] + [end - start]
            for (number, offset, kind, _), till in zip(entries, ends, strict=True):
                yield self.head[start + offset : start + till].rstrip(b"\0"), number, kind


def made_of(tree: Mapping[bytes, object], drawn: random.Random) -> list[ManifestEntry]:
    def below(path: bytes, tree: Mapping[bytes, object]) -> Iterator[ManifestEntry]:
        for name, what in tree.items():
            here = os.path.join(path, name)
            kind = {int: stat.S_IFREG, bytes: stat.S_IFLNK, dict: stat.S_IFDIR}[type(what)]
            yield ManifestEntry(
                here,
                kind | drawn.randrange(0o10000),
                drawn.randrange(2**32),
                drawn.randrange(2**32),
                what if isinstance(what, int) else 0,
                drawn.randrange(-(2**62), 2**62),
                0,
                0,
                what if isinstance(what, bytes) else b"",
            )
            if isinstance(what, dict):
                yield from below(here, what)

    return sorted([ROOT, *below(b"", tree)], key=lambda one: one.path)


def shown(file: ManifestEntry) -> ManifestEntry:
    """As the image shows it: without the bits that give another's rights."""
    mode = file.mode & ~0o6000 if file.is_file else file.mode
    return ManifestEntry(
        file.path, mode, file.uid, file.gid, file.size, file.mtime_ns, 0, 0, file.link
    )


@given(tree=TREES, acl=ENTRIES, drawn=st.randoms(use_true_random=False))
def test_erofs_layout_of_any_tree_reads_back_the_same_names_inodes_acls_and_offsets(
    tree: dict[bytes, object], acl: bytes, drawn: random.Random
) -> None:
    files = made_of(tree, drawn)
    with_acl = [one for one in files if not one.link and drawn.random() < 0.3]
    acls = {one.path: acl for one in with_acl} if len(acl) > 4 else {}
    made = erofs.compute_layout(DirectoryManifest("/top", tuple(files)), acls)
    reader = Reader(made)
    found = sorted(reader.walk(reader.root, b"", reader.root), key=lambda one: one[0].path)
    assert [one for one, _ in found] == [shown(one) for one in files]
    assert {one.path: acl for one, acl in found if acl} == acls
    assert reader.inodes == len(files)
    # Each file has a place of its own behind all else, where the stager puts it.
    at = len(made.head)
    assert [(begin, path) for begin, _, path in sorted(reader.data)] == [
        (begin, files[number].path) for begin, number in zip(made.starts, made.numbers, strict=True)
    ]
    for begin, size, _ in sorted(reader.data):
        assert begin % BLOCK == 0
        assert at <= begin
        at = begin + size
    assert at <= made.size


def test_erofs_layout_is_deterministic_and_depends_on_the_directorys_path() -> None:
    files = (ROOT, ManifestEntry(b"a", stat.S_IFREG | 0o644, 1, 1, 5, 1, 2, 3))
    assert erofs.compute_layout(DirectoryManifest("/top", files), {}) == erofs.compute_layout(
        DirectoryManifest("/top", files), {}
    )
    other = erofs.compute_layout(DirectoryManifest("/other", files), {})
    assert (
        other.head != erofs.compute_layout(DirectoryManifest("/top", files), {}).head
    )  # each has its own UUID


def test_erofs_layout_finds_the_file_of_an_offset() -> None:
    sizes = (5, 0, BLOCK + 1, 7)
    files = [
        ManifestEntry(b"%d" % n, stat.S_IFREG, 0, 0, size, 0, 0, n) for n, size in enumerate(sizes)
    ]
    made = erofs.compute_layout(DirectoryManifest("/top", (ROOT, *files)), {})
    assert made.numbers == (1, 3, 4)
    assert [made.find_file_index(at) for at in made.starts] == [0, 1, 2]
    assert made.find_file_index(made.starts[0] - 1) == -1
    assert made.find_file_index(made.starts[2] - 1) == 1
    assert made.find_file_index(made.size) == 2


@pytest.mark.parametrize("size", [1 << 44, (1 << 63) - 1])
def test_erofs_layout_with_a_file_larger_than_the_format_allows_is_declined(size: int) -> None:
    """A file of 8 EiB takes its user no more than a truncate(1)."""
    files = (ROOT, ManifestEntry(b"hole", stat.S_IFREG, 0, 0, size, 0, 0, 1))
    with pytest.raises(Declined) as caught:
        erofs.compute_layout(DirectoryManifest("/top", files), {})
    assert caught.value.reason == "too-large"


# As the kernel reads it


@pytest.fixture
def top(node: Node) -> Path:
    made = node.places.root / "top"
    made.mkdir()
    return made


def image(node: Node, top: Path, user: User = ALICE, piece: int = 10_000) -> Path:
    """What a stager writes, in pieces of a size that fits nothing."""
    root, path = manifest.open_root(str(top), user)
    found = manifest.scan_directory(root, path, user, 100_000)
    made = erofs.compute_layout(found, manifest.read_acls(root, found, user))
    opened = DirectorySource(root, found, made, user, 100_000, Clock(), 0.0)
    file = node.places.root / "image"
    with file.open("wb") as out:
        for start in range(0, made.size, piece):
            memory = memoryview(bytearray(b"\xee" * min(piece, made.size - start)))
            opened.read(start, memory)
            out.write(memory)
    opened.close()
    os.close(root)
    return file


@contextlib.contextmanager
def shown_at(node: Node, copy: Path) -> Iterator[Path]:
    """Where the kernel shows the image."""
    device = loop.attach_file(copy, read_only=True)
    point = node.places.root / "mounted"
    point.mkdir()
    try:
        mounts.mount(device, str(point), mounts.MS_RDONLY, "erofs")
        yield point
    finally:
        mounts.umount(str(point))
        subprocess.run(["losetup", "--detach", device], check=True)


def rsync(options: str, top: Path, point: Path) -> str:
    argv = ["rsync", options, "--delete", "--out-format=%i %n", f"{top}/", f"{point}/"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def differences(node: Node, top: Path, copy: Path) -> str:
    """What rsync would change: contents, owners, modes, times, links, ACLs."""
    with shown_at(node, copy) as point:
        counted = sum(len(names) + len(folders) for _, folders, names in os.walk(point))
        assert counted == sum(len(names) + len(folders) for _, folders, names in os.walk(top))
        return rsync("-nacAX", top, point)


def test_kernel_lists_every_name_of_a_large_erofs_directory(node: Node, top: Path) -> None:
    drawn = random.Random(1)
    for number in range(3000):
        name = b"%04d" % number + drawn.randbytes(drawn.randrange(100)).translate(None, b"/\0")
        with open(os.fsencode(top) + b"/" + name, "wb") as file:
            file.write(name * drawn.randrange(3))
    assert differences(node, top, image(node, top)) == ""


def test_kernel_shows_links_modes_and_times_of_an_erofs_image_unchanged(
    node: Node, top: Path
) -> None:
    for length in (1, 59, 4000, 4031, 4032, 4033, 4095):
        (top / f"link{length}").symlink_to("x" * length)
    for mode in (0o555, 0o755, 0o4755, 0o2750, 0o7777):
        (top / f"folder{mode:o}").mkdir()
        (top / f"folder{mode:o}").chmod(mode)
        (top / f"folder{mode:o}/file").write_bytes(b"x" * mode)
    for seconds in (-5, 0, 2**31 - 1, 2**33):
        (top / f"time{seconds}").touch()
        os.utime(top / f"time{seconds}", ns=(1, seconds * 10**9 + 7))
    subprocess.run(["chown", "-Rh", "123456:70000", top], check=True)
    # chown(2) has taken the set-id bits of files; those of directories stay.
    assert differences(node, top, image(node, top, User("", 123456, 70000))) == ""


def test_kernel_shows_acls_of_any_length_in_an_erofs_image(node: Node, top: Path) -> None:
    for count in (1, 10, 400):
        file = top / f"file{count}"
        file.write_bytes(b"x")
        entries = ",".join(f"u:{5000 + number}:r" for number in range(count))
        subprocess.run(["setfacl", "-m", entries, file], check=True)
    (top / "folder").mkdir()
    subprocess.run(["setfacl", "-m", "u:4242:rx", top / "folder"], check=True)
    assert differences(node, top, image(node, top)) == ""


def test_erofs_image_holds_hard_linked_files_once_with_their_link_count(
    node: Node, top: Path
) -> None:
    """In several directories; a name outside of the tree is none of the copy's."""
    (top / "a/b").mkdir(parents=True)
    (top / "c").mkdir()
    (top / "a/file").write_bytes(os.urandom(300_000))
    subprocess.run(["setfacl", "-m", "u:4242:r", top / "a/file"], check=True)
    for name in ("a/b/deep", "c/beside", "above", "../outside"):
        (top / name).hardlink_to(top / "a/file")
    (top / "twin").write_bytes((top / "a/file").read_bytes())
    (top / "c/empty").touch()
    (top / "c/void").hardlink_to(top / "c/empty")
    copy = image(node, top)
    assert copy.stat().st_size < 2 * 300_000 + 20 * BLOCK
    with shown_at(node, copy) as point:
        facts = [(point / name).stat() for name in ("a/file", "a/b/deep", "c/beside", "above")]
        assert {(one.st_ino, one.st_nlink) for one in facts} == {(facts[0].st_ino, 4)}
        assert (point / "twin").stat().st_ino != facts[0].st_ino
        assert (point / "twin").stat().st_nlink == 1
        assert (point / "c/empty").samefile(point / "c/void")
        used = subprocess.run(["du", "-sk", point], capture_output=True, text=True, check=True)
        assert int(used.stdout.split()[0]) < 650
        # With -H, rsync would change what is one file here and another one there.
        assert rsync("-nacAXH", top, point) == ""


def test_erofs_layout_gives_hard_links_one_inode(node: Node) -> None:
    file = ManifestEntry(b"a", stat.S_IFREG | 0o644, 1, 1, BLOCK + 1, 1, 2, 3)
    files = (ROOT, *(msgspec.structs.replace(file, path=name) for name in (b"a", b"b", b"c")))
    made = erofs.compute_layout(DirectoryManifest("/top", files, links=((3, 1),)), {})
    reader = Reader(made)
    numbers = {name: number for name, number, _ in reader.names(BLOCK * 2, 12 * 5 + 6)}
    assert numbers[b"a"] == numbers[b"c"] != numbers[b"b"]
    assert (reader.inodes, made.numbers) == (3, (1, 2))
    assert made.size == len(made.head) + 4 * BLOCK


@pytest.mark.parametrize("piece", [1, 4095, 4096, 100_000])
def test_erofs_image_written_in_pieces_of_any_size_equals_the_tree(
    node: Node, top: Path, piece: int
) -> None:
    for size in (0, 1, 4095, 4096, 4097, 9000) if piece > 1 else (0, 1, 4097):
        (top / str(size)).write_bytes(os.urandom(size))
    assert differences(node, top, image(node, top, piece=piece)) == ""


def test_process_that_reads_a_users_tree_keeps_its_root_ids_afterwards(
    node: Node, top: Path
) -> None:
    """The stager's main thread reads too, and has to publish as root afterwards."""
    (top / "file").write_bytes(b"x")
    image(node, top)
    (top / "new").touch()
    assert (top / "new").stat().st_uid == 0
