"""A job's image comes from the node's NVMe, however it was asked for, and is copied once.

Here is what Slurm or pyxis has a part in; the rest of a job's life is in tests/hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from jobs import RELEASE, Ran, Reads, Site
from spec import REPO

NODES = ("n1", "n2", "n3", "n4")
INNER = f"srun {' '.join(RELEASE)}"

WAYS: dict[str, Callable[[Site, str], Ran]] = {
    "srun": lambda site, image: site.srun(image),
    "sbatch": lambda site, image: site.sbatch(INNER, f"--container-image={image}"),
    "salloc": lambda site, image: site.run(
        ["salloc", f"--container-image={image}", "srun", *RELEASE]
    ),
    "hint": lambda site, image: site.sbatch(
        f"srun --container-image={image} {' '.join(RELEASE)}", f"--comment=stage={image}"
    ),
}


@pytest.mark.always
@pytest.mark.parametrize("way", WAYS)
def test_first_job_copies_the_image_and_the_second_job_reads_nothing_from_the_source(
    site: Site, way: str
) -> None:
    image = site.image(way, mib=4)
    digest = site.sha256(image)
    with contextlib.closing(Reads(site.source(image))) as source:
        cold = WAYS[way](site, image)
        assert source.happened(), "the copy was not read from the source: this proves nothing"
        warm = WAYS[way](site, image)
        assert not source.happened()
    outcome = site.outcome(cold.job)
    assert (outcome.result, outcome.bytes) == ("copied", site.source(image).stat().st_size)
    assert (site.outcome(warm.job).result, site.outcome(warm.job).bytes) == ("hit", 0)

    for job in (cold, warm):
        assert job.stdout == f'NAME="{way}"\nID={way}\n', "not run in the image"
        seen = site.saw(job.job)
        assert seen.file == site.copy(outcome.key)
        assert (seen.path, seen.mount_point, seen.sha256) == (image, image, digest)


def test_two_jobs_at_once_on_one_node_make_one_copy(site: Site) -> None:
    image = site.image("same", mib=32)
    with ThreadPoolExecutor() as pool:
        rans = list(pool.map(site.srun, [image] * 2))
    assert [ran.code for ran in rans] == [0, 0], rans
    jobs = [ran.job for ran in rans]
    first, second = sorted(site.outcome(job).result for job in jobs)
    assert first == "copied"
    assert second in ("joined", "hit")
    (key,) = site.entries()
    assert [site.saw(job).file for job in jobs] == [site.copy(key)] * 2
    assert first in site.command("explain", str(jobs[0])) + site.command("explain", str(jobs[1]))


def test_job_on_four_nodes_makes_one_copy_on_each(site: Site) -> None:
    image = site.image("four", mib=4)
    job = site.srun(image, node=",".join(NODES)).job
    for node, seen in zip(NODES, site.seen(job), strict=True):
        outcome = site.outcome(job, node)
        assert outcome.result == "copied"
        assert list(site.entries(node)) == [outcome.key]
        assert (seen.node, seen.file) == (node, site.copy(outcome.key, node))
        assert seen.sha256 == site.sha256(image)


def in_place(site: Site, path: str) -> None:
    """As alice on the login node: the same inode, the same size."""
    size = site.source(path).stat().st_size
    write = f"printf changed | dd of={path} bs=1 seek={size - 8 * 1024} conv=notrunc status=none"
    site.cluster.run(["sh", "-c", write])


def by_rename(site: Site, path: str) -> None:
    site.cluster.run(["mv", site.image("new", mib=2, seed=7), path])


@pytest.mark.parametrize("change", [in_place, by_rename])
def test_new_job_sees_a_changed_image_while_an_older_job_runs(
    site: Site, change: Callable[[Site, str], None]
) -> None:
    image = site.image("changing", mib=2)
    with site.holding(image) as old:
        before = site.saw(old.job)
        change(site, image)
        with site.holding(image) as new:
            outcome = site.outcome(new.job)
            assert outcome.result == "copied"
            assert site.saw(new.job).sha256 == site.sha256(image) != before.sha256
            assert site.saw(new.job).file == site.copy(outcome.key)
            assert len(site.entries()) == 2, "the old one is leased"
            old.stop()
            assert site.redirected() == [image]
            assert site.saw(site.srun(image).job).file == site.copy(outcome.key)


def test_cancelled_job_leaves_no_redirect_and_no_lease(site: Site) -> None:
    image = site.image("cancelled")
    with site.holding(image) as held:
        site.cluster.run(["scancel", str(held.job)])
        site.wait_over(held.job)
        assert site.redirected() == []
        assert site.leases() == []


def test_job_that_saves_over_its_image_gets_no_redirect(site: Site) -> None:
    image = site.image("saved")
    job = site.srun(
        image, "sh", "-c", f"echo more >> {image}", options=[f"--container-save={image}"]
    )
    assert (job.code, site.outcome(job.job).redirect) == (0, "none")
    assert site.shows_source(site.saw(job.job))


def test_job_without_image_and_hint_writes_no_file(site: Site) -> None:
    def files() -> str:
        find = "find /mnt/nvme /run/forestage /var/log/forestage /var/lib/forestage /tmp /etc"
        # The checkout may lie below /tmp, where other tests write to it.
        own = ["-path", str(REPO), "-prune", "-o"]
        shown = ["-not", "-name", "called.*", "-printf", "%p %s %T@ %C@\n"]
        return site.root([*find.split(), *own, *shown], "n1")

    site.srun(None, "true")  # makes the marks that Slurm has called the hooks
    before = files()
    job = site.srun(None, "true", comment="nothing for you")
    assert files() == before
    assert site.words(job.job) == [f"forestage: prolog job={job.job} result=none"]
