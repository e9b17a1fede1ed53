"""What goes of a user's directory in the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.features.registry import store_age, store_collection
from forestage.features.registry.store_age import (
    AGAIN,
    CollectionSighting,
    FileTime,
    StoreCollection,
)
from forestage.features.registry.store_collection import (
    LEFT,
    LIVE,
    OF_JOB,
    RECENT,
    RECORDS,
    StoreFile,
)

NOW = 1_800_000_000.0
DAY = 86400.0


def image(name: str, age: float, size: int = 100, kind: str = "sqsh") -> list[StoreFile]:
    return [
        StoreFile(f"{name}.{kind}", name, kind, size, age=99 * DAY),
        StoreFile(f"{name}.json", name, "json", 4, age=age),
    ]


def file(kind: str, age: float, name: str = "a") -> StoreFile:
    return StoreFile(f"{name}.{kind}", name, kind, 10, age=age)


def going(files: list[StoreFile], keep: float = 30 * DAY, most: int | None = None) -> list[str]:
    return [one.name for one in store_collection.plan_collection(files, keep, most).images]


def test_collection_plan_deletes_images_unused_for_the_keep_time() -> None:
    files = image("a", 31 * DAY) + image("b", 29 * DAY)
    assert going(files) == ["a"]


def test_collection_plan_over_the_size_limit_deletes_the_least_recently_used_images() -> None:
    files = image("a", 3 * DAY) + image("b", 1 * DAY) + image("c", 2 * DAY)
    assert going(files, most=250) == ["a"]
    assert going(files, most=100) == ["a", "c"]
    assert going(files, most=300) == []


@pytest.mark.parametrize("kind", ["", "0123456789abcdef.part"])
def test_collection_plan_counts_parts_and_other_files_to_the_size_limit(kind: str) -> None:
    files = [*image("a", 3 * DAY), *image("b", 1 * DAY), StoreFile("c", "c", kind, 100)]
    assert going(files, most=300) == []
    assert going(files, most=299) == ["a"]


def test_collection_plan_keeps_a_recently_used_image_over_the_size_limit() -> None:
    files = image("a", RECENT - 1) + image("b", RECENT + 1)
    assert going(files, most=1) == ["b"]


def test_collection_plan_deletes_an_image_of_a_single_job_sooner() -> None:
    files = image("job-a", OF_JOB + 1) + image("job-b", OF_JOB - 1)
    assert going(files) == ["job-a"]


def test_collection_plan_ages_an_image_without_a_record_from_its_import() -> None:
    assert going([StoreFile("a.sqsh", "a", "sqsh", 1, age=31 * DAY)]) == ["a"]
    assert going([StoreFile("a.sqsh", "a", "sqsh", 1, age=DAY)]) == []


@pytest.mark.parametrize(
    ("kind", "age"),
    [
        ("0123456789abcdef.part", LIVE),
        ("lease.1", LIVE),
        ("json", LIVE),
        ("wanted", LEFT),
        ("failed", LEFT),
        ("new", LEFT),
        ("job", RECORDS),
        ("tag", RECORDS),
    ],
)
def test_collection_plan_deletes_each_kind_of_leftover_after_its_lifetime(
    kind: str, age: float
) -> None:
    assert store_collection.plan_collection([file(kind, age - 1)], DAY, None).files == ()
    assert len(store_collection.plan_collection([file(kind, age + 1)], DAY, None).files) == 1


def test_collection_plan_keeps_the_part_of_a_running_import() -> None:
    part = file("0123456789abcdef.part", 9 * DAY)
    assert store_collection.plan_collection([part, file("lease.3", 20)], DAY, None).files == ()
    assert store_collection.plan_collection([part, file("lease.3", 20, "b")], DAY, None).files == (
        part.path,
    )


def test_collection_plan_compares_each_file_only_a_few_times() -> None:
    """A user of many jobs has a record of each, and who plans has a minute."""
    looks = 0

    class Counted(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    files = [file("job", RECORDS + 1, Counted(number)) for number in range(500)]
    assert len(store_collection.plan_collection(files, DAY, None).files) == 500
    assert looks < 5 * 500


def test_collection_plan_keeps_unknown_files() -> None:
    assert (
        store_collection.plan_collection(
            [StoreFile("notes.txt", "notes.txt", "", 1, age=99 * DAY)], DAY, None
        ).files
        == ()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        for kind in ("sqsh", "json"):
            (tmp_path / f"{name}.{kind}").write_bytes(b"x" * 5000)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/1-x.json").touch()
    return tmp_path


def unused(folder: Path, seconds: float) -> StoreCollection:
    """What a collection knows where nothing of this was touched for so long."""
    times = {
        file.path: FileTime(file.mtime_ns, 0.0) for file in store_collection.list_files(folder)
    }
    return StoreCollection("token", seconds, times)


def test_collection_deletes_the_unused_image_and_its_files(folder: Path) -> None:
    known = unused(folder, 40 * DAY)
    os.utime(folder / "b.json")
    done = store_collection.collect_garbage(folder, 30 * DAY, None, known, False)
    assert (done.images, done.files, done.problem) == (("a",), 1, "")
    assert sorted(one.name for one in folder.rglob("*")) == ["b.json", "b.sqsh", "jobs"]


def test_collection_dry_run_reports_the_same_images_and_deletes_nothing(folder: Path) -> None:
    known = unused(folder, 40 * DAY)
    before = sorted(folder.rglob("*"))
    dry = store_collection.collect_garbage(folder, 30 * DAY, None, known, True)
    assert len(dry.images) == 2
    assert sorted(folder.rglob("*")) == before
    assert store_collection.collect_garbage(folder, 30 * DAY, None, known, False) == dry


@pytest.mark.parametrize("used", [NOW, 1.0])
def test_collection_keeps_an_image_used_between_plan_and_deletion(
    folder: Path, used: float
) -> None:
    """By whatever clock: that of the node that uses it may be behind."""
    files = store_collection.add_ages(
        store_collection.list_files(folder), unused(folder, 40 * DAY), None
    )
    old = next(
        one
        for one in store_collection.plan_collection(files, 30 * DAY, None).images
        if one.name == "a"
    )
    os.utime(folder / "a.json", (used, used))
    assert not store_collection._delete_unless_used(folder, old)
    assert (folder / "a.sqsh").exists()


@pytest.mark.parametrize("step", [-40 * DAY, -3600.0, 3600.0, 40 * DAY])
def test_store_file_age_is_the_counted_unused_time_whatever_its_mtime(
    folder: Path, step: float
) -> None:
    """Who touched it had a clock of their own, and so has who looks: neither is asked."""
    for name in ("a.sqsh", "a.json"):
        there = (folder / name).stat().st_mtime
        os.utime(folder / name, (there + step, there + step))
    known = unused(folder, AGAIN)
    ages = {
        file.age
        for file in store_collection.add_ages(store_collection.list_files(folder), known, None)
    }
    assert ages == {AGAIN}
    os.utime(folder / "a.json", (1, 1))
    (touched,) = [
        file
        for file in store_collection.add_ages(store_collection.list_files(folder), known, None)
        if file.age < AGAIN
    ]
    assert (touched.path, touched.age) == ("a.json", 0.0)


def test_store_file_age_uses_the_servers_clock_if_that_is_known() -> None:
    server = round(NOW * 1e9)
    seen = StoreFile("a.sqsh", "a", "sqsh", 1, server - round(31 * DAY * 1e9))
    (file,) = store_collection.add_ages([seen], StoreCollection(), server)
    assert file.age == pytest.approx(31 * DAY)
    (file,) = store_collection.add_ages([seen], StoreCollection(), None)
    assert file.age == 0.0


def visit(
    folder: Path, sight: CollectionSighting | None, now: float
) -> tuple[CollectionSighting, StoreCollection | None]:
    """As a node does; it remembers what it met first."""
    token, found = store_collection.claim_collection(folder, sight, now)
    return sight if sight and sight.token == token else CollectionSighting(token, now), found


def test_store_age_grows_only_by_seconds_that_a_nodes_monotonic_clock_counted(folder: Path) -> None:
    """Each node by its own monotonic clock, which begins where it likes."""
    first, found = visit(folder, None, 1e6)
    assert found is not None
    assert found.seconds == 0.0
    other, found = visit(folder, None, 5.0)
    assert found is None, "it has not seen AGAIN seconds pass"
    other, found = visit(folder, other, 5.0 + AGAIN - 1)
    assert found is None
    other, found = visit(folder, other, 5.0 + AGAIN)
    assert found is not None
    assert found.seconds == AGAIN
    first, found = visit(folder, first, 1e6 + AGAIN + 60)
    assert found is None, "another node has collected meanwhile"
    first, found = visit(folder, first, 1e6 + 2 * AGAIN + 60)
    assert found is not None
    assert found.seconds == 2 * AGAIN
    assert [one.name for one in folder.glob("collected-*")] == ["collected-3"]


def test_store_file_touched_between_two_collections_has_age_0(folder: Path) -> None:
    sight, _ = visit(folder, None, 0.0)
    sight, _ = visit(folder, sight, AGAIN)
    os.utime(folder / "a.json", (1, 1))
    sight, found = visit(folder, sight, 2 * AGAIN)
    assert found is not None
    files = store_collection.add_ages(store_collection.list_files(folder), found, None)
    ages = {file.path: file.age for file in files}
    assert (ages["a.json"], ages["a.sqsh"], ages["b.json"]) == (0.0, 2 * AGAIN, 2 * AGAIN)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"token":"x","seconds":"much"}'])
def test_damaged_collection_record_gives_all_files_age_0(folder: Path, damage: str) -> None:
    (folder / "collected-99999").write_text(damage)
    _, found = visit(folder, CollectionSighting("x", 0.0), 99 * DAY)
    assert found is not None
    assert all(
        file.age == 0.0
        for file in store_collection.add_ages(store_collection.list_files(folder), found, None)
    )
    assert (folder / "collected-100000").exists()


def test_collection_record_lists_a_limited_number_of_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_age, "MOST", 2)
    _, found = visit(folder, None, 0.0)
    assert found is not None
    assert len(found.files) == 2


def test_collection_neither_follows_nor_deletes_links_and_fifos(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "1-y.json").touch()
    os.utime(other / "1-y.json", (1, 1))
    (folder / "tags").symlink_to(other)
    (folder / "c.sqsh").symlink_to(other / "1-y.json")
    os.mkfifo(folder / "d.sqsh")
    store_collection.collect_garbage(folder, 0, None, unused(folder, 40 * DAY), False)
    assert (other / "1-y.json").exists()
    assert (folder / "c.sqsh").is_symlink()
    assert (folder / "d.sqsh").exists()


def test_collection_lists_a_limited_number_of_directory_entries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_collection, "MOST", 3)
    assert len(store_collection.list_files(folder)) <= 3 + 1  # and one in jobs
