"""Two nodes of a job without a store: one asks the registry, the other goes by its word."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_tree_nodes import Cluster

from forestage.data import looks
from forestage.data.looks import Look
from forestage.hooks.boundary import nothing_to_do
from forestage.registry import agreed, place
from forestage.registry.agreed import Nodes
from node import Node

REFERENCE = "nvcr.io#nvidia/pytorch:25.01-py3"
DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def cluster(node: Node) -> Iterator[Cluster]:
    found = Cluster(node)
    for one in found.nodes.values():
        one.cache.prepare(require_mount=False)
    with found.serving():
        yield found


def nodes(
    cluster: Cluster, name: str, step: int = 0, batch: bool = True, of_step: str = "n[1-2]"
) -> Nodes:
    facts = {"SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": of_step}
    job = cluster.job(name, **facts)
    return agreed.nodes_of(cluster.bare(name), job, REFERENCE, batch)


def asked(cluster: Cluster, name: str, found: Nodes) -> str:
    return agreed.asked(cluster.bare(name), found)


@pytest.mark.parametrize("batch", [True, False])
def test_second_node_goes_by_what_the_first_was_told(cluster: Cluster, batch: bool) -> None:
    first, second = (nodes(cluster, name, batch=batch) for name in ("n1", "n2"))
    assert asked(cluster, "n1", first) == "", "it leads"
    with agreed.telling(first) as tell:
        tell(DIGEST)
    assert asked(cluster, "n2", second) == DIGEST


def test_further_step_has_the_digest_of_its_batch_job_on_every_node(cluster: Cluster) -> None:
    with agreed.telling(nodes(cluster, "n1")) as tell:
        tell(DIGEST)
    assert asked(cluster, "n2", nodes(cluster, "n2")) == DIGEST
    for name in ("n1", "n2"):
        assert asked(cluster, name, nodes(cluster, name, step=1)) == DIGEST
        assert asked(cluster, name, nodes(cluster, name, step=1, of_step=name)) == DIGEST


def test_step_without_the_jobs_first_node_asks_that_node(cluster: Cluster) -> None:
    with agreed.telling(nodes(cluster, "n1", of_step="n1")) as tell:
        tell(DIGEST)
    assert asked(cluster, "n2", nodes(cluster, "n2", step=1, of_step="n2")) == DIGEST


def test_further_step_of_an_allocation_asks_anew(cluster: Cluster) -> None:
    with agreed.telling(nodes(cluster, "n1", batch=False)) as tell:
        tell(DIGEST)
    found = nodes(cluster, "n1", step=1, batch=False)
    assert asked(cluster, "n1", found) == ""
    with agreed.telling(found) as tell:
        tell(OTHER)
    assert asked(cluster, "n2", nodes(cluster, "n2", step=1, batch=False)) == OTHER


def test_first_node_that_is_refused_has_the_other_ask_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreed, "PATIENCE", 3600.0)
    monkeypatch.setattr(agreed, "NOT_YET", 3600.0)
    with pytest.raises(OSError, match="refused"), agreed.telling(nodes(cluster, "n1")):
        raise OSError("refused")
    assert asked(cluster, "n2", nodes(cluster, "n2")) == ""


@pytest.mark.parametrize(
    "lie", ["", "sha256:x", "../../etc", f"{DIGEST}\n", f"{DIGEST}@{DIGEST}", "\0"]
)
def test_word_that_is_no_digest_counts_for_nothing(cluster: Cluster, lie: str) -> None:
    first = nodes(cluster, "n1")
    assert first.step
    first.step.tell(Look("looked", digest=lie))
    assert asked(cluster, "n2", nodes(cluster, "n2")) == ""


def test_node_without_peers_asks_the_registry_itself(cluster: Cluster) -> None:
    cluster.nodes["n2"].configure(redirect="spank")
    found = nodes(cluster, "n2")
    assert found == Nodes(None, None)
    assert asked(cluster, "n2", found) == ""
    with agreed.telling(found) as tell:
        tell(DIGEST)


def test_first_node_that_is_silent_is_not_waited_for_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreed, "NOT_YET", 0.2)
    assert asked(cluster, "n2", nodes(cluster, "n2")) == ""


def test_what_was_told_goes_with_the_job(cluster: Cluster) -> None:
    first = nodes(cluster, "n1")
    with agreed.telling(first) as tell:
        tell(DIGEST)
    node = cluster.nodes["n1"]
    node.leases.drop(1)  # as of a job whose image is not staged

    def is_over() -> bool:
        paths = (str(node.places.leases), "/nowhere", str(node.places.images))
        return nothing_to_do("epilog", {"SLURM_JOB_ID": "1"}, *paths)

    assert not is_over()
    node.epilog(1)
    assert is_over()
    assert not (node.cache.looks / "1").exists()
    assert first.whole
    assert first.whole.told() is None


def test_what_was_told_outlives_a_sweep_though_an_import_holds_no_lease(cluster: Cluster) -> None:
    first = nodes(cluster, "n1")
    with agreed.telling(first) as tell:
        tell(DIGEST)
    node = cluster.nodes["n1"]
    node.leases.drop(1)
    looks.sweep(node.cache, node.leases, place.agreed(node.places))
    assert asked(cluster, "n1", nodes(cluster, "n1", step=1)) == DIGEST
    place.forget(node.places, 1)
    looks.sweep(node.cache, node.leases, place.agreed(node.places))
    assert asked(cluster, "n1", nodes(cluster, "n1", step=2)) == ""
