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


def test_image_option_of_the_job_is_redirected_in_its_step(spank: Site) -> None:
    image = spank.image("job", mib=2)
    job = spank.srun(image)
    assert job.stdout == 'NAME="job"\nID=job\n', job
    assert spank.outcome(job.job).result == "started"
    assert wrong(spank, image, spank.seen(job.job)) == []


def test_inner_steps_on_two_nodes_copy_first_and_then_hit_without_a_helper(spank: Site) -> None:
    image = spank.image("inner", mib=2)
    step = f"srun --container-image={image} {SHOW}"
    job = spank.sbatch(f"{step}\n{step}", node="n1,n2")
    assert job.stdout.count("ID=inner") == 4, job
    for node in ("n1", "n2"):
        first, second = served(spank, job.job, node)
        assert (first.result, second.result) == ("copied", "hit")
        assert first.wait > second.wait == 0.0, "the second step asked a helper"
    assert wrong(spank, image, spank.seen(job.job)) == []


def test_two_cold_steps_of_a_job_read_through_the_copy(spank: Site) -> None:
    image = spank.image("cold", mib=8)
    spank.configure(redirect="spank", cold="through", bandwidth="64KiB", chunk_size="1MiB")
    step = f"srun --container-image={image} {SHOW}"
    job = spank.sbatch(f"{step}\n{step}")
    assert job.stdout.count("ID=cold") == 2, job
    first, second = served(spank, job.job, "n1")
    assert (first.result, second.result) == ("through", "through")
    assert first.wait > second.wait == 0.0, "the second step asked a helper"
    for seen in spank.seen(job.job):
        assert (seen.sha256, seen.mount_point) == (spank.sha256(image), image)
        assert not spank.shows_source(seen)
    spank.end_stagers()
    spank.await_keepers()
    spank.reset()  # parts stay, for a resumed copy


def test_redirect_bind_mounts_the_copy_on_the_whole_node(site: Site) -> None:
    image = site.image("bound", mib=2)
    job = site.srun(image)
    assert (site.outcome(job.job).result, site.outcome(job.job).redirect) == ("copied", "mounted")
    assert wrong(site, image, site.seen(job.job)) == []
