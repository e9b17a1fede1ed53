"""What `status` says of a node: all that is there, at a width that people have."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
from rich.console import Console

from commands import CHUNK, NOW, Site
from forestage import features
from forestage.cache import disk_errors
from forestage.cache.evict import CacheSpace
from forestage.cache.lease import EntryUse
from forestage.commands import status
from forestage.commands.copies import CopyUnderWay
from forestage.commands.inventory import LeasedImage, LeaseHolder
from forestage.commands.status import DiskSpace, EntryCounts, NodeStatus, format_output
from forestage.features.contexts import StatusFacts, StatusPart
from forestage.system import lock
from forestage.system.render import draw_blocks
from forestage.system.terminal import TextLine, format_local_time
from made_up import around_all

G = 1 << 30
LONG = "/lustre/" + "/".join(f"directory-{number}" for number in range(12)) + "/image.sqsh"

FULL = NodeStatus(
    cache="/mnt/nvme/forestage",
    unusable="",
    redirects=(LONG,),
    leases=(LeaseHolder(4242, "alice", NOW - 90, (LeasedImage("k" * 32, LONG, True),)),),
    problems=("a lease is damaged",),
    disk=DiskSpace("/mnt/nvme", 1000 * G, 400 * G),
    room=CacheSpace(400 * G, 500 * G, 900 * G, 50 * G, 720 * G, 450 * G),
    entries=EntryCounts(12, 3, 1, 1, 0),
    copies=(
        CopyUnderWay(
            key="k" * 32,
            image=LONG,
            engine="chunks",
            phase="copying",
            job=4242,
            copied=9 * G,
            size=23 * G,
            percent=39.1,
            age=4.0,
            rate=2.5 * G,
            left=6.2,
            place=0,
            waiting=(4242, 4243),
        ),
    ),
    through=("k" * 32, "l" * 32),
    parts=(
        StatusPart(
            {"helpers": 2},
            after="copies",
            room=(("helped", "3 GiB"),),
            rows=(("helpers", "2 of them"),),
            tables=(TextLine("1 helper at work"),),
        ),
    ),
)


@pytest.mark.parametrize("width", [80, 120])
def test_status_output_fits_the_terminal_width_and_keeps_all_values(width: int) -> None:
    out = io.StringIO()
    draw_blocks(
        format_output(FULL, NOW), Console(file=out, width=width, markup=False, highlight=False)
    )
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for word in (
        "jobs 4242, 4243",
        "12 (3 leased, 1 pinned, 1 superseded)",
        "39%",
        "2.5 GiB/s",
        "6s",
        "Problem",
        "2 images",
        "helped",
        "2 of them",
        "1 helper at work",
    ):
        assert word in out.getvalue()


def test_status_fields_of_features_follow_the_field_that_the_feature_names() -> None:
    parts = (
        StatusPart({"a": 1, "b": 2}, after="cache"),
        StatusPart({"c": 3}, after="nowhere"),
        StatusPart({"d": 4}, after="cache"),
    )
    found = NodeStatus("/cache", "", (), (), (), parts=parts)
    names = [*status.make_document(found)]
    assert names[:5] == ["cache", "a", "b", "d", "unusable"]
    assert names[-1] == "c"
    assert "parts" not in names
    assert (found.find_field("d"), found.find_field("e")) == (4, None)


def test_status_prints_the_rows_and_json_fields_of_a_made_up_feature(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_status(facts: StatusFacts) -> StatusPart:
        assert (facts.has_cache, len(facts.items)) == (True, 1)
        rows = (("helpers", "2 of them"),)
        return StatusPart({"helpers": 2}, after="copies", rows=rows, tables=(TextLine("Helpers."),))

    site.publish(site.image("a.sqsh"))
    around_all(monkeypatch, {"status.read_status": read_status}, {})
    printed = site.run("status").output
    assert "2 of them" in printed
    assert "\nHelpers.\n" in printed
    names = [*site.json("status")]
    assert names[names.index("copies") + 1] == "helpers"


def test_status_without_features_has_only_the_fields_of_the_core(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "FEATURES", ())
    assert site.run("status").exit_code == 0
    assert {*site.json("status")} == {*NodeStatus.__struct_fields__} - {"parts"}


def test_live_copy_counts_as_used_space_and_as_a_copy_in_status(site: Site) -> None:
    _, owner = site.part(site.image("a.sqsh", b"x" * 4 * CHUNK), phase="copying")
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        found = status.read_node_status(site.node)
    assert found.room is not None
    assert found.room.used >= 4 * CHUNK
    assert [copy.key for copy in found.copies] == [owner.image.key]
    assert found.entries == EntryCounts()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "killed"])
def test_status_names_the_image_of_a_lease_on_an_unfinished_copy(site: Site, is_live: bool) -> None:
    path = site.image("a.sqsh", b"x" * CHUNK)
    _, owner = site.part(path, phase="copying")
    site.lease(7, EntryUse(owner.image.key))
    with contextlib.ExitStack() as stack:
        if is_live:
            stack.enter_context(lock.held(site.node.cache.key_lock(owner.image.key), 0))
        found = site.json("status")
        assert [image["path"] for image in found["leases"][0]["images"]] == [str(path)]
        assert owner.image.key not in site.run("status").stdout


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda site: None, "does not exist yet: the first job with an image creates it"),
        (lambda site: site.node.cache.prepare(False), "No copy is under way."),
    ],
)
def test_status_of_a_node_without_entries_exits_0(
    site: Site, change: Callable[[Site], None], expected: str
) -> None:
    change(site)
    done = site.run("status")
    assert done.exit_code == 0
    assert expected in done.stdout


def test_status_on_a_host_without_jobs_advises_to_query_a_node_by_srun(site: Site) -> None:
    """A login node has the package and the same configuration, and a cache that nobody uses."""
    asks = "srun -w NODE forestage status"
    assert asks in site.run("status").output
    mark = site.places.hook_call_mark("prolog")
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text("7")
    assert asks not in site.run("status").output
    mark.unlink()
    site.node.cache.prepare(False)
    assert asks not in site.run("status").output


def test_status_shows_a_disk_doubt_with_its_time_and_kernel_message(site: Site) -> None:
    assert "disk errors" not in site.run("status").output
    assert site.json("status")["doubt"] is None
    disk_errors.start_doubt(site.places, site.world.clock, "I/O error, dev nvme0n1, sector 8")
    line = f"no image is served, since {format_local_time(NOW)}: I/O error, dev nvme0n1, sector 8"
    assert line in site.run("status").output
    assert site.json("status")["doubt"] == {"since": NOW, "why": "I/O error, dev nvme0n1, sector 8"}


@pytest.mark.parametrize(
    ("redirect", "companion", "word"),
    [
        ("auto", True, "in its steps"),
        ("spank", True, "in its steps"),
        ("auto", False, "no"),
        ("none", True, "no"),
        ("bind", True, "no"),
    ],
)
def test_status_shows_for_a_lease_whether_steps_see_the_copy(
    site: Site, redirect: str, companion: bool, word: str
) -> None:
    site.configure(f"redirect: {redirect}\n")
    key = site.publish(site.image("a.sqsh"))
    site.lease(7, EntryUse(key))
    if companion:
        site.places.loaded.write_text("")
    (row,) = [one for one in site.run("status").output.splitlines() if one.split()[:1] == ["7"]]
    assert word in row


def test_status_shows_why_staging_is_off_and_how_to_switch_staging_on(site: Site) -> None:
    assert "switched off" not in site.run("status").output
    site.configure("enabled: false\n")
    done = site.run("status")
    assert done.output.splitlines()[0].startswith("staging")
    assert "switched off: `enabled: false` (set it to true to switch it on)" in done.output
    site.configure("enabled: false\npartitions: {debug: {enabled: true}}\n")
    assert "switched off" not in site.run("status").output
    site.places.disabled.parent.mkdir(parents=True, exist_ok=True)
    site.places.disabled.write_text("INC-42\n")
    printed = f"{site.places.disabled}: INC-42 (`forestage on` switches it on)"
    assert f"switched off: {printed}" in site.run("status").output
    assert site.json("status")["off"] == printed
