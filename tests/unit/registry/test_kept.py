"""What a node imports for itself: whose it is, when it counts, and when the file goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.cache.image import Image
from forestage.cache.layout import Cache
from forestage.errors import Failed
from forestage.registry import kept
from forestage.registry.kept import NAME_BYTES, RECENT, RECORDS, UNUSED, Found
from forestage.system.as_user import User

NAME = f"{'a' * 64}-amd64-0123456789abcdef"
NOW = 1_000_000_000.0
Publish = Callable[[Image], object]
Make = Callable[..., Image]


@pytest.fixture
def user(me: User) -> User:
    return me


@pytest.fixture
def file(cache: Cache, user: User) -> Path:
    """What the worker has imported."""
    imported = kept.prepare(cache, user) / str(user.uid) / f"{NAME}.sqsh"
    imported.write_bytes(b"x" * 5)
    return imported


@pytest.fixture
def image(make_image: Make, file: Path, user: User) -> Image:
    found = make_image(path=str(file))
    access = msgspec.structs.replace(found.access, uid=user.uid)
    return msgspec.structs.replace(found, access=access)


def test_directory_is_beside_the_cache_and_each_users_own(cache: Cache, user: User) -> None:
    above = kept.prepare(cache, user)
    own = (above / str(user.uid)).stat()
    assert above.parent == cache.root.parent
    assert above.stat().st_mode & 0o777 == 0o711
    assert (own.st_mode & 0o777, own.st_uid) == (0o700, user.uid)


@pytest.mark.parametrize("what", ["link", "open"])
def test_directory_that_others_may_change_is_not_used(
    cache: Cache, user: User, tmp_path: Path, what: str
) -> None:
    above = kept.directory(cache)
    if what == "link":
        above.symlink_to(tmp_path)
    else:
        above.mkdir()
        above.chmod(0o777)
    with pytest.raises(Failed, match="not a directory of root's"):
        kept.prepare(cache, user)


def test_name_stands_for_the_entry_that_was_made_of_it(
    cache: Cache, user: User, image: Image, publish: Publish
) -> None:
    assert kept.find(cache, user, NAME) is None
    kept.note(cache, user, NAME, image)
    assert kept.find(cache, user, NAME) is None  # not yet copied
    publish(image)
    assert kept.find(cache, user, NAME) == image


def test_name_of_another_user_stands_for_nothing(
    cache: Cache, user: User, image: Image, publish: Publish
) -> None:
    kept.note(cache, user, NAME, image)
    publish(image)
    other = msgspec.structs.replace(user, uid=user.uid + 1)
    assert kept.find(cache, other, NAME) is None


def test_entry_that_is_not_proven_since_the_boot_does_not_count(
    cache: Cache, user: User, image: Image, publish: Publish
) -> None:
    kept.note(cache, user, NAME, image)
    publish(image)
    (cache.entry_dir(image.key) / "boot").write_text("another boot")
    assert kept.find(cache, user, NAME) is None


@pytest.mark.parametrize("path", ["e/etc/victim", "other.sqsh", "../x/{name}.sqsh", "/etc/victim"])
def test_path_that_is_not_the_names_own_is_never_noted(
    cache: Cache, user: User, image: Image, file: Path, path: str
) -> None:
    """A worker names what its user likes, and a link may lie at the name."""
    lies = str(file.parent / path.format(name=NAME))
    identity = msgspec.structs.replace(image.identity, path=lies)
    kept.note(cache, user, NAME, msgspec.structs.replace(image, identity=identity))
    assert not (cache.root / "imported").exists()


def test_file_of_another_user_is_never_noted(cache: Cache, user: User, image: Image) -> None:
    access = msgspec.structs.replace(image.access, uid=user.uid + 1)
    kept.note(cache, user, NAME, msgspec.structs.replace(image, access=access))
    assert not (cache.root / "imported").exists()


def test_record_cannot_have_a_file_elsewhere_deleted(
    cache: Cache, user: User, image: Image, file: Path, publish: Publish, tmp_path: Path
) -> None:
    """Whatever a record says: only its own name counts."""
    victim = tmp_path / "victim"
    victim.write_text("x")
    kept.note(cache, user, NAME, image)
    identity = msgspec.structs.replace(image.identity, path=str(victim))
    lying = msgspec.structs.replace(image, identity=identity)
    record = cache.root / "imported" / f"{user.uid}-{NAME}.json"
    record.write_bytes(msgspec.json.encode(lying))
    publish(lying)
    kept.tidy(cache)
    assert victim.exists()
    assert not file.exists()


def test_own_directory_that_was_swapped_leads_nowhere(
    cache: Cache, user: User, image: Image, file: Path, publish: Publish, tmp_path: Path
) -> None:
    kept.note(cache, user, NAME, image)
    publish(image)
    elsewhere = tmp_path / "elsewhere"
    file.parent.rename(elsewhere)
    file.parent.symlink_to(elsewhere)
    kept.tidy(cache)
    assert (elsewhere / file.name).exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff" * 9])
def test_damaged_record_counts_as_none(
    cache: Cache, user: User, image: Image, damage: bytes
) -> None:
    kept.note(cache, user, NAME, image)
    (cache.root / "imported" / f"{user.uid}-{NAME}.json").write_bytes(damage)
    assert kept.find(cache, user, NAME) is None
    kept.tidy(cache)


def test_file_goes_once_its_entry_is_there(
    cache: Cache, user: User, image: Image, file: Path, publish: Publish
) -> None:
    kept.note(cache, user, NAME, image)
    kept.tidy(cache)
    assert file.exists()
    publish(image)
    kept.tidy(cache)
    assert not file.exists()
    assert kept.find(cache, user, NAME) == image


def test_record_goes_once_file_and_entry_have_gone(
    cache: Cache, user: User, image: Image, file: Path
) -> None:
    kept.note(cache, user, NAME, image)
    file.unlink()
    kept.tidy(cache)
    assert list((cache.root / "imported").iterdir()) == []


def test_what_a_user_puts_in_the_place_of_their_file_leads_nowhere(
    cache: Cache, user: User, image: Image, file: Path, publish: Publish, tmp_path: Path
) -> None:
    kept.note(cache, user, NAME, image)
    publish(image)
    victim = tmp_path / "victim"
    victim.write_text("x")
    file.unlink()
    file.symlink_to(victim)
    kept.tidy(cache)
    assert victim.exists()
    assert not file.is_symlink()


def found(path: str, age: float, size: int = 100, is_folder: bool = False) -> Found:
    return Found(path, size, NOW - age, is_folder)


def test_of_imports_what_is_old_goes_whatever_it_is() -> None:
    files = [found("a.sqsh", UNUSED + 1), found("notes", UNUSED + 1), found("b.sqsh", UNUSED - 1)]
    assert [one.path for one in kept.going(files, 1000, NOW)] == ["a.sqsh", "notes"]
    records = [found("jobs/a", RECORDS + 1), found("tags/b", RECORDS - 1)]
    assert [one.path for one in kept.going(records, 1000, NOW)] == ["jobs/a"]


def test_of_too_many_imports_what_changed_longest_ago_goes_and_records_count() -> None:
    files = [found("a.sqsh", 30), found("b.part", 1), found("jobs/c", 20), found("d", 40)]
    assert [one.path for one in kept.going(files, 400, NOW)] == []
    assert [one.path for one in kept.going(files, 399, NOW)] == ["d"]
    assert [one.path for one in kept.going(files, 100, NOW)] == ["d", "a.sqsh", "jobs/c"]
    assert [one.path for one in kept.going(files, 0, NOW)] == ["d", "a.sqsh", "jobs/c"]
    assert len(kept.going(files, 0, NOW + RECENT)) == 4


@pytest.mark.parametrize("name", ["a.0123456789abcdef.part", "a.sqsh"])
def test_import_that_goes_on_stays_though_it_is_larger_than_a_users_share(name: str) -> None:
    """Its step would fail, which pyxis alone would have started."""
    of_it = [found("a.lease.1", 5), found("a.large", 5, size=1 << 20)]
    files = [found("old.part", 20), *of_it, found(name, 1, size=9000), found("c", 0)]
    assert [one.path for one in kept.going(files, 1000, NOW)] == ["old.part", "a.large", "c"]


def test_where_not_all_names_were_looked_at_all_are_too_much(
    cache: Cache, own: Path, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LOOKED", 20)
    for number in range(50):
        (own / f"{number}").touch()
        os.chown(own / f"{number}", user.uid, user.gid)
    for _ in range(3):
        assert kept.bound(cache, 1 << 40, time.time() + RECENT) == []
    assert len(list(own.iterdir())) < 20


def test_folder_that_no_worker_makes_goes_at_once() -> None:
    files = [found("mine", 0, is_folder=True), found("jobs/mine", 0, is_folder=True)]
    assert len(kept.going(files, 1000, NOW)) == 2


@pytest.fixture
def own(file: Path) -> Path:
    return file.parent


def test_imports_are_bounded_by_size_and_by_age(cache: Cache, own: Path, file: Path) -> None:
    now = time.time()
    other = own / "by hand"
    other.write_bytes(b"x" * 20_000)
    os.utime(other, (now + 9 * UNUSED, now + 9 * UNUSED))  # its user says what they like
    assert kept.bound(cache, 1 << 20, now) == []
    assert other.exists()
    assert kept.bound(cache, NAME_BYTES, now + RECENT) == []
    assert not file.exists()
    other.write_bytes(b"x")
    os.utime(other, (now + 9 * UNUSED, now + 9 * UNUSED))
    assert kept.bound(cache, 1 << 20, now + UNUSED - 60) == []
    assert other.exists()
    assert kept.bound(cache, 1 << 20, now + UNUSED + 60) == []
    assert not other.exists()


def test_folder_of_any_depth_closed_to_its_user_goes_and_no_link_is_followed(
    cache: Cache, user: User, own: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    os.chown(outside, user.uid, user.gid)
    (outside / "victim").touch()
    here = os.open(own, os.O_RDONLY)
    for _ in range(3000):  # no path could name the last of them
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.symlink(outside, "link", dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (own / "closed").mkdir()
    (own / "closed/file").touch()
    (own / "closed").chmod(0)
    for name in ("jobs", "tags"):
        (own / name).symlink_to(outside)
    (own / "fifo.sqsh").parent.mkdir(exist_ok=True)
    os.mkfifo(own / "fifo.sqsh")
    for path in (own, *own.iterdir()):
        os.chown(path, user.uid, user.gid, follow_symlinks=False)
    own.chmod(0)
    assert kept.bound(cache, 0, time.time() + RECENT) == []
    assert list(own.iterdir()) == []
    assert (outside / "victim").exists()


@pytest.mark.usefixtures("as_root")
def test_imports_are_bounded_as_their_user_and_what_that_cannot_delete_is_told(
    cache: Cache,
) -> None:
    """They may move a folder in, of whose content they could delete nothing."""
    alice, bob = User("", 61001, 61001), User("", 61002, 61002)
    own = kept.prepare(cache, alice) / str(alice.uid)
    victim = own / "moved/of bob's/victim"
    victim.parent.mkdir(parents=True)
    victim.touch()
    os.chown(own / "moved", alice.uid, alice.gid)
    for path in (victim, victim.parent):
        os.chown(path, bob.uid, bob.gid)
    (own / "mine/closed").mkdir(parents=True)
    (own / "mine/closed/file").touch()
    for path in (own / "mine/closed/file", own / "mine/closed", own / "mine"):
        os.chown(path, alice.uid, alice.gid)
        path.chmod(0)  # she cannot enter it herself as it is
    (problem,) = kept.bound(cache, 0, time.time())
    assert str(own) in problem
    assert victim.exists()
    assert not (own / "mine").exists()


def test_directory_that_is_empty_for_a_day_goes(cache: Cache, own: Path, file: Path) -> None:
    later = time.time() + UNUSED + 60
    assert kept.bound(cache, 1 << 20, later) == []
    assert not own.exists()


def test_look_at_a_directory_keeps_nothing_in_it_young(cache: Cache, own: Path) -> None:
    (own / "jobs").mkdir()
    kept.bound(cache, 1 << 20, time.time())  # the records that were in there have gone
    assert not (own / "jobs").exists()
    before = own.stat().st_ctime_ns
    assert kept.bound(cache, 1 << 20, time.time()) == []
    assert own.stat().st_ctime_ns == before, "else it is never empty for a day"


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("whose", ["jobs", "."])
def test_ids_of_a_users_own_namespace_keep_nothing_from_being_bounded(
    cache: Cache, whose: str
) -> None:
    """Who has subuids gives files to them, without any right."""
    alice, subuid = User("", 61001, 61001), 161001
    own = kept.prepare(cache, alice) / str(alice.uid)
    (own / "jobs").mkdir()
    (own / "jobs/file").touch()
    (own / "large").write_bytes(b"x" * 20_000)
    for path in (own / "jobs", own / "large"):
        os.chown(path, alice.uid, alice.gid)
    os.chown(own / whose, subuid, subuid)
    problems = kept.bound(cache, NAME_BYTES, time.time())
    assert not (own / "large").exists()
    assert len(problems) == (whose == "jobs")
    assert own.stat().st_uid == alice.uid
