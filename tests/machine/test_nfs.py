"""The shared file system is an NFS server that dies, refuses, or has other bytes now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from compute import IMAGES, Compute, command
from install import CACHE

HUNG = 400  # seconds: who has not ended after that waits for the server
PORT = "-p tcp --dport 2049 -j DROP"
FORGET = "sync; echo 3 >/proc/sys/vm/drop_caches"
ATTRIBUTES = "H4: a directory is compared by attributes that the client has cached"


@contextlib.contextmanager
def dead(node: Compute) -> Iterator[None]:
    """The server answers nothing, as if it had lost its power; a `hard` mount waits for it."""
    node.run(f"iptables -I INPUT {PORT}")
    try:
        yield
    finally:
        node.run(f"iptables -D INPUT {PORT}")
        node.run("ls /lustre/images >/dev/null")


def test_server_dead_before_the_prolog_the_job_starts_and_can_be_cancelled(node: Compute) -> None:
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


def test_server_dead_while_copied_a_step_ends_and_the_copy_is_right_when_it_is_back(
    node: Compute,
) -> None:
    image = node.image("copying", mib=24)
    with node.configured("bandwidth: 1MiB\n"):
        with node.holding(f"stage={image.path}"), dead(node):
            node.run("scancel --user=alice")
            node.idle(HUNG)
        node.until("! pgrep -x forestage-stage")
    done = node.srun(f"stage={image.path} stage-wait=5m", image.look)
    assert image.seen(done)
    assert node.run("forestage verify --all").code == 0


def test_server_dead_under_a_reader_the_job_can_be_cancelled_and_nothing_is_left(
    node: Compute,
) -> None:
    image = node.image("through", mib=24)
    with (
        node.configured("bandwidth: 1MiB\n"),
        node.holding(
            f"stage={image.path}", f"dd if={image.path} bs=64k count=1 of=/dev/null", image.look
        ) as job,
        dead(node),
    ):
        node.run("touch /tmp/lane.off")
        node.run("scancel --user=alice")
        assert job.wait(HUNG).code != 0
        node.idle(HUNG)
    node.until("! pgrep forestage")
    assert node.left() == ""


def test_server_dead_under_a_hit_the_job_reads_on(node: Compute) -> None:
    image = node.warm("hit")
    with node.holding(f"stage={image.path}", "true", image.look) as job, dead(node):
        node.run("touch /tmp/lane.off")
        assert image.seen(job.wait(HUNG))
        node.idle(HUNG)


def test_directory_taken_from_the_export_the_job_ends_as_without_forestage_and_back_it_is_right(
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
    image = node.warm("changed")
    other = node.image("other")
    share = f"/export/images/{image.path.rsplit('/', 1)[1]}"
    change = "cat" if how == "in-place" else "cp --remove-destination /dev/stdin"
    target = f">{share}" if how == "in-place" else share
    node.run(f"{change} {target} </export/images/other.sqsh; chown alice: {share}")
    assert other.seen(node.srun(f"stage={image.path}", image.look))


def test_image_changed_on_the_server_while_copied_is_no_entry_with_old_or_mixed_bytes(
    node: Compute,
) -> None:
    image, other = node.image("mixed", mib=16), node.image("other", mib=16)
    share = "/export/images/mixed.sqsh"
    with node.configured("bandwidth: 1MiB\n"):
        with node.holding(f"stage={image.path}"):
            node.run(f"cat /export/images/other.sqsh >{share}")
        node.until("! pgrep -x forestage-stage")
    done = node.srun(f"stage={image.path} stage-wait=5m", image.look)
    assert other.seen(done)
    assert other.seen(node.srun(f"stage={image.path}", image.look))


@pytest.mark.xfail(strict=True, reason=ATTRIBUTES)
def test_directory_changed_on_the_server_while_cached_shows_its_new_bytes(node: Compute) -> None:
    path, share = f"{IMAGES}/set", "/export/images/set"
    node.run(
        f"mkdir -p {share}; for i in 1 2 3; do echo old >{share}/$i; done; chown -R alice: {share}"
    )
    node.srun(f"stage={path}/ stage-wait=5m", f"cat {path}/2")
    # What the client knows of the files is fresh: it asks again after three seconds and more.
    script = command(f"stage={path}/", f"cat {path}/2")
    change = f"sed -i s/old/NEW/ {share}/2; touch -r {share}/1 {share}"
    node.run(f"ls -l {path} >/dev/null; {change}")
    assert node.run(script, user="alice").out == "NEW\n"


def test_private_image_of_a_squashed_root_is_a_hit_for_its_owner_and_nothing_for_others(
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
