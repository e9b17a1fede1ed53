"""forestage-estimate against what forestage itself did, on accounting of a real slurmdbd."""

from __future__ import annotations

import dataclasses
import json
import random
import zipapp
from dataclasses import dataclass

import accounts
import pytest
from jobs import Site
from newcomer import told
from spec import REPO, ClusterSpec
from steps import accompanied
from suite import ACCOUNTING, on_suite

from forestage import events
from forestage.events import RequestOutcome

JOBS = 2000
IMAGES = 40
SIZES = (3, 6, 12)  # MiB
DISK = 400  # MiB
CACHE = 160  # MiB of that; half of the images' bytes
# By the command line, by #SBATCH, by a step; and jobs without an image besides, for the sample.
KINDS = {"line": 50, "sbatch": 30, "step": 20, "none": 5}
ESTIMATE = ["python3", "-I", "-S", str(REPO / "src/estimate"), "--since=now-1days", "--json"]


@dataclass(frozen=True)
class Submitted:
    kind: str
    image: str


@pytest.fixture(scope="module")
def cluster_spec(machine: None) -> ClusterSpec:
    spec = on_suite(accompanied(4), ACCOUNTING)
    return dataclasses.replace(spec, nvme_mib=DISK)


@pytest.fixture
def booked(site: Site) -> Site:
    accounts.keep(site.cluster)
    # A step's image is served by the companion, all others by the Prolog.
    # All jobs are of one user, and no image is unpacked.
    room = {"max_size": f"{CACHE}MiB", "max_user_share": "100%", "unpack_ratio": 0}
    site.configure(cold="wait", partitions={"plain": {"redirect": "spank"}}, **room)
    return site


def script(image: str, kind: str) -> str:
    lines = {
        "sbatch": f"#SBATCH --container-image={image}\ntrue",
        "step": f"srun --container-image={image} true",
    }
    return f"#!/bin/sh\n{lines.get(kind, 'true')}\n"


def submit(site: Site, many: list[Submitted]) -> list[int]:
    """All of them in a row, each alone on a node; returns when they are over."""
    commands = []
    for number, one in enumerate(many):
        path = f"/shared/alice/job{number}.sh"
        site.cluster.write(path, script(one.image, one.kind))
        options = ["--parsable", "--exclusive", "--nodes=1", "--output=/dev/null"]
        options += ["--partition=plain"] * (one.kind == "step")
        options += [f"--container-image={one.image}"] * (one.kind == "line")
        commands.append(" ".join(["sbatch", *options, path]))
    done = site.cluster.run(["sh", "-e"], input="\n".join(commands) + "\n", timeout=1800)
    site.cluster.wait_idle(timeout=3600)
    site.await_stagers()
    return [int(line) for line in done.stdout.split()]


def uses(site: Site) -> dict[tuple[int, str, str], bool]:
    """By job, node and image: whether its first request was a hit, in forestage's own events."""
    found: dict[tuple[int, str, str], bool] = {}
    for node in site.cluster.nodes:
        log = site.cluster.host_path("/var/log/forestage/events.jsonl", node)
        for event in events.read_events(log):
            if event.hook in ("prolog", "step") and isinstance(event.outcome, RequestOutcome):
                key = event.job, node, event.outcome.request
                found.setdefault(key, event.outcome.result == "hit")
    return found


@pytest.mark.long
@pytest.mark.timeout(10800)
def test_hits_estimated_for_2000_jobs_match_forestages_own_events(booked: Site) -> None:
    site, chance = booked, random.Random(31)
    images = [site.image(f"i{n}", mib=SIZES[n % 3], seed=n) for n in range(IMAGES)]
    weights = [1 / (rank + 1) for rank in range(IMAGES)]
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=JOBS)
    wanted = chance.choices(images, weights, k=JOBS)
    jobs = [Submitted(kind, image) for kind, image in zip(kinds, wanted, strict=True)]

    numbers = submit(site, jobs[: JOBS // 2])
    for number in chance.sample(range(IMAGES), IMAGES // 10):
        site.image(f"i{number}", mib=SIZES[number % 3], seed=1000 + number)
    numbers += submit(site, jobs[JOBS // 2 :])

    by_number = dict(zip(numbers, jobs, strict=True))
    did = uses(site)
    assert len(did) == sum(job.kind != "none" for job in jobs)
    shown = [hit for (job, _, _), hit in did.items() if by_number[job].kind in ("line", "step")]
    unseen = sum(job.kind == "sbatch" for job in jobs) / len(did)

    argv = [*ESTIMATE, f"--cache={CACHE}M"]
    said = json.loads(site.cluster.run(argv, user="root", timeout=600).stdout)
    print(f"hits={sum(shown)} of {len(shown)}, unseen={unseen:.3f}", json.dumps(said))
    assert said["known"] == said["sized"] == len(shown)
    assert said["jobs"] == JOBS
    assert abs(said["chosen"]["hits"] - sum(shown)) <= 0.1 * sum(shown)
    assert abs(said["unseen"] - unseen) <= 0.05

    # What docs/sites.md has somebody type.
    made = site.cluster.host_path("/shared/forestage-estimate.pyz")
    zipapp.create_archive(REPO / "src/estimate", made)
    (block,) = told("test_estimate.py")
    typed = site.cluster.run(["sh", "-eu", "-c", block], user="root", cwd="/shared", timeout=600)
    assert f'"known": {len(shown)}' in typed.stdout
    assert site.cluster.host_path("/shared/estimate.html").stat().st_size > 1000
