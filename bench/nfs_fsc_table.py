"""The table behind bench/nfs-fsc: two jobs on a node whose shared file system is kernel NFS.

A virtual machine (tests/machine) whose server is its own: the loopback device is the link, and has
`mbit` Mbit/s (tc's tbf). Its processors are emulated, 10 to 50 times slower than a node's: a link
of 50 Mbit/s is to them what one of a Gbit/s is to a node. The node's disk is two emulated NVMe
as RAID 0 with XFS; cachefilesd and forestage keep their copies there, and jobs unpack there.

In each round each variant starts with nothing on the node, and has two jobs with the image, which
unsquashfs unpacks whole: `plain`, NFS alone; `fsc`, NFS mounted with `fsc`, and cachefilesd; and
`forestage`, installed as docs/install.md has it, on plain NFS. For the first two Slurm has no line
of forestage's. Before each job the file system is mounted anew, so that its client trusts nothing
that it had read, all page caches are dropped, and a job with another image has read the programs.
Each round begins with another variant.

Seconds are from `srun` until it has ended; `to plain` is the ratio to the same job of `plain`, of
the same round. `read`: images that went over the link until all copies were on the disk. All
unpacked bytes are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / f"tests/{folder}") for folder in ("machine", "slurm", ".")]

import busy  # noqa: E402
from compute import Compute, command  # noqa: E402
from host import exit_on_sigterm  # noqa: E402
from install import installed  # noqa: E402
from rounds import find_spread, rotate_names  # noqa: E402
from vm import VM, VMError  # noqa: E402

MIB = 1 << 20
VARIANTS = ("plain", "fsc", "forestage")
OTHER_MIB = 1  # of the image whose job does not count
SHARE, SLURM = "/export/images", "/etc/slurm"
FSCACHE, UNPACKED = "/mnt/nvme/fscache", "/mnt/nvme/unpacked"
# What a job keeps of an image in memory is little: Slurm counts the pages that it has written.
UNSQUASHFS = f"unsquashfs -q -n -p 2 -da 16 -fr 16 -d {UNPACKED}/image"
CACHEFILESD = f"dir {FSCACHE}\\ntag nfs\\nbrun 10%%\\nbcull 7%%\\nbstop 3%%\\n"

PREPARE = f"""\
mkdir -p {FSCACHE} {UNPACKED}
chmod 1777 {UNPACKED}
printf '{CACHEFILESD}' >/etc/cachefilesd.conf
echo RUN=yes >>/etc/default/cachefilesd
cd {SLURM}
for file in slurm.conf plugstack.conf; do
    cp $file $file.forestage
    grep -vi forestage $file >$file.without || true
done
"""
# What is right already is left alone: a restart of slurmd takes long here.
BECOME = f"""\
cd {SLURM}
! cmp -s slurm.conf slurm.conf.KIND || exit 0
for file in slurm.conf plugstack.conf; do cp $file.KIND $file; done
scontrol reconfigure
systemctl restart slurmd
"""
CLEAR = f"""\
forestage evict --all >&2 || true
umount /lustre
systemctl stop cachefilesd
rm -rf {FSCACHE} {UNPACKED}/*
mkdir {FSCACHE}
"""
# `fsc` is of no use to a mount that is there before cachefilesd: this one is made after it.
MOUNT = "mount -t nfs4 -o vers=4.2,hardMORE 127.0.0.1:/ /lustre"
FORGET = f"""\
! mountpoint -q /lustre || umount /lustre
{MOUNT}
rm -rf {UNPACKED}/*
sync
echo 3 >/proc/sys/vm/drop_caches
"""
SENT = "cat /sys/class/net/lo/statistics/tx_bytes"


@dataclass(frozen=True)
class JobRun:
    """One job: seconds from srun to its end, and bytes that went over the link for it."""

    seconds: float
    read: int


Runs = dict[str, list[tuple[JobRun, JobRun]]]  # by variant; a first and a second job per round


@dataclass(frozen=True)
class NfsNode:
    """A node with two images on its NFS server, and how to measure a job on it."""

    node: Compute
    image: str
    blob: str  # the digest of what is in the image
    other: str
    size: int

    def measure_pair(self, variant: str) -> tuple[JobRun, JobRun]:
        """Run two jobs on a node that has nothing yet."""
        kind = "forestage" if variant == "forestage" else "without"
        self.node.run(BECOME.replace("KIND", kind))
        self.node.idle()
        self.node.run(CLEAR)
        if variant == "fsc":
            self.node.run("systemctl start cachefilesd")
        return self._measure_job(variant), self._measure_job(variant)

    def _measure_job(self, variant: str) -> JobRun:
        self.node.run(FORGET.replace("MORE", ",fsc" if variant == "fsc" else ""))
        if variant == "fsc" and "yes" not in self.node.run("cat /proc/fs/nfsfs/volumes").out:
            raise VMError("the NFS client does not use the cache of cachefilesd")
        self._run_job(variant, self.other)
        before = self._count_sent()
        seconds = self._run_job(variant, self.image)
        read = self._count_sent() - before
        if self.node.run(f"sha256sum <{UNPACKED}/image/blob").out.split()[0] != self.blob:
            raise VMError(f"{variant}: the job saw other bytes than the image has")
        return JobRun(seconds, read)

    def _run_job(self, variant: str, image: str) -> float:
        """Return the job's seconds, once all that it has begun has ended."""
        stage = f"stage={image}" if variant == "forestage" else ""
        script = command(stage, f"{UNSQUASHFS} {image}", "--mem=1500")
        self.node.run(f"rm -rf {UNPACKED}/*")
        timed = f"date +%s.%N; {script} >&2; date +%s.%N"
        start, end = map(float, self.node.run(timed, user="alice").out.split())
        self.node.idle()
        self.node.await_processes()
        return end - start

    def _count_sent(self) -> int:
        return int(self.node.run(SENT).out)


def make_site(node: Compute, options: argparse.Namespace) -> NfsNode:
    image, other = node.image("image", mib=options.mib), node.image("other", mib=OTHER_MIB)
    exported = image.path.replace("/lustre/images", SHARE)
    blob = node.run(f"unsquashfs -cat {exported} blob | sha256sum").out.split()[0]
    size = int(node.run(f"stat -c %s {exported}").out)
    node.run(PREPARE)
    # With a burst of a packet of the loopback device, whose packets have 64 KiB.
    node.run(f"tc qdisc add dev lo root tbf rate {options.mbit}mbit burst 256kb latency 1s")
    return NfsNode(node, image.path, blob, other.path, size)


def list_ratios(runs: Runs, variant: str, job: int) -> list[float]:
    pairs = zip(runs[variant], runs["plain"], strict=True)
    return [one[job].seconds / plain[job].seconds for one, plain in pairs]


def find_median_read(runs: Runs, variant: str, job: int, size: int) -> float:
    return statistics.median(pair[job].read for pair in runs[variant]) / size


def list_rows(runs: Runs, size: int) -> Iterator[str]:
    yield "| | job | s | from | to | to plain | from | to | read |"
    yield "|:--" + "|--:" * 8 + "|"
    for variant, pairs in runs.items():
        for job in (0, 1):
            seconds = [f"{one:.1f}" for one in find_spread([pair[job].seconds for pair in pairs])]
            ratios = [f"{one:.2f}" for one in find_spread(list_ratios(runs, variant, job))]
            words = [variant, str(job + 1), *seconds, *ratios]
            yield f"| {' | '.join(words)} | {find_median_read(runs, variant, job, size):.2f} |"


def format_summary(runs: Runs, size: int) -> str:
    """The line that others read."""
    words = []
    for variant in VARIANTS[1:]:
        for job in (0, 1):
            name = f"{variant}{job + 1}"
            words.append(f"{name}={statistics.median(list_ratios(runs, variant, job)):.2f}")
            words.append(f"{name}_read={find_median_read(runs, variant, job, size):.3f}")
    return " ".join(words)


def run_bench(options: argparse.Namespace) -> Iterator[str]:
    start, load = time.monotonic(), busy.MachineLoad()
    layer = installed(options.suite)
    with tempfile.TemporaryDirectory() as folder, VM.of(layer, Path(folder)) as vm:
        node = Compute(vm)
        node.boot()
        site = make_site(node, options)
        kernel = node.run("uname -r").out.strip()
        yield (
            f"Linux {kernel}, {site.size / MIB:.0f} MiB, a link of {options.mbit:g} Mbit/s,"
            f" {os.cpu_count()} processors that emulate 2; medians of {options.rounds}\n"
        )
        runs: Runs = {variant: [] for variant in VARIANTS}
        for number in range(options.rounds):
            for variant in rotate_names(VARIANTS, number):
                pair = site.measure_pair(variant)
                runs[variant].append(pair)
                jobs = [f"{one.seconds:.1f} s ({one.read / site.size:.2f})" for one in pair]
                yield f"{variant}: {', '.join(jobs)}"
    yield from ("", *list_rows(runs, site.size), "")
    yield f"{time.monotonic() - start:.0f} s\n"
    yield load.last(format_summary(runs, site.size))


def main() -> int:
    parser = busy.BenchOptions("nfs-fsc", __doc__, "40 minutes, and 10 more the first time")
    parser.add_argument("--mib", type=int, default=256, help="of the image")
    parser.add_argument("--mbit", type=float, default=50, help="of the link, Mbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    words = "the Debian whose kernel and Slurm the node has"
    parser.add_argument("--suite", choices=("bookworm", "trixie"), default="bookworm", help=words)
    options = parser.begin()
    exit_on_sigterm()
    for line in run_bench(options):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
