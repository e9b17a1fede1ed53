"""The table behind bench/step: the same step on two nodes, of which one has the companion.

The steps are those of one job that holds both nodes, so that no Prolog is in what is measured: from
the start of srun to its end, for a task that does nothing. In each round every step is run on both
nodes, in turn; a ratio is the median of the rounds' ratios. After half of the rounds the nodes
change places. The stand-in for pyxis only opens the image: the real one takes longer, with and
without the companion, so that a real site's ratios are smaller.

Beside it: what sbatch takes with a plugstack.conf without the companion, with it, and with --stage
as well, for a job that is only looked at (--test-only), on the login.

A helper looks at the image in the first step that asks for it, each round by another name of the
same file; the further steps go by the record of that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests/slurm"))

import busy  # noqa: E402
from cluster import Cluster, ClusterSpec  # noqa: E402
from host import exit_on_sigterm  # noqa: E402
from images import make_image  # noqa: E402

ROUNDS = 40
WARM_UP = 2
IMAGE = "/shared/alice{slashes}image.sqsh"
PLUGSTACK = "/etc/slurm/plugstack.conf"
PYXIS = "required {state}/pyxis.so container=no"
EVENTS = "/var/log/forestage/events.jsonl"
OF_IMAGE = f"--container-image={IMAGE}"
STEPS = {
    "noimage": ("no image", ["--ntasks=1"]),
    "first": ("first, 1 task", ["--ntasks=1", OF_IMAGE]),
    "further": ("further, 1 task", ["--ntasks=1", OF_IMAGE]),
    "many": ("further, 16 tasks", ["--ntasks=16", "--overcommit", OF_IMAGE]),
}

PLAIN_CONF = "/etc/slurm/plain/slurm.conf"
SLURM_CONF = "/etc/slurm/slurm.conf"
SUBMISSIONS: dict[str, tuple[str, list[str]]] = {
    "plain": (PLAIN_CONF, []),
    "submit": (SLURM_CONF, []),
    "option": (SLURM_CONF, [f"--stage={IMAGE.format(slashes='/')}", "--stage-wait=5m"]),
}

Times = dict[str, list[tuple[float, float]]]  # seconds with and without the companion


def main() -> int:
    if sys.argv[1:2] == ["--in-the-job"]:
        with_it, without, rounds = sys.argv[2:]
        json.dump(measure_steps(with_it, without, int(rounds)), sys.stdout)
        return 0
    if sys.argv[1:2] == ["--on-the-login"]:
        json.dump(submit_rounds(int(sys.argv[2])), sys.stdout)
        return 0
    options = busy.BenchOptions("step", __doc__, "2 minutes")
    options.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    rounds, load = options.begin().rounds, busy.MachineLoad()
    exit_on_sigterm()
    try:
        print_table(*measure_on_cluster(rounds), load)
    except KeyboardInterrupt:
        return 130
    return 0


def measure_on_cluster(rounds: int) -> tuple[Times, list[float], dict[str, list[float]]]:
    """The steps' times, the seconds of the helper's own runs, and those of submissions."""
    half = -(-rounds // 2)  # each node has the companion in one half of the rounds
    spec = ClusterSpec(nodes=2, plugstack=(PYXIS,), companion="")
    times: Times = {name: [] for name in STEPS}
    with Cluster.up(spec) as cluster:
        cluster.write(
            "/etc/forestage/forestage.yaml", "sources: [/shared]\nredirect: spank\ncold: wait\n"
        )
        cluster.write("/etc/slurm/plain.conf", PYXIS.format(state="/var/lib/cluster") + "\n")
        make_image(cluster, IMAGE.format(slashes="/"))
        compiled = ["/usr/lib/forestage/bin/python3", "-m", "compileall", "-q", str(REPO / "src")]
        cluster.run(compiled, user="root", node="n1")
        submitted = measure_submissions(cluster, rounds)
        for with_it, without in (("n1", "n2"), ("n2", "n1")):
            plain = ["mount", "--bind", "/etc/slurm/plain.conf", PLUGSTACK]
            cluster.run(plain, user="root", node=without)
            for name, pairs in measure_half(cluster, with_it, without, half).items():
                times[name] += pairs
            cluster.run(["umount", PLUGSTACK], user="root", node=without)
        helped = [seconds for node in cluster.nodes for seconds in helper_times(cluster, node)]
    expected = 2 * (half + WARM_UP)
    if len(helped) != expected:
        raise SystemExit(f"the companion asked {len(helped)} times instead of {expected}")
    return times, helped, submitted


def measure_submissions(cluster: Cluster, rounds: int) -> dict[str, list[float]]:
    """Seconds of each sbatch, by the names of SUBMISSIONS."""
    plain = f"{cluster.read(SLURM_CONF)}PlugStackConfig=/etc/slurm/plain.conf\n"
    cluster.write(PLAIN_CONF, plain)
    argv = [sys.executable, "-B", __file__, "--on-the-login", str(rounds)]
    found: dict[str, list[float]] = json.loads(cluster.run(argv, timeout=60 + 8 * rounds).stdout)
    return found


def submit_rounds(rounds: int) -> dict[str, list[float]]:
    """On the login. The first rounds read all programs once; they do not count."""
    took: dict[str, list[float]] = {name: [] for name in SUBMISSIONS}
    for number in range(rounds + WARM_UP):
        for name, (conf, options) in SUBMISSIONS.items():
            argv = ["sbatch", "--test-only", *options, "--wrap=true"]
            start = time.perf_counter()
            subprocess.run(
                argv, check=True, env=os.environ | {"SLURM_CONF": conf}, stderr=subprocess.DEVNULL
            )
            if number >= WARM_UP:
                took[name].append(time.perf_counter() - start)
    return took


def measure_half(cluster: Cluster, with_it: str, without: str, rounds: int) -> Times:
    script = [sys.executable, "-B", __file__, "--in-the-job", with_it, without, str(rounds)]
    allocation = ["salloc", "--nodes=2", "--ntasks-per-node=8", *script]
    done = cluster.run(allocation, timeout=60 + 8 * rounds)
    found: Times = json.loads(done.stdout)
    return found


def helper_times(cluster: Cluster, node: str) -> list[float]:
    """Of the steps for which there was a helper: no other has waited."""
    events = map(json.loads, cluster.read(EVENTS, node).splitlines())
    steps = [event for event in events if event["hook"] == "step"]
    return [step["total"] for step in steps if "wait" in step["outcome"]]


def measure_steps(with_it: str, without: str, rounds: int) -> Times:
    """In the job. The first rounds copy the image and read all programs once; they do not count."""
    times: Times = {name: [] for name in STEPS}
    for number in range(rounds + WARM_UP):
        for name, (_, options) in STEPS.items():
            order = (with_it, without) if number % 2 else (without, with_it)
            named = [option.format(slashes="/" * (number + 1)) for option in options]
            took = {node: time_srun(node, named) for node in order}
            if number >= WARM_UP:
                times[name].append((took[with_it], took[without]))
    return times


def time_srun(node: str, options: list[str]) -> float:
    where = ["--nodes=1", f"--nodelist={node}", "--overlap"]
    start = time.perf_counter()
    subprocess.run(["srun", *where, *options, "/bin/true"], check=True)
    return time.perf_counter() - start


def print_table(
    times: Times, helped: list[float], submitted: dict[str, list[float]], load: busy.MachineLoad
) -> None:
    rounds = len(times["first"])
    print(f"{rounds} rounds; milliseconds from the start of srun to its end, medians:\n")
    print(f"  {'':18}{'with':>8}{'without':>9}{'added':>8}{'ratio':>8}")
    adds = {}
    for name, pairs in times.items():
        ratio = statistics.median(a / b for a, b in pairs)
        adds[name] = added = statistics.median(a - b for a, b in pairs)
        with_it, without = (statistics.median(column) for column in zip(*pairs, strict=True))
        numbers = f"{with_it * 1000:8.1f}{without * 1000:9.1f}{added * 1000:8.1f}"
        print(f"  {STEPS[name][0]:18}{numbers}{ratio:8.2f}")
    task = (adds["many"] - adds["further"]) / 15
    print(
        f"\nof a first step, {statistics.median(helped) * 1000:.1f} ms are the helper's own work;"
    )
    print(f"each further task of a step adds {task * 1e6:.0f} microseconds")
    for name, what in (("submit", "without --stage"), ("option", "with it")):
        pairs = zip(submitted[name], submitted["plain"], strict=True)
        adds[name] = statistics.median(a - b for a, b in pairs)
        print(f"a submission {what} takes {adds[name] * 1000:.1f} ms more than without companion")
    print("milliseconds added to a step's start, 1 task, and to a submission:")
    shown = ("noimage", "first", "further", "submit", "option")
    figures = (f"{name}={adds[name] * 1000:.1f}" for name in shown)
    print(load.last(" ".join(figures)))


if __name__ == "__main__":
    sys.exit(main())
