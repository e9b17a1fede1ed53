"""Copies that take longer than Slurm lets a Prolog take: the copy goes on, no job and node suffers.

The copies are slow because `bandwidth:` says so; everything else is as it is on a real node.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from host import wait_until
from jobs import RELEASE, Site, hooked
from spec import ClusterSpec

TIMEOUT = 8  # seconds of PrologEpilogTimeout; `deadline: auto` then is 5 s
SETTINGS = {
    "impatient": {"PrologFlags": "Alloc,DeferBatch", "PrologEpilogTimeout": str(TIMEOUT)},
    "undeferred": {"PrologFlags": "Alloc"},
}
# MiB that, at 2 MiB/s, take longer than what would be lost: the node at 8 s, an srun at 20 s.
LONGER = {"Alloc,DeferBatch": 24, "Alloc": 48}


@pytest.fixture(
    scope="module", params=["impatient", pytest.param("undeferred", marks=pytest.mark.ci)]
)
def cluster_spec(request: pytest.FixtureRequest) -> ClusterSpec:
    return hooked(nodes=2, **SETTINGS[request.param])


def published(site: Site, image: str, node: str = "n1") -> None:
    """Waits until the stager that no hook waits for any more has ended its copy."""
    parts = site.cache(node).parts
    wait_until(lambda: not any(parts.iterdir()), 90, lambda: f"{image} is still being copied")


def test_copy_slower_than_slurms_timeouts_fails_no_job_and_drains_no_node(
    site: Site, cluster_spec: ClusterSpec
) -> None:
    """Whatever limit slurm.conf sets, `deadline: auto` comes first, and the copy goes on.

    Without DeferBatch a batch script starts while its second node is still in its Prolog.
    """
    mib = LONGER[cluster_spec.slurm_conf["PrologFlags"] or ""]
    slow, half = site.image("slow", mib=mib), site.image("half", mib=mib, seed=1)
    site.srun(half, node="n1")  # cold on n2
    site.configure(deadline="auto", bandwidth="2MiB")
    steps = f"srun -l {' '.join(RELEASE)}; echo end"
    with ThreadPoolExecutor() as pool:
        batching = pool.submit(site.sbatch, steps, f"--container-image={half}", node="n1,n2")
        first = site.srun(slow)
        batch = batching.result()
    assert first.code == 0, first
    assert site.outcome(first.job).reason == "deadline"
    assert site.shows_source(site.saw(first.job))
    assert {"0: ID=half", "1: ID=half", "end"} <= set(batch.stdout.splitlines()), batch
    assert site.outcome(batch.job, "n1").result == "hit"
    assert site.outcome(batch.job, "n2").reason == "deadline"
    assert set(site.cluster.node_states().values()) == {"idle"}
    published(site, slow)
    published(site, half, "n2")
    second = site.srun(slow)
    assert site.outcome(second.job).result == "hit"
    assert site.saw(second.job).sha256 == site.sha256(slow)
    assert not site.shows_source(site.saw(second.job))


def test_stage_wait_hint_extends_the_wait_without_draining_the_node(site: Site) -> None:
    image = site.image("hinted", mib=24, seed=2)
    # Longer than the deadline, and by far shorter than what TIMEOUT leaves.
    site.configure(deadline="1s", bandwidth="16MiB", chunk_size="1MiB")
    ran = site.srun(image, comment="stage-wait=5m")
    outcome = site.outcome(ran.job)
    assert outcome.result == "copied", outcome
    assert set(site.cluster.node_states().values()) == {"idle"}


def test_cold_auto_job_starts_without_waiting_and_is_redirected_later(site: Site) -> None:
    image = site.image("cold", mib=24, seed=4)
    site.configure(cold="auto", bandwidth="2MiB", chunk_size="1MiB")
    go = site.source("/shared/alice/go-on")
    go.unlink(missing_ok=True)
    job = site.cluster.submit(
        f"#!/bin/sh\nsrun {' '.join(RELEASE)}\nuntil test -e go-on; do sleep 0.1; done\n"
        f"srun {' '.join(RELEASE)}\n",
        f"--container-image={image}",
        "--nodelist=n1",
    )
    wait_until(lambda: site.seen(job), 60, lambda: "no step begins")
    assert site.cached_paths("n1") == [], "the copy takes longer than the start"
    binds = site.cluster.host_path("/proc/1/mountinfo", "n1")
    wait_until(lambda: image in binds.read_text(), 90, lambda: "no redirect")
    go.touch()
    site.wait_over(job)
    batch, first, second = site.seen(job)
    assert [site.shows_source(one) for one in (batch, first, second)] == [True, True, False]
    assert {batch.sha256, first.sha256, second.sha256} == {site.sha256(image)}
    assert (site.outcome(job).result, site.outcome(job).redirect) == ("started", "later")
    assert image not in binds.read_text()


def test_cancelled_job_that_does_not_wait_for_its_copy_ends_before_the_copy(site: Site) -> None:
    image = site.image("left", mib=24, seed=5)
    site.configure(cold="shared", bandwidth="1MiB", chunk_size="1MiB")
    began = site.source("/shared/alice/began")
    began.unlink(missing_ok=True)
    script = "#!/bin/sh\ntouch began\nsleep 600\n"
    job = site.cluster.submit(script, f"--container-image={image}", "--nodelist=n1")
    parts = site.cache("n1").parts
    # A batch job that is cancelled while slurmd starts it may cost its node, as Slurm has it.
    wait_until(began.exists, 60, lambda: "the job does not start")
    wait_until(lambda: parts.is_dir() and any(parts.iterdir()), 60, lambda: "no copy begins")
    site.cluster.run(["scancel", str(job)], user="root")
    site.wait_over(job)
    assert site.cached_paths("n1") == [], "nobody waits for the copy"
    site.cluster.wait_idle()
    site.end_stagers()  # it would go on for as long again
    site.reset()


def test_stager_outlives_its_cancelled_job(site: Site) -> None:
    image = site.image("cancelled", mib=16, seed=3)
    site.configure(deadline="30s", bandwidth="4MiB")
    step = site.cluster.popen(["srun", "--nodelist=n1", f"--container-image={image}", "true"])
    parts = site.cache("n1").parts
    wait_until(lambda: parts.is_dir() and any(parts.iterdir()), 60, lambda: "no copy begins")
    site.cluster.run(["scancel", "--user=alice"], user="root")
    step.communicate(timeout=240)
    published(site, image)
    assert site.cached_paths("n1") == [image]
    site.cluster.wait_idle()
