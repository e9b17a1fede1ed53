"""Images of 75 MiB on a disk of 256 MiB: three fit, so the fourth asks who has to go."""

from __future__ import annotations

import pytest
from cluster import Cluster
from images import MIB
from jobs import Site, hooked
from spec import ClusterSpec

NAMES = ("a", "b", "c", "d")
# With the tree of an image it makes a little less than 75 MiB, of which three fit into 90 %.
PADDING = 70


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(nodes=1, nvme_mib=256)


@pytest.fixture(scope="module")
def paths(site_cluster: Cluster) -> dict[str, str]:
    site = Site(site_cluster)
    paths = {name: site.image(name, mib=PADDING, seed=ord(name)) for name in NAMES}
    sizes = [site.source(path).stat().st_size for path in paths.values()]
    assert all(72 * MIB < size < 75 * MIB for size in sizes), sizes
    return paths


def stage(site: Site, *images: str) -> list[str]:
    """Stages them one after the other, by jobs that do not read them; what came of each."""
    jobs = [site.srun(None, "true", comment=f"stage={image}").job for image in images]
    return [result for job in jobs for result in site.results(job)]


def test_the_least_recently_used_goes(site: Site, paths: dict[str, str]) -> None:
    a, b, c, d = paths.values()
    assert stage(site, a, b, c, a) == ["copied", "copied", "copied", "hit"]
    last = site.srun(d)
    outcome = site.outcome(last.job)
    assert outcome.result == "copied"
    assert site.cached_paths() == [a, c, d]
    assert site.saw(last.job).file == site.copy(outcome.key)
    assert site.saw(last.job).sha256 == site.sha256(d)


def test_leased_and_pinned_images_never_go_even_if_that_means_declining(
    site: Site, paths: dict[str, str]
) -> None:
    a, b, c, d = paths.values()
    assert stage(site, a, b, c) == ["copied"] * 3
    site.command("pin", a)
    with (
        site.holding(None, comment=f"stage={b}"),
        site.holding(None, comment=f"stage={c}") as job_of_c,
    ):
        declined = site.srun(d)
        outcome = site.outcome(declined.job)
        assert (outcome.result, outcome.reason) == ("declined", "no-room")
        assert (declined.code, site.shows_source(site.saw(declined.job))) == (0, True)
        assert site.cached_paths() == [a, b, c]

        job_of_c.stop()
        assert stage(site, d) == ["copied"], "the most recently used was free, and it alone"
        assert site.cached_paths() == [a, b, d]
    site.command("unpin", a)
    assert stage(site, c) == ["copied"]
    assert site.cached_paths() == [b, c, d]


def test_the_epilog_evicts_down_to_the_low_watermark(site: Site) -> None:
    leased, unleased, last = (site.image(name, mib=4) for name in ("leased", "unleased", "last"))
    size = site.source(last).stat().st_size
    site.configure(max_size=3 * size + MIB, low_watermark="80%")  # of three: two
    with site.holding(None, comment=f"stage={leased}"):
        assert stage(site, unleased) == ["copied"]
        assert site.cached_paths() == [leased, unleased]
        assert stage(site, last) == ["copied"]
        assert site.cached_paths() == [last, leased], "not the least recently used"
