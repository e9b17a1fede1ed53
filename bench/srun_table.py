"""The table behind bench/srun: from srun's start to the first instruction of a job's first task.

With `PrologFlags=Alloc` srun asks whether the job's Prologs are over: at once, after 0.1 s, and
then after 0.3 s more (Slurm 22.05) or 1.1 s (since 23.02; `_wait_nodes_ready` in its allocate.c). A
job whose Prologs are over at 0.1 s has its question `met`; any other pays for the next one. srun
says how often it has waited.

    none, alloc, empty    see bench/lines.py; the image is read at the shared path
    noimage               our hooks, and a job without an image
    hit                   the image is in the node's cache
    cold                  it is not: the job reads through

In each round each of them runs once, each round beginning with another; a ratio is the median of
the rounds' ratios. The stand-in for pyxis only opens the image, which is in the page cache: what is
measured is the way to the task, not what it reads. Jobs begin when nothing of the one before is
left, and one that does not count goes before those that find other lines in slurm.conf: it has the
daemons load their plugins, and notes that Prologs may work in the background.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
import lines  # noqa: E402
from cluster import Cluster, ClusterError  # noqa: E402
from idle import IdleNodes  # noqa: E402
from jobs import Site  # noqa: E402
from memory import print_in_memory  # noqa: E402
from rounds import rotate_names  # noqa: E402
from spec import ClusterSpec  # noqa: E402

from forestage.events import RequestOutcome  # noqa: E402

JOBS = 50
NODE = "n1"
COLD_MIB = 72  # a smaller one than 64 MiB is waited for, up to 1 s
# What Slurm has of us (bench/lines.py).
VARIANTS = {
    "none": "none",
    "alloc": "alloc",
    "empty": "empty",
    "noimage": "ours",
    "hit": "ours",
    "cold": "ours",
}
# Both clocks are `date`'s, whose own start counts as well.
SCRIPT = 'date +%s.%N; exec srun -vv "$@" date +%s.%N'
AGAIN = "still waiting"  # what srun says that goes on asking at 0.1 s


@dataclass(frozen=True)
class TaskStart:
    """One job: seconds from srun to its task, and whether its question at 0.1 s was met.

    `helped`: its step found no record of what its Prolog did, or not all that this promises, and
    asked the companion's helper, which takes longer.
    """

    seconds: float
    met: bool
    helped: bool = False


Starts = dict[str, list[TaskStart]]  # by variant, one for each round


class SrunBench:
    def __init__(self, cluster: Cluster, spec: ClusterSpec) -> None:
        self.site, self.spec = Site(cluster), spec
        self.kept = self.site.image("kept", mib=1)
        self.cold = self.site.image("cold", mib=COLD_MIB, seed=1)
        compiled = ["/usr/lib/forestage/bin/python3", "-m", "compileall", "-q", str(REPO / "src")]
        self.site.root(compiled, NODE)
        self.idle = IdleNodes(self.site)
        self.site.configure(redirect="spank", cold="wait")
        self._run(self.kept)
        self.site.configure(redirect="spank", cold="auto")
        self._run(self.kept)

    def start(self, variant: str) -> TaskStart:
        """Runs a job. Raises ClusterError where it came to its image in another way."""
        if lines.apply_spec(self.site.cluster, lines.KINDS[VARIANTS[variant]](self.spec)):
            self._run(self.kept)
        if variant == "cold":
            self._forget(self.cold)
        image = {"noimage": None, "cold": self.cold}.get(variant, self.kept)
        started, job = self._run(image)
        steps = self.site.outcomes(job, hook="step")
        came = [one.result for one in steps]
        if (came == ["hit"]) != (variant == "hit"):
            raise ClusterError(f"{variant}: {came}")
        # Only a helper measures what it has waited.
        return replace(
            started, helped=any(isinstance(one, RequestOutcome) and one.wait for one in steps)
        )

    def _run(self, image: str | None) -> tuple[TaskStart, int]:
        options = [f"--container-image={image}"] if image else []
        ran = self.site.cluster.run(["sh", "-c", SCRIPT, "sh", *options])
        self.idle.wait()
        srun, task = map(float, ran.stdout.split())
        found = re.search(r"jobid (\d+): nodes", ran.stderr)
        if found is None:
            raise ClusterError(f"srun names no job:\n{ran.stderr}")
        return TaskStart(task - srun, AGAIN not in ran.stderr), int(found[1])

    def _forget(self, image: str) -> None:
        """Has the node have no copy of it, of which no process may know any more."""
        cache = self.site.cache(NODE)
        for key, stored in self.site.entries(NODE).items():
            if stored.entry and stored.entry.identity.path == image:
                shutil.rmtree(cache.entry_dir(key))


def measure_starts(bench: SrunBench, rounds: int) -> Starts:
    """The first round reads all programs once; it does not count."""
    names = [*VARIANTS]
    starts: Starts = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in rotate_names(names, number):
            start = bench.start(name)
            if number:
                starts[name].append(start)
    return starts


def find_median_ratio(starts: Starts, name: str, to: str) -> float:
    pairs = zip(starts[name], starts[to], strict=True)
    return statistics.median(one.seconds / other.seconds for one, other in pairs)


def find_met_share(starts: Starts, name: str) -> float:
    return statistics.mean(one.met for one in starts[name])


def format_table(starts: Starts) -> Iterator[str]:
    """`met` and `helped`: shares of the jobs (see TaskStart)."""
    yield "| ms | median | from | to | met | helped | to none | to empty |"
    yield "|:--" + "|--:" * 7 + "|"
    for name, done in starts.items():
        times = [one.seconds * 1000 for one in done]
        spread = f"{statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f}"
        ratios = " | ".join(
            f"{find_median_ratio(starts, name, to):.2f}" for to in ("none", "empty")
        )
        helped = statistics.mean(one.helped for one in done)
        shares = f"{find_met_share(starts, name):.2f} | {helped:.2f}"
        yield f"| {name} | {spread} | {shares} | {ratios} |"


def run_bench(options: argparse.Namespace) -> Iterator[str]:
    load = busy.MachineLoad()
    spec = ClusterSpec(
        nodes=1, nvme_mib=1024, plugstack=("required {state}/pyxis.so container=no",), companion=""
    )
    spec = lines.use_suite(lines.without_test_shell(spec), options.suite)
    with Cluster.up(spec) as cluster:
        release = lines.read_slurm_release(cluster)
        starts = measure_starts(SrunBench(cluster, spec), options.jobs)
    yield from (*format_table(starts), "")
    yield f"Slurm {release}, {options.jobs} rounds"
    words = [f"{name}_met={find_met_share(starts, name):.2f}" for name in ("hit", "cold")]
    words += [
        f"{name}_vs_empty={find_median_ratio(starts, name, 'empty'):.2f}"
        for name in ("hit", "cold")
    ]
    yield load.last(" ".join(words))


def main() -> int:
    parser = busy.BenchOptions("srun", __doc__, "6 minutes")
    parser.add_argument("jobs", nargs="?", type=int, default=JOBS, help="of each kind")
    lines.add_suite_option(parser)
    return print_in_memory(run_bench(parser.begin()))


if __name__ == "__main__":
    sys.exit(main())
