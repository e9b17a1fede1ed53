"""The table behind bench/first-start: a first job on N nodes, with peers and without.

The cluster of bench/peers, installed as docs/install.md has it, with the companion, and with
nothing but `sources` in its configuration; containers start as in bench/start. `links` are those of
the file server and of each node, in Mbit/s: the first is slow for several nodes together, the
second gives each node all that its own link takes. In each round all variants run, each round
beginning with another: `without` forestage, with `peers.enabled: false` (`off`), and with its
default (`auto`).
Nothing of the image is in the page caches of the nodes.

Seconds are from srun until the program in the last node's container has ended; `to` a variant are
ratios of the same round. `read`: images that left the file server until all copies were there;
`by jobs`: how many of those of `auto` jobs read themselves, where the copy was not yet. `later`:
one more job on the same nodes after `auto`. What giving costs: the CPU-seconds of all services for
each GiB that came from peers, and the most memory that one of them had; and, as in bench/peers, how
many times as long a program took on the processor on which its node gave 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
import lines  # noqa: E402
import net  # noqa: E402
import peers_cluster  # noqa: E402
import start_image  # noqa: E402
import start_table  # noqa: E402
from cluster import Cluster  # noqa: E402
from fleet import Fleet, networked  # noqa: E402
from memory import print_in_memory  # noqa: E402
from peers_watch import SERVICE, ProcessWatch  # noqa: E402
from rounds import find_spread, rotate_names  # noqa: E402
from spec import STORE, Net  # noqa: E402
from start_table import StartBench, StartRun  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "without": {},
    "off": {"peers": {"enabled": False}},
    "auto": {},
}
SHARE = 0.05  # of the image, which PROGRAM reads; with what the kernel reads ahead some 7 %


class LinkRates(NamedTuple):
    """Mbit/s of the file server's, and of each node's."""

    store: float
    node: float

    def __str__(self) -> str:
        return f"{self.store:g}:{self.node:g}"


@dataclass
class StartCase:
    """So many nodes, one way to start, one pair of links; a run of each variant for each round."""

    mode: str
    links: LinkRates
    nodes: int
    runs: dict[str, list[StartRun]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    later: list[StartRun] = field(default_factory=list)
    cpu: float = 0.0  # seconds of the services
    memory: int = 0
    given: int = 0  # bytes that came from peers
    by_jobs: int = 0  # bytes that jobs read of the source while their copies were on the way

    def ratios(self, variant: str, base: str) -> list[float]:
        return start_table.list_ratios(self.runs, variant, base)

    def read(self, variant: str, size: int) -> float:
        return statistics.median(one.read for one in self.runs[variant]) / size


def measure_case(bench: StartBench, fleet: Fleet, case: StartCase, rounds: int) -> None:
    bench.nodes = fleet.cluster.nodes[: case.nodes]
    networks = peers_cluster.list_networks(fleet)
    names = list(VARIANTS)
    for number in range(rounds):
        for variant in rotate_names(names, number):
            with ProcessWatch(networks) as watch:
                case.runs[variant].append(bench.start(case.mode, variant))
            if variant != "auto":
                continue
            load = watch.load(SERVICE)
            events = [one for node in bench.nodes for one in bench.noted(node)]
            copies = [one.outcome for one in events if one.hook == "stager"]
            case.given += sum(one.from_peers for one in copies)
            case.by_jobs += sum(one.read_straight for one in copies)
            case.cpu, case.memory = case.cpu + load.cpu, max(case.memory, load.memory)
            case.later.append(bench.start_again(f"{case.mode}, later"))


HEAD = (
    *("start, links, nodes", "without s", "off s", "auto s", "to off", "from", "to", "to without"),
    *("without read", "off read", "auto read", "by jobs", "later s", "later read"),
    *("CPU-s/GiB", "service MiB"),
)


def list_heading() -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield "|:--" + "|--:" * (len(HEAD) - 1) + "|"


def format_row(case: StartCase, size: int) -> str:
    words = [f"{case.mode}, {case.links}, {case.nodes}"]
    for name in VARIANTS:
        middle, least, most = find_spread([one.seconds for one in case.runs[name]])
        words.append(f"{middle:.1f} ({least:.1f}-{most:.1f})")
    words += [f"{one:.2f}" for one in find_spread(case.ratios("auto", "off"))]
    words.append(f"{statistics.median(case.ratios('auto', 'without')):.2f}")
    words += [f"{case.read(name, size):.2f}" for name in VARIANTS]
    words.append(f"{case.by_jobs / len(case.later) / size:.2f}")
    words.append(f"{statistics.median(one.seconds for one in case.later):.1f}")
    words.append(f"{max(one.read for one in case.later) / size:.2f}")
    words.append(f"{case.cpu * GIB / case.given if case.given else 0:.2f}")
    words.append(f"{case.memory / MIB:.0f}")
    return f"| {' | '.join(words)} |"


def format_summary(cases: Sequence[StartCase], size: int) -> str:
    """The line that others read; of the most nodes and the slowest file server."""
    shown = min(cases, key=lambda one: (-one.nodes, one.links.store, one.mode != "unpack"))
    worst = max(statistics.median(one.ratios("auto", "off")) for one in cases)
    later = max(run.read for one in cases for run in one.later)
    return (
        f"n{shown.nodes}_src_bytes={shown.read('auto', size):.3f}"
        f" n{shown.nodes}_vs_without={statistics.median(shown.ratios('auto', 'without')):.2f}"
        f" worst_vs_off={worst:.2f} later_src={later / size:.3f}"
    )


@contextlib.contextmanager
def start_bench(options: argparse.Namespace) -> Iterator[tuple[StartBench, Fleet]]:
    count = max(options.nodes)
    spec = networked(count, Net())
    spec = lines.without_test_shell(replace(spec, nvme_mib=5 * options.mib + 512, companion=""))
    with tempfile.TemporaryDirectory() as work, Cluster.up(spec) as cluster:
        fleet, place = Fleet(cluster), "/shared/alice/"
        path, other = f"{place}image.sqsh", f"{place}other.sqsh"
        image = start_image.make_image(cluster.host_path(path), options.mib, SHARE, Path(work))
        start_image.make_image(cluster.host_path(other), start_table.OTHER_MIB, SHARE, Path(work))
        configure = _make_configure(cluster, options.chunk_mib)
        configure(**VARIANTS["auto"])
        fleet.serve(cluster.nodes)
        about = fleet, spec, image, path, fleet.sent_by_store, lambda _: None, configure, other
        idle = start_table.prepare_cluster(cluster)
        yield StartBench(*about, idle, cluster.nodes, VARIANTS, in_full=True), fleet


def _make_configure(cluster: Cluster, chunk_mib: int) -> Callable[..., None]:
    chunk = {"chunk_size": f"{chunk_mib}MiB"} if chunk_mib else {}

    def configure(**keys: object) -> None:
        # JSON is YAML.
        text = json.dumps({"sources": ["/shared"], **chunk, **keys})
        cluster.write("/etc/forestage/forestage.yaml", text)

    return configure


def change_links(fleet: Fleet, links: LinkRates) -> None:
    fleet.links = Net(node_mbit=links.node, store_mbit=links.store)
    for node in fleet.cluster.nodes:
        fleet.slow(node, links.node)
    # Of the other end as well: requests go there.
    enter = ["nsenter", f"--net={net.NAMESPACES / STORE}", "--"]
    for argv in (
        net.shape(net.port(STORE), links.store),
        [*enter, *net.shape("eth0", links.store)],
    ):
        fleet.cluster.run(argv, user="root")


def run_cases(options: argparse.Namespace) -> Iterator[str]:
    start, load, cases = time.monotonic(), busy.MachineLoad(), []
    with start_bench(options) as (bench, fleet):
        size = bench.image.size
        yield (
            f"{size / MIB:.0f} MiB, links of the file server and of each node in Mbit/s,"
            f" {os.cpu_count()} processors for all of it; medians of {options.rounds}\n"
        )
        yield from list_heading()
        bench.nodes = fleet.cluster.nodes[:1]
        bench.start("unpack", "without")  # reads all programs once; does not count
        for links in options.links:
            change_links(fleet, links)
            for mode in options.modes:
                for count in options.nodes:
                    cases.append(case := StartCase(mode, links, count))
                    measure_case(bench, fleet, case, options.rounds)
                    yield format_row(case, size)
    yield f"\n{time.monotonic() - start:.0f} s\n"
    pair = peers_cluster.format_pair_costs(options.pair_mib, options.pairs)
    yield load.last(f"{format_summary(cases, size)} {pair}")


def main() -> int:
    return print_in_memory(run_cases(_read_options()))


def _read_options() -> argparse.Namespace:
    parser = busy.BenchOptions("first-start", __doc__, "40 minutes")
    parser.add_argument("--nodes", default="1,2,4,8", type=_read_counts)
    parser.add_argument(
        "--links", default="400:400,1600:200", type=_read_links, help="STORE:NODE,…"
    )
    parser.add_argument("--modes", default="unpack,squashfuse", type=_read_modes)
    parser.add_argument("--mib", type=int, default=255, help="of the image")
    parser.add_argument("--chunk-mib", type=int, default=0, help="0: the default")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pair-mib", type=int, default=1024, help="without shaped links")
    parser.add_argument(
        "--pairs", type=int, default=10, help="of a program alone and beside a giver"
    )
    return parser.begin()


def _read_counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _read_links(text: str) -> list[LinkRates]:
    return [LinkRates(*map(float, word.split(":"))) for word in text.split(",")]


def _read_modes(text: str) -> list[str]:
    if unknown := set(words := text.split(",")) - set(start_table.MODES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return words


if __name__ == "__main__":
    sys.exit(main())
