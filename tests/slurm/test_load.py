"""Many jobs at once on a real Slurm, and all that may befall them: nobody is the worse for it."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import tricks
from ahead import Passes
from cluster import Cluster
from host import wait_until
from jobs import CACHE, CLI, Site
from load import AHEAD, CONFIG, SPANK_ONLY, Sources, script, strained
from loading import Load
from registry import serving
from traces import Traces, failed, misfortunes, misread, shown_elsewhere, tally, wordy

SEED = "FORESTAGE_LOAD_SEED"  # any word; with it, both sizes have that script
ROW = "FORESTAGE_LOAD_ROW"  # so many jobs in a row for the large size; 500 take most of an hour
THEN = "FORESTAGE_LOAD_MANY"  # and so many at once after them
FEW = (3, 30, 12)  # jobs in a row, then so many with so many at once
MANY = (100, 500, 50)
FEW_SEED = "57361"  # of each kind of job, mishap and trick there is one


@pytest.fixture
def load(machine: None, keys: Mapping[str, object], tmp_path: Path) -> Iterator[Load]:
    """On a cluster of its own: each job that it has seen, and whatever is left, is this load's."""
    with Cluster.up(strained()) as cluster, serving(cluster, tmp_path) as registry:
        site = Site(cluster)
        site.configure(**keys)
        tricks.prepare_registry(site, registry)
        sources = Sources(site, settled=keys is AHEAD)
        for node in cluster.nodes:
            tricks.furnish(site, node)
        yield Load(site, sources, ahead=Passes(site) if keys is AHEAD else None)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(CONFIG, id="binds", marks=pytest.mark.ci),
        pytest.param(SPANK_ONLY, id="spank"),
        pytest.param(AHEAD, id="ahead", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("size", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=str)
def test_random_load_of_jobs_and_mishaps_causes_no_wrong_bytes_and_leaves_no_traces(
    load: Load, size: tuple[int, int, int], keys: Mapping[str, object]
) -> None:
    site, nodes = load.site, load.site.cluster.nodes
    seed = os.environ.get(SEED) or (FEW_SEED if size == FEW else secrets.token_hex(4))
    print(f"\n{SEED}={seed}")
    before = {node: Traces.of(site, node) for node in nodes}
    in_a_row, many, at_once = size
    if size == MANY:
        in_a_row = int(os.environ.get(ROW, in_a_row))
        many = int(os.environ.get(THEN, many))
    start = time.monotonic()
    load.carry_out(script(f"{seed} row", in_a_row, nodes), 1)
    print(f"the {in_a_row} in a row: {time.monotonic() - start:.0f} s")
    load.carry_out(script(f"{seed} many", many, nodes), at_once)
    print(f"{time.monotonic() - start:.0f} s,", dict(sorted((load.tally + tally(load)).items())))

    if load.ahead is not None:
        load.ahead.end()
        load.problems += load.ahead.problems
        print(dict(load.ahead.tally))
    # After an hour all of it is told, not only what comes first.
    wrong = load.problems + misread(load) + misfortunes(load) + failed(load) + wordy(load)
    # Before what hostile jobs have left is ended: it counts, too.
    wrong += [one for node in nodes for one in shown_elsewhere(site, node)]
    print(*wrong, sep="\n")
    tricks.end(site)
    # Copies go on when their jobs have ended.
    wait_until(lambda: not _at_work(site), 60, lambda: f"live on: {_at_work(site)}")
    site.configure(**{**keys, "bandwidth": None})  # `verify` keeps to it
    for node in nodes:
        _is_clean(site, node)
        assert Traces.of(site, node).grown(before[node]) == []
    assert wrong == []


def _at_work(site: Site) -> dict[str, Sequence[str]]:
    """The nodes that are not at rest, with what lives there."""
    found = {node: Traces.of(site, node) for node in site.cluster.nodes}
    return {node: one.processes for node, one in found.items() if not one.at_rest}


def _is_clean(site: Site, node: str) -> None:
    """No lease and no redirect is left, by what is seen and by what the sweep finds.

    And no bad entry. What a killed stager, a killed hook or a reboot has left may still be there:
    the sweep of a later day deletes it.
    """
    old = ["-exec", "touch", "-d", "2 days ago", "{}", "+"]
    site.root(["find", "/run/forestage/through", f"{CACHE}/parts", *old], node)
    site.root(["find", CACHE, "-maxdepth", "1", "-name", ".*.*", *old], node)
    assert (site.leases(node), site.redirected(node)) == ([], [])
    ran = site.cluster.run([CLI, "sweep", "--json"], user="root", node=node, check=False)
    swept = json.loads(ran.stdout)
    assert (ran.returncode, swept["released"], swept["redirects"]) == (0, [], []), swept
    site.command("verify", "--all", node=node)
