"""The shared file system is an NFS server that dies, refuses, or has other bytes now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from compute import IMAGES, OFF, Compute, command
from install import CACHE

HUNG = 400  # seconds: who has not ended after that waits for the server
PORT = "-p tcp --dport 2049 -j DROP"
SLOW = "bandwidth: 1MiB\n"
SHARE = "/export/images"  # where the server has them
SET, SHARED_SET = f"{IMAGES}/set", f"{SHARE}/set"
ALL = "find . -type f | sort | xargs sha256sum | sha256sum"
CHANGES = {
    "in-place": "echo NEW | dd of=2 conv=notrunc status=none",
    "replaced": "sed s/old/NEW/ 2 >../2; mv ../2 2",
    "added": "echo more >4",
    "removed": "rm 2",
    "renamed": "mv deep depth",
}


@contextlib.contextmanager
def dead(node: Compute) -> Iterator[None]:
    """The server answers nothing, as if it had lost its power; a `hard` mount waits for it."""
    node.run(f"iptables -I INPUT {PORT}")
    try:
        yield
    finally:
        node.run(f"iptables -D INPUT {PORT}")
        node.run("ls /lustre/images >/dev/null")


def made_set(node: Compute, kib: int = 0) -> None:
    """A directory of alice's on the server; each of its files has a line, and so much besides."""
    node.run(
        f"mkdir -p {SHARED_SET}/deep; cd {SHARED_SET}; echo old | tee 1 2 3 >deep/1;"
        f"for file in 1 2 3 deep/1; do head -c {kib}K /dev/urandom >>$file; done; chown -R alice: ."
    )


def content(node: Compute) -> str:
    return node.run(f"cd {SHARED_SET}; {ALL}").out.split()[0]


def shown(node: Compute, stage: str = f"stage={SET}/") -> list[str]:
    """What a job finds in the directory, and of which file system."""
    return node.srun(stage, f"cd {SET}; {ALL}; findmnt -n -o FSTYPE -T .").out.split()[::2]


def test_job_starts_and_can_be_cancelled_while_the_nfs_server_is_dead(node: Compute) -> None:
    image = node.image("before")
    with dead(node):
        node.run("rm -f /tmp/alice.started")
        script = f"#!/bin/sh\n#SBATCH --comment=stage={image.path}\ntouch /tmp/alice.started\n"
        node.run(
            "cd /tmp; sbatch -o /tmp/alice.out", user="alice", stdin=f"{script}cat {image.path}"
        )
        node.until("test -e /tmp/alice.started", HUNG)
        node.run("scancel --user=alice")
        node.idle(HUNG)
    assert image.seen(node.srun(f"stage={image.path}", image.look))


def test_copy_is_right_after_the_nfs_server_died_during_the_copy_and_returned(
    node: Compute,
) -> None:
    image = node.image("copying", mib=24)
    with node.configured(SLOW):
        with node.holding(f"stage={image.path}"), dead(node):
            node.run("scancel --user=alice")
            node.idle(HUNG)
        node.until("! pgrep -x forestage-stage")
    done = node.srun(f"stage={image.path} stage-wait=5m", image.look)
    assert image.seen(done)
    node.run("forestage verify --all")


@pytest.mark.releases
def test_job_reading_through_can_be_cancelled_while_the_nfs_server_is_dead(
    node: Compute,
) -> None:
    image = node.image("through", mib=24)
    first = f"dd if={image.path} bs=64k count=1 of=/dev/null"
    with (
        node.configured(SLOW),
        node.holding(f"stage={image.path}", first, image.look) as job,
        dead(node),
    ):
        node.run(f"touch {OFF}")
        node.until("pgrep -u alice -x sha256sum")
        node.run("scancel --user=alice")
        assert job.wait(HUNG).code != 0
        node.idle(HUNG)
    assert node.left() == ""


@pytest.mark.parametrize("redirect", ["spank", "bind"])
def test_job_with_a_hit_reads_on_and_its_epilog_ends_while_the_nfs_server_is_dead(
    node: Compute, redirect: str
) -> None:
    image = node.warm("hit")
    with node.configured(f"redirect: {redirect}\n"):
        with node.holding(f"stage={image.path}", "true", image.look) as job, dead(node):
            node.run(f"touch {OFF}")
            assert image.seen(job.wait(HUNG))
            node.idle(HUNG)
        node.run("forestage sweep")
    assert node.left() == ""


def test_job_ends_while_its_directory_is_unexported_and_reads_right_bytes_afterwards(
    node: Compute,
) -> None:
    image = node.warm("unexported")
    node.run("exportfs -u 127.0.0.1:/export")
    try:
        done = node.begin(command(f"stage={image.path}", image.look), user="alice").wait(HUNG)
        assert done.code != 0 or image.seen(done)
        node.idle(HUNG)
    finally:
        node.run("exportfs -a")
    assert image.seen(node.srun(f"stage={image.path}", image.look))


@pytest.mark.parametrize("how", ["replaced", "in-place"])
def test_image_changed_on_the_server_while_cached_shows_its_new_bytes(
    node: Compute, how: str
) -> None:
    """At once, whatever this client has cached of it: a step opens the source, which asks."""
    image, other = node.warm("changed"), node.image("other")
    copy = "dd if=other.sqsh of=changed.sqsh" if how == "in-place" else "mv other.sqsh changed.sqsh"
    node.run(f"ls -l {image.path} >/dev/null; cd {SHARE}; {copy}", user="alice")
    assert other.seen(node.srun(f"stage={image.path}", image.look))


def test_image_changed_on_the_server_while_copied_is_no_entry_with_old_or_mixed_bytes(
    node: Compute,
) -> None:
    image, other = node.image("mixed", mib=16), node.image("other", mib=16)
    with node.configured(SLOW):
        with node.holding(f"stage={image.path}"):
            node.run(f"cd {SHARE}; dd if=other.sqsh of=mixed.sqsh", user="alice")
        node.until("! pgrep -x forestage-stage")
    assert other.seen(node.srun(f"stage={image.path} stage-wait=5m", image.look))
    assert other.seen(node.srun(f"stage={image.path}", image.look))


@pytest.mark.parametrize("how", CHANGES)
def test_directory_changed_on_the_server_while_cached_shows_its_new_files(
    node: Compute, how: str
) -> None:
    made_set(node)
    shown(node, f"stage={SET}/ stage-wait=5m")
    assert shown(node) == [content(node), "erofs"]
    # What the client knows of all of it is fresh: by itself it asks again after 3 to 60 seconds.
    node.run(f"ls -lR {SET} >/dev/null; cd {SHARED_SET}; {CHANGES[how]}")
    assert shown(node)[0] == content(node)


def test_directory_changed_on_the_server_while_copied_is_no_entry_with_old_or_mixed_files(
    node: Compute,
) -> None:
    made_set(node, kib=4096)
    with node.configured(SLOW):
        with node.holding(f"stage={SET}/"):
            node.run(f"cd {SHARED_SET}; {CHANGES['replaced']}")
        node.until("! pgrep -x forestage-stage")
    assert shown(node, f"stage={SET}/ stage-wait=5m")[0] == content(node)
    assert shown(node) == [content(node), "erofs"]


def test_private_image_under_root_squash_is_a_hit_only_for_its_owner(
    node: Compute,
) -> None:
    image = node.warm("private", mode="600")
    assert node.run(f"cat {image.path}", check=False).code != 0
    script = f"{image.look}; findmnt -n -o FSTYPE -T {image.path}"
    mine = node.srun(f"stage={image.path}", script)
    assert image.seen(mine)
    assert mine.out.split()[-1] == "xfs"
    others = node.run(command(f"stage={image.path}", image.look), user="bob", check=False)
    assert others.code != 0
    assert image.sha256 not in others.out
    assert node.run(f"stat -c '%U %a' {CACHE}/entries/*/image").out == "alice 600\n"
