"""Room for a new image: who has to go, who never does, and that nothing goes in vain."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from forestage.events import ReleaseOutcome
from node import Later, Node, content

ROOM_FOR_TWO = "700K"
ROOM_FOR_THREE = "900K"


def stage(node: Node, job: int, name: str, seed: int, clock: Later | None = None) -> str:
    """Runs a job through Prolog and Epilog; gives the key of its image."""
    ran = node.prolog(job, node.put(name, content(seed)), clock=clock)
    assert ran.outcome.result == "copied"
    node.epilog(job, clock)
    return ran.outcome.key


def test_copy_evicts_entries_of_a_disk_without_free_inodes(
    node: Node,
) -> None:
    # No Epilog would: where each Prolog fails, no job has a lease.
    old = [stage(node, job, f"alice/{job}.sqsh", job) for job in (1, 2, 3)]
    new = node.put("alice/new.sqsh", content(4))
    used = sum(1 for _ in node.nvme.rglob("*"))
    options = f"remount,size=64m,nr_inodes={used + 100}"
    subprocess.run(["mount", "-o", options, node.nvme], check=True)
    scratch = node.nvme / "scratch"
    scratch.mkdir()
    with contextlib.suppress(OSError):
        for number in range(200):
            (scratch / str(number)).touch()
    assert os.statvfs(node.nvme).f_ffree == 0
    assert node.prolog(4, new).outcome.result == "copied"
    assert not any(node.cache.entry_dir(key).exists() for key in old)


def test_least_recently_used_entry_is_evicted_and_no_other(node: Node) -> None:
    node.configure(max_size=ROOM_FOR_TWO)
    old = stage(node, 1, "alice/1.sqsh", 1)
    new = stage(node, 2, "alice/2.sqsh", 2, Later(10))
    # A hit is a use.
    node.prolog(3, node.shared / "alice/1.sqsh", clock=Later(20))
    node.epilog(3, Later(20))
    third = stage(node, 4, "alice/3.sqsh", 3, Later(30))
    assert node.entries() == {old, third}
    assert new not in node.entries()


def test_superseded_entry_is_evicted_before_the_least_recently_used(node: Node) -> None:
    node.configure(max_size=ROOM_FOR_THREE)
    oldest = stage(node, 1, "alice/other.sqsh", 1)
    before = stage(node, 2, "alice/image.sqsh", 2, Later(10))
    after = stage(node, 3, "alice/image.sqsh", 3, Later(20))
    assert node.entries() == {oldest, before, after}
    new = stage(node, 4, "alice/new.sqsh", 4, Later(30))
    assert node.entries() == {oldest, after, new}


def test_leased_entry_is_never_evicted_and_a_hopeless_copy_evicts_nothing(node: Node) -> None:
    node.configure(max_size=ROOM_FOR_TWO)
    leased = node.put("alice/1.sqsh", content(1))
    node.prolog(1, leased)
    free = stage(node, 2, "alice/2.sqsh", 2, Later(10))
    entries = node.entries()

    # Too big for what the unleased one would give back.
    ran = node.prolog(3, node.put("alice/big.sqsh", content(3, 512 * 1024)), clock=Later(20))

    assert ran.ended == (0, "declined", "no-room")
    assert node.entries() == entries
    assert leased.read_bytes() == content(1)
    assert not list(node.cache.parts.iterdir())
    # But there is room for one that fits in its place.
    stage(node, 4, "alice/4.sqsh", 4, Later(30))
    assert free not in node.entries()
    assert leased.read_bytes() == content(1)


def test_pinned_entry_is_never_evicted(node: Node) -> None:
    node.configure(max_size=ROOM_FOR_TWO)
    pinned = stage(node, 1, "alice/1.sqsh", 1)
    (node.cache.entry_dir(pinned) / "pinned").touch()
    unpinned = stage(node, 2, "alice/2.sqsh", 2, Later(10))
    third = stage(node, 3, "alice/3.sqsh", 3, Later(20))
    assert node.entries() == {pinned, third}
    assert unpinned not in node.entries()


def test_epilog_evicts_to_the_low_watermark_but_keeps_leased_entries(node: Node) -> None:
    node.configure(max_size=ROOM_FOR_THREE, low_watermark="40%")
    leased = node.prolog(1, node.put("alice/1.sqsh", content(1))).outcome.key
    ran = node.prolog(2, node.put("alice/2.sqsh", content(2)), clock=Later(10))
    assert node.entries() == {leased, ran.outcome.key}
    assert node.epilog(2, Later(10)).outcome.evicted == (ran.outcome.key,)
    assert node.entries() == {leased}
    assert list(node.cache.evicted.iterdir()) == []


def test_copy_that_would_use_min_free_is_declined(node: Node) -> None:
    node.configure(min_free="100%")
    path = node.put("alice/1.sqsh")
    assert node.prolog(1, path).said == ("declined", "no-room")
    assert node.shows_source(path)


def test_image_is_declined_before_copying_if_other_files_fill_the_disk(node: Node) -> None:
    node.cache.prepare(require_mount=True)
    (node.nvme / "enroot").write_bytes(bytes(63 * 1024 * 1024 + 900 * 1024))
    assert node.prolog(1, node.put("alice/1.sqsh")).ended == (0, "declined", "no-room")
    assert list(node.cache.parts.iterdir()) == []


def test_evicted_image_that_is_open_can_be_read_to_its_end(node: Node) -> None:
    node.configure(max_size=ROOM_FOR_TWO)
    path = node.put("alice/1.sqsh", content(1))
    key = node.prolog(1, path).outcome.key
    with Path(path).open("rb") as late:
        start = late.read(1000)
        node.epilog(1)
        stage(node, 2, "alice/2.sqsh", 2, Later(10))
        stage(node, 3, "alice/3.sqsh", 3, Later(20))
        assert key not in node.entries()
        assert start + late.read() == content(1)


def test_epilog_evicts_other_entries_before_that_of_its_own_job_which_may_be_requeued(
    node: Node,
) -> None:
    """Expedited requeue (Slurm 25.11): the job begins again on its nodes, which are kept for it."""
    node.configure(max_size="1M")
    path = node.put("alice/1.sqsh", content(1))
    first = node.prolog(7, path)
    others = {stage(node, job, f"alice/{job}.sqsh", job, Later(10 * job)) for job in (2, 3)}
    node.configure(max_size="1M", low_watermark="30%")
    ended = node.epilog(7, Later(60)).outcome
    assert isinstance(ended, ReleaseOutcome)
    assert (set(ended.evicted), node.entries()) == (others, {first.outcome.key})
    again = node.prolog(7, path, clock=Later(61))
    assert again.said == ("hit", "")
    assert node.held(7).uses
