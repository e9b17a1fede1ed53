"""A job's own mount, PID and user namespaces (namespace/linux, Slurm 25.11 and later)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
from jobs import Site
from spec import ClusterSpec
from steps import SHOW, accompanied, served, wrong
from suite import on_suite

KINDS = {"pid": ("NEWNS", "NEWPID"), "pid and user": ("NEWNS", "NEWPID", "NEWUSER")}


def _namespaces(kinds: tuple[str, ...]) -> str:
    flags = "".join(f'    - "CLONE_{kind}"\n' for kind in kinds)
    return (
        "---\ndefaults:\n  auto_base_path: true\n  base_path: /var/spool/namespaces\n"
        f"  dir_confs: []\n  disable_bpf_token: true\n  clone_ns_flags:\n{flags}"
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(KINDS[name], id=name, marks=pytest.mark.suite("sid")) for name in KINDS],
)
def cluster_spec(request: pytest.FixtureRequest, machine: None) -> Iterator[ClusterSpec]:
    """All on one processor: Linux 6.18 counts namespaces for each, and does not let Slurm bind one
    with a number that is lower than that of slurmd's own (EINVAL in namespace/linux)."""
    flags = {"NamespaceType": "namespace/linux", "PrologFlags": "Alloc,DeferBatch,Contain"}
    spec = accompanied(1, **flags)
    files = {**spec.files, "/etc/slurm/namespace.yaml": _namespaces(request.param)}
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    yield on_suite(dataclasses.replace(spec, files=files), "sid")
    os.sched_setaffinity(0, processors)


@pytest.fixture
def spank(site: Site) -> Site:
    """The plugin changes the node's own mount table, so that nobody looks at that here."""
    site.configure(redirect="spank")
    return site


def test_step_in_job_namespaces_sees_the_nodes_copy(spank: Site) -> None:
    image = spank.image("inner", mib=2)
    first, second = (spank.srun(image) for _ in range(2))
    for job in (first, second):
        assert job.stdout == 'NAME="inner"\nID=inner\n', job
        assert wrong(spank, image, spank.seen(job.job)) == []
    assert spank.outcome(second.job).result == "hit"
    assert [one.result for one in served(spank, second.job, "n1")] == ["hit"]


def test_cold_step_in_job_namespaces_reads_through_the_prologs_keeper(spank: Site) -> None:
    image = spank.image("cold", mib=8)
    spank.configure(redirect="spank", cold="through", bandwidth="64KiB", chunk_size="1MiB")
    job = spank.srun(image)
    assert job.stdout == 'NAME="cold"\nID=cold\n', job
    assert [one.result for one in served(spank, job.job, "n1")] == ["through"]
    (seen,) = spank.seen(job.job)
    assert (seen.sha256, seen.mount_point) == (spank.sha256(image), image)
    assert not spank.shows_source(seen)
    spank.end_stagers()
    spank.await_keepers()
    spank.reset()


def test_inner_step_in_job_namespaces_starts_no_keeper_and_reads_the_source(spank: Site) -> None:
    image = spank.image("within", mib=8)
    spank.configure(redirect="spank", cold="through", bandwidth="64KiB", chunk_size="1MiB")
    job = spank.sbatch(f"srun --container-image={image} {SHOW}")
    assert job.stdout.count("ID=within") == 1, job
    (step,) = served(spank, job.job, "n1")
    assert (step.result, step.reason) == ("started", "no-through")
    (seen,) = spank.seen(job.job)
    assert spank.shows_source(seen)
    spank.await_keepers()
    spank.reset()
