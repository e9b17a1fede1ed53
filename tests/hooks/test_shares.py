"""Files that are large in name only, and users who want everything: others keep what they have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.cache import evict
from forestage.cache.part import MAX_CHUNKS
from forestage.config import Config
from forestage.events import RequestOutcome
from node import ALICE, BOB, Node, User, content

MIB = 1 << 20
IMAGE = MIB  # bytes
ROOM = 12 * MIB


def holes(node: Node, name: str, size: int) -> Path:
    """An image that has its size from truncate(1), and next to nothing on disk."""
    path = node.put(name, content(7, 4096))
    os.truncate(node.server / name, size)
    return path


def stage(node: Node, job: int, user: User, name: str, size: int = IMAGE) -> str:
    """Runs a job of the user's through Prolog and Epilog; gives its image's key, "" for none."""
    ran = node.prolog(job, node.put(name, content(job, size), user), user)
    node.epilog(job)
    return ran.outcome.key if ran.outcome.result == "copied" else ""


def staged(node: Node, first: int, user: User, count: int) -> set[str]:
    keys = {stage(node, job, user, f"{user.name}/{job}") for job in range(first, first + count)}
    assert "" not in keys
    return keys


def test_file_of_8_pib_is_declined_before_a_lease_or_part_is_created(node: Node) -> None:
    path = holes(node, "alice/huge.sqsh", 8 << 50)
    ran = node.prolog(1, path)
    assert ran.ended == (0, "declined", "too-large")
    assert "chunk_size" in ran.outcome.detail
    assert (node.lease(1), node.parts(), node.outcomes("stager")) == (None, [], ())


def test_image_with_more_than_max_chunks_is_declined(node: Node) -> None:
    small = holes(node, "alice/small.sqsh", 64 * MIB)
    assert node.prolog(1, small).outcome.result == "copied"
    over = holes(node, "alice/over.sqsh", MAX_CHUNKS * MIB + 1)
    assert node.prolog(2, over).said == ("declined", "too-large")


def test_file_that_consists_of_holes_evicts_nothing(node: Node) -> None:
    node.configure(max_size=ROOM, max_user_share="100%")
    keys = staged(node, 1, BOB, 10)
    ran = node.prolog(20, holes(node, "alice/hole.sqsh", 57 * MIB))
    assert ran.outcome.result == "copied"
    assert node.entries() == keys | {ran.outcome.key}


def test_image_larger_than_the_cache_is_declined_before_copying(node: Node) -> None:
    node.configure(max_size=ROOM, chunk_size="1M")
    keys = staged(node, 1, BOB, 4)
    assert node.prolog(20, node.put("alice/big", content(2, 13 * MIB))).said == (
        "declined",
        "no-room",
    )
    assert node.entries() == keys
    assert node.parts() == []


def test_one_user_cannot_evict_entries_of_another_user_within_the_share(node: Node) -> None:
    node.configure(max_size=ROOM)
    keys = staged(node, 1, BOB, 5)
    for job in range(20, 40):
        assert stage(node, job, ALICE, f"alice/{job}")
    assert keys <= node.entries()
    # Half is hers, and what was free beside it.
    assert len(node.entries() - keys) == 6


def test_entries_of_a_user_above_the_share_are_evicted_first(node: Node) -> None:
    node.configure(max_size=ROOM)
    staged(node, 1, ALICE, 11)
    keys = staged(node, 20, BOB, 4)
    assert keys <= node.entries()
    node.configure(max_size=ROOM, low_watermark="50%")
    node.prolog(40, node.shared / "bob/20", BOB)
    node.epilog(40)
    assert keys <= node.entries()


def test_user_may_exceed_the_share_while_the_cache_has_room(node: Node) -> None:
    node.configure(max_size=ROOM)
    keys = staged(node, 1, ALICE, 10)
    assert node.entries() == keys


def test_image_used_by_two_users_counts_for_no_users_share(node: Node) -> None:
    node.configure(max_size=ROOM)
    keys = staged(node, 1, BOB, 5)
    common = staged(node, 10, ALICE, 6)
    for job in range(10, 16):
        ran = node.prolog(50 + job, node.shared / f"alice/{job}", BOB)
        assert ran.outcome.result == "hit"
        node.epilog(50 + job)
    # Half of the cache would be hers, were those counted, and they would go before any of his.
    new = staged(node, 20, ALICE, 2)
    assert common | new <= node.entries()
    assert len(keys & node.entries()) < 5


def test_second_user_of_an_image_is_recorded_by_the_epilog(node: Node) -> None:
    path = node.put("alice/image")
    node.prolog(1, path)
    node.epilog(1)
    assert [one.user for one in node.cache.list_entries()] == [ALICE.uid]
    node.prolog(2, path, BOB)
    node.epilog(2)
    assert [one.user for one in node.cache.list_entries()] == [None]


def fill(node: Node, size: int) -> None:
    """Takes so many bytes of the cache's disk, as other data of the site does."""
    (node.nvme / "enroot").write_bytes(bytes(size))


def disk(node: Node) -> tuple[int, int]:
    """Its bytes, and those that are free."""
    facts = os.statvfs(node.nvme)
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


DEFAULTS = {"max_size": None, "min_free": None, "low_watermark": None, "unpack_ratio": None}


def test_default_limits_leave_half_of_the_disk_or_a_fifth_beside_other_files(node: Node) -> None:
    node.configure(**DEFAULTS)
    for job in range(1, 13):
        stage(node, job, (ALICE, BOB)[job % 2], f"alice/{job}", 4 * MIB)
        assert evict.measure_space(node.cache, node.cache.list_entries(), Config()).used < 33 * MIB
    assert len(node.entries()) > 3
    fill(node, 26 * MIB)
    node.prolog(50, comment="stage=off")
    node.epilog(50)
    total, free = disk(node)
    assert free >= total // 5 + 4 * MIB  # a fifth of what the cache may take then
    assert node.entries()


def test_prolog_evicts_entries_for_room_to_unpack_the_container(node: Node) -> None:
    """The disk is as full as it may be at rest, and enroot unpacks to it."""
    keys = staged(node, 1, BOB, 10)
    node.configure(unpack_ratio=3, min_free="20%")
    total, free = disk(node)
    fill(node, free - total // 5 - MIB)
    path = node.put("bob/1", content(1, IMAGE), BOB)
    ran = node.prolog(20, node.shared / "bob/10", BOB)
    assert ran.outcome.result == "hit"
    assert disk(node)[1] >= total // 5 + 3 * MIB
    # No more than that, the least recently used first, and not what the job has.
    assert len(keys - node.entries()) == 2
    assert isinstance(ran.outcome, RequestOutcome)
    assert set(ran.outcome.evicted) == keys - node.entries()
    assert ran.outcome.key in node.entries()
    assert path.exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("told", "goes"),
    [
        ("/mnt/nvme/enroot/${UID}", True),
        ("/raid/enroot-data/$(id -u)", False),
        ("/link/${UID}", True),
        ("${XDG_DATA_HOME}/enroot", True),  # nobody can say
    ],
)
def test_prolog_evicts_for_unpacking_only_on_enroots_data_disk(
    node: Node, told: str, goes: bool
) -> None:
    keys = staged(node, 1, BOB, 10)
    node.configure(unpack_ratio=3, min_free="20%")
    conf = node.places.root / "etc/enroot/enroot.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(f"ENROOT_DATA_PATH {told}\n")
    (node.places.root / "link").symlink_to(node.nvme)
    total, free = disk(node)
    fill(node, free - total // 5 - MIB)
    assert node.prolog(20, node.shared / "bob/10", BOB).outcome.result == "hit"
    assert (node.entries() != keys) is goes


def test_job_with_stage_off_evicts_nothing_for_unpacking(node: Node) -> None:
    keys = staged(node, 1, BOB, 10)
    path = node.shared / "bob/10"
    node.prolog(20, path, BOB)  # whose redirect has the next job's Prolog look at the image
    node.configure(unpack_ratio=100)
    assert node.prolog(21, path, BOB, comment="stage=off").said == ("declined", "off")
    assert node.entries() == keys


def test_job_with_enough_room_to_unpack_evicts_nothing(node: Node) -> None:
    keys = staged(node, 1, BOB, 10)
    node.configure(unpack_ratio=3, min_free="20%")
    node.prolog(20, node.shared / "bob/10", BOB)
    assert node.entries() == keys


def test_no_entry_is_evicted_to_unpack_a_file_that_is_mounted(node: Node) -> None:
    keys = staged(node, 1, BOB, 10)
    node.configure(unpack_ratio=3, min_free="20%", redirect="spank")
    total, free = disk(node)
    fill(node, free - total // 5 - MIB)
    node.prolog(20, user=BOB, comment=f"stage={node.shared}/bob/10@{node.shared}/bob/point")
    assert node.outcomes("prolog", 20)[-1].result == "hit"
    assert node.entries() == keys


def test_room_to_unpack_above_the_share_evicts_no_other_users_entries(node: Node) -> None:
    keys = staged(node, 1, BOB, 5)
    path = node.put("alice/image", content(30, MIB))
    node.prolog(30, path)
    node.configure(unpack_ratio=100, max_size=ROOM)
    assert disk(node)[1] < 100 * MIB
    assert node.prolog(31, path).outcome.result == "hit"
    assert keys <= node.entries()
    # Nor do his own, where all of them would not do.
    node.prolog(32, node.shared / "bob/1", BOB)
    assert keys <= node.entries()


def test_evictions_for_a_container_are_in_the_prologs_outcome_and_not_in_the_step_record(
    node: Node,
) -> None:
    """Their events are written by the companion, from the record that the Prolog leaves."""
    staged(node, 1, BOB, 10)
    node.configure(redirect="spank", unpack_ratio=3, min_free="20%")
    total, free = disk(node)
    fill(node, free - total // 5 - MIB)
    ran = node.prolog(20, node.shared / "bob/10", BOB)
    assert isinstance(ran.outcome, RequestOutcome)
    assert len(ran.outcome.evicted) == 2
    record = node.leases.step_record_file(20).read_text()
    assert "evicted" not in record
    assert ran.outcome.key in record


def test_step_record_contains_the_room_that_must_stay_free(node: Node) -> None:
    path = node.staged(1)
    node.configure(redirect="spank", unpack_ratio=3, min_free="20%")
    node.prolog(2, path)
    lines = node.leases.step_record_file(2).read_text().splitlines()
    assert f"room\t{round(disk(node)[0] / 5)}\t3" in lines
