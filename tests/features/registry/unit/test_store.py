"""A user's directory in the store, and what may lie there."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.clock import Clock
from forestage.errors import Declined
from forestage.features.registry import store as module
from forestage.features.registry import store_age
from forestage.features.registry.image_import import SHARED_FAILURE_REASONS
from forestage.features.registry.store import ImageRecord, ImageStore
from forestage.features.registry.store_age import StoreCollection
from forestage.features.registry.store_commands import STEP_IMPORT_REASONS
from forestage.features.registry.store_files import find_own_record, try_create_file
from forestage.system import mounts, records

NAME = "ab" * 32 + "-x86_64-0123456789abcdef"
OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
RECORD = ImageRecord("here#image:v1", OLD, 1.0, 0, "n1")


@pytest.fixture(scope="module")
def squashfs(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "file").write_bytes(os.urandom(50_000))
    image = folder.with_name("image.sqsh")
    argv = ["mksquashfs", folder, image, "-quiet", "-no-progress"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return image.read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path, Clock())


def test_published_store_image_is_found_and_its_record_touched(
    store: ImageStore, squashfs: bytes
) -> None:
    part = store.new_part_path(NAME)
    part.write_bytes(squashfs)
    path = store.publish_image(NAME, part, RECORD, None)
    noted = path.with_suffix(".json")
    os.utime(noted, (1, 1))
    assert store.find_image(NAME) == path
    assert noted.stat().st_mtime > 1
    assert find_own_record(noted, ImageRecord) == ImageRecord(
        "here#image:v1", OLD, 1.0, len(squashfs), "n1"
    )
    assert {one.suffix for one in store.folder.iterdir()} == {".sqsh", ".json"}


@pytest.mark.parametrize(
    ("cut", "most", "reason"),
    [(0, None, "import-failed"), (-1, None, "import-failed"), (None, 4096, "too-large")],
)
def test_incomplete_or_too_large_part_is_not_published_in_the_store(
    store: ImageStore, squashfs: bytes, cut: int | None, most: int | None, reason: str
) -> None:
    part = store.new_part_path(NAME)
    # mksquashfs pads its files to 4 KiB, beyond what the superblock counts.
    used = int.from_bytes(squashfs[40:48], "little")
    part.write_bytes(squashfs if cut is None else squashfs[: used + cut] if cut else b"text")
    with pytest.raises(Declined) as declined:
        store.publish_image(NAME, part, RECORD, most)
    assert declined.value.reason == reason
    assert list(store.folder.iterdir()) == []


def test_part_deleted_before_publishing_is_declined_with_a_reason_for_another_import(
    store: ImageStore,
) -> None:
    """The sweep does so where a user has too much on a node: their step begins all the same."""
    with pytest.raises(Declined, match="deleted while it was written") as declined:
        store.publish_image(NAME, store.new_part_path(NAME), RECORD, None)
    assert declined.value.reason in STEP_IMPORT_REASONS
    assert declined.value.reason not in SHARED_FAILURE_REASONS


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_or_quota_error_is_declined_as_store_full(store: ImageStore, code: int) -> None:
    with pytest.raises(Declined) as declined, module.convert_store_errors(store.folder):
        raise OSError(code, os.strerror(code))
    assert declined.value.reason == "store-full"


def test_first_digest_recorded_for_a_job_is_kept(store: ImageStore) -> None:
    assert store.find_job_digest("12", "here#image:v1") is None
    assert store.agree_on_job_digest("12", "here#image:v1", OLD) == OLD
    assert store.agree_on_job_digest("12", "here#image:v1", NEW) == OLD
    assert store.agree_on_job_digest("12", "here#other:v1", NEW) == NEW
    assert store.agree_on_job_digest("13", "here#image:v1", NEW) == NEW


def unused(store: ImageStore, seconds: float) -> None:
    """Nothing there was touched for so long, as the nodes' collections have counted."""
    files = [(str(one.relative_to(store.folder)), one.stat().st_mtime_ns)
             for one in store.folder.rglob("*.json")]  # fmt: skip
    known = store_age.make_next_collection(StoreCollection(), files, 0.0, "one")
    known = store_age.make_next_collection(known, files, seconds, "two")
    (store.folder / "collected-7").write_bytes(msgspec.json.encode(known))


def test_digest_record_of_an_old_job_with_the_same_number_is_ignored(store: ImageStore) -> None:
    store.agree_on_job_digest("12", "here#image:v1", OLD)
    (path,) = (store.folder / "jobs").iterdir()
    unused(store, module.RECORD_LASTS - 60)
    before = path.stat().st_mtime_ns
    assert store.find_job_digest("12", "here#image:v1") == OLD
    assert path.stat().st_mtime_ns > before, "it is used, and so is not old"
    unused(store, module.RECORD_LASTS + 60)
    assert store.find_job_digest("12", "here#image:v1") is None
    assert store.agree_on_job_digest("12", "here#image:v1", NEW) == NEW
    assert store.find_job_digest("12", "here#image:v1") == NEW


@pytest.mark.parametrize("step", [-40 * 86400.0, -3600.0, 3600.0, 40 * 86400.0])
def test_digest_record_of_a_running_job_is_used_whatever_its_mtime(
    store: ImageStore, step: float
) -> None:
    """A node of the job is ahead, or behind, and both have one image."""
    store.agree_on_job_digest("12", "here#image:v1", OLD)
    (path,) = (store.folder / "jobs").iterdir()
    there = path.stat().st_mtime
    os.utime(path, (there + step, there + step))
    assert store.find_job_digest("12", "here#image:v1") == OLD
    assert store.agree_on_job_digest("12", "here#image:v1", NEW) == OLD


def test_digest_record_ages_by_the_file_servers_clock_if_the_server_sets_the_times(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind,) = {
        one.kind
        for one in [mounts.find_mount_of_path(mounts.list_mounts(), str(store.folder))]
        if one
    }
    monkeypatch.setattr(mounts, "SERVER_SETS_TIMES", frozenset((kind,)))
    store.agree_on_job_digest("12", "here#image:v1", OLD)
    (path,) = (store.folder / "jobs").iterdir()
    there = path.stat().st_mtime
    os.utime(path, (there - module.RECORD_LASTS + 60, there - module.RECORD_LASTS + 60))
    assert store.find_job_digest("12", "here#image:v1") == OLD
    os.utime(path, (there - module.RECORD_LASTS - 60, there - module.RECORD_LASTS - 60))
    assert store.find_job_digest("12", "here#image:v1") is None
    assert store.agree_on_job_digest("12", "here#image:v1", NEW) == NEW
    assert [one.name for one in store.folder.iterdir()] == ["jobs"], "no file is left of asking"


def test_digest_record_with_an_invalid_digest_is_ignored(store: ImageStore) -> None:
    store.agree_on_job_digest("12", "here#image:v1", OLD)
    (path,) = (store.folder / "jobs").iterdir()
    path.write_text('{"reference":"here#image:v1","digest":"../../x","date":1}')
    assert store.find_job_digest("12", "here#image:v1") is None


@pytest.mark.parametrize("job", ["../../x", "a/b", "", ".", "\0", "x" * 500])
def test_digest_record_of_an_odd_job_id_stays_in_the_jobs_folder(
    store: ImageStore, job: str
) -> None:
    store.agree_on_job_digest(job, "here#image:v1", OLD)
    assert store.find_job_digest(job, "here#image:v1") == OLD
    assert [path.parent for path in store.folder.rglob("*.json")] == [store.folder / "jobs"]


def test_link_in_place_of_a_store_folder_is_not_followed(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("jobs", "tags"):
        (store.folder / name).symlink_to(tmp_path / "elsewhere")
    assert store.agree_on_job_digest("12", "here#image:v1", OLD) == OLD
    store.record_last_digest("here#image:v1", OLD)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_last_digest_of_a_tag_is_the_most_recently_stored(store: ImageStore) -> None:
    assert store.find_last_digest("here#image:v1") == ""
    store.record_last_digest("here#image:v1", OLD)
    store.record_last_digest("here#image:v1", NEW)
    assert store.find_last_digest("here#image:v1") == NEW


def test_second_create_of_a_store_file_fails_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert try_create_file(path, b"first")
    assert not try_create_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
@pytest.mark.parametrize("renames", [True, False])
def test_store_file_is_created_exclusively_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, renames: bool
) -> None:
    monkeypatch.setattr(os, "link", refuses(code))
    if not renames:
        monkeypatch.setattr(records, "rename_no_replace", refuses(errno.EINVAL))
    assert try_create_file(tmp_path / "file", b"first")
    assert not try_create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def refuses(code: int) -> Callable[..., None]:
    def refusing(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refusing


class Meanwhile(Clock):
    """Nobody really sleeps; something happens instead."""

    def __init__(self, happens: Callable[[], object] = lambda: None) -> None:
        self.happens, self.now = happens, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.happens()


@pytest.mark.parametrize("ends", [True, False])
def test_half_written_digest_record_is_waited_for_and_then_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Without hard links and renames a record is there before it is whole; its writer may die."""
    monkeypatch.setattr(os, "link", refuses(errno.EPERM))
    monkeypatch.setattr(records, "rename_no_replace", refuses(errno.EINVAL))
    clock = Meanwhile()
    store = ImageStore(tmp_path, clock)
    assert store.agree_on_job_digest("12", "here#image:v1", OLD) == OLD
    (path,) = (store.folder / "jobs").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:9])
    if ends:
        clock.happens = lambda: path.write_bytes(whole)
    assert store.agree_on_job_digest("12", "here#image:v1", NEW) == (OLD if ends else NEW)
    assert clock.now <= module.WRITE_TIMEOUT + 1


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "large", "nested", "bytes"])
def test_invalid_store_record_is_read_as_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "record.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "real").write_text('{"reference":"","digest":"","date":1,"size":1,"host":""}')
        path.symlink_to(tmp_path / "real")
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes({"large": b" " * 100_000, "nested": b"[" * 5000, "bytes": b"\xff"}[kind])
    assert find_own_record(path, ImageRecord) is None
