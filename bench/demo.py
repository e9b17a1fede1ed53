"""What ./demo runs: four jobs' worth of forestage on a real Slurm cluster, with what was measured.

The shared file system is an ext4 image that each node mounts read-only through a loop device of its
own: so each has its own page cache and its own counters, as if it were a client of a file server.
Nothing here computes what should happen; every number is read from the kernel, from the nodes'
event logs or from the report of the stand-in for pyxis. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/slurm"))

from cluster import Cluster, ClusterError, ClusterSpec
from host import exit_on_sigterm, wait_until
from images import MIB, make_image, sha256

SHARED, NVME = "/lustre", "/mnt/nvme"
TREE = "/shared/images"  # what becomes SHARED
IMAGES = ("pytorch", "jax", "nemo", "vllm")
IMAGE_MIB = 220  # four of them do not fit into what the cache may take of 1 GiB, three do
CONFIG = f"sources: [{SHARED}]\ncold: wait\nredirect: bind\n"
EVENTS = "/var/log/forestage/events.jsonl"
TELL = "--comment=stage-tell=yes"  # what users write who want to read what happened
SECTOR = 512  # bytes; the unit of /sys/dev/block/*/stat whatever the disk's own is

ABOUT = f"""
How it is measured
  Prolog, wait  {EVENTS} of the node:
                the whole Prolog, and what staging took of it
  read, written the kernel's count of what crossed the node's own device below
                {SHARED} and {NVME}, from before the job to after it; its
                image had been dropped from the page cache
  path shows    device and inode that the job's task found at the image's path
  bytes         sha256 of all that the task read there, against the source's
  The user reads  what forestage's SPANK plugin prints on srun's stderr, once, for a
                job with `stage-tell=yes` in its comment
The stand-in for pyxis reads the whole image, as enroot does to unpack it."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that have crossed a node's devices so far."""

    shared_read: int
    nvme_written: int
    nvme_read: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class Ran:
    """A job that is over, and the lines of forestage's that its user read."""

    job: int
    said: list[str]


def main() -> int:
    exit_on_sigterm()
    signal.signal(signal.SIGHUP, signal.default_int_handler)  # the terminal was closed
    start = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(
                Cluster.up(ClusterSpec(nodes=4, nvme_mib=1024, companion=""))
            )
            stack.callback(clean_up_undisturbed)
            prepare(cluster, start)
            demonstrate(cluster)
    except ClusterError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the cluster is gone", file=sys.stderr)
        return 130
    print(f"\nCleaned up. {time.monotonic() - start:.0f} s in all.")
    return 0


def clean_up_undisturbed() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def demonstrate(cluster: Cluster) -> None:
    four_nodes(cluster, "1. Without forestage (--comment=stage=off)", "--comment=stage=off")
    four_nodes(cluster, "2. Cold: no node has the image", TELL)
    four_nodes(cluster, "3. Warm: the same job again", TELL)
    eviction(cluster)
    print(ABOUT)


# The cluster and its images


def prepare(cluster: Cluster, start: float) -> None:
    say(f"A Slurm cluster of four nodes, each with 1 GiB of NVMe: {time.monotonic() - start:.1f} s")
    cluster.write("/etc/forestage/forestage.yaml", CONFIG)
    start = time.monotonic()
    for seed, name in enumerate(IMAGES):
        make_image(cluster, f"{TREE}/{name}.sqsh", mib=IMAGE_MIB, name=name, seed=seed)
    mount_shared(cluster)
    size = image_file(cluster, IMAGES[0]).stat().st_size // MIB
    say(f"{len(IMAGES)} images of {size} MiB in {SHARED}: {time.monotonic() - start:.1f} s")


def mount_shared(cluster: Cluster) -> None:
    """Turns the tree into the file system that each node mounts through a device of its own."""
    disk = cluster.state / "shared.ext4"
    disk.touch()
    os.truncate(disk, (len(IMAGES) * (IMAGE_MIB + 30)) * MIB)
    tree = cluster.host_path(TREE)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-d", tree, disk], check=True)
    shutil.rmtree(tree)
    cluster.run(["mkdir", SHARED], user="root")
    try:
        for node in cluster.nodes:
            attach = ["losetup", "--find", "--show", "--read-only", str(disk)]
            loop = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
            cluster.run(["mount", "-o", "ro", loop, SHARED], user="root", node=node)
    finally:
        # A mounted one stays until the node's mounts go, and that is with the cluster.
        attached = ["losetup", "--noheadings", "--output=NAME", f"--associated={disk}"]
        loops = subprocess.run(attached, check=True, capture_output=True, text=True).stdout.split()
        for loop in loops:
            subprocess.run(["losetup", "--detach", loop], check=True)


def image_file(cluster: Cluster, name: str, node: str = "n1") -> Path:
    return cluster.host_path(f"{SHARED}/{name}.sqsh", node)


# Three jobs on four nodes


def four_nodes(cluster: Cluster, title: str, *options: str) -> None:
    digest = sha256(image_file(cluster, IMAGES[0]))
    drop_page_cache(cluster)
    before = {node: traffic(cluster, node) for node in cluster.nodes}
    start = time.monotonic()
    ran = run_job(cluster, IMAGES[0], "-N4", *options)
    job = ran.job
    took = time.monotonic() - start
    cluster.wait_idle()
    say(f"\n{title}: job {job}, srun took {took:.1f} s\n")
    row = "  {:5}{:9}{:>8}{:>8}{:>9}{:>9}{:>9}  {:11}{}"
    print(row.format("", "", "", "", "shared", "NVMe", "NVMe", "path shows", "").rstrip())
    names = ("node", "result", "Prolog", "wait", "read", "written", "read", "inode", "bytes")
    print(row.format(*names))
    reports = {report["node"]: report for report in cluster.pyxis_reports(job)}
    total = 0
    for node in cluster.nodes:
        event, report = event_of(cluster, node, "prolog", job), reports[node]
        moved = traffic(cluster, node) - before[node]
        total += moved.shared_read
        cells = (
            node,
            event["outcome"]["result"],
            f"{event['total']:.2f} s",
            f"{event['outcome']['wait']:.2f} s",
            *(f"{size // MIB} MiB" for size in astuple(moved)),
            f"{place(cluster, node, report['dev'])} {report['ino']}",
            "same" if report["sha256"] == digest else "DIFFERENT",
        )
        print(row.format(*cells))
    say(f"  {total // MIB} MiB were read from the shared file system by the four nodes.")
    for line in ran.said:
        say(f"  The user reads: {line}")


def run_job(cluster: Cluster, image: str, *options: str) -> Ran:
    """Runs a job in that image to its end."""
    argv = ["srun", container(image), *options, "sh", "-c", "echo $SLURM_JOB_ID"]
    done = cluster.run(argv, timeout=180)
    said = [line for line in done.stderr.splitlines() if line.startswith("forestage: ")]
    return Ran(int(done.stdout.split()[0]), said)


def container(image: str) -> str:
    return f"--container-image={SHARED}/{image}.sqsh"


def drop_page_cache(cluster: Cluster) -> None:
    for node in cluster.nodes:
        entries = cluster.host_path(f"{NVME}/forestage/entries", node).glob("*/image")
        for file in (*entries, *(image_file(cluster, name, node) for name in IMAGES)):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def devices(cluster: Cluster, node: str) -> dict[str, str]:
    """The block device, as 7:1, below each mount point of the node."""
    lines = [line.split() for line in cluster.mounts(node).splitlines()]
    return {fields[4]: fields[2] for fields in lines}


def traffic(cluster: Cluster, node: str) -> Traffic:
    below = devices(cluster, node)
    shared, nvme = (
        [int(word) for word in Path("/sys/dev/block", below[point], "stat").read_text().split()]
        for point in (SHARED, NVME)
    )
    # Fields 3 and 7 of Documentation/block/stat.rst: sectors read and written.
    return Traffic(shared[2] * SECTOR, nvme[6] * SECTOR, nvme[2] * SECTOR)


def place(cluster: Cluster, node: str, device: object) -> str:
    below = devices(cluster, node)
    return {below[NVME]: "NVMe", below[SHARED]: "shared"}.get(str(device), str(device))


def event_of(cluster: Cluster, node: str, hook: str, job: int) -> dict | None:
    events = map(json.loads, cluster.read(EVENTS, node).splitlines())
    return next((event for event in events if (event["hook"], event["job"]) == (hook, job)), None)


# Eviction on one node


def eviction(cluster: Cluster) -> None:
    say(f"\n4. Eviction: {len(IMAGES)} images on n1, whose NVMe holds three\n")
    row = "  {:24}{:10}{:>8}{:>11}  {}"
    print(row.format("job", "result", "Prolog", "NVMe free", "then the cache holds"))
    job = cluster.submit("#!/bin/sh\nsleep 300\n", "-w", "n1", container(IMAGES[0]))
    wait_until(lambda: cluster.pyxis_reports(job), 60, lambda: f"job {job} did not start")
    print_cache(cluster, row, f"{IMAGES[0]}, runs on", job)
    for name in IMAGES[1:]:
        job = run_job(cluster, name, "-w", "n1").job
        wait_until(partial(event_of, cluster, "n1", "epilog", job), 60, lambda: "no Epilog")
        print_cache(cluster, row, f"{name}, has ended", job)
    print("  * leased by a running job: never evicted")


def print_cache(cluster: Cluster, row: str, what: str, job: int) -> None:
    leased = " ".join(
        lease.read_text() for lease in cluster.host_path("/run/forestage/leases", "n1").glob("*")
    )
    held = []
    for entry in cluster.host_path(f"{NVME}/forestage/entries", "n1").iterdir():
        path = json.loads((entry / "entry.json").read_text())["identity"]["path"]
        held.append(Path(path).stem + ("*" if entry.name in leased else ""))
    event = event_of(cluster, "n1", "prolog", job)
    disk = os.statvfs(cluster.host_path(NVME, "n1"))
    free = f"{disk.f_bavail * disk.f_frsize // MIB} MiB"
    result, total = event["outcome"]["result"], f"{event['total']:.2f} s"
    print(row.format(what, result, total, free, ", ".join(sorted(held))))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
