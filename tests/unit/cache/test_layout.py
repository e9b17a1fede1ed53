"""The cache on disk: a crash at any step leaves no half entry, and nothing that blocks the next."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.cache import known_disks
from forestage.cache import layout as module
from forestage.cache.layout import Cache, Entry, StoredEntry, tree_bytes
from forestage.cache.part import PartRecord, boot_id
from forestage.cache.source_image import AccessRights, SourceImage
from forestage.errors import Failed
from forestage.system import file_systems, lock, mounts
from forestage.system.mounts import MountInfo

Publish = Callable[[SourceImage], Entry]
Make = Callable[..., SourceImage]


def test_constructing_a_cache_object_creates_no_files(tmp_path: Path) -> None:
    Cache(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_prepare_creates_the_cache_layout_readable_by_root_only(tmp_path: Path) -> None:
    made = Cache(tmp_path / "disk/cache")
    made.prepare(require_mount=False)
    made.prepare(require_mount=False)
    assert sorted(path.name for path in made.root.iterdir()) == [
        "CACHEDIR.TAG",
        "entries",
        "evicted",
        "format",
        "locks",
        "parts",
    ]
    assert made.root.stat().st_mode & 0o7777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in made.root.rglob("*"))
    tag = (made.root / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_interrupted_prepare_is_finished_by_the_next_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Cache(tmp_path / "cache")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.records, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            made.prepare(require_mount=False)
    assert not (made.root / "format").exists()
    made.prepare(require_mount=False)
    assert (made.root / "format").read_text() == module.FORMAT


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702, 0o710, 0o777])
def test_cache_root_accessible_to_group_or_other_users_is_refused(
    tmp_path: Path, mode: int
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(Failed) as caught:
        Cache(root).prepare(require_mount=False)
    assert caught.value.reason == "cache-not-ours"
    assert list(root.iterdir()) == []


def test_cache_root_owned_by_another_user_is_refused(tmp_path: Path, as_root: None) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    os.chown(root, 65534, 65534)
    with pytest.raises(Failed, match="not a directory of root's"):
        Cache(root).prepare(require_mount=False)


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_cache_root_that_is_a_symlink_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(target)
    with pytest.raises(Failed, match="not a directory of root's"):
        Cache(tmp_path / "cache").prepare(require_mount=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("text", ["2\n", "", "1", "garbage"])
def test_cache_of_another_format_is_refused_and_left_unchanged(tmp_path: Path, text: str) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    (root / "format").write_text(text)
    with pytest.raises(Failed) as caught:
        Cache(root).prepare(require_mount=False)
    assert caught.value.reason == "cache-format"
    assert [path.name for path in root.iterdir()] == ["format"]


def test_cache_on_the_root_file_system_is_used_only_if_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = MountInfo(1, 0, "0:1", "/", "/")
    disk = MountInfo(2, 1, "0:2", "/", str(tmp_path))
    made = Cache(tmp_path / "cache")
    for table in ([], [root]):
        monkeypatch.setattr(mounts, "list_mounts", lambda table=table: table)
        with pytest.raises(Failed) as caught:
            made.prepare(require_mount=True)
        assert caught.value.reason == "cache-not-mounted"
    assert list(tmp_path.iterdir()) == []
    made.prepare(require_mount=False)
    monkeypatch.setattr(mounts, "list_mounts", lambda: [root, disk])
    made.prepare(require_mount=True)


@pytest.mark.parametrize(
    ("identity", "top", "is_used"),
    [("ext4 1", 1, True), ("ext4 2", 1, False), ("ext4 1", 2, False)],
    ids=["remembered", "another", "that of the root"],
)
def test_file_system_that_is_remembered_is_used_without_the_mount_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    identity: str,
    top: int,
    is_used: bool,
) -> None:
    made = Cache(tmp_path / "cache", known_disks=tmp_path / "caches.json")
    made.root.mkdir()
    disk = known_disks.CacheLocation(made.real_root, str(tmp_path), "ext4 1")
    known_disks.remember_disk(tmp_path / "caches.json", disk)
    monkeypatch.setattr(file_systems, "read_identity", lambda _root, _kind: identity)
    fd_path = "/proc/self/fd/{}".format
    ids = {"/": top}
    monkeypatch.setattr(mounts, "read_mount_id", lambda fd: ids.get(os.readlink(fd_path(fd)), 2))
    monkeypatch.setattr(mounts, "list_mounts", lambda: [MountInfo(1, 0, "0:1", "/", "/")])
    refused = pytest.raises(Failed, match="on the root file system")
    with contextlib.nullcontext() if is_used else refused:
        made.check_on_its_disk(require_mount=True)


def test_published_entry_is_found_by_its_source_image(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    wanted = make_image()
    assert cache.find_entry(wanted) is None
    entry = publish(wanted)
    assert cache.find_entry(wanted) == cache.find_entry_by_key(wanted.key) == entry
    assert sorted(os.listdir(cache.entry_dir(wanted.key))) == [
        "boot",
        "entry.json",
        "image",
        "used",
    ]
    assert list(cache.parts.iterdir()) == []


def test_publish_fails_on_a_fifo_in_the_part_without_hanging(
    cache: Cache, publish: Publish, make_image: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module.records.write

    def beside(path: Path, data: bytes) -> None:
        write(path, data)
        if path.name == "used":
            os.mkfifo(path.with_name("boot"))

    monkeypatch.setattr(module.records, "write", beside)
    with pytest.raises(OSError, match="boot"):
        publish(make_image())
    assert list(cache.entries.iterdir()) == []


def test_entry_is_not_found_for_a_source_with_other_mtime_or_rights(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    wanted = make_image()
    publish(wanted)
    assert cache.find_entry(make_image(mtime_ns=11)) is None
    for access in (
        AccessRights(1, 0, 0o644),
        AccessRights(0, 0, 0o640),
        AccessRights(0, 0, 0o644, b"acl"),
    ):
        assert cache.find_entry(SourceImage(wanted.identity, access)) is None


def _remove_record(entry: Path) -> None:
    (entry / "entry.json").unlink()


def _cut_record(entry: Path) -> None:
    os.truncate(entry / "entry.json", 20)


def _spoil_record(entry: Path) -> None:
    (entry / "entry.json").write_bytes(b"\xff\xfe")


def _empty_record(entry: Path) -> None:
    (entry / "entry.json").write_bytes(b"")


def _remove_image(entry: Path) -> None:
    (entry / "image").unlink()


def _cut_image(entry: Path) -> None:
    os.truncate(entry / "image", 1)


def _foreign_record(entry: Path) -> None:
    record = msgspec.json.decode((entry / "entry.json").read_bytes())
    (entry / "entry.json").write_bytes(msgspec.json.encode({**record, "key": "other"}))


@pytest.mark.parametrize(
    "damage",
    [
        _remove_record,
        _cut_record,
        _spoil_record,
        _empty_record,
        _remove_image,
        _cut_image,
        _foreign_record,
    ],
)
def test_damaged_entry_is_not_found_but_listed_and_replaced_by_publish(
    cache: Cache, publish: Publish, make_image: Make, damage: Callable[[Path], None]
) -> None:
    wanted = make_image()
    publish(wanted)
    damage(cache.entry_dir(wanted.key))
    assert cache.find_entry(wanted) is None
    (one,) = cache.list_entries()
    assert (one.key, one.entry) == (wanted.key, None)
    entry = publish(wanted)
    assert cache.find_entry(wanted) == entry


def test_stray_directory_among_the_entries_is_listed_as_an_entry(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    publish(make_image())
    (cache.entries / "empty").mkdir()
    assert {one.key for one in cache.list_entries()} == {make_image().key, "empty"}


def test_publish_syncs_image_map_and_part_before_the_entries_directory(
    cache: Cache, publish: Publish, make_image: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    key = make_image().key
    (cache.parts / key).mkdir()
    cache.part(key).map.write_bytes(b"digests")
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    monkeypatch.setattr(os, "fsync", noting)
    publish(make_image())
    part = cache.part(key)
    order = list(map(str, (part.image, part.map, part.directory, cache.entries)))
    assert [path for path in synced if path in order][-4:] == order


def test_last_use_of_an_entry_is_recorded_and_a_missing_record_is_no_damage(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    wanted = make_image()
    publish(wanted)
    cache.record_use(wanted.key, 1234.0)
    assert cache.list_entries()[0].used == 1234.0
    (cache.entry_dir(wanted.key) / "used").unlink()
    assert cache.list_entries()[0].entry is not None


def test_entry_is_pinned_by_a_file_in_its_directory(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    publish(make_image())
    assert not cache.list_entries()[0].pinned
    (cache.entry_dir(make_image().key) / "pinned").touch()
    assert cache.list_entries()[0].pinned


def test_key_can_be_evicted_again_while_its_earlier_entry_is_being_deleted(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    key = make_image().key
    for _ in range(3):
        publish(make_image())
        cache.evict_entry(key)
    cache.evict_entry(key)
    assert sorted(path.name for path in cache.evicted.iterdir()) == [f"{key}.{n}" for n in range(3)]


def test_evict_fails_without_an_endless_loop_if_the_entry_cannot_be_renamed(
    cache: Cache, publish: Publish, make_image: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(make_image())

    def full(*_: object) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(Failed) as caught:
        cache.evict_entry(make_image().key)
    assert caught.value.reason == "evicted-stays"


def test_stager_is_reported_only_while_its_key_lock_is_held_and_its_part_record_is_newer(
    cache: Cache, make_image: Make
) -> None:
    wanted = make_image()
    owner = PartRecord(1, boot_id(), wanted, chunk=4, engine="chunks", job=7, since=1.0)
    assert cache.find_stager(wanted.key) is None
    cache.part(wanted.key).write_record(owner)
    assert cache.find_stager(wanted.key) is None, "nobody has ever had the lock"
    with lock.held(cache.key_lock(wanted.key), 0):
        later = cache.part(wanted.key).record.stat().st_mtime_ns + 1
        os.utime(cache.key_lock(wanted.key), ns=(later, later))
        assert cache.find_stager(wanted.key) is None, "it is another's record, who was killed"
        os.utime(cache.part(wanted.key).record, ns=(later, later))
        assert cache.find_stager(wanted.key) == owner
        cache.part(wanted.key).write_record(msgspec.structs.replace(owner, boot="older"))
        assert cache.find_stager(wanted.key) is None
        cache.part(wanted.key).write_record(owner)
        assert cache.find_stager(wanted.key) == owner
    assert cache.find_stager(wanted.key) is None


def test_tree_bytes_counts_allocated_not_apparent_size(tmp_path: Path) -> None:
    with (tmp_path / "image").open("wb") as file:
        file.truncate(1 << 30)
    assert tree_bytes(tmp_path) < 1 << 20
    fd = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 1 << 20)
    os.close(fd)
    assert tree_bytes(tmp_path) >= 1 << 20


def test_entry_records_its_only_user_until_there_is_a_second_user(
    cache: Cache, make_image: Make
) -> None:
    wanted = make_image()
    cache.part_dir(wanted.key).mkdir()
    cache.part(wanted.key).image.write_bytes(b"x" * wanted.size)
    cache.publish(Entry(wanted.key, wanted.identity, wanted.access, 1.0, "rsync"), user=7)
    users = []
    for user in (None, 7, 8, 7):
        cache.record_use(wanted.key, 5.0, user)
        users += [one.user for one in cache.list_entries()]
    assert users == [7, 7, None, None]
    assert cache.list_entries()[0].used == 5.0


@pytest.mark.parametrize("text", [b"", b"many", b"\xff", b"7" * 5000])
def test_entry_with_a_damaged_user_record_counts_for_no_user(
    cache: Cache, publish: Publish, make_image: Make, text: bytes
) -> None:
    key = publish(make_image()).key
    (cache.entry_dir(key) / "used").write_bytes(text)
    assert cache.list_entries()[0].user is None


@pytest.mark.parametrize(
    ("expected", "used", "unused"),
    [(9.0, 500.0, True), (9.0, 0.0, True), (9.0, 501.0, False), (0.0, 500.0, False)],
    ids=["as made", "expected no more", "used", "of a job"],
)
def test_entry_copied_for_a_pending_job_is_unused_until_its_time_of_use_changes(
    expected: float, used: float, unused: bool, make_image: Make
) -> None:
    made = make_image()
    entry = Entry(made.key, made.identity, made.access, 500.0, "chunks", expected=expected)
    assert StoredEntry(made.key, 1, used, False, entry).is_unused is unused
    assert not StoredEntry(made.key, 1, used, False, None).is_unused


@pytest.mark.parametrize(
    ("step", "goes"), [(-40 * 86400.0, True), (40 * 86400.0, True), (60.0, False)]
)
def test_unfinished_files_are_dropped_if_their_age_is_large_in_either_direction(
    cache: Cache, step: float, goes: bool
) -> None:
    cache.root.mkdir(parents=True, exist_ok=True)
    left = cache.root / ".version.0123"
    left.touch()
    cache.drop_unfinished(left.stat().st_mtime + step)
    assert left.exists() is not goes
