"""A site that redirects paths on the whole node, and has the companion for the steps inside."""

from __future__ import annotations

import pytest
from jobs import Site
from spec import ClusterSpec
from steps import SHOW, accompanied, served, wrong
from test_job_stages import in_place


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied(2)


def test_image_of_an_inner_step_is_redirected_on_the_whole_node(site: Site) -> None:
    image = site.image("inner", mib=2)
    step = f"srun --container-image={image} {SHOW}"
    job = site.sbatch(f"{step}\n{step}\ngrep -c entries /proc/self/mountinfo")
    assert job.stdout.splitlines()[-1] == "1", "not on the node: the batch script sees no bind"
    first, second = served(site, job.job, "n1")
    assert (first.result, first.redirect) == ("copied", "mounted")
    assert (second.result, second.redirect) == ("hit", "kept")
    assert wrong(site, image, site.seen(job.job)) == []


def test_inner_step_sees_a_changed_image_beneath_another_jobs_redirect(site: Site) -> None:
    """Another job's redirect lies on the path; without the companion, this step would get it."""
    image = site.image("changing", mib=2)
    with site.holding(image) as old:
        in_place(site, image)
        job = site.sbatch(f"srun --container-image={image} {SHOW}")
        seen = site.saw(job.job)
        assert seen.sha256 == site.sha256(image) != site.saw(old.job).sha256
        assert not site.shows_source(seen)
