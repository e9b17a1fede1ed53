"""What a test cluster's slurm.conf and plugstack.conf have of forestage, and of Prologs at all.

    none     no line of ours, and no Prolog
    alloc    `PrologFlags=Alloc` alone: srun asks whether the nodes are ready, and waits
    empty    besides a Prolog and an Epilog that do nothing: what nearly every site has already
    ours     forestage's

From `none` to `empty` it is Slurm that takes longer, from there on it is us.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster import Cluster
from host import wait_until
from spec import REPO, ClusterSpec, plugstack_conf, slurm_conf
from suite import SUITES, on_suite

EMPTY = "/etc/empty"
# What a slurmd logs that has read slurm.conf once more: until 23.02, and since, where it is
# another process then.
READ_AGAIN = ("got reconfigure request", "slurmd started on")


def without_test_shell(spec: ClusterSpec) -> ClusterSpec:
    """With the hooks as a site has them: tests put a shell before these, to keep what they say."""
    return replace(
        spec,
        prolog=str(REPO / "prolog/forestage"),
        epilog=str(REPO / "epilog/forestage"),
        files={**spec.files, EMPTY: "#!/bin/sh\nexit 0\n"},
    )


def _with_lines(spec: ClusterSpec, prolog: str | None, flags: str | None) -> ClusterSpec:
    conf = {"Prolog": prolog, "Epilog": prolog, "PrologFlags": flags}
    return replace(spec, companion=None, slurm_conf={**spec.slurm_conf, **conf})


KINDS: Mapping[str, Callable[[ClusterSpec], ClusterSpec]] = {
    "none": lambda spec: _with_lines(spec, None, None),
    "alloc": lambda spec: _with_lines(spec, None, "Alloc"),
    "empty": lambda spec: _with_lines(spec, EMPTY, "Alloc"),
    "ours": lambda spec: spec,
}


def apply_spec(cluster: Cluster, spec: ClusterSpec) -> bool:
    """Gives the cluster the lines of `spec`; whether it had others. No job may be there.

    A file that is right already is left alone: Prologs go by its times
    (hooks/background_prolog.py).
    """
    changed = _write_file(cluster, "/etc/slurm/plugstack.conf", plugstack_conf(spec))
    if not _write_file(cluster, "/etc/slurm/slurm.conf", slurm_conf(spec)):
        return changed
    before = {node: _count_reads(cluster, node) for node in cluster.nodes}
    cluster.run(["scontrol", "reconfigure"], user="root")

    def late() -> list[str]:
        return [node for node in cluster.nodes if _count_reads(cluster, node) == before[node]]

    wait_until(lambda: not late(), 60, lambda: f"{late()} did not read slurm.conf again")
    cluster.wait_idle()
    return True


def _write_file(cluster: Cluster, path: str, text: str) -> bool:
    if cluster.read(path) == text:
        return False
    cluster.write(path, text)
    return True


def _count_reads(cluster: Cluster, node: str) -> int:
    log = (cluster.state / "log" / f"{node}.log").read_text(errors="replace")
    return sum(log.count(words) for words in READ_AGAIN)


# Releases of Slurm


def add_suite_option(parser: argparse.ArgumentParser) -> None:
    words = "whose Slurm it is; this machine's own if not given"
    parser.add_argument("--suite", choices=list(SUITES), help=words)


def use_suite(spec: ClusterSpec, suite: str | None) -> ClusterSpec:
    return on_suite(spec, suite) if suite else spec


def read_slurm_release(cluster: Cluster) -> str:
    """As 22.05.8."""
    return cluster.run(["srun", "--version"]).stdout.split()[-1]
