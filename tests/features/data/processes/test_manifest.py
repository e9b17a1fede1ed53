"""What a look at a directory finds: all of it, nothing else, and only what its user may read."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.errors import Declined
from forestage.features.data import manifest, user_threads
from forestage.features.data.manifest import DirectoryManifest, ManifestEntry
from forestage.system import file_systems, mounts
from forestage.system.as_user import User
from forestage.system.files import Statx
from forestage.units import make_printable
from node import ALICE, BOB

MOST = 1000
NAMES = st.binary(min_size=1, max_size=40).filter(
    lambda name: name not in (b".", b"..") and not set(b"/\0") & set(name)
)


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "top"
    made.mkdir()
    # Others than root must get there.
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    yield made
    # pytest's own way of removing things goes down by recursion.
    subprocess.run(["rm", "-rf", made], check=True)


def look(top: Path, user: User, most: int = MOST) -> DirectoryManifest:
    root, path = manifest.open_root(str(top), user)
    try:
        return manifest.scan_directory(root, path, user, most)
    finally:
        os.close(root)


def declined(top: Path, user: User, most: int = MOST) -> str:
    with pytest.raises(Declined) as caught:
        look(top, user, most)
    return caught.value.reason


def paths(found: DirectoryManifest) -> list[bytes]:
    return [one.path for one in found.files]


def give(path: Path, user: User, mode: int) -> None:
    os.chown(path, user.uid, user.gid)
    path.chmod(mode)


def test_directory_scan_lists_all_files_below_in_order(top: Path, me: User) -> None:
    (top / "b/c").mkdir(parents=True)
    (top / "b/c/file").write_bytes(b"12345")
    (top / "a").write_bytes(b"")
    found = look(top, me)
    assert found.path == str(top)
    assert paths(found) == [b"", b"a", b"b", b"b/c", b"b/c/file"]
    assert (found.files[-1].size, found.total_bytes) == (5, 5)
    facts = (top / "b/c/file").stat()
    assert (found.files[-1].inode, found.files[-1].mtime_ns) == (facts.st_ino, facts.st_mtime_ns)


@given(names=st.sets(NAMES, max_size=20))
def test_directory_scan_lists_names_of_any_bytes(
    names: set[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    top = tmp_path_factory.mktemp("names")
    for name in names:
        os.close(os.open(os.fsencode(top) + b"/" + name, os.O_CREAT | os.O_WRONLY))
    found = look(top, User("", os.getuid(), os.getgid()))
    assert paths(found) == sorted({b"", *names})


def test_scan_of_a_directory_with_slow_stats_uses_several_threads(
    top: Path, me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"{number:04}" for number in range(5 * manifest.NAMES_PER_TURN)}
    for name in names:
        (top / name).touch()
    together, alone, met = (
        threading.Barrier(4, timeout=240),
        iter(range(manifest.NAMES_PER_TURN)),
        threading.local(),
    )
    real = manifest._inspect_name

    def waiting(*args: object) -> ManifestEntry:
        if next(alone, None) is not None:  # of the first parts, which one thread has
            time.sleep(0.01)
        elif not hasattr(met, "others"):
            met.others = True
            together.wait()
        return real(*args)  # type: ignore[arg-type]

    # Five parts of one directory, and four threads that wait for one another in them.
    monkeypatch.setattr(user_threads, "MOST", 4)
    monkeypatch.setattr(manifest, "_inspect_name", waiting)
    assert paths(look(top, me)) == sorted({b"", *map(os.fsencode, names)})


def test_directory_scan_records_symbolic_links_without_following(top: Path, me: User) -> None:
    outside = top.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    (top / "folder").symlink_to(outside)
    (top / "file").symlink_to("../outside/file")
    (top / "loop").symlink_to("loop")
    found = look(top, me)
    assert [(one.path, one.link, one.size) for one in found.files[1:]] == [
        (b"file", b"../outside/file", 0),
        (b"folder", os.fsencode(outside), 0),
        (b"loop", b"loop", 0),
    ]


def test_directory_replaced_by_a_link_during_the_scan_is_declined(
    top: Path, me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = top.parent / "outside"
    outside.mkdir()
    (outside / "other").touch()
    (top / "folder").mkdir()
    real = manifest._inspect_name

    def swapped(*args: object) -> ManifestEntry:
        facts = real(*args)  # type: ignore[arg-type]
        if not (top / "folder").is_symlink():
            (top / "folder").rmdir()
            (top / "folder").symlink_to(outside)
        return facts

    monkeypatch.setattr(manifest, "_inspect_name", swapped)
    assert declined(top, me) in ("changed", "bad-path")


def test_file_that_vanishes_during_a_scan_is_declined_as_changed_by_its_name(
    top: Path, me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "folder").mkdir()
    (top / "folder/file").touch()
    real = manifest._inspect_name

    def removed(*args: object) -> ManifestEntry:
        if args[2] == b"file":
            (top / "folder/file").unlink()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(manifest, "_inspect_name", removed)
    with pytest.raises(Declined) as caught:
        look(top, me)
    said = f"{top} changed while it was looked at: folder/file is not there any more"
    assert (caught.value.reason, str(caught.value)) == ("changed", said)


def test_directory_that_vanishes_during_a_scan_is_declined_as_changed_by_its_name(
    top: Path, me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "folder").mkdir()
    real = manifest._inspect_name

    def removed(*args: object) -> ManifestEntry:
        facts = real(*args)  # type: ignore[arg-type]
        (top / "folder").rmdir()
        return facts

    monkeypatch.setattr(manifest, "_inspect_name", removed)
    with pytest.raises(Declined, match="looked at: folder is not there any more") as caught:
        look(top, me)
    assert caught.value.reason == "changed"


def test_scan_of_a_tree_deeper_than_the_longest_path_is_declined(top: Path, me: User) -> None:
    """The kernel takes no path of more than 4096 bytes, so that no deeper tree can be copied."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with pytest.raises(Declined) as caught:
        look(top, me, 10**6)
    assert caught.value.reason == "bad-path"
    # However long the path is, the text that a log or a user is given says why.
    assert make_printable(str(caught.value)).startswith(f"{top}/d/d/")
    assert make_printable(str(caught.value)).endswith("has a name, or a path, that is too long")


def test_directory_scan_with_more_files_than_the_limit_is_declined(top: Path, me: User) -> None:
    for number in range(20):
        (top / str(number)).touch()
    assert len(look(top, me, 21).files) == 21
    assert declined(top, me, 20) == "too-many-files"


def test_directory_scan_stops_listing_once_the_file_limit_is_exceeded(
    top: Path, me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of 10⁷ names is not held in memory first."""
    for number in range(10 * manifest.NAMES_PER_TURN):
        (top / str(number)).touch()
    listed: list[int] = []
    real = manifest._ScanLimits.add_and_check
    monkeypatch.setattr(
        manifest._ScanLimits,
        "add_and_check",
        lambda self, *told: (listed.append(told[0]), real(self, *told)),
    )
    assert declined(top, me, 10) == "too-many-files"
    assert sum(listed) == manifest.NAMES_PER_TURN


@pytest.mark.parametrize("kind", ["names", "links"])
def test_directory_scan_is_declined_if_its_names_take_too_much_memory(
    top: Path, me: User, kind: str
) -> None:
    folder = top
    for _ in range(10):
        folder /= "d" * 200
        folder.mkdir()
        if kind == "links":
            folder = top
            (top / "link").symlink_to("x" * 4000)
            break
    assert len(look(top, me, 100).files) > 1
    assert declined(top, me, 11) == "too-many-files"


@pytest.mark.parametrize("mode", [0o600, 0o044, 0o000])
def test_directory_scan_with_a_file_unreadable_for_the_user_is_declined(
    as_root: None, top: Path, mode: int
) -> None:
    """Whoever owns it has the owner's bits alone, whatever others may."""
    (top / "file").write_bytes(b"x")
    give(top / "file", ALICE if mode == 0o044 else BOB, mode)
    assert declined(top, ALICE) == "no-permission"


@pytest.mark.parametrize("mode", [0o711, 0o744])
def test_directory_scan_with_a_subdirectory_closed_to_the_user_is_declined(
    as_root: None, top: Path, mode: int
) -> None:
    (top / "folder").mkdir(mode=mode)
    (top / "folder").chmod(mode)
    assert declined(top, ALICE) == "no-permission"


def test_declined_scan_lists_all_names_that_cannot_be_copied(as_root: None, top: Path) -> None:
    (top / "a").mkdir()
    os.mkfifo(top / "a/fifo")
    os.mknod(top / "a/socket", 0o140600)
    (top / "lost+found/below").mkdir(parents=True)
    (top / "lost+found").chmod(0o700)
    (top / "secret").touch(mode=0o600)
    (top / "sub").mkdir()
    mounts.mount("tmpfs", str(top / "sub"), 0, "tmpfs")
    try:
        with pytest.raises(Declined) as caught:
            look(top, ALICE)
    finally:
        mounts.umount(str(top / "sub"))
    assert caught.value.reason == "odd-file"
    assert caught.value.what == (
        f"{top} holds 5 names that cannot be copied:"
        " a/fifo is neither a file, a directory nor a link;"
        " a/socket is neither a file, a directory nor a link;"
        " lost+found is not readable by this user;"
        " secret is not readable by this user;"
        " sub is another file system"
    )


def test_declined_scan_gives_the_bad_name_relative_to_the_scanned_directory(
    top: Path, me: User
) -> None:
    (top / "a/b").mkdir(parents=True)
    os.mkfifo(top / "a/b/fifo")
    with pytest.raises(Declined, match="a/b/fifo is neither a file, a directory nor a link") as it:
        look(top, me)
    assert it.value.what.startswith(f"{top}: a/b/fifo ")


def test_declined_scan_counts_all_bad_names_and_lists_ten(top: Path, me: User) -> None:
    folder = top
    for _ in range(3):
        folder /= "d" * 70
        folder.mkdir()
    for number in range(300):
        os.mkfifo(folder / f"{number:03}")
    with pytest.raises(Declined) as caught:
        look(top, me)
    what = caught.value.what
    assert what.startswith(f"{top} holds 300 names that cannot be copied: ")
    assert [f"ddd/{number:03} is neither" in what for number in range(12)] == [True] * 10 + [
        False
    ] * 2
    assert what.endswith("; and 290 more")
    assert len(what) < 10 * 200 + 300


@pytest.mark.parametrize(
    ("acl", "mode", "may"), [("u:4242:-", 0o644, False), ("u:4242:r", 0o600, True)]
)
def test_directory_scan_respects_acls_for_read_access(
    as_root: None, top: Path, acl: str, mode: int, may: bool
) -> None:
    (top / "file").write_bytes(b"x")
    give(top / "file", ALICE, mode)
    subprocess.run(["setfacl", "-m", acl, top / "file"], check=True)
    if may:
        assert paths(look(top, BOB)) == [b"", b"file"]
    else:
        assert declined(top, BOB) == "no-permission"


def test_directory_scan_checks_access_by_opening_files_without_faccessat2(
    as_root: None, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "file").write_bytes(b"x")
    give(top / "file", BOB, 0o604)
    monkeypatch.setattr(manifest, "_SYS_FACCESSAT2", 100_000)  # no such call: ENOSYS
    assert paths(look(top, ALICE)) == [b"", b"file"]
    (top / "file").chmod(0o600)
    assert declined(top, ALICE) == "no-permission"


def test_manifest_digest_changes_with_every_field_of_every_file(top: Path, me: User) -> None:
    (top / "file").write_bytes(b"x")
    (top / "link").symlink_to("a")
    found = look(top, me)
    assert look(top, me).digest == found.digest
    digests = {found.digest}
    for number, one in enumerate(found.files):
        for field in ManifestEntry.__struct_fields__:
            now = getattr(one, field)
            changed = msgspec.structs.replace(
                one, **{field: now + (b"x" if now == b"" else 1 if isinstance(now, int) else b"y")}
            )
            files = (*found.files[:number], changed, *found.files[number + 1 :])
            digests.add(DirectoryManifest(found.path, files).digest)
    assert len(digests) == 1 + len(found.files) * len(ManifestEntry.__struct_fields__)
    assert DirectoryManifest("/other", found.files).digest not in digests


def test_manifest_acls_include_only_files_that_have_an_acl(as_root: None, top: Path) -> None:
    for name in ("with", "without"):
        (top / name).write_bytes(b"x")
    (top / "link").symlink_to("with")
    subprocess.run(["setfacl", "-m", "u:4242:r", top / "with"], check=True)
    root, path = manifest.open_root(str(top), BOB)
    found = manifest.scan_directory(root, path, BOB, MOST)
    acls = manifest.read_acls(root, found, BOB)
    os.close(root)
    assert acls == {b"with": os.getxattr(top / "with", "system.posix_acl_access")}


def test_directory_is_declined_if_its_acls_take_too_much_memory(
    as_root: None, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "file").write_bytes(b"x")
    subprocess.run(["setfacl", "-m", "u:4242:r", top / "file"], check=True)
    monkeypatch.setattr(manifest, "MOST_ACLS", 10)
    root, path = manifest.open_root(str(top), BOB)
    found = manifest.scan_directory(root, path, BOB, MOST)
    with pytest.raises(Declined, match="bytes of ACLs"):
        manifest.read_acls(root, found, BOB)
    os.close(root)


# --- another node's manifest


def sound() -> DirectoryManifest:
    top = ManifestEntry(b"", 0o40755, 1, 1, 0, 5, 5, 10)
    folder = msgspec.structs.replace(top, path=b"a", inode=11)
    file = ManifestEntry(b"a/b", 0o100644, 1, 1, 7, 5, 5, 12)
    link = ManifestEntry(b"a/c", 0o120777, 1, 1, 0, 5, 5, 13, b"b")
    return DirectoryManifest("/lustre/set", (top, folder, file, link))


def test_manifest_of_a_real_scan_passes_the_soundness_check(top: Path, me: User) -> None:
    (top / "a").mkdir()
    (top / "a-b").write_bytes(b"x")
    (top / "a" / "b").write_bytes(b"x")
    (top / "a" / "link").symlink_to("b")
    manifest.check_manifest(look(top, me), {}, 100)
    manifest.check_manifest(sound(), {b"a/b": b"\2\0\0\0" + bytes(8)}, 4)


@pytest.mark.parametrize(
    ("number", "facts"),
    [
        (0, {"path": b"x"}),
        (0, {"mode": 0o100644}),
        (1, {"path": b""}),
        (1, {"mode": 0o100755}),  # then what is in it has no directory
        (2, {"path": b"a/.."}),
        (2, {"path": b"a/."}),
        (2, {"path": b"a//b"}),
        (2, {"path": b"/etc/passwd"}),
        (2, {"path": b"../b"}),
        (2, {"path": b"b/b"}),
        (2, {"path": b"a/b\0"}),
        (2, {"path": b"a/" + b"b" * 256}),
        (2, {"path": b"a/d"}),  # behind what follows
        (2, {"path": b"a/c"}),  # twice
        (2, {"mode": 0o020644}),
        (2, {"mode": 0o100644 + (1 << 16)}),
        (2, {"uid": -1}),
        (2, {"gid": 1 << 32}),
        (2, {"size": -1}),
        (2, {"size": 1 << 63}),
        (2, {"inode": -1}),
        (2, {"mtime_ns": 1 << 63}),
        (2, {"link": b"x"}),
        (3, {"link": b""}),
        (3, {"link": b"x" * 4096}),
        (3, {"link": b"x\0"}),
        (3, {"size": 5}),
    ],
)
def test_manifest_that_no_scan_can_produce_is_declined(
    number: int, facts: dict[str, object]
) -> None:
    files = list(sound().files)
    files[number] = msgspec.structs.replace(files[number], **facts)
    with pytest.raises(Declined) as caught:
        manifest.check_manifest(DirectoryManifest("/lustre/set", tuple(files)), {}, 100)
    assert caught.value.reason == "bad-look"


@pytest.mark.parametrize("sparse", [(-1,), (0,), (2, 2), (3,), (4,), (1 << 70,)])
def test_manifest_with_invalid_numbers_of_sparse_files_is_declined(sparse: tuple[int, ...]) -> None:
    manifest.check_manifest(msgspec.structs.replace(sound(), sparse=(2,)), {}, 100)
    with pytest.raises(Declined, match="holes"):
        manifest.check_manifest(msgspec.structs.replace(sound(), sparse=sparse), {}, 100)


def test_directory_scan_records_sparse_files_without_changing_the_digest(
    top: Path, me: User
) -> None:
    (top / "small").write_bytes(b"x")
    (top / "whole").write_bytes(b"x" * 50_000)
    (top / "sparse").touch()
    os.truncate(top / "sparse", 50_000)
    found = look(top, me)
    assert [found.files[number].path for number in found.sparse] == [b"sparse"]
    assert found.digest == DirectoryManifest(found.path, found.files).digest
    lent = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=DirectoryManifest)
    assert lent == found


# --- hard links


def link(top: Path, *names: str) -> None:
    """Makes a file of these names."""
    (top / names[0]).write_bytes(b"x" * 5000)
    for name in names[1:]:
        (top / name).hardlink_to(top / names[0])


def test_directory_scan_records_hard_links_and_counts_their_bytes_once(top: Path, me: User) -> None:
    (top / "b").mkdir()
    link(top, "c", "a", "b/deep", "../outside")
    link(top, "one", "../other")  # its second name is not in the tree
    (top / "twin").write_bytes(b"x" * 5000)
    found = look(top, me)
    names = {number: one.path for number, one in enumerate(found.files)}
    assert [(names[at], names[first]) for at, first in found.links] == [
        (b"b/deep", b"a"),
        (b"c", b"a"),
    ]
    assert found.total_bytes == 15_000
    assert found.names_by_inode == {1: [1, 3, 4]}
    manifest.check_manifest(found, {}, 100)
    lent = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=DirectoryManifest)
    assert (lent, lent.digest) == (found, found.digest)


def test_manifest_digest_differs_between_hard_links_and_separate_files(top: Path, me: User) -> None:
    link(top, "a", "b")
    found = look(top, me)
    assert found.digest != DirectoryManifest(found.path, found.files).digest


@pytest.mark.parametrize("broken", ["inode number", "handle", "no handle", "its own count"])
def test_names_are_no_hard_links_unless_inode_handle_and_link_count_agree(
    top: Path, me: User, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    link(top, "a", "b")
    assert len(look(top, me).links) == 1
    if broken == "inode number":
        monkeypatch.setattr(file_systems, "is_inode_number_true", lambda _: False)
    elif broken == "handle":
        monkeypatch.setattr(file_systems, "read_file_handle", lambda path, _: path)
    elif broken == "no handle":
        monkeypatch.setattr(file_systems, "read_file_handle", lambda *_: None)
    else:
        real = manifest.read_fresh_stat

        def latest(fd: int, disk: int, name: bytes = b"") -> Statx:
            facts = real(fd, disk, name)
            words = {word: getattr(facts, word) for word in Statx._fields}
            return Statx(**words | {"st_nlink": 1})

        monkeypatch.setattr(manifest, "read_fresh_stat", latest)
    assert look(top, me).links == ()


@pytest.mark.parametrize("field", ["mode", "uid", "gid", "size", "mtime_ns", "ctime_ns", "inode"])
def test_files_that_differ_in_any_stat_field_are_not_recorded_as_hard_links(
    top: Path, me: User, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Whatever their file system says of them, and their handles."""
    link(top, "a", "b", "../outside")
    real = manifest._make_entry
    monkeypatch.setattr(file_systems, "read_file_handle", lambda *_: b"one")
    assert len(look(top, me).links) == 1

    def other(path: bytes, *facts: Any) -> ManifestEntry:
        file = real(path, *facts)
        change = {field: getattr(file, field) + 1} if path == b"b" else {}
        return msgspec.structs.replace(file, **change)

    monkeypatch.setattr(manifest, "_make_entry", other)
    assert look(top, me).links == ()


def twins() -> DirectoryManifest:
    """A sound manifest, in which b is a further name of a/b."""
    found = sound()
    further = msgspec.structs.replace(found.files[2], path=b"b")
    return DirectoryManifest("/lustre/set", (*found.files, further), links=((4, 2),))


@pytest.mark.parametrize(
    "links",
    [
        ((4, 3),),
        ((4, 1),),
        ((4, 4),),
        ((2, 4),),
        ((4, -1),),
        ((5, 2),),
        ((-1, 2),),
        ((4, 2), (4, 2)),
        ((1, 0),),
        ((1 << 70, 2),),
    ],
)
def test_manifest_with_impossible_hard_link_pairs_is_declined(
    links: tuple[tuple[int, int], ...],
) -> None:
    manifest.check_manifest(twins(), {}, 100)
    with pytest.raises(Declined, match="names of one file"):
        manifest.check_manifest(msgspec.structs.replace(twins(), links=links), {}, 100)


@pytest.mark.parametrize(
    "facts", [{"mode": 0o100600}, {"uid": 2}, {"inode": 9}, {"size": 8}, {"ctime_ns": 6}]
)
def test_manifest_with_a_hard_link_pair_of_different_files_is_declined(
    facts: dict[str, int],
) -> None:
    found = twins()
    other = msgspec.structs.replace(found.files[4], **facts)
    changed = msgspec.structs.replace(found, files=(*found.files[:4], other))
    with pytest.raises(Declined, match="names of one file"):
        manifest.check_manifest(changed, {}, 100)
    acl = b"\2\0\0\0" + bytes(8)
    manifest.check_manifest(found, {b"a/b": acl, b"b": acl}, 100)
    with pytest.raises(Declined, match="names of one file"):
        manifest.check_manifest(found, {b"a/b": acl}, 100)


@pytest.mark.parametrize(
    ("path", "acl"),
    [
        (b"none", b"\2\0\0\0" + bytes(8)),
        (b"a/c", b"\2\0\0\0" + bytes(8)),
        (b"a/b", b""),
        (b"a/b", b"\2\0\0\0"),
        (b"a/b", b"\1\0\0\0" + bytes(8)),
        (b"a/b", b"\2\0\0\0" + bytes(7)),
        (b"a/b", b"\2\0\0\0" + bytes(1 << 16)),
    ],
)
def test_manifest_with_an_invalid_acl_is_declined(path: bytes, acl: bytes) -> None:
    with pytest.raises(Declined, match="an ACL"):
        manifest.check_manifest(sound(), {path: acl}, 100)


def test_manifest_of_too_many_files_is_declined() -> None:
    with pytest.raises(Declined, match="too many"):
        manifest.check_manifest(sound(), {}, 3)
    with pytest.raises(Declined, match="too many"):
        manifest.check_manifest(DirectoryManifest("/lustre/set", ()), {}, 3)


def test_manifest_sample_holds_the_top_directory_and_randomly_drawn_files(
    top: Path, me: User
) -> None:
    for number in range(10 * manifest.SAMPLE):
        (top / str(number)).touch()
    found = look(top, me)
    drawn = [frozenset(one.path for one in manifest.sample_files(found)) for _ in range(2)]
    assert all(len(one) == 1 + manifest.SAMPLE and b"" in one for one in drawn)
    assert drawn[0] != drawn[1]
