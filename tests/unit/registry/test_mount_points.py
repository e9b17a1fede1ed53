"""The file over which a step's copy of a registry's image is bound."""

from __future__ import annotations

from pathlib import Path

from forestage.paths import Places
from forestage.registry import mount_points

SIZE = 60 << 30


def test_place_has_the_copys_size_and_takes_nothing(tmp_path: Path) -> None:
    made = mount_points.make(Places(tmp_path), 7, 0, SIZE)
    facts = Path(made.path).stat()
    assert (facts.st_size, facts.st_blocks, facts.st_mode & 0o777) == (SIZE, 0, 0o444)
    assert made.facts == (facts.st_ino, SIZE, facts.st_mtime_ns, facts.st_ctime_ns)


def test_place_begins_with_no_magic_number(tmp_path: Path) -> None:
    with open(mount_points.make(Places(tmp_path), 7, 0, 100).path, "rb") as file:
        assert file.read() == bytes(100)


def test_every_user_reaches_it_and_lists_nothing(tmp_path: Path) -> None:
    places = Places(tmp_path)
    mount_points.make(places, 7, 0, 1)
    assert places.images.stat().st_mode & 0o777 == 0o711


def test_place_of_an_earlier_run_of_the_job_is_replaced(tmp_path: Path) -> None:
    places = Places(tmp_path)
    first = mount_points.make(places, 7, 0, 1)
    Path(first.path).unlink()
    Path(first.path).symlink_to("/etc/passwd")
    second = mount_points.make(places, 7, 0, 2)
    assert not Path(second.path).is_symlink()
    assert Path("/etc/passwd").stat().st_size != 2


def test_end_of_a_job_takes_its_places_and_no_others(tmp_path: Path) -> None:
    places = Places(tmp_path)
    kept = [mount_points.make(places, job, 0, 1).path for job in (77, 8)]
    mount_points.make(places, 7, 0, 1)
    mount_points.make(places, 7, 1, 1)
    mount_points.forget(places, 7)
    assert sorted(map(str, places.images.iterdir())) == sorted(kept)


def test_places_of_jobs_that_are_over_are_left_over(tmp_path: Path) -> None:
    places = Places(tmp_path)
    assert mount_points.leftover(places, frozenset(), 0.0) == []
    for job in (7, 8):
        mount_points.make(places, job, 0, 1)
    (places.images / "8.0.sock").touch()
    (places.images / "odd").touch()
    later = (places.images / "odd").stat().st_mtime + mount_points.OLD
    assert (
        mount_points.leftover(places, frozenset({8}), later - 60) == []
    )  # an import holds no lease
    left = mount_points.leftover(places, frozenset({8}), later + 60)
    assert sorted(path.name for path in left) == ["7.0.sqsh", "odd"]
