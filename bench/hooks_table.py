"""What the hooks cost a job: without an image, and with one that is in the cache already.

Below them, what commands that people, health checks and shells run often cost a processor.

With the companion, whose Prolog ends before its work does; in the partition `waits`, as on a node
without the companion, it does that first. Its Epilog comes when the Prolog's process has ended.

Runs prolog/forestage on a node of a test cluster as slurmd does: as root, without PATH, with the
variables of a job. Each round runs all commands once, in turn, so that a busy moment of the machine
hits all of them; a ratio is the median of the rounds' ratios to `python3 -I -c pass`, with the
interpreter and the virtual environment that the hooks use. The loop that takes the times runs on
the node itself. As root.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests/slurm"))

import busy  # noqa: E402

ROUNDS = 100
FEW = 20  # rounds of the commands
PYTHON = "/usr/lib/forestage/bin/python3"
PROLOG, EPILOG = str(REPO / "prolog/forestage"), str(REPO / "epilog/forestage")
IMAGE = "/shared/alice/image.sqsh"
EVENTS = Path("/var/log/forestage/events.jsonl")
LEASES = Path("/run/forestage/leases")
BARE, NO_IMAGE, HIT, AFTER = "python3 -I -c pass", "Prolog, no image", "Prolog, hit", "Epilog"
WORKS = "… that does its work"
GOALS = {NO_IMAGE: 1.3, HIT: 1.5, WORKS: 5.0, AFTER: 3.0}
KEYS = """\
sources: [/shared]
redirect: spank
partitions: {waits: {cold: wait}}
"""

COMMAND = "/usr/lib/forestage/bin/forestage"
COMPLETE = "completion"
COMMANDS = {
    "--help": [COMMAND, "--help"],
    "status --oneline": [COMMAND, "status", "--oneline"],
    "explain": [COMMAND, "explain", "1"],
    COMPLETE: [COMMAND],
}
SHELL = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
COMPLETION = {
    "_FORESTAGE_COMPLETE": "bash_complete",
    "COMP_WORDS": "forestage explain ",
    "COMP_CWORD": "2",
}

Environment = dict[str, str]
Times = dict[str, list[float]]  # seconds, one for each round


def main() -> int:
    if sys.argv[1:2] == ["--on-the-node"]:
        rounds = int(sys.argv[2])
        json.dump([measure_hooks(rounds), measure_commands(min(rounds, FEW))], sys.stdout)
        return 0
    options = busy.BenchOptions("hooks", __doc__, "a minute")
    options.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    rounds, load = options.begin().rounds, busy.MachineLoad()
    try:
        hooks, commands = measure_on_cluster(rounds)
        print_command_table(commands, min(rounds, FEW))
        print_hook_table(hooks, rounds, load)
    except KeyboardInterrupt:
        return 130
    return 0


def measure_on_cluster(rounds: int) -> list[Times]:
    # Here, since on the node there is no need for them; and they lie beside tests/slurm/cluster.
    from cluster import Cluster, ClusterSpec
    from host import exit_on_sigterm
    from images import make_image

    exit_on_sigterm()
    with Cluster.up(ClusterSpec(nodes=1, companion="")) as cluster:
        cluster.write("/etc/forestage/forestage.yaml", KEYS)
        make_image(cluster, IMAGE)
        # An installed package has its byte code; a checkout may not have it yet.
        compiled = [PYTHON, "-m", "compileall", "-q", str(REPO / "src")]
        cluster.run(compiled, user="root", node="n1")
        loop = [sys.executable, "-B", __file__, "--on-the-node", str(rounds)]
        done = cluster.run(loop, user="root", node="n1", timeout=120 + 2 * rounds)
    found: list[Times] = json.loads(done.stdout)
    return found


def measure_hooks(rounds: int) -> Times:
    """On the node: the first image is copied and all programs are read once, then times count."""
    run_round(1)
    wait_until(lambda: any(event["hook"] == "stager" for event in told()), "the copy")
    for job in range(2, 4):
        run_round(job)
    times: Times = {}
    for job in range(4, 4 + rounds):
        for what, seconds in run_round(job).items():
            times.setdefault(what, []).append(seconds)
    results = [event["outcome"]["result"] for event in told() if event["hook"] == "prolog"]
    if results[2:] != ["hit"] * 2 * (rounds + 2):
        raise SystemExit(f"these were no hits: see {EVENTS}, which tells {sorted(set(results))}")
    return times


def measure_commands(rounds: int) -> Times:
    """Seconds of a processor for each, on the node that the hooks have left."""
    times: Times = {}
    for number in range(rounds + 1):
        for what, argv in {BARE: [PYTHON, "-I", "-c", "pass"], **COMMANDS}.items():
            seconds = measure_processor_time(argv, SHELL | (COMPLETION if what == COMPLETE else {}))
            if number:  # the first has byte code and files read
                times.setdefault(what, []).append(seconds)
    return times


def told() -> list[dict[str, Any]]:
    return [*map(json.loads, EVENTS.open())] if EVENTS.exists() else []


def wait_until(happened: Callable[[], bool], what: str) -> None:
    for _ in range(6000):
        if happened():
            return
        time.sleep(0.005)
    raise SystemExit(f"waited in vain for {what}")


def run_round(job: int) -> dict[str, float]:
    with_image = {"SPANK__SLURM_SPANK_OPTION_pyxis_container_image": IMAGE}
    waits = {"SLURM_JOB_PARTITION": "waits"}
    found = {
        BARE: time_command([PYTHON, "-I", "-c", "pass"], make_slurmd_environment("prolog", job)),
        NO_IMAGE: time_command([PROLOG], make_slurmd_environment("prolog", job)),
        WORKS: time_command([PROLOG], make_slurmd_environment("prolog", job) | with_image | waits),
    }
    time_command([EPILOG], make_slurmd_environment("epilog", job))
    found[HIT] = time_command([PROLOG], make_slurmd_environment("prolog", job) | with_image)
    wait_until(lambda: not (LEASES / f"{job}.prolog").exists(), "the Prolog's process")
    found[AFTER] = time_command([EPILOG], make_slurmd_environment("epilog", job))
    return {what: found[what] for what in (BARE, NO_IMAGE, HIT, WORKS, AFTER)}


def make_slurmd_environment(hook: str, job: int) -> Environment:
    """What slurmd 22.05 gives a hook for a job without comment: no PATH, no HOME."""
    nodes = {"SLURM_JOB_NODELIST": "n1", "SLURM_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    return nodes | {
        "SLURM_CLUSTER_NAME": "forestage",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JOB_GID": "21001",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_PARTITION": "all",
        "SLURM_JOB_UID": "21001",
        "SLURM_JOB_USER": "alice",
        "SLURM_JOB_WORK_DIR": "/shared/alice",
        "SLURM_SCRIPT_CONTEXT": f"{hook}_slurmd",
    }


def time_command(argv: list[str], environment: Environment) -> float:
    start = time.perf_counter()
    run_command(argv, environment)
    return time.perf_counter() - start


def measure_processor_time(argv: list[str], environment: Environment) -> float:
    used = run_command(argv, environment)
    return used.ru_utime + used.ru_stime


def run_command(argv: list[str], environment: Environment) -> resource.struct_rusage:
    null = os.open(os.devnull, os.O_RDWR)
    child = os.posix_spawn(
        argv[0],
        argv,
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in range(3)],
    )
    _, status, used = os.wait4(child, 0)
    os.close(null)
    if status:
        raise SystemExit(f"{' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}")
    return used


def print_command_table(times: Times, rounds: int) -> None:
    print(f"{rounds} rounds of commands on it, in milliseconds of a processor:\n")
    print(f"  {'':20}{'min':>8}{'median':>8}{'max':>8}{'ratio':>8}")
    for what, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times[BARE], strict=True))
        spread = (min(seconds), statistics.median(seconds), max(seconds))
        print(f"  {what:20}{''.join(f'{value * 1000:8.1f}' for value in spread)}{ratio:8.2f}")
    print()


def print_hook_table(times: Times, rounds: int, load: busy.MachineLoad) -> None:
    print(f"{rounds} rounds on one node, in milliseconds:\n")
    print(f"  {'':20}{'min':>8}{'median':>8}{'max':>8}{'ratio':>8}{'goal':>8}")
    ratios = {}
    for what, seconds in times.items():
        ratios[what] = statistics.median(a / b for a, b in zip(seconds, times[BARE], strict=True))
        spread = (min(seconds), statistics.median(seconds), max(seconds))
        numbers = "".join(f"{value * 1000:8.1f}" for value in spread)
        goal = f"{GOALS[what]:8.1f}" if what in GOALS else ""
        print(f"  {what:20}{numbers}{ratios[what]:8.2f}{goal}")
    figures = f"noimage={ratios[NO_IMAGE]:.2f} hit={ratios[HIT]:.2f} epilog={ratios[AFTER]:.2f}"
    print(f"\n{load.last(figures)}")


if __name__ == "__main__":
    sys.exit(main())
