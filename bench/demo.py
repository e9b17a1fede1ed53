"""What ./demo runs: a job on four nodes without forestage, for the first time, and once more.

The nodes have networks of their own; the shared file system is GlusterFS behind one link that is
shaped, and all nodes read it through that. forestage runs as docs/install.md sets it up, with the
companion: its configuration says `sources` alone, and each node runs the peer service. Nothing here
computes what should happen: bytes are the kernel's count of what left the file server, seconds are
those from srun to the first line that the container prints, and each container adds up what it has
read of its image.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import start_image  # noqa: E402
from cluster import Cluster, ClusterError, ClusterSpec  # noqa: E402
from fleet import Fleet, networked  # noqa: E402
from host import exit_on_sigterm, wait_until  # noqa: E402
from jobs import CACHE  # noqa: E402
from spec import Net  # noqa: E402
from start_image import MIB, PROGRAM, StartImage  # noqa: E402

NODES, LINK = 4, 300.0  # Mbit/s, of the file server and of each node
IMAGES = ("pytorch", "jax", "nemo", "vllm")
IMAGE_MIB = 128  # four do not fit into what the cache may take of a node's disk
DISK_MIB = 1024
SHARE = 0.01  # of an image: what the program in the container reads
UNPACKED = "/mnt/nvme/unpacked"
PYXIS = f"required {{state}}/pyxis.so unpack={UNPACKED}"
OFF, TELL = "--comment=stage=off", "--comment=stage-tell=yes"
COLUMNS = {"without": OFF, "first job": TELL, "later jobs": TELL}

ABOUT = """
The stand-in for pyxis unpacks the image with unsquashfs, as enroot does. The file server has one
link of 300 Mbit/s. Without forestage each node reads the image over it. The nodes of the first job
read it about once, and take the rest from each other, as they do by default. Later jobs read
nothing of it from there: what is left are names and attributes.
"""


@dataclass(frozen=True)
class JobStart:
    """A job's start: seconds to the first line, bytes from the file server, containers right."""

    seconds: float
    sent: int
    right: int
    said: Sequence[str]


def main() -> int:
    exit_on_sigterm()
    signal.signal(signal.SIGHUP, signal.default_int_handler)  # the terminal was closed
    start = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            work = Path(stack.enter_context(TemporaryDirectory()))
            fleet = Fleet(stack.enter_context(Cluster.up(cluster_spec())))
            stack.callback(clean_up_undisturbed)
            images = prepare_images(fleet, work)
            print_text(
                f"{NODES} nodes, {len(IMAGES)} images: {time.monotonic() - start:.0f} s to set up"
            )
            run_three_jobs(fleet, images)
            show_eviction(fleet)
            print_text(ABOUT)
    except ClusterError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the cluster is gone", file=sys.stderr)
        return 130
    print_text(f"Cleaned up. {time.monotonic() - start:.0f} s in all.")
    return 0


def clean_up_undisturbed() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def cluster_spec() -> ClusterSpec:
    made = networked(NODES, Net(node_mbit=LINK, store_mbit=LINK))
    hooks = {name: str(REPO / name / "forestage") for name in ("prolog", "epilog")}
    return replace(made, nvme_mib=DISK_MIB, companion="", plugstack=(PYXIS,), **hooks)


def prepare_images(fleet: Fleet, work: Path) -> dict[str, StartImage]:
    cluster = fleet.cluster
    made = {}
    for name in IMAGES:
        made[name] = start_image.make_image(
            cluster.host_path(image_path(name)), IMAGE_MIB, SHARE, work
        )
    for node in cluster.nodes:
        fleet.root(["mkdir", "-m", "1777", UNPACKED], node)
    cluster.write("/etc/forestage/forestage.yaml", "sources: [/shared]\n")
    fleet.serve(cluster.nodes)
    # By what an earlier job has noted a Prolog may end at once; and all programs are read once.
    cluster.run(build_srun_command(f"-N{NODES}", OFF, "true"))
    wait_until_settled(fleet)
    return made


def image_path(name: str) -> str:
    return f"/shared/alice/{name}.sqsh"


def build_srun_command(*words: str) -> list[str]:
    return ["srun", "--ntasks-per-node=1", *words]


def wait_until_settled(fleet: Fleet) -> None:
    """Waits for Epilogs and copies, and has nothing of images in the page cache."""
    fleet.cluster.wait_idle()
    fleet.await_stagers()
    for node in fleet.cluster.nodes:
        fleet.root(["sh", "-c", f"rm -rf {UNPACKED}/*; sync -f /mnt/nvme"], node)
        entries = fleet.cluster.host_path(CACHE, node).glob("entries/*/image")
        for file in (
            *entries,
            *(fleet.cluster.host_path(image_path(name), node) for name in IMAGES),
        ):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Three jobs on four nodes


def run_three_jobs(fleet: Fleet, images: dict[str, StartImage]) -> None:
    name = IMAGES[0]
    size = images[name].size / MIB
    print_text(
        f"\nsrun -N{NODES} --container-image={image_path(name)} …, an image of {size:.0f} MiB\n"
    )
    found = {}
    for column, comment in COLUMNS.items():
        found[column] = start_job(fleet, image_path(name), images[name].answer, comment)
    row = "  {:34}" + "{:>12}" * len(found)
    print_text(row.format("", *found))
    sent = [f"{one.sent / MIB:.0f} MiB" for one in found.values()]
    print_text(row.format("read from the file server", *sent))
    print_text(
        row.format("seconds to the first line", *(f"{one.seconds:.1f}" for one in found.values()))
    )
    right = [f"{one.right} of {NODES}" for one in found.values()]
    print_text(row.format("containers with the right bytes", *right))
    print_text("")
    for column, one in found.items():
        for line in one.said:
            print_text(f"  {column}: the user reads: {line}")
    took = " -> ".join(f"{one.seconds:.1f} s" for one in found.values())
    print_text(f"\n{NODES} nodes: {took}; file server: {' -> '.join(sent)}\n")


def start_job(fleet: Fleet, image: str, answer: str, comment: str) -> JobStart:
    """Runs a job in that image, of which each node prints a line, and then what it has read."""
    before, begin = fleet.sent_by_store(), time.monotonic()
    command = ["sh", "-c", f"echo started; {' '.join(PROGRAM)}"]
    options = [f"-N{NODES}", f"--container-image={image}", comment]
    job = fleet.cluster.popen(
        build_srun_command(*options, *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    first = job.stdout.readline()  # type: ignore[union-attr]
    seconds = time.monotonic() - begin
    out, said = job.communicate(timeout=180)
    if first.strip() != "started":
        raise ClusterError(f"the job did not start: {first}{out}{said}")
    wait_until_settled(fleet)
    lines = [line for line in said.splitlines() if line.startswith("forestage: ")]
    return JobStart(seconds, fleet.sent_by_store() - before, out.split().count(answer), lines)


# Eviction on one node


def show_eviction(fleet: Fleet) -> None:
    cluster, node = fleet.cluster, fleet.cluster.nodes[0]
    print_text(f"{len(IMAGES)} images on {node}, too many for its cache; a job uses the first\n")
    row = "  {:24}{}"
    print_text(row.format("after a job with", "the cache holds"))
    held = cluster.submit(
        "#!/bin/sh\nsleep 300\n", "-w", node, f"--comment=stage={image_path(IMAGES[0])}"
    )
    jobs = {held}
    wait_until(
        lambda: list_leased_entries(fleet, node) == jobs, 60, lambda: f"job {held} did not start"
    )
    for name in IMAGES[1:]:
        cluster.run(
            build_srun_command(
                "-w", node, f"--container-image={image_path(name)}", "sh", "-c", "exit"
            )
        )
        fleet.await_stagers()
        wait_until(
            lambda: list_leased_entries(fleet, node) == jobs, 60, lambda: "an Epilog did not end"
        )
        shown = [f"{one}{'*' * (one == IMAGES[0])}" for one in list_cached_entries(fleet, node)]
        print_text(row.format(name, ", ".join(shown)))
    print_text("  * held by the job that runs: never evicted")
    cluster.run(["scancel", str(held)])


def list_leased_entries(fleet: Fleet, node: str) -> set[int]:
    return {one.job for one in fleet.leases(node)}


def list_cached_entries(fleet: Fleet, node: str) -> list[str]:
    return sorted(Path(one).stem for one in fleet.cached_paths(node))


def print_text(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
