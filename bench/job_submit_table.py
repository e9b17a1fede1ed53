"""The table behind bench/job-submit: what the function costs in slurmctld, in ms of its processor.

    plain       a script of three steps, each with an image
    hostile     the slowest of tests/slurm/hostile.py, whose scripts are made to be searched slowly

Each script is submitted N times; the most that any took counts, as slurmctld has a lock meanwhile.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
from cluster import Cluster  # noqa: E402
from hostile import SCRIPTS  # noqa: E402
from spec import ClusterSpec  # noqa: E402

TIMES = 20
PLAIN = "".join(f"srun --container-image=/shared/{name}.sqsh true\n" for name in "abc")
OWN = f"""\
local note_images = dofile("{REPO}/packaging/slurm/job_submit.lua")
function slurm_job_submit(job_desc, part_list, submit_uid)
    local before = os.clock()
    note_images(job_desc)
    slurm.log_info("took %s %.3f ms", job_desc.name, (os.clock() - before) * 1000)
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end
"""


def main() -> None:
    parser = busy.BenchOptions("job-submit", __doc__, "a minute")
    parser.add_argument(
        "times", nargs="?", type=int, default=TIMES, metavar="N", help="%(default)s"
    )
    options: argparse.Namespace = parser.begin()
    load = busy.MachineLoad()
    conf = {"JobSubmitPlugins": "lua", "Prolog": None, "Epilog": None}
    files = {"/etc/slurm/job_submit.lua": OWN}
    spec = ClusterSpec(nodes=1, slurm_conf=conf, files=files)
    with Cluster.up(spec) as cluster:
        for name, script in {"plain": PLAIN, **SCRIPTS}.items():
            for _ in range(options.times):
                cluster.submit(f"#!/bin/sh\n{script}", "--hold", f"--job-name={name}")
        log = (cluster.state / "log/slurmctld.log").read_text()
    took = dict.fromkeys(["plain", *SCRIPTS], 0.0)
    for name, milliseconds in re.findall(r"took (\S+) (\S+) ms", log):
        took[name] = max(took[name], float(milliseconds))
    for name, worst in took.items():
        print(f"{name:16}{worst:8.2f} ms")
    worst = max(took[name] for name in SCRIPTS)
    print(load.last(f"plain={took['plain']:.2f} hostile={worst:.2f}"))


if __name__ == "__main__":
    main()
