"""A step that waits for a copy: it starts, however long that takes, and a cancelled one ends."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from host import wait_until
from jobs import RELEASE, Site
from spec import ClusterSpec
from steps import SHOW, accompanied, seen_at, served, wrong

BATCH_START = 1  # seconds; the default of 10 would only make the test longer
LOST_AFTER = BATCH_START + 10  # Slurm loses a step at BatchStartTimeout + MessageTimeout
SLOW = LOST_AFTER + 3
KILL_WAIT = 30  # seconds, Slurm's default: then it kills what does not end by itself


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied(BatchStartTimeout=str(BATCH_START))


def slow(site: Site) -> list[str]:
    """Images of one size whose copies take so long, and the configuration that makes it so."""
    images = [site.image(f"slow{number}", mib=16, seed=number) for number in range(4)]
    size = site.source(images[0]).stat().st_size
    site.configure(redirect="spank", deadline="auto", bandwidth=size // SLOW, chunk_size="1MiB")
    return images


def helped(site: Site, node: str) -> bool:
    """Whether the companion's helper waits there."""
    processes = site.root(["ps", "-e", "-o", "args="], node).splitlines()
    return any(process.endswith("/bin/forestage step") for process in processes)


def cancel_while_it_waits(site: Site, node: str) -> None:
    """The only step of its node."""
    parts = site.cache(node).parts
    wait_until(lambda: any(parts.glob("*/image")), 60, lambda: "no copy begins")
    wait_until(lambda: helped(site, node), 60, lambda: "no step waits")
    assert [len(lease.uses) for lease in site.leases(node)] == [1]
    site.cluster.run(["scancel", f"--nodelist={node}"], user="root")


def test_step_waiting_longer_than_slurms_timeouts_starts_and_a_cancelled_step_ends(
    site: Site,
) -> None:
    at_job_level, inner, first, second = slow(site)
    # A step on the second node of its job.
    asking = ["srun", "--nodes=1", "--nodelist=n2", f"--container-image={inner}", *RELEASE]
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(site.srun, at_job_level, node="n1,n2")]
        jobs += [pool.submit(site.run, ["salloc", *asking], "n1,n2")]
        pool.submit(site.srun, first, "true", node="n3")
        pool.submit(site.srun, second, "true", node="n4")
        for node in ("n3", "n4"):
            cancel_while_it_waits(site, node)
        wide, alone = (job.result() for job in jobs)

    for ran, image, nodes in ((wide, at_job_level, ["n1", "n2"]), (alone, inner, ["n2"])):
        seen = seen_at(site, image)
        assert (ran.code, ran.stderr.count("error")) == (0, 0), ran
        assert [one.node for one in seen] == nodes
        assert wrong(site, image, seen) == []
        said = [line for line in ran.stderr.splitlines() if "forestage: " in line]
        assert len(said) == 1, ran
        assert f"forestage: {nodes[0]}: waiting for the copy of {image}" in said[0]
    assert [one.result for one in served(site, wide.job, "n1")] == ["joined"]
    # That of the job level has begun in its Prolog, who knows how long before the step.
    (copied,) = served(site, alone.job, "n2")
    assert copied.result == "copied"
    assert copied.wait > LOST_AFTER

    for node in ("n3", "n4"):
        log = site.cluster.read(f"/var/log/slurm/{node}.log")
        assert "the step is being signalled" in log, "Slurm had to kill it"
        assert site.leases(node) == []
    assert set(site.cluster.node_states().values()) == {"idle"}
    site.await_stagers()
    site.configure(redirect="spank")
    late = site.srun(second, node="n4")
    assert late.code == 0
    assert site.saw(late.job).sha256 == site.sha256(second)


@pytest.mark.long
@pytest.mark.parametrize("signal", ["scancel", "interrupt"])
def test_cancelled_waiting_step_ends_and_the_next_step_of_the_job_starts(
    site: Site, signal: str
) -> None:
    image = slow(site)[0]
    site.source("/shared/alice/helped").unlink(missing_ok=True)
    first = f"srun --container-image={image} true & until test -e helped; do sleep 0.1; done; "
    end = {"scancel": "scancel $SLURM_JOB_ID.0", "interrupt": "kill -INT $!; kill -INT $!"}[signal]
    job = site.cluster.popen(
        ["salloc", "--nodelist=n1", "sh", "-c", f"{first}{end}; wait; echo; srun {SHOW}"]
    )
    wait_until(lambda: helped(site, "n1"), 60, lambda: "no step waits")
    began = time.monotonic()
    site.source("/shared/alice/helped").touch()
    stdout, stderr = job.communicate(timeout=120)
    assert time.monotonic() - began < KILL_WAIT, "Slurm had to kill it"
    assert "Debian" in stdout, (stdout, stderr)
    wait_until(lambda: site.cached_paths() == [image], 90, lambda: "no entry")
