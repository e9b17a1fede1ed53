"""The same on other releases of Slurm and Python, in Debian trees: ./test --all, --suite NAME."""

from __future__ import annotations

import pytest
from jobs import Site
from spec import ClusterSpec
from steps import SHOW, accompanied, served, wrong
from suite import SUITES, on_suite


@pytest.fixture(
    scope="module", params=[pytest.param(s, marks=pytest.mark.suite(s)) for s in SUITES]
)
def cluster_spec(request: pytest.FixtureRequest, machine: None) -> ClusterSpec:
    """Both plugins compile there with -Werror, or there is no cluster."""
    return on_suite(accompanied(2), request.param)


def test_step_at_job_level(spank: Site) -> None:
    image = spank.image("job", mib=2)
    job = spank.srun(image)
    assert job.stdout == 'NAME="job"\nID=job\n', job
    assert spank.outcome(job.job).result == "started"
    assert wrong(spank, image, spank.seen(job.job)) == []


def test_inner_step_on_two_nodes(spank: Site) -> None:
    image = spank.image("inner", mib=2)
    step = f"srun --container-image={image} {SHOW}"
    job = spank.sbatch(f"{step}\n{step}", node="n1,n2")
    assert job.stdout.count("ID=inner") == 4, job
    for node in ("n1", "n2"):
        assert [one.result for one in served(spank, job.job, node)] == ["copied", "hit"]
    assert wrong(spank, image, spank.seen(job.job)) == []


def test_redirect_of_the_whole_node(site: Site) -> None:
    image = site.image("bound", mib=2)
    job = site.srun(image)
    assert (site.outcome(job.job).result, site.outcome(job.job).redirect) == ("copied", "mounted")
    assert wrong(site, image, site.seen(job.job)) == []
