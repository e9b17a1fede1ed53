"""The node of a cluster that is a virtual machine: its images, its jobs, what it does for them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from install import CACHE
from vm import PATIENCE, VM, Done, Running, VMError, quoted

from forestage import events
from forestage.events import EventRecord

IMAGES = "/lustre/images"
LOG = "/var/log/forestage/events.jsonl"
ON, OFF = "/tmp/lane.on", "/tmp/lane.off"


@dataclass(frozen=True)
class Image:
    """A file on the shared file system, and the digest of its bytes."""

    path: str
    sha256: str

    @property
    def look(self) -> str:
        """The script of a job that reads it all."""
        return f"sha256sum <{self.path}"

    def seen(self, done: Done) -> bool:
        """Whether a job that did `look` first has ended well, and read these bytes."""
        return done.code == 0 and done.out.split()[0] == self.sha256


class Compute:
    """Made of a machine that is off."""

    def __init__(self, vm: VM) -> None:
        self.vm = vm
        self.run, self.begin, self.until = vm.run, vm.begin, vm.until

    def boot(self) -> None:
        """Until the node takes jobs. Those that a power cut ended Slurm may not know to be over."""
        self.vm.boot()
        self.until("scancel --partition=all 2>/dev/null")
        self.idle()

    def ready(self) -> None:
        """Nothing runs, nothing is cached; or the machine boots as it was installed."""
        try:
            there = "mountpoint /mnt/nvme; ls /lustre/images /mnt/nvme"
            self.run(f"sinfo -h -o %T | grep -qx idle; {there}", limit=60)
        except (VMError, AssertionError):
            self.vm.cut_power()
            self.vm.fresh_disks()
            self.boot()

    def clean(self) -> None:
        self.run("scancel --partition=all")
        self.idle()
        self.run("forestage evict --all >/dev/null; rm -rf /export/images/*", check=False)

    # The shared file system

    def image(self, name: str, mib: int = 8, user: str = "alice", mode: str = "644") -> Image:
        """A squashfs that does not compress, with a file `blob` and one that says its name."""
        path = f"{IMAGES}/{name}.sqsh"
        made = self.run(
            f"mkdir -p /tmp/{name}; echo {name} >/tmp/{name}/name;"
            f"head -c {mib}M /dev/urandom >/tmp/{name}/blob;"
            f"mksquashfs /tmp/{name} /export/images/{name}.sqsh -quiet -no-progress -noD"
            " -noappend >&2;"
            f"rm -r /tmp/{name}; cd /export/images; chown {user}: {name}.sqsh;"
            f"chmod {mode} {name}.sqsh; sync -f .; sha256sum <{name}.sqsh"
        )
        return Image(path, made.out.split()[0])

    def warm(self, name: str, mode: str = "644") -> Image:
        """An image that the cache has."""
        image = self.image(name, mode=mode)
        assert image.seen(self.srun(f"stage={image.path} stage-wait=5m", image.look))
        return image

    # Jobs

    def srun(self, stage: str, script: str, *options: str, user: str = "alice") -> Done:
        """A job of one step whose comment is `stage`; the script is sh's."""
        return self.run(command(stage, script, *options), user=user)

    @contextlib.contextmanager
    def holding(
        self, stage: str, first: str = "true", last: str = "true", *options: str
    ) -> Iterator[Running]:
        """A job of alice's that has done `first`; it does `last` when the block is over."""
        wait = f"touch {ON}; until test -e {OFF}; do sleep 0.2; done"
        self.run(f"rm -f {ON} {OFF}")
        job = self.begin(command(stage, f"{first}; {wait}; {last}", *options), user="alice")
        try:
            self.until(f"test -e {ON}")
            yield job
        finally:
            self.run(f"touch {OFF}")

    @contextlib.contextmanager
    def configured(self, lines: str) -> Iterator[None]:
        """With these lines of the configuration besides."""
        file = "/etc/forestage/conf.d/test.yaml"
        self.vm.put(file, lines.encode())
        try:
            yield
        finally:
            self.run(f"rm -f {file}")  # gone already, if the power went before it was flushed

    def outcomes(self, job: int) -> list[EventRecord]:
        """What the hooks and stagers did for a job."""
        file = Path(self.vm.folder / "events")
        file.write_bytes(self.vm.get(LOG))
        return [one for one in events.read_events(file) if one.job == job]

    def idle(self, limit: float = PATIENCE) -> None:
        """Waits until no job is there, and the node's last Epilog is over."""
        self.until('test -z "$(squeue -h)"', limit)
        self.until("sinfo -h -o %T | grep -qx idle", limit)

    def results(self, job: int, hook: str) -> list[str]:
        return [one.outcome.result for one in self.outcomes(job) if one.hook == hook]

    # What is there

    def processes(self) -> dict[str, set[str]]:
        """The cgroups of what forestage runs, by the processes' names."""
        found: dict[str, set[str]] = {}
        for line in self.run("ps -e -o comm=,cgroup=").out.splitlines():
            name, _, group = line.partition(" ")
            if name.startswith(("forestage", "squashfuse")):
                found.setdefault(name, set()).add(group.strip().removeprefix("0::"))
        return found

    def await_processes(self) -> None:
        """Wait until none of jobs or copies is there; the peer service lives as long as a node."""
        others = "ps -e -o comm=,cgroup= | grep -v /forestage-peer.service"
        self.until(f"! {others} | grep -qE '^(forestage|squashfuse)'")

    def entries(self) -> list[str]:
        return self.run(f"ls {CACHE}/entries 2>/dev/null || true").out.split()

    def left(self) -> str:
        """What there may not be without a job: leases, mounts, loop devices.

        Processes neither: it waits for their end, also of a copy that no job needs any more.
        """
        self.await_processes()
        return self.run(
            # A keeper's directory stays for the sweep, the state in it does not.
            "cd /run/forestage; find leases served through/*/state -type f -o -type s 2>/dev/null"
            " | grep . || true;"
            f"grep -E ' (/lustre/|{CACHE})' /proc/self/mountinfo || true;"
            " losetup --list --noheadings"
        ).out.strip()


def command(stage: str, script: str, *options: str) -> str:
    return f"srun {' '.join(options)} --comment={shlex.quote(stage)} sh -c {quoted(script)}"
