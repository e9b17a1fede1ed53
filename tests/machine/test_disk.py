"""The cache's disk freezes: jobs do not notice, and it heals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from compute import OFF, Compute, Image, command

HUNG = 300  # seconds: who has not ended after that waits for the disk; many times what it takes


def goes_by(node: Compute, image: Image) -> tuple[str, str]:
    """A whole job, its Epilog as well, while the disk is as it is: what it got, and why."""
    script = command(f"stage={image.path}", f"{image.look}; echo $SLURM_JOB_ID")
    done = node.begin(script, user="alice").wait(HUNG)
    assert image.seen(done)
    node.idle(HUNG)
    job = int(done.out.split()[-1])
    last = [one.outcome for one in node.outcomes(job) if one.hook in ("prolog", "step")][-1]
    return last.result, last.reason


def heals(node: Compute, image: Image) -> None:
    """The next jobs find the image in the cache again, and nothing is left of what went before."""
    node.run("systemctl start forestage-sweep")
    node.srun(f"stage={image.path} stage-wait=5m", "true")
    assert goes_by(node, image)[0] == "hit"
    assert node.left() == ""


@contextlib.contextmanager
def frozen(node: Compute) -> Iterator[None]:
    node.run("fsfreeze -f /mnt/nvme")
    try:
        yield
    finally:
        node.run("fsfreeze -u /mnt/nvme")


def test_disk_frozen_while_a_job_runs_holds_no_epilog(node: Compute) -> None:
    image = node.warm("running")
    with node.holding(f"stage={image.path}", "true", image.look) as running, frozen(node):
        node.run(f"touch {OFF}")
        assert image.seen(running.wait(HUNG))
        node.idle(HUNG)
    heals(node, image)


def test_disk_frozen_while_a_step_reads_through_holds_neither_it_nor_its_epilog(
    node: Compute,
) -> None:
    image = node.image("through", mib=24)
    first = f"dd if={image.path} bs=64k count=1 of=/dev/null"
    with node.configured("bandwidth: 1MiB\n"):
        holding = node.holding(f"stage={image.path}", first, image.look)
        with holding as running, frozen(node):
            node.run(f"touch {OFF}")
            assert image.seen(running.wait(HUNG))
            node.idle(HUNG)
        heals(node, image)
