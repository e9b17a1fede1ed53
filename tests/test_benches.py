"""Each bench runs, and ends with the line that it promises; how fast anything is, no test says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
sys.path.append(str(BENCH))

import start_readers  # noqa: E402

RATIO = r"-?\d+\.\d+"  # a time that is added to another may be lost in the noise

LIMIT = 840  # seconds for one that hangs: what takes half a minute alone takes minutes in a lane

LOAD = r" load=\d+\.\d-\d+\.\d"  # of the machine, before and after

# As small as they can be: a run of a few seconds each.
SMALL = {
    "copy": (
        ["32MiB", "1"],
        (
            f"vs_rsync={RATIO} vs_cp={RATIO} of_limit={RATIO}"
            f" vs_cp_cold={RATIO} of_limit_cold={RATIO} cpu={RATIO}"
        ),
    ),
    "data": (
        ["--files", "60", "--large", "0", "--rounds", "1", "--jobs", "2", "--nodes", "2"],
        f"dir_vs_rsync={RATIO} tree_vs_tar={RATIO} n2_src_bytes={RATIO} epoch_vs_shared={RATIO}",
    ),
    "first-start": (
        [
            *("--nodes", "1,2", "--links", "400:400", "--mib", "2"),
            *("--modes", "unpack", "--pair-mib", "8", "--pairs", "1"),
        ],
        (
            f"n2_src_bytes={RATIO} n2_vs_without={RATIO} worst_vs_off={RATIO} later_src={RATIO}"
            rf" giver={RATIO} taker={RATIO} cp={RATIO} beside={RATIO}\({RATIO}-{RATIO}\)"
        ),
    ),
    "growth": (
        ["100", "--runs", "1"],
        " ".join(
            f"{name}={RATIO}"
            for name in (
                *("hit", "cold", "epilog", "epilog_full", "cold_full"),
                *("hit_mounts", "epilog_mounts", "hit_conf"),
            )
        ),
    ),
    "hooks": (["2"], f"noimage={RATIO} hit={RATIO} epilog={RATIO}"),
    "job-submit": (["1"], f"plain={RATIO} hostile={RATIO}"),
    "nfs-fsc": (
        ["--mib", "4", "--rounds", "1"],
        " ".join(
            f"{name}{job}={RATIO} {name}{job}_read={RATIO}"
            for name in ("fsc", "forestage")
            for job in (1, 2)
        ),
    ),
    "peers": (
        ["--nodes", "1,2", "--mib", "4", "--jobs", "2x1,1x2", "--pair-mib", "8", "--pairs", "1"],
        (
            rf"src_bytes={RATIO}\(2\) t2_over_t1={RATIO} speedup2={RATIO} jobs2_src={RATIO}"
            rf" jobs1x2_src={RATIO} giver={RATIO} taker={RATIO} cp={RATIO}"
            rf" beside={RATIO}\({RATIO}-{RATIO}\)"
        ),
    ),
    "peers-model": (["4"], rf"cpu=\d+s worst_read={RATIO}"),
    "peers-silent": (
        ["--nodes", "2", "--rounds", "1", "--mib", "4", "--rate", "16", "--chunk-mib", "1"],
        f"worst2={RATIO}",
    ),
    "prefetch": (
        [
            *("--seeds", "1", "--jobs", "8", "--runs", "3-4", "--mib", "2-4"),
            *("--pending", "50", "--cloud", "20"),
        ],
        (
            f"readable={RATIO} popular={RATIO} warm={RATIO} p90_over_warm={RATIO}"
            rf" makespan={RATIO} wait={RATIO} later=\d+ pass={RATIO} job_info_ms={RATIO}"
        ),
    ),
    "prefetch-policy": (
        ["--seeds", "1", "--minutes", "30"],
        rf"cpu=\d+s gain={RATIO} vs_popular={RATIO}",
    ),
    "registry": (
        ["--nodes", "2", "--rounds", "1", "--steps", "1", "--mib", "1", "--mbyte", "100"],
        f"first={RATIO} warm={RATIO} pulls={RATIO}",
    ),
    "scale": (
        ["100", "20"],
        rf"hit_100_over_10={RATIO} plan_100_ms=\d+ copies_1=1 copies_20=20 work_20_over_1={RATIO}",
    ),
    "start": (
        ["8", "--rounds", "1"],
        " ".join(
            f"{mode}_{name}={RATIO}"
            for name in ("cold", "warm", "cold_vs_empty", "warm_vs_empty")
            for mode in ("squashfuse", "unpack")
        ),
    ),
    "srun": (
        ["1"],
        f"hit_met={RATIO} cold_met={RATIO} hit_vs_empty={RATIO} cold_vs_empty={RATIO}",
    ),
    "window": (
        ["0.0625", "1"],
        f"stalls_vs_shared={RATIO} speedup={RATIO} src_bytes={RATIO} peak={RATIO}",
    ),
    "step": (["1"], f"noimage={RATIO} first={RATIO} further={RATIO} submit={RATIO} option={RATIO}"),
}

# These need a virtual machine's packages, and make its disks where these are not there.
IN_MACHINE = {"nfs-fsc"}
LONGEST = 3 * 3600
BENCHES = [
    pytest.param(name, marks=[pytest.mark.machine, pytest.mark.timeout(LONGEST)])
    if name in IN_MACHINE
    else pytest.param(name, marks=[pytest.mark.timeout(LIMIT + 60)])
    for name in SMALL
]


def test_every_bench_has_a_small_run_in_the_tests() -> None:
    programs = {path.name for path in BENCH.iterdir() if path.is_file() and not path.suffix}
    assert programs == set(SMALL)


@pytest.mark.ci
@pytest.mark.parametrize("bench", BENCHES)
def test_bench_ends_with_its_documented_result_line(machine: None, bench: str) -> None:
    options, promised = SMALL[bench]
    limit = LONGEST if bench in IN_MACHINE else LIMIT
    ran = subprocess.run(
        [BENCH / bench, *options], capture_output=True, text=True, check=False, timeout=limit
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.fullmatch(promised + LOAD, ran.stdout.splitlines()[-1]), ran.stdout


@pytest.mark.ci
@pytest.mark.parametrize("bench", SMALL)
def test_help_of_each_bench_states_its_usage_and_duration(bench: str) -> None:
    ran = subprocess.run(
        [BENCH / bench, "--help"], capture_output=True, text=True, check=False, timeout=240
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.match(rf"usage: bench/{bench} ", ran.stdout)
    assert re.search(r"^Takes .*\d|^Takes a ", ran.stdout, re.MULTILINE)


def test_bench_shows_the_stderr_of_a_step_that_ends_without_an_answer() -> None:
    argv = ["sh", "-c", "echo no such file >&2; exit 2"]
    step = subprocess.Popen(argv, stdin=-1, stdout=-1, stderr=-1, text=True)
    refused = pytest.raises(SystemExit, match="ended with 2: no such file")
    with refused, start_readers.start_conversation(step):
        pass
