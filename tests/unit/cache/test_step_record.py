"""The record of what a job's steps are shown: what it says, and when there is none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from forestage.cache import step_record
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.step_record import MAX_RECORD_BYTES, RecordedImage
from forestage.paths import NodePaths
from forestage.slurm.step_protocol import PROTOCOL_GREETING
from forestage.system.as_user import User

JOB = 7
KEYS = ("a" * 32, "b" * 32)


@pytest.fixture
def places(tmp_path: Path) -> NodePaths:
    places = NodePaths(tmp_path)
    (places.etc / "conf.d").mkdir(parents=True)
    (places.etc / "conf.d/site.yaml").touch()
    return places


@pytest.fixture
def leases(places: NodePaths) -> LeaseDirectory:
    leases = LeaseDirectory(places.leases)
    leases.write_lease(lease(*KEYS))
    return leases


def lease(*keys: str) -> Lease:
    return Lease(JOB, User("u", 1, 1), 1.0, "/c", tuple(map(EntryUse, keys)))


def image(
    key: str = KEYS[0], asked: str = "/a", event: str = "{}", entry: str = ""
) -> RecordedImage:
    entry = entry or f"/c/entries/{key}/image"
    return RecordedImage(asked, 1, event, ("use", entry, "/a", *"12341"))


def note(leases: LeaseDirectory, places: NodePaths, *images: RecordedImage) -> list[list[str]]:
    """The record's lines, each in its fields."""
    step_record.add_images(leases, JOB, step_record.format_config_lines(places), images)
    file = leases.step_record_file(JOB)
    return [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []


def test_step_record_names_all_files_that_decided_and_has_mode_600(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    (first,), boot, log, *files, found = note(leases, places, image())
    assert (first, boot[0], log) == (PROTOCOL_GREETING, "boot", ["events", str(places.events)])
    site = places.etc / "conf.d/site.yaml"
    assert [line[1] for line in files] == [
        str(places.disabled),
        str(places.lasting_off_file),
        str(places.etc / "forestage.yaml"),
        str(places.etc / "conf.d"),
        str(site),
        str(leases.lease_file(JOB)),
        str(leases.notes_file(JOB)),
    ]
    facts = site.stat()
    numbers = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    assert files[4][2:] == [str(number) for number in numbers]
    assert files[0][2:] == files[1][2:] == files[2][2:] == ["0"] * 4
    assert found == ["image", "/a", "1", "{}", *image().reply_fields]
    assert leases.step_record_file(JOB).stat().st_mode & 0o777 == 0o600


def test_second_image_joins_the_first_in_the_step_record_after_the_lease_changed(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    note(leases, places, image())
    leases.touch_lease(JOB)
    lines = note(leases, places, image(KEYS[1], "/b"), image(asked="/a", event="{new}"))
    assert [(line[1], line[3]) for line in lines if line[0] == "image"] == [
        ("/a", "{new}"),
        ("/b", "{}"),
    ]


@pytest.mark.parametrize("name", ["conf.d/site.yaml", "conf.d/new.yaml", "forestage.yaml"])
def test_images_recorded_under_another_configuration_are_dropped_from_the_step_record(
    leases: LeaseDirectory, places: NodePaths, name: str
) -> None:
    note(leases, places, image())
    (places.etc / name).write_text("# changed\n")
    lines = note(leases, places, image(KEYS[1], "/b"))
    assert [line[1] for line in lines if line[0] == "image"] == ["/b"]


def test_image_that_the_lease_does_not_hold_is_not_in_the_step_record(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    note(leases, places, image())
    leases.write_lease(lease(KEYS[1]))
    lines = note(leases, places, image(KEYS[1], "/b"), image("c" * 32, "/c"))
    assert [line[1] for line in lines if line[0] == "image"] == ["/b"]


def test_job_without_a_lease_or_with_stage_off_has_no_step_record(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    leases.add_notes(JOB, lease().user.uid, off=True)
    assert note(leases, places, image()) == []
    leases.drop_lease(JOB)
    assert note(leases, places, image()) == []


def test_image_recorded_for_another_user_is_dropped_from_the_step_record(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    """Of an earlier job with the same number."""
    note(leases, places, image())
    leases.write_lease(msgspec.structs.replace(lease(*KEYS), user=User("v", 2, 2)))
    lines = note(leases, places, msgspec.structs.replace(image(asked="/b"), uid=2))
    assert [line[1:3] for line in lines if line[0] == "image"] == [["/b", "2"]]
    assert note(leases, places, image(asked="/c")) == lines  # nothing is added for the first


def test_configuration_file_name_with_a_tab_leaves_no_step_record(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    (places.etc / "conf.d/a\tb.yaml").touch()
    assert step_record.format_config_lines(places) == []
    assert note(leases, places, image()) == []


def test_full_step_record_drops_its_oldest_images(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    long = "x" * (MAX_RECORD_BYTES // 2 - 2000)
    for name in "abc":
        lines = note(leases, places, image(asked=f"/{name}", event=long))
    assert [line[1] for line in lines if line[0] == "image"] == ["/b", "/c"]
    assert leases.step_record_file(JOB).stat().st_size < MAX_RECORD_BYTES


def test_damaged_step_record_is_replaced(leases: LeaseDirectory, places: NodePaths) -> None:
    leases.step_record_file(JOB).mkdir()
    assert leases.list_jobs() == (JOB,)
    leases.drop_lease(JOB)
    assert not leases.step_record_file(JOB).exists()
    leases.write_lease(lease(*KEYS))
    leases.step_record_file(JOB).write_bytes(b"\xff\n")
    assert len(note(leases, places, image())) == 11


def test_step_record_is_deleted_with_its_lease(leases: LeaseDirectory, places: NodePaths) -> None:
    note(leases, places, image())
    leases.drop_lease(JOB)
    assert list(leases.directory.iterdir()) == []


def test_step_record_without_a_lease_is_deleted_by_drop_unfinished(
    leases: LeaseDirectory, places: NodePaths
) -> None:
    note(leases, places, image())
    leases.drop_unfinished()
    assert leases.step_record_file(JOB).exists()
    leases.lease_file(JOB).unlink()
    leases.drop_unfinished()
    assert list(leases.directory.iterdir()) == []
