"""What `status` says of a node: all that is there, at a width that people have."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from commands import CHUNK, NOW, Site
from forestage import status
from forestage.cache.evict import Room
from forestage.cache.lease import Use
from forestage.copies import Copy
from forestage.counters import Given
from forestage.entries import Holder, Leased
from forestage.status import Counts, Disk, Status, counts, pieces
from forestage.system import lock
from forestage.system.terminal import draw

G = 1 << 30
LONG = "/lustre/" + "/".join(f"directory-{number}" for number in range(12)) + "/image.sqsh"

FULL = Status(
    cache="/mnt/nvme/forestage",
    unusable="",
    redirects=(LONG,),
    leases=(Holder(4242, "alice", NOW - 90, (Leased("k" * 32, LONG, True),)),),
    problems=("a lease is damaged",),
    disk=Disk("/mnt/nvme", 1000 * G, 400 * G),
    room=Room(400 * G, 500 * G, 900 * G, 50 * G, 720 * G),
    entries=Counts(12, 3, 1, 1, 0),
    copies=(
        Copy(
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
    served=Given(since=NOW - 9, bytes=3 * G, chunks=768),
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("width", [80, 120])
def test_all_of_it_fits_and_no_path_is_cut(width: int) -> None:
    out = io.StringIO()
    draw(pieces(FULL, NOW), Console(file=out, width=width, markup=False, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for word in (
        "12 (3 leased, 1 pinned, 1 superseded)",
        "39%",
        "2.5 GiB/s",
        "6s",
        "Problem",
        "3 GiB in 768 chunks",
    ):
        assert word in out.getvalue()


def test_a_stager_at_work_counts_as_used_room_and_as_a_copy(site: Site) -> None:
    _, owner = site.part(site.image("a.sqsh", b"x" * 4 * CHUNK), phase="copying")
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        found = status.gather(site.node)
    assert found.room is not None
    assert found.room.used >= 4 * CHUNK
    assert [copy.key for copy in found.copies] == [owner.image.key]
    assert found.entries == Counts()


def test_one_entry_may_count_as_several_things(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"))
    site.lease(1, Use(key))
    site.lease(2, Use(key))
    site.run("pin", key)
    assert status.gather(site.node).entries == Counts(total=1, leased=1, pinned=1)
    assert counts(()) == Counts()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda site: None, "not made yet: the first job with an image makes it"),
        (lambda site: site.node.cache.prepare(False), "No copy is under way."),
    ],
)
def test_an_empty_node_is_in_order(
    site: Site, change: Callable[[Site], None], expected: str
) -> None:
    change(site)
    done = site.run("status")
    assert done.exit_code == 0
    assert expected in done.stdout


def test_what_the_peer_service_gave_is_told(site: Site) -> None:
    assert "served" not in site.run("status").output
    assert site.json("status")["served"] is None
    site.places.peer.parent.mkdir(parents=True, exist_ok=True)
    site.places.peer.write_text('{"since": 1, "bytes": 1048576, "chunks": 1}')
    assert "1 MiB in 1 chunk to other nodes" in site.run("status").output
    assert site.json("status")["served"]["bytes"] == 1048576


def test_it_says_plainly_that_staging_is_switched_off_and_how_to_switch_it_on(site: Site) -> None:
    assert "switched off" not in site.run("status").output
    site.configure("enabled: false\n")
    done = site.run("status")
    assert done.output.splitlines()[0].startswith("staging")
    assert "switched off: `enabled: false` (set it to true to switch it on)" in done.output
    site.configure("")
    site.places.disabled.parent.mkdir(parents=True, exist_ok=True)
    site.places.disabled.write_text("INC-42\n")
    told = f"{site.places.disabled}: INC-42 (remove the file to switch it on)"
    assert f"switched off: {told}" in site.run("status").output
    assert site.json("status")["off"] == told
