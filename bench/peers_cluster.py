"""The tables behind bench/peers: one image to N nodes, directly and with the nodes' help.

A cluster with a network of its own (tests/slurm/net.py): each node behind a link of `node-mbit`,
a GlusterFS server behind one of `store-mbit`. Each measurement is a job over N nodes with an image
that none of them has read a byte of. Seconds are from `sbatch` to the last node's published entry,
so Slurm's own start is in them; bytes are those on the file server's link, and `read` those that
the server itself has read. All nodes share this machine's processors: `busy` says how much of these
was used, and near 100 % it is them that is measured, not the network.

Then jobs on different nodes, one after the other, with one file: `jobs8_src` is how often it was
read from the file server for 8 jobs of a node each, `jobs4x4_src` for 4 jobs of 4 nodes. Last what
bytes cost without shaped links (peers_pair.py): CPU-seconds for each GiB in chunks of 4 MiB, and
`beside`, how many times as long a job took on the processor on which its node gave 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
import peers_pair  # noqa: E402
from cluster import Cluster, ClusterError  # noqa: E402
from fleet import MIB, Fleet, networked  # noqa: E402
from host import exit_on_sigterm  # noqa: E402
from mishaps import MISHAPS, meet  # noqa: E402
from peers_watch import SERVICE, STAGER, ProcessLoad, ProcessWatch  # noqa: E402
from spec import Net  # noqa: E402

GIB = 1 << 30
CLUSTER = {"enabled": True, "listen": "{node}", "reach": "cluster"}
SETTLE = 2.0  # seconds between two measurements, for what the last one's job leaves to do


@dataclass(frozen=True)
class PeerJobResult:
    """One job. Bytes, seconds; `spread`: the last stager began so long after the first."""

    seconds: float
    spread: float
    sent: int
    read: int
    from_peers: int
    copied: int
    busy: float
    stagers: ProcessLoad
    services: ProcessLoad


class JobSeries(NamedTuple):
    """Jobs one after the other, of so many nodes each."""

    jobs: int
    nodes: int

    def __str__(self) -> str:
        return f"jobs{self.jobs}" + f"x{self.nodes}" * (self.nodes > 1)


Results = Mapping[int, tuple[PeerJobResult, PeerJobResult]]  # by nodes: directly, with peers


def measure_job(fleet: Fleet, count: int, mib: int, peers: bool) -> PeerJobResult:
    """A job on the first `count` nodes. Raises ClusterError where a copy is not right."""
    nodes = fleet.cluster.nodes[:count]
    fleet.configure(peers={"enabled": peers, "listen": "{node}"})
    path = fleet.data(f"image-{count}-{'peers' if peers else 'direct'}", mib)
    time.sleep(SETTLE)
    sent, read, start = fleet.sent_by_store(), fleet.read_of_store(), time.time()
    with ProcessWatch(list_networks(fleet)) as watch:
        job = fleet.start(path, nodes)
        copies = fleet.await_copies(path, nodes, 900)
    sent, read = fleet.sent_by_store() - sent, fleet.read_of_store() - read
    fleet.wait_over(job)
    if wrong := fleet.wrong(path, nodes):
        raise ClusterError(f"{path} is not right on {wrong}\n{fleet.logs(nodes)}")
    fleet.source(path).unlink()
    fleet.reset()
    begun = [event.time - event.outcome.wait for event in copies.values()]
    return PeerJobResult(
        seconds=max(event.time for event in copies.values()) - start,
        spread=max(begun) - min(begun),
        sent=sent,
        read=read,
        from_peers=sum(event.outcome.from_peers for event in copies.values()),
        copied=count * mib * MIB,
        busy=watch.busy,
        stagers=watch.load(STAGER),
        services=watch.load(SERVICE),
    )


def list_networks(fleet: Fleet) -> frozenset[int]:
    own = (fleet.cluster.host_path("/proc/1/ns/net", node) for node in fleet.cluster.nodes)
    return frozenset(os.stat(network).st_ino for network in own)


def format_times(results: Results, size: int) -> Iterator[str]:
    """How long, and how much the file server had to give."""
    yield "| nodes | direct s | sent MiB | peers s | MiB | sent x | read x | speedup | spread s |"
    yield "|--:" * 9 + "|"
    for count, (direct, peers) in results.items():
        yield (
            f"| {count} | {direct.seconds:.1f} | {direct.sent / MIB:.0f} | {peers.seconds:.1f}"
            f" | {peers.sent / MIB:.0f} | {peers.sent / size:.3f} | {peers.read / size:.3f}"
            f" | {direct.seconds / peers.seconds:.2f} | {peers.spread:.1f} |"
        )


def format_costs(results: Results) -> Iterator[str]:
    """What it takes of the nodes: CPU-seconds for each GiB, MiB of each process's own memory."""
    yield "| nodes | served | direct | peers | service | direct | peers | direct | peers |"
    yield "| | CPU-s/GiB | stager CPU-s/GiB | | MiB | stager MiB | | busy % | |"
    yield "|--:" * 9 + "|"
    for count, (direct, peers) in results.items():
        served = peers.services.cpu * GIB / peers.from_peers if peers.from_peers else 0.0
        cpu = [one.stagers.cpu * GIB / one.copied for one in (direct, peers)]
        memory = [one.memory / MIB for one in (peers.services, direct.stagers, peers.stagers)]
        busy = [100 * one.busy for one in (direct, peers)]
        figures = [f"{one:.2f}" for one in (served, *cpu)]
        figures += [f"{one:.0f}" for one in (*memory, *busy)]
        yield f"| {count} | {' | '.join(figures)} |"


def format_summary(results: Results, size: int) -> str:
    least, most = min(results), max(results)
    direct, peers = results[most]
    return (
        f"src_bytes={peers.sent / size:.3f}({most})"
        f" t{most}_over_t{least}={peers.seconds / results[least][1].seconds:.2f}"
        f" speedup{most}={direct.seconds / peers.seconds:.2f}"
    )


def run_job_series(fleet: Fleet, shape: JobSeries, mib: int) -> str:
    """Jobs one after the other, each on nodes that have nothing: how often the source was read."""
    fleet.reset()
    fleet.configure(peers=CLUSTER)
    nodes = fleet.cluster.nodes[: shape.jobs * shape.nodes]
    path = fleet.data(f"image-{shape}", mib)
    for node in nodes:
        fleet.command("sweep", node=node)  # who is there
    before = fleet.read_of_store()
    for first in range(0, len(nodes), shape.nodes):
        mine = nodes[first : first + shape.nodes]
        job = fleet.start(path, mine)
        fleet.await_copies(path, mine, 900)
        fleet.wait_over(job)
    read = fleet.read_of_store() - before
    if wrong := fleet.wrong(path, nodes):
        raise ClusterError(f"{path} is not right on {wrong}\n{fleet.logs(nodes)}")
    fleet.source(path).unlink()
    return f"{shape}_src={read / (mib * MIB):.3f}"


def format_pair_costs(mib: int, pairs: int) -> str:
    cost, ratios = peers_pair.measure_costs(mib), peers_pair.measure_job_slowdown(mib, pairs)
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    return (
        f"giver={cost.giver:.2f} taker={cost.taker:.2f} cp={cost.cp:.2f}"
        f" beside={middle:.3f}({least:.3f}-{most:.3f})"
    )


def measure_hostile_peers(fleet: Fleet, nodes: int, mib: int) -> Generator[str, None, str]:
    """How long the healthy nodes took when others had bad luck; all of theirs was right.

    Returns the figures of the last line.
    """
    yield "| disturbance | s | x undisturbed | read x | right |"
    yield "|:--" + "|--:" * 4 + "|"
    undisturbed, most, wrong = 0.0, 0.0, 0
    for name in MISHAPS:
        fleet.reset()
        told = meet(fleet, name, fleet.cluster.nodes[:nodes], mib)
        undisturbed = undisturbed or told.seconds
        most, wrong = max(most, told.source), wrong + len(told.wrong)
        right = [one.result for one in told.outcomes.values()].count("copied") - len(told.wrong)
        yield (
            f"| {name} | {told.seconds:.1f} | {told.seconds / undisturbed:.2f}"
            f" | {told.source:.3f} | {right} of {len(told.outcomes)} |"
        )
        fleet.cluster.wait_idle(60)
    return f"hostile_read={most:.3f} wrong={wrong}"


def run_bench(options: argparse.Namespace) -> Iterator[str]:
    load = busy.MachineLoad()
    links = Net(node_mbit=options.node_mbit, store_mbit=options.store_mbit)
    yield (
        f"{options.mib} MiB, node links {links.node_mbit:g} Mbit/s, file server's"
        f" {links.store_mbit:g} Mbit/s, {os.cpu_count()} processors for all of it\n"
    )
    results: dict[int, tuple[PeerJobResult, PeerJobResult]] = {}
    most = max(*options.nodes, *(shape.jobs * shape.nodes for shape in options.jobs))
    with Cluster.up(networked(most, links)) as cluster:
        fleet = Fleet(cluster, int(options.chunk_mib * MIB))
        fleet.reset()
        fleet.configure(peers=CLUSTER)
        fleet.serve(cluster.nodes)
        if options.hostile:
            yield load.last(
                (yield from measure_hostile_peers(fleet, max(options.nodes), options.mib))
            )
            return
        for count in options.nodes:
            direct, peers = (measure_job(fleet, count, options.mib, on) for on in (False, True))
            results[count] = (direct, peers)
        shared = [run_job_series(fleet, shape, options.mib // 4) for shape in options.jobs]
    size = options.mib * MIB
    yield from (*format_times(results, size), "", *format_costs(results), "")
    last = (
        format_summary(results, size),
        *shared,
        format_pair_costs(options.pair_mib, options.pairs),
    )
    yield load.last(" ".join(last))


def main() -> int:
    parser = busy.BenchOptions("peers", __doc__, "10 minutes")
    parser.add_argument("--nodes", default="1,4,16", type=_read_counts)
    parser.add_argument(
        "--jobs", default="8x1,4x4", type=_read_shapes, help="a quarter of MIB each"
    )
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--chunk-mib", type=float, default=1)
    parser.add_argument("--node-mbit", type=float, default=Net.node_mbit)
    parser.add_argument("--store-mbit", type=float, default=Net.store_mbit)
    parser.add_argument("--pair-mib", type=int, default=1024, help="without shaped links")
    parser.add_argument("--pairs", type=int, default=20, help="of a job alone and beside a giver")
    parser.add_argument("--hostile", action="store_true", help="what the faults of one node cost")
    options = parser.begin()
    exit_on_sigterm()
    try:
        for line in run_bench(options):
            print(line, flush=True)
    except KeyboardInterrupt:
        return 130
    return 0


def _read_counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _read_shapes(text: str) -> list[JobSeries]:
    return [JobSeries(*map(int, word.split("x"))) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
