"""A job sees the file that the shared file system has when it starts, whatever the cache has."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from host import wait_until
from images import MIB
from jobs import RELEASE, Site


def in_place(site: Site, path: str) -> None:
    """As alice on the login node: the same inode, the same size."""
    size = site.source(path).stat().st_size
    write = f"printf changed | dd of={path} bs=1 seek={size - 8 * 1024} conv=notrunc status=none"
    site.cluster.run(["sh", "-c", write])


def by_rename(site: Site, path: str) -> None:
    new = site.image("new", mib=2, seed=7)
    site.cluster.run(["mv", new, path])


CHANGES = [in_place, by_rename]
Change = Callable[[Site, str], None]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_job_sees_the_change(site: Site, change: Change) -> None:
    image = site.image("changing", mib=2)
    first = site.srun(image)
    change(site, image)
    second = site.srun(image)
    outcome = site.outcome(second.job)
    assert outcome.result == "copied"
    assert site.saw(second.job).file == site.copy(outcome.key)
    assert site.saw(second.job).sha256 == site.sha256(image) != site.saw(first.job).sha256
    assert site.outcome(site.srun(image).job).result == "hit"


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_job_sees_the_change_while_an_older_one_runs(site: Site, change: Change) -> None:
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
            late = site.srun(image)
            assert site.saw(late.job).file == site.copy(outcome.key)


def test_without_the_companion_a_redirect_hides_the_change_from_inner_steps(site: Site) -> None:
    """A known limit: no Prolog knows of this step, and another job's redirect
    lies on its path. test_step_bind.py shows what the companion makes of it."""
    image = site.image("changing", mib=2)
    with site.holding(image) as old:
        in_place(site, image)
        job = site.sbatch(None, f"srun --container-image={image} {' '.join(RELEASE)}")
        assert site.saw(job.job).sha256 == site.saw(old.job).sha256 != site.sha256(image)


@pytest.mark.parametrize("way", ["removed", "unreadable"])
def test_a_source_that_is_gone_is_gone_for_the_next_job(site: Site, way: str) -> None:
    image = site.image("gone", mib=1)
    with site.holding(image):
        site.cluster.run(["rm", image] if way == "removed" else ["chmod", "0600", image])
        late = site.srun(image, user="bob")
        expected = "No such file or directory" if way == "removed" else "Permission denied"
        assert site.saw(late.job).error == expected
        assert late.code != 0
        reason = "missing" if way == "removed" else "no-permission"
        assert site.outcome(late.job).reason == reason


def test_a_superseded_entry_goes_first(site: Site) -> None:
    oldest, changing, third = (site.image(name, mib=4) for name in ("old", "changing", "third"))
    size = site.source(oldest).stat().st_size
    site.configure(max_size=3 * size + MIB)
    for image in (oldest, changing):
        site.srun(image)
    (superseded,) = [
        key
        for key, one in site.entries().items()
        if one.entry and one.entry.identity.path == changing
    ]
    in_place(site, changing)
    site.srun(changing)
    assert superseded in site.entries()
    site.srun(third)
    assert superseded not in site.entries(), "the least recently used went instead"
    assert site.cached_paths() == sorted([oldest, changing, third])


def test_a_source_that_keeps_changing_is_not_staged(site: Site) -> None:
    image = site.image("restless", mib=8)
    site.configure(bandwidth="8MiB", chunk_size="1MiB")  # so that it changes before the copy ends
    was = site.source(image).stat().st_mtime_ns
    touch = f"import os\nwhile True: os.utime({image!r})"
    writer = site.cluster.popen(["python3", "-c", touch])
    try:
        wait_until(
            lambda: site.source(image).stat().st_mtime_ns != was, 60, lambda: "no change begins"
        )
        job = site.srun(image)
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.communicate()
    assert site.outcome(job.job).reason == "changed"
    assert (job.code, site.shows_source(site.saw(job.job))) == (0, True)
    assert site.entries() == {}
