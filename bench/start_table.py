"""The table behind bench/start: from `srun` to the job's end, without forestage and with it.

One node (or several) of a test cluster, and a container that starts in two ways: `unpack`, where
unsquashfs writes the image to the node's disk and a program runs in that tree, and `squashfuse`,
where the image is mounted and the program hops through some per cent of it. The shared file system
gives so many bytes a second to everybody together; nodes' disks are in memory, so that it is the
source that is measured. In each round every variant runs once, each round beginning with another;
a ratio is the median of the rounds' ratios to `without`, for which Slurm has no line of ours, or to
`empty`, where it has a Prolog and an Epilog that do nothing, as nearly every site has: what they
cost is Slurm's. Before each run nothing of the image is in the page cache, and before a cold one
nothing in the node's cache; the copy that a job leaves behind is ended before the next run begins.
A job with another image comes first: by what it notes the Prolog of the next may end at once.

On several nodes these have networks of their own, the shared file system is GlusterFS behind one
shaped link, and nodes get chunks from each other (as in bench/peers); there copies go on to their
end, and what they read counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
import lines  # noqa: E402
import start_image  # noqa: E402
import start_readers  # noqa: E402
import start_source  # noqa: E402
from cluster import Cluster, ClusterError  # noqa: E402
from fleet import Fleet, networked  # noqa: E402
from idle import IdleNodes  # noqa: E402
from jobs import CACHE, Site, hooked  # noqa: E402
from memory import print_in_memory  # noqa: E402
from rounds import find_spread, rotate_names  # noqa: E402
from spec import ClusterSpec, Net  # noqa: E402
from start_image import MIB, PROGRAM, StartImage  # noqa: E402

from forestage import events  # noqa: E402
from forestage.cache.part import PROCESS_NAME  # noqa: E402
from forestage.events import EventRecord  # noqa: E402

STAGER = PROCESS_NAME[:15]  # as the kernel keeps it
NVME, UNPACKED, LUSTRE = "/mnt/nvme", "/mnt/nvme/unpacked", "/lustre"
MODES = ("squashfuse", "unpack")
PYXIS = {
    "outside": "required {state}/pyxis.so container=no",
    "squashfuse": "required {state}/pyxis.so",
    "unpack": f"required {{state}}/pyxis.so unpack={UNPACKED}",
}
# MB/s, so that each of the two reads for about a second or longer.
RATES = {"squashfuse": 18.0, "unpack": 120.0}
NETWORK_RATE = 50.0
NETWORK_MIB = 728  # with fewer, eight nodes on a few processors show what processes cost
# Of the image. Shell, tables and what the kernel reads ahead come on top: a start reads 5 to 7 % on
# one node. On several nodes it is as with a real image of 728 MB: it needs 10 MB, and the kernel
# reads 3 % of the image for it.
SHARE, NETWORK_SHARE = 0.05, 0.01
# The loop device is a local disk, which the file systems that it stands for are not.
STEP = {"redirect": "spank", "direct": "off"}
COLD = {name: {**STEP, "cold": name} for name in ("auto", "shared", "through", "wait")}
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "without": {},
    "empty": {},
    **COLD,
    "warm": COLD["auto"],
}
LINES = {"without": "none", "empty": "empty"}  # see bench/lines.py; all others have ours
BASES = ("without", "empty")
NOTHING = ["/bin/sh", "-c", "exit"]
OTHER_MIB = 1  # of the image that a job has which does not count


@dataclass(frozen=True)
class StartRun:
    """One job: seconds from srun to its end; bytes that the source gave for it.

    `came` are the results that its steps, or else its Prologs, have noted of the image.
    """

    seconds: float
    read: int
    came: frozenset[str]


@dataclass
class StartBench:
    """A cluster with an image on its shared file system, and how to measure a start on it."""

    site: Site
    spec: ClusterSpec
    image: StartImage
    path: str
    given: Callable[[], int]  # bytes that the source has given so far
    slow: Callable[[float], None]  # to so many bytes a second
    configure: Callable[..., None]
    other: str
    idle: IdleNodes
    nodes: Sequence[str]
    variants: Mapping[str, Mapping[str, object]]
    in_full: bool  # copies go on to their end

    def start(self, mode: str, variant: str) -> StartRun:
        """Runs a job in the image. Raises ClusterError if it saw anything else than the image."""
        self._prepare(mode, variant)
        run = self.start_again(f"{mode}, {variant}")
        if variant == "warm" and run.came != {"hit"}:
            raise ClusterError(f"{mode}, {variant}: {', '.join(run.came)}")
        return run

    def start_again(self, what: str) -> StartRun:
        """Runs a further job of the same kind: whatever the last one has left is there."""
        self._forget()
        before, start = self.given(), time.perf_counter()
        ran = self.site.cluster.run(["srun", *self._where(self.path), *PROGRAM])
        seconds = time.perf_counter() - start
        if ran.stdout.split().count(self.image.answer) != len(self.nodes):
            raise ClusterError(f"{what}: {ran.stdout}{ran.stderr}")
        self.settle(self.in_full)
        return StartRun(seconds, self.given() - before, self._came())

    def readers(self) -> Iterator[str]:
        """The table of reading all of it. Raises ClusterError where a step was refused."""
        self._prepare("outside", "through")
        self.slow(0)
        with self._reader() as served:
            self.site.await_stagers()
            with self._reader() as entry:
                yield from start_readers.format_table(served, entry, self._forget)
        self.settle()

    def _reader(self) -> contextlib.AbstractContextManager[start_readers.Ask]:
        argv = ["srun", f"--container-image={self.path}", *start_readers.build_command(self.path)]
        return start_readers.start_conversation(
            self.site.cluster.popen(argv, stdin=subprocess.PIPE)
        )

    def settle(self, in_full: bool = True) -> None:
        """Waits until jobs, copies and servers have ended; not `in_full`, it ends the copies."""
        self.site.cluster.wait_idle()
        for node in () if in_full else self.site.cluster.nodes:
            end = ["pkill", "--exact", STAGER]
            self.site.cluster.run(end, user="root", node=node, check=False)
        self.idle.wait()
        for node in self.site.cluster.nodes:
            self.site.root(["sh", "-c", f"rm -rf {UNPACKED}/*"], node)

    def _become(self, mode: str, variant: str) -> None:
        spec = lines.KINDS[LINES.get(variant, "ours")](self.spec)
        self.configure(**self.variants[variant])
        lines.apply_spec(self.site.cluster, replace(spec, plugstack=(PYXIS[mode],)))
        self.site.cluster.run(["srun", *self._where(self.other), *NOTHING])
        self.settle()

    def _where(self, image: str) -> list[str]:
        where = [f"--nodes={len(self.nodes)}", f"--nodelist={','.join(self.nodes)}"]
        return [*where, "--ntasks-per-node=1", f"--container-image={image}"]

    def _prepare(self, mode: str, variant: str) -> None:
        nodes = self.nodes
        if variant != "warm":
            for node in nodes:
                self.site.root(["rm", "-rf", CACHE], node)
        elif not all(self.path in self.site.cached_paths(node) for node in nodes):
            self._become("outside", "wait")
            self.site.cluster.run(["srun", *self._where(self.path), *NOTHING])
            self.settle()
        self._become(mode, variant)
        for node in nodes:
            self._log(node).write_text("")

    def _forget(self) -> None:
        """Has nothing of image and entries in the page cache."""
        cluster = self.site.cluster
        for node in self.nodes:
            self.site.root(["sync", "--file-system", NVME], node)
            entries = cluster.host_path(CACHE, node).glob("entries/*/image")
            for file in (cluster.host_path(self.path, node), *entries):
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _came(self) -> frozenset[str]:
        found: dict[str, str] = {}
        for node in self.nodes:
            noted = {one.hook: one.outcome.result for one in self.noted(node)}
            found[node] = noted.get("step") or noted.get("prolog") or "-"
        return frozenset(found.values())

    def noted(self, node: str) -> list[EventRecord]:
        """What hooks and stagers of the last job with the image have noted."""
        return list(events.read_events(self._log(node)))

    def _log(self, node: str) -> Path:
        return self.site.cluster.host_path("/var/log/forestage/events.jsonl", node)


# The two kinds of clusters


@contextlib.contextmanager
def start_disk_bench(options: argparse.Namespace) -> Iterator[StartBench]:
    """One node, whose shared file system is a slow disk."""
    # The disk has an inode for each MiB, and an image some thousand files.
    made = replace(hooked(1, nvme_mib=4096 + 4 * options.mib), companion="")
    spec = lines.use_suite(lines.without_test_shell(made), options.suite)
    with tempfile.TemporaryDirectory() as directory, Cluster.up(spec) as cluster:
        work, tree = Path(directory), Path(directory, "shared")
        tree.mkdir()
        image = start_image.make_image(tree / "image.sqsh", options.mib, SHARE, work)
        start_image.make_image(tree / "other.sqsh", OTHER_MIB, SHARE, work)
        tree.chmod(0o755)
        with start_source.mount_on_nodes(cluster, tree, LUSTRE, options.latency, work) as disk:
            path, other = f"{LUSTRE}/image.sqsh", f"{LUSTRE}/other.sqsh"
            idle, site = prepare_cluster(cluster), Site(cluster)
            configure = partial(site.configure, sources=[LUSTRE], deadline="600s")
            about = site, spec, image, path, disk.given, disk.slow, configure, other, idle
            yield StartBench(*about, cluster.nodes, VARIANTS, in_full=False)


@contextlib.contextmanager
def start_network_bench(options: argparse.Namespace) -> Iterator[StartBench]:
    """Several nodes with the networks of bench/peers."""
    mbit = 8 * options.rates["unpack"]
    made = networked(options.nodes, Net(node_mbit=mbit, store_mbit=mbit))
    spec = lines.without_test_shell(replace(made, nvme_mib=4 * options.mib + 128, companion=""))
    with tempfile.TemporaryDirectory() as work, Cluster.up(spec) as cluster:
        fleet = Fleet(cluster)
        path, other = "/shared/alice/image.sqsh", "/shared/alice/other.sqsh"
        image = start_image.make_image(
            cluster.host_path(path), options.mib, NETWORK_SHARE, Path(work)
        )
        start_image.make_image(cluster.host_path(other), OTHER_MIB, NETWORK_SHARE, Path(work))
        fleet.configure()
        fleet.serve(cluster.nodes)
        about = fleet, spec, image, path, fleet.sent_by_store, lambda _: None, fleet.configure
        yield StartBench(
            *about, other, prepare_cluster(cluster), cluster.nodes, VARIANTS, in_full=True
        )


def prepare_cluster(cluster: Cluster) -> IdleNodes:
    site = Site(cluster)
    for node in cluster.nodes:
        site.root(["mkdir", "-m", "1777", UNPACKED], node)
    compiled = ["/usr/lib/forestage/bin/python3", "-m", "compileall", "-q", str(REPO / "src")]
    site.root(compiled, cluster.nodes[0])
    return IdleNodes(site)


# The table

Runs = dict[str, list[StartRun]]  # by variant, one for each round


def measure_starts(bench: StartBench, mode: str, variants: Sequence[str], rounds: int) -> Runs:
    runs: Runs = {variant: [] for variant in variants}
    bench.start(mode, "without")  # reads all programs once; does not count
    for number in range(rounds):
        for variant in rotate_names(variants, number):
            runs[variant].append(bench.start(mode, variant))
    return runs


def list_ratios(runs: Runs, variant: str, base: str) -> list[float]:
    pairs = zip(runs[variant], runs[base], strict=True)
    return [one.seconds / other.seconds for one, other in pairs]


def format_table(mode: str, rate: float, runs: Runs, size: int) -> Iterator[str]:
    """`read`: images that the source gave, on several nodes with all that the copies read.

    `came`: how the image came, as forestage has noted it.
    """
    to = "".join(f" to {base} | from | to |" for base in BASES)
    yield f"| {mode}, {rate:g} MB/s | s | from | to |{to} read | came |"
    yield "|:--" + "|--:" * 10 + "|:--|"
    for variant, done in runs.items():
        figures = find_spread([one.seconds for one in done])
        for base in BASES:
            figures += find_spread(list_ratios(runs, variant, base))
        figures += [statistics.median(one.read for one in done) / size]
        came = ", ".join(sorted(frozenset().union(*(one.came for one in done))))
        yield f"| {variant} | {' | '.join(f'{one:.2f}' for one in figures)} | {came} |"


def run_bench(options: argparse.Namespace) -> Iterator[str]:
    start, load = time.monotonic(), busy.MachineLoad()
    place = start_disk_bench if options.nodes == 1 else start_network_bench
    with place(options) as bench:
        size, release = bench.image.size, lines.read_slurm_release(bench.site.cluster)
        yield (
            f"{options.nodes} nodes, {size / MIB:.0f} MiB, {options.latency} ms for each read,"
            f" {os.cpu_count()} processors; medians of {options.rounds}\n"
        )
        found = {}
        for mode, rate in options.rates.items():
            bench.slow(rate * 1e6)
            found[mode] = measure_starts(bench, mode, options.variants, options.rounds)
            yield from (*format_table(mode, rate, found[mode], size), "")
        if options.nodes == 1:
            yield from (*bench.readers(), "")
    yield f"{time.monotonic() - start:.0f} s\n"
    yield f"Slurm {release}, {options.rounds} rounds"
    yield load.last(format_summary(found, size, options.nodes))


def format_summary(found: Mapping[str, Runs], size: int, nodes: int) -> str:
    """The line that others read, for `cold: auto`."""

    def words(variant: str, name: str, base: str) -> list[str]:
        ratio = {mode: statistics.median(list_ratios(found[mode], variant, base)) for mode in MODES}
        return [f"{prefix}{mode}_{name}={ratio[mode]:.2f}" for mode in MODES]

    prefix = f"n{nodes}_" if nodes > 1 else ""
    line = []
    for base, against in (("without", ""), ("empty", "_vs_empty")):
        line += words("auto", f"cold{against}", base)
        line += words("warm", f"warm{against}", base) if nodes == 1 else []
    if nodes > 1:
        read = max(one.read for runs in found.values() for one in runs["auto"])
        line.append(f"src_bytes={read / size:.3f}")
    return " ".join(line)


def main() -> int:
    return print_in_memory(run_bench(_read_options()))


def _read_options() -> argparse.Namespace:
    parser = busy.BenchOptions("start", __doc__, "10 minutes, with --nodes 8 as long")
    parser.add_argument("mib", nargs="?", type=int, help="of the image")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbyte", type=float, help="what the source gives in a second, MB")
    parser.add_argument("--latency", type=int, default=0, help="of each read, ms; one node only")
    parser.add_argument("--variants", type=_read_variants, help=",".join(VARIANTS))
    lines.add_suite_option(parser)
    options = parser.begin()
    one = options.nodes == 1
    if options.suite and not one:
        parser.error("--suite: the trees of other releases have no GlusterFS")
    options.mib = options.mib or (256 if one else NETWORK_MIB)
    rates = RATES if one else dict.fromkeys(MODES, NETWORK_RATE)
    options.rates = dict.fromkeys(MODES, options.mbyte) if options.mbyte else rates
    needed = {*BASES, "auto", *(["warm"] if one else [])}
    wanted = options.variants or (tuple(VARIANTS) if one else ())
    options.variants = [name for name in VARIANTS if name in {*needed, *wanted}]
    return options


def _read_variants(text: str) -> tuple[str, ...]:
    if unknown := set(words := text.split(",")) - VARIANTS.keys():
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return tuple(words)


if __name__ == "__main__":
    sys.exit(main())
