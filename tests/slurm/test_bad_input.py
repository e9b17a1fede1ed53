"""Requests that pyxis or Slurm could turn differently: never worse off than without forestage.

Each job of `all` has a twin in `plain`, where forestage is switched off, on another node. Both
must end the same way and must have found the same; the log has one line about it, and so has
`forestage explain`. All other bad requests, and nodes in trouble, are in tests/hooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from jobs import Ran, Site, hooked
from spec import ClusterSpec


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(nodes=2, nvme_mib=64)


def text(site: Site) -> str:
    path = "/shared/alice/text.sqsh"
    site.source(path).write_text("This is not an image.\n" * 100)
    return path


@dataclass(frozen=True)
class Case:
    """What is asked for by pyxis' option, and the reason why it is not staged."""

    reason: str
    path: Callable[[Site], str]
    user: str = "alice"


CASES = {
    "missing": Case("missing", lambda site: "/shared/alice/missing.sqsh"),
    "directory": Case("not-a-file", lambda site: "/shared/alice"),
    "unreadable": Case("no-permission", lambda site: site.image("own", mode=0o600), user="bob"),
    "no-image": Case("not-squashfs", text),
    "registry": Case("registry", lambda site: "nvcr.io#nvidia/pytorch:24.01-py3"),
    "newline": Case("bad-path", lambda site: "/shared/alice/a\nb.sqsh"),
    "long-path": Case("bad-path", lambda site: "/shared" + "/x" * 2500),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_image_is_declined_and_the_job_ends_as_without_forestage(site: Site, name: str) -> None:
    case = CASES[name]
    job = served_as_without(site, case.path(site), case.user)
    assert_declined(site, job, case.reason)
    assert site.entries() == {}


def served_as_without(site: Site, path: str, user: str) -> Ran:
    """Runs the job and its twin, who must not differ; returns the job, which was on n1."""

    def run(node: str, partition: str) -> Ran:
        return site.srun(path, user=user, node=node, options=[f"--partition={partition}"])

    with ThreadPoolExecutor() as pool:
        job, twin = pool.map(run, ("n1", "n2"), ("all", "plain"))
    assert fate(job) == fate(twin)
    assert [(s.path, s.file, s.sha256, s.error) for s in site.seen(job.job)] == [
        (s.path, s.file, s.sha256, s.error) for s in site.seen(twin.job)
    ]
    return job


def fate(job: Ran) -> tuple[int, str, list[str]]:
    """How a job ended, and the words that it said.

    Who of a step's processes writes its line first is chance, and so is where a line that is longer
    than a pipe takes at once is cut by another one.
    """
    said = re.sub(r"\bn[12]\b", "node", job.stderr)
    # Whether a busy slurmctld gave the node at once is chance as well.
    said = re.sub(r"srun: job \d+ (queued and|has been) .*\n", "", said)
    return job.code, job.stdout, sorted(re.sub(r"[/x]{9,}", " ", said).split())


def assert_declined(site: Site, job: Ran, reason: str) -> None:
    outcome = site.outcome(job.job)
    assert (outcome.result, outcome.reason) == ("declined", reason)
    assert reason in log_line(site, job)


def log_line(site: Site, job: Ran) -> str:
    """The log's one line about a job; `forestage explain` must say the same."""
    (line,) = site.words(job.job)
    assert line.isprintable(), "control characters reach the log"
    assert len(line) < 5000
    explained = site.command("explain", str(job.job))
    assert all(row.isprintable() for row in explained.split("\n"))
    for outcome in site.outcomes(job.job):
        assert outcome.result in explained
        assert f"({outcome.reason})" in explained or not outcome.reason
    return line


# The comment


def test_hint_of_control_characters_is_reported_and_ignored(site: Site) -> None:
    problem = r"unknown hint stage-\x1b[31m\x07="
    job = site.srun(None, "true", comment="my work;stage-\x1b[31m\x07=1")
    assert job.code == 0
    assert_declined(site, job, "bad-hint")
    assert problem in log_line(site, job)
    assert problem in site.command("explain", str(job.job))


def test_image_at_the_end_of_the_longest_comment_is_staged(site: Site) -> None:
    """Slurm 22.05 takes 1024 bytes at most, from sbatch as from `scontrol update`."""
    image = site.image("good")
    hint = f" stage={image}"
    comment = ("stage=/y;" * 1024)[: 1024 - len(hint)] + hint
    job = site.srun(image, comment=comment)
    assert job.code == 0
    assert "copied" in site.results(job.job)
    assert "copied" in log_line(site, job)


def test_job_with_a_10_kb_comment_is_refused_by_slurm(site: Site) -> None:
    submit = ["srun", f"--comment=stage=/shared/alice/a.sqsh {'x' * 10240}", "true"]
    assert "too long" in site.cluster.run(submit, check=False).stderr
