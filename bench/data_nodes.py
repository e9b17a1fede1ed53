"""A directory to several nodes at once, which help one another, from one file server on a network.

The networks of bench/peers: GlusterFS behind one shaped link. On each node runs what its Prolog
does (bench/data_once.py), all at one time.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path

from cluster import Cluster, ClusterError
from fleet import Fleet, networked
from spec import ALICE, REPO, Net

MIB = 1 << 20
CHUNK = MIB  # the smallest: the tree is small
MBIT = 400.0  # of the file server's link, and of each node's
TREE = "/shared/alice/tree"


def format_table(nodes: int, tree: Path) -> Generator[str, None, float]:
    """Yields lines; returns bytes on the file server's link for each byte of the tree."""
    with Cluster.up(networked(nodes, Net(node_mbit=MBIT, store_mbit=MBIT))) as cluster:
        fleet = Fleet(cluster, CHUNK)
        fleet.configure(redirect="spank")
        fleet.serve(cluster.nodes)
        size = _copy_tree(tree, fleet.source(TREE))
        sent, read, start = fleet.sent_by_store(), fleet.read_of_store(), time.perf_counter()
        _stage_on_all(fleet)
        seconds = time.perf_counter() - start
        sent, read = fleet.sent_by_store() - sent, fleet.read_of_store() - read
    yield "| nodes | files | MiB | s | at the link's rate, directly | sent x | read x |"
    yield "|--:" * 7 + "|"
    files = sum(len(names) for _, _, names in os.walk(tree))
    directly = nodes * size * 8 / (MBIT * 1e6)
    yield (
        f"| {nodes} | {files} | {size / MIB:.0f} | {seconds:.1f} | {directly:.1f}"
        f" | {sent / size:.3f} | {read / size:.3f} |"
    )
    return sent / size


def _copy_tree(tree: Path, there: Path) -> int:
    shutil.copytree(tree, there)
    for path in (there, *there.rglob("*")):
        os.chown(path, ALICE.uid, ALICE.uid)
    return sum(path.stat().st_size for path in there.rglob("*") if path.is_file())


def _stage_on_all(fleet: Fleet) -> None:
    nodes = fleet.cluster.nodes
    argv = ["/usr/lib/forestage/bin/python3", "-B", str(REPO / "bench/data_once.py"), TREE]
    started = {
        node: fleet.cluster.popen(
            [*argv, node, ",".join(nodes), str(ALICE.uid)], user="root", node=node
        )
        for node in nodes
    }
    for node, process in started.items():
        out, err = process.communicate(timeout=600)
        if process.returncode or not out.startswith("ready"):
            raise ClusterError(f"{node}: {out}{err}\n{fleet.logs([node])}")
