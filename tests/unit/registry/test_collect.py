"""What goes of a user's directory in the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.registry import collect
from forestage.registry.collect import LEFT, LIVE, OF_JOB, RECENT, RECORDS, File

NOW = 1_800_000_000.0
DAY = 86400.0


def image(name: str, age: float, size: int = 100, kind: str = "sqsh") -> list[File]:
    return [
        File(f"{name}.{kind}", name, kind, size, NOW - 99 * DAY),
        File(f"{name}.json", name, "json", 4, NOW - age),
    ]


def file(kind: str, age: float, name: str = "a") -> File:
    return File(f"{name}.{kind}", name, kind, 10, NOW - age)


def going(files: list[File], keep: float = 30 * DAY, most: int | None = None) -> list[str]:
    return [one.name for one in collect.plan(files, keep, most, NOW).images]


def test_images_that_nobody_used_for_long_go() -> None:
    files = image("a", 31 * DAY) + image("b", 29 * DAY)
    assert going(files) == ["a"]


def test_of_too_many_bytes_those_used_longest_ago_go() -> None:
    files = image("a", 3 * DAY) + image("b", 1 * DAY) + image("c", 2 * DAY)
    assert going(files, most=250) == ["a"]
    assert going(files, most=100) == ["a", "c"]
    assert going(files, most=300) == []


@pytest.mark.parametrize("kind", ["", "0123456789abcdef.part"])
def test_other_files_and_parts_leave_images_so_much_less(kind: str) -> None:
    files = [*image("a", 3 * DAY), *image("b", 1 * DAY), File("c", "c", kind, 100, NOW)]
    assert going(files, most=300) == []
    assert going(files, most=299) == ["a"]


def test_image_that_was_used_a_moment_ago_stays_whatever_there_is() -> None:
    files = image("a", RECENT - 1) + image("b", RECENT + 1)
    assert going(files, most=1) == ["b"]


def test_image_of_one_job_goes_soon() -> None:
    files = image("job-a", OF_JOB + 1) + image("job-b", OF_JOB - 1)
    assert going(files) == ["job-a"]


def test_image_without_a_record_counts_from_its_import() -> None:
    assert going([File("a.sqsh", "a", "sqsh", 1, NOW - 31 * DAY)]) == ["a"]
    assert going([File("a.sqsh", "a", "sqsh", 1, NOW - DAY)]) == []


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
def test_what_is_left_over_goes_after_its_time_and_not_before(kind: str, age: float) -> None:
    assert collect.plan([file(kind, age - 1)], DAY, None, NOW).files == ()
    assert len(collect.plan([file(kind, age + 1)], DAY, None, NOW).files) == 1


def test_part_of_an_import_that_lives_stays() -> None:
    part = file("0123456789abcdef.part", 9 * DAY)
    assert collect.plan([part, file("lease.3", 20)], DAY, None, NOW).files == ()
    assert collect.plan([part, file("lease.3", 20, "b")], DAY, None, NOW).files == (part.path,)


def test_plan_of_many_files_looks_at_each_a_few_times() -> None:
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
    assert len(collect.plan(files, DAY, None, NOW).files) == 500
    assert looks < 5 * 500


def test_what_is_unknown_stays() -> None:
    assert collect.plan([File("notes.txt", "notes.txt", "", 1, 0)], DAY, None, NOW).files == ()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        for kind in ("sqsh", "json"):
            (tmp_path / f"{name}.{kind}").write_bytes(b"x" * 5000)
            os.utime(tmp_path / f"{name}.{kind}", (NOW - 40 * DAY, NOW - 40 * DAY))
    os.utime(tmp_path / "b.json", (NOW, NOW))
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/1-x.json").touch()
    os.utime(tmp_path / "jobs/1-x.json", (1, 1))
    return tmp_path


def test_plan_is_carried_out(folder: Path) -> None:
    done = collect.collect(folder, 30 * DAY, None, NOW, False)
    assert (done.images, done.files, done.problem) == (("a",), 1, "")
    assert sorted(one.name for one in folder.rglob("*")) == ["b.json", "b.sqsh", "jobs"]


def test_dry_run_says_the_same_and_deletes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    dry = collect.collect(folder, 30 * DAY, None, NOW, True)
    assert sorted(folder.rglob("*")) == before
    assert collect.collect(folder, 30 * DAY, None, NOW, False) == dry


def test_image_that_is_found_between_plan_and_deletion_stays(folder: Path) -> None:
    (old,) = collect.plan(collect.look(folder), 30 * DAY, None, NOW).images
    os.utime(folder / "a.json", (NOW, NOW))
    assert not collect._delete(folder, old)
    assert (folder / "a.sqsh").exists()


def test_links_and_odd_files_are_neither_followed_nor_deleted(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "1-y.json").touch()
    os.utime(other / "1-y.json", (1, 1))
    (folder / "tags").symlink_to(other)
    (folder / "c.sqsh").symlink_to(other / "1-y.json")
    os.mkfifo(folder / "d.sqsh")
    collect.collect(folder, 0, None, NOW, False)
    assert (other / "1-y.json").exists()
    assert (folder / "c.sqsh").is_symlink()
    assert (folder / "d.sqsh").exists()


def test_directory_without_end_is_looked_at_in_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MOST", 3)
    assert len(collect.look(folder)) <= 3 + 1  # and one in jobs
