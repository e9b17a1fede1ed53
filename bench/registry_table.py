"""The table behind bench/registry: from `sbatch` to the end of a job's last step, cold and warm.

The steps name an image of a registry by its tag. `pyxis` is pyxis alone: `enroot import` on each
node and in each step (bench/registry_plain.sh), without hooks and companion. `ours` has them, and a
store on the shared file system. Both run the stand-ins for pyxis and enroot, mount the image with
squashfuse, read some of it, and keep layers on the node's disk, as enroot's cache does: so a node
asks the registry for a layer once, also without forestage. A cold job begins with no layer, store
or copy anywhere; the warm one comes behind it. Before each job nothing of these is in the page
cache.

The registry gives each connection so many bytes a second, and not less where there are many: nodes
do not slow each other down there, as they would behind one link of a site, which is the better
case for pyxis alone. All nodes' imports share this machine's processors, which is the worse one.

In each round all jobs run once, and each round begins with another of the two; a ratio is the
median of the rounds'. Requests are those of the round that had most. `GETs` are those of manifests
and layers together, as multiples of what one import by `pyxis` took in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
from cluster import Cluster, ClusterError  # noqa: E402
from host import wait_until  # noqa: E402
from jobs import CACHE, HOOK, HOOK_LOG, Site  # noqa: E402
from memory import print_in_memory  # noqa: E402
from registry import (  # noqa: E402
    IMPORTS,
    STORE,
    Registry,
    imports,
    padding,
    serving,
    with_importer,
)
from spec import ALICE, ClusterSpec, plugstack_conf  # noqa: E402
from steps import accompanied  # noqa: E402

from forestage.events import Outcome  # noqa: E402

NVME, LAYERS = "/mnt/nvme", "/mnt/nvme/layers"
IMAGE = "team/tool:1"
PYXIS = "required {state}/pyxis.so"
PLAIN = f"{PYXIS} importer={REPO}/bench/registry_plain.sh"
# The loop device is a local disk, which the file systems that it stands for are not.
KEYS = {"redirect": "spank", "cold": "auto", "direct": "off", "registry": {"store": STORE}}
WHO = ("pyxis", "ours")
WHEN = ("cold", "warm")
MANIFESTS, LAYERS_OF = "/v2/.*/manifests/.*", "/v2/.*/blobs/.*"
READ_SHARE = 16  # a start reads one file of so many


@dataclass(frozen=True)
class RegistryRun:
    """One job: seconds from sbatch to the end of its last step; what it asked the registry for."""

    seconds: float
    imports: int
    manifests: int  # GETs
    layers: int  # GETs, with that of the image's configuration
    heads: int

    @property
    def gets(self) -> int:
        return self.manifests + self.layers


Runs = dict[tuple[int, str, str], list[RegistryRun]]  # by nodes, who, when: one for each round


@dataclass
class RegistryBench:
    """A cluster, a registry with an image, and how to measure a job of both."""

    site: Site
    spec: ClusterSpec
    registry: Registry
    options: argparse.Namespace
    at_rest: dict[str, set[str]] = field(default_factory=dict)

    def job(self, who: str, when: str, nodes: int, steps: int) -> RegistryRun:
        """Raises ClusterError where it saw anything else than the image, or another way went."""
        self._become(who)
        if when == "cold":
            self._empty()
        self._forget()
        self.registry.behaves()
        self.registry.slow(self.options.mbyte * 1e6)
        before, start = len(imports(self.site.cluster)), time.time()
        where = [f"--nodes={nodes}", f"--nodelist=n[1-{nodes}]", "--ntasks-per-node=1"]
        ran = self.site.sbatch(self._script(steps), *where)
        lines = ran.stdout.splitlines()
        seen, end = lines.count(self._answer()), lines[-1] if lines else "0"
        made = len(imports(self.site.cluster)) - before
        self._check(seen == nodes * steps, f"{who}, {when}: {ran.stdout}")
        if who == "ours":
            self._check(made == (when == "cold"), f"ours, {when}: {made} imports")
        self._settle()
        if (who, when) == ("ours", "warm"):
            came = {one.result for n in range(nodes) for one in self._outcomes(ran.job, n)}
            self._check(came == {"hit"}, f"ours, warm: {came}")
        return RegistryRun(
            seconds=float(end) - start,
            imports=made,
            manifests=self.registry.count("GET", MANIFESTS),
            layers=self.registry.count("GET", LAYERS_OF),
            heads=self.registry.count("HEAD", "/v2/.*"),
        )

    def _outcomes(self, job: int, number: int) -> list[Outcome]:
        return self.site.outcomes(job, self.site.cluster.nodes[number], "step")

    def _script(self, steps: int) -> str:
        image = f"{self.registry.host}#{IMAGE}"
        command = f"cat {' '.join(f'/{name}' for name in self._read())} | sha256sum"
        step = f"srun --container-image={image} sh -c '{command}' | cut -c -64"
        variables = f"export STANDIN_LOG={IMPORTS} STANDIN_CACHE={LAYERS}"
        return "\n".join([variables, *[step] * steps, "date +%s.%N"])

    def _read(self) -> list[str]:
        return list(padding(self.options.mib))[::READ_SHARE]

    def _answer(self) -> str:
        files = padding(self.options.mib)
        return hashlib.sha256(b"".join(files[name] for name in self._read())).hexdigest()

    def _check(self, right: bool, otherwise: str) -> None:
        if not right:
            raise ClusterError(f"{otherwise}\n{self.site.cluster.logs()}")

    def _become(self, who: str) -> None:
        cluster, ours = self.site.cluster, who == "ours"
        plain = replace(self.spec, companion=None, plugstack=(PLAIN,))
        cluster.write("/etc/slurm/plugstack.conf", plugstack_conf(self.spec if ours else plain))
        for hook in ("prolog", "epilog"):
            script = HOOK.format(hook=REPO / hook / "forestage", log=HOOK_LOG)
            cluster.write(f"/etc/{hook}", script if ours else "#!/bin/sh\n", mode=0o755)

    def _empty(self) -> None:
        for node in self.site.cluster.nodes:
            self.site.root(["rm", "-rf", CACHE, LAYERS], node)
            self.site.root(["install", "-d", "-o", ALICE.name, LAYERS], node)
        self.site.cluster.run(["rm", "-rf", STORE], user="root")
        self.site.cluster.run(["mkdir", "-m", "1777", STORE], user="root")

    def _forget(self) -> None:
        """Has nothing of store, layers and entries in the page cache."""
        files = [*self.site.source(STORE).rglob("*.sqsh")]
        for node in self.site.cluster.nodes:
            self.site.root(["sync", "--file-system", NVME], node)
            files += self.site.cluster.host_path(CACHE, node).glob("entries/*/image")
            files += self.site.cluster.host_path(LAYERS, node).glob("*")
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _settle(self) -> None:
        """Waits until the nodes are idle, and copies and servers have ended."""
        self.site.cluster.wait_idle()
        wait_until(lambda: not self._busy(), 300, lambda: f"live on: {self._busy()}")

    def _busy(self) -> list[str]:
        found = []
        for node in self.site.cluster.nodes:
            living = self.site.processes(node)
            found += [f"{node}: {living[pid]}" for pid in living.keys() - self.at_rest[node]]
        return found


@contextlib.contextmanager
def start_bench(options: argparse.Namespace) -> Iterator[RegistryBench]:
    room = 1024 + 4 * options.mib
    bare = replace(accompanied(options.nodes), plugstack=(PYXIS,), nvme_mib=room)
    spec = with_importer(bare)
    with (
        tempfile.TemporaryDirectory() as work,
        Cluster.up(spec) as cluster,
        serving(cluster, Path(work)) as registry,
    ):
        site = Site(cluster)
        site.configure(**KEYS)
        registry.push(IMAGE, "tool", options.mib)
        cluster.run(["install", "-m", "666", "/dev/null", IMPORTS], user="root")
        compiled = ["/usr/lib/forestage/bin/python3", "-m", "compileall", "-q", str(REPO / "src")]
        site.root(compiled, cluster.nodes[0])
        at_rest = {node: set(site.processes(node)) for node in cluster.nodes}
        yield RegistryBench(site, spec, registry, options, at_rest)


def measure_jobs(bench: RegistryBench, counts: list[int]) -> Runs:
    """Of each number of nodes, one job of each kind in each round."""
    options, runs = bench.options, Runs()
    for number in range(options.rounds):
        for nodes in counts:
            for who in WHO if number % 2 == 0 else reversed(WHO):
                for when in WHEN:
                    run = bench.job(who, when, nodes, options.steps)
                    runs.setdefault((nodes, who, when), []).append(run)
    return runs


def list_ratios(runs: Runs, nodes: int, when: str) -> list[float]:
    """Ours over pyxis alone, one for each round."""
    pairs = zip(runs[nodes, "ours", when], runs[nodes, "pyxis", when], strict=True)
    return [ours.seconds / plain.seconds for ours, plain in pairs]


def format_table(runs: Runs, nodes: int, one: RegistryRun) -> Iterator[str]:
    yield (
        f"| nodes: {nodes} | s | from | to | ratio | from | to | imports | manifests | layers"
        " | GETs | HEADs |"
    )
    yield "|:--" + "|--:" * 11 + "|"
    for when in WHEN:
        for who in WHO:
            done = runs[nodes, who, when]
            seconds = [run.seconds for run in done]
            relative = list_ratios(runs, nodes, when) if who == "ours" else [1.0]
            figures = [statistics.median(seconds), min(seconds), max(seconds)]
            figures += [statistics.median(relative), min(relative), max(relative)]
            row = " | ".join(f"{figure:.2f}" for figure in figures)
            asked = " | ".join(str(max(of)) for of in zip(*map(_list_requests, done), strict=True))
            heads = max(run.heads for run in done)
            yield f"| {who}, {when} | {row} | {asked} | {find_most_gets(done, one):.2f} | {heads} |"


def _list_requests(run: RegistryRun) -> tuple[int, int, int]:
    return run.imports, run.manifests, run.layers


def find_most_gets(done: list[RegistryRun], one: RegistryRun) -> float:
    """Imports' worth, of the round that had most."""
    return max(run.gets for run in done) / one.gets


def run_bench(options: argparse.Namespace) -> Iterator[str]:
    start, load = time.monotonic(), busy.MachineLoad()
    yield (
        f"{options.mib} MiB, {options.mbyte:g} MB/s for each connection to the registry, jobs of"
        f" {options.steps} steps; {os.cpu_count()} processors for all nodes; medians of"
        f" {options.rounds}"
    )
    with start_bench(options) as bench:
        bench.job("pyxis", "cold", 1, 1)  # reads all programs once; does not count
        bench.job("ours", "cold", 1, 1)
        one = bench.job("pyxis", "cold", 1, 1)
        yield f"one import: {one.seconds:.2f} s, {one.gets} GETs, {one.heads} HEADs\n"
        counts = sorted({1, options.nodes})
        runs = measure_jobs(bench, counts)
    for nodes in counts:
        yield from (*format_table(runs, nodes, one), "")
    first = statistics.median(list_ratios(runs, 1, "cold"))
    yield f"on 1 node: first={first:.2f}; below: on {options.nodes}"
    yield f"{time.monotonic() - start:.0f} s\n"
    cold, warm = (statistics.median(list_ratios(runs, options.nodes, when)) for when in WHEN)
    pulls = find_most_gets(runs[options.nodes, "ours", "cold"], one)
    yield load.last(f"first={cold:.2f} warm={warm:.2f} pulls={pulls:.2f}")


def main() -> int:
    return print_in_memory(run_bench(_read_options()))


def _read_options() -> argparse.Namespace:
    parser = busy.BenchOptions("registry", __doc__, "10 minutes; --rounds 3: 15")
    parser.add_argument("--nodes", type=int, default=8, help="besides one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of each job")
    parser.add_argument("--mib", type=int, default=64, help="of the image; none can be compressed")
    parser.add_argument("--mbyte", type=float, default=16.0, help="each connection, MB/s")
    return parser.begin()


if __name__ == "__main__":
    sys.exit(main())
