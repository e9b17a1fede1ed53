"""Records a real backfill scheduler's plans: prefetch_record.py FILE [SECONDS] [SEED], as root.

Eight nodes of tests/slurm, a queue of ten: jobs of whole nodes and of a quarter, arrays,
heterogeneous jobs, and a reservation of two nodes for one user. Jobs of 8 to 45 s with limits of 1
to 6 times that; the queue is read once a second. FILE is what prefetch_model.read_recording()
reads: of each plan the changes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

from cluster import Cluster  # noqa: E402
from spec import ClusterSpec  # noqa: E402

from forestage.slurm.nodelist import expand_nodelist  # noqa: E402

NODES, QUEUE = 8, 10
# id, of an array without its task; state; user; count of nodes; nodes; planned nodes
FORMAT = "%i|%F|%T|%u|%D|%N|%Y"


def main() -> None:
    path, seconds = Path(sys.argv[1]), float((*sys.argv, "420")[2])
    chance = random.Random(int((*sys.argv, "420", "1")[3]))
    spec = ClusterSpec(
        nodes=NODES, prolog="", epilog="", slurm_conf={"Prolog": None, "Epilog": None}
    )
    jobs: dict[str, dict[str, object]] = {}
    plans: dict[str, list[list[object]]] = {}
    with Cluster.up(spec) as cluster:
        cluster.run(_reserve(), user="root")
        start = now = time.time()
        while now - start < seconds:
            waiting = 0
            now = time.time()
            asked = cluster.run(["squeue", "-h", "-o", FORMAT], user="root")
            at = round(now - start, 1)
            for line in asked.stdout.splitlines():
                job, base, state, user, count, nodes, planned = line.split("|")
                if state == "PENDING":
                    waiting += 1
                    seen = plans.setdefault(base, [])
                    plan = [*expand_nodelist(planned)] if planned else []
                    if not seen or seen[-1][1] != plan:
                        seen.append([at, plan])
                elif nodes:
                    about = {"base": base, "user": user, "count": int(count), "start": at}
                    jobs.setdefault(job, {**about, "nodes": expand_nodelist(nodes)})["end"] = at + 1
            for _ in range(QUEUE - waiting):
                user = chance.choice(("alice", "bob"))  # the course is bob's: alice's is refused
                cluster.run(_job(chance, at), user=user, check=False)
            time.sleep(max(0.0, now + 1 - time.time()))
        cluster.run(["scancel", "--user=alice,bob"], user="root", check=False)
    text = json.dumps({"jobs": jobs, "plans": plans}, separators=(",", ":"))
    path.write_text(text.replace('],"', '],\n"').replace('},"', '},\n"') + "\n")


def _reserve() -> list[str]:
    words = "create reservation reservationname=course users=bob nodes=n7,n8 starttime=now+120"
    return ["scontrol", *words.split(), "duration=2"]


def _job(chance: random.Random, at: float) -> list[str]:
    runs = chance.uniform(8, 45)
    limit = f"--time=0:{int(runs * chance.uniform(1, 6)) + 1}"
    whole = ["--exclusive", f"-N{chance.randint(1, 4)}"]
    kind = chance.random()
    if kind < 0.25:
        whole = ["-n1", "-c2"]
    elif kind < 0.4:
        whole = ["--exclusive", "-N1", f"--array=1-{chance.randint(2, 5)}"]
    elif kind < 0.5:
        whole = ["--exclusive", "-N1", limit, ":", "--exclusive", f"-N{chance.randint(1, 2)}"]
    elif kind < 0.6 and at < 200:
        whole = ["--exclusive", "-N1", "--reservation=course"]
    return ["sbatch", "-o/dev/null", limit, *whole, f"--wrap=sleep {runs:.0f}"]


if __name__ == "__main__":
    main()
