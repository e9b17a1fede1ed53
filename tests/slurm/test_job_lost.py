"""A node that registers while a Prolog waits for a copy: Slurm must not take the job for lost.

slurmctld ends a running batch job that has no slurmstepd on its first node once the job is older
than BatchStartTimeout + min(10 s, MessageTimeout): job_mgr.c, _purge_missing_jobs. It looks when
the node registers, whatever PrologFlags is.
"""

from __future__ import annotations

import pytest
from host import wait_until
from jobs import Site, hooked
from spec import ClusterSpec

BATCH_START = 1  # seconds; the default of 10 would only make the test longer
LOST_AFTER = BATCH_START + 10
REGISTERED = "MESSAGE_NODE_REGISTRATION_STATUS"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(nodes=1, BatchStartTimeout=str(BATCH_START), SlurmctldDebug="debug2")


def age(site: Site, job: int) -> int:
    """Seconds since Slurm started the job, its Prolog included; as squeue's M:SS has it."""
    shown = site.cluster.run(["squeue", "--noheader", f"--jobs={job}", "--format=%M"], user="root")
    minutes, _, seconds = shown.stdout.strip().rpartition(":")
    return int(minutes or 0) * 60 + int(seconds or 0)


def registrations(site: Site) -> int:
    return (site.cluster.state / "log/slurmctld.log").read_text().count(REGISTERED)


def state(site: Site, job: int) -> str:
    shown = site.cluster.run(["scontrol", "--oneliner", "show", "job", str(job)], user="root")
    return dict(word.partition("=")[::2] for word in shown.stdout.split())["JobState"]


def test_job_completes_though_slurm_is_reconfigured_during_its_slow_copy(site: Site) -> None:
    image = site.image("slow", mib=2 * LOST_AFTER)
    site.configure(deadline="auto", bandwidth="1MiB", chunk_size="1MiB")
    script = "#!/bin/sh\nuntil test -e /shared/alice/go; do sleep 0.05; done\n"
    job = site.cluster.submit(script, f"--container-image={image}", "--no-requeue")
    wait_until(lambda: age(site, job) > LOST_AFTER, 90, lambda: f"{job} does not grow old", 0.5)
    before = registrations(site)
    site.cluster.run(["scontrol", "reconfigure"], user="root")
    wait_until(lambda: registrations(site) > before, 90, lambda: "n1 does not register")
    site.source("/shared/alice/go").touch()
    site.wait_over(job)
    assert state(site, job) == "COMPLETED"
    assert site.outcome(job).reason == "deadline"
    site.end_stagers()  # nobody needs the rest of the copy
    site.reset()
