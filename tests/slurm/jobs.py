"""Jobs on a test cluster: what they see of their images, and what forestage does for them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import images
from cluster import Cluster, ClusterError
from host import wait_until
from spec import ALICE, REPO, ClusterSpec, User

from forestage import events
from forestage.cache.layout import Cache, StoredEntry
from forestage.cache.lease import Lease, LeaseDirectory
from forestage.cache.part import PROCESS_NAME as STAGER
from forestage.events import Outcome
from forestage.system import mounts
from forestage.views.through.keeper import PROCESS_NAME as KEEPER
from forestage.views.through.keeper import SERVER_NAME as SERVER

CACHE = "/mnt/nvme/forestage"
CLI = "/usr/lib/forestage/bin/forestage"
RELEASE = ("cat", "/etc/os-release")
# The hooks as they are; what they say would else be lost, as no syslog listens.
HOOK_LOG = "/var/spool/slurmd/hooks.log"
HOOK = "#!/bin/sh\nexec {hook} >>{log} 2>&1\n"
PARTITIONS = (
    "all Default=YES Nodes=ALL OverSubscribe=YES State=UP\n"
    "PartitionName=plain Nodes=ALL OverSubscribe=YES State=UP"
)


def hooked(nodes: int = 4, nvme_mib: int = 1024, hook: str = HOOK, **conf: str) -> ClusterSpec:
    """A cluster with the repository's hooks, whose words can be read, and a partition `plain`.

    For the jobs of `plain` forestage is switched off: they see what all others would see without.
    `conf` are further lines of slurm.conf.
    """
    hooks = {name: REPO / name / "forestage" for name in ("prolog", "epilog")}
    return ClusterSpec(
        nodes=nodes,
        nvme_mib=nvme_mib,
        prolog="/etc/prolog",
        epilog="/etc/epilog",
        files={f"/etc/{name}": hook.format(hook=h, log=HOOK_LOG) for name, h in hooks.items()},
        slurm_conf={"PartitionName": PARTITIONS, **conf},
    )


@dataclass(frozen=True)
class Seen:
    """What the stand-in for pyxis found at a task's image path."""

    node: str
    path: str
    dev: str
    ino: int
    size: int
    sha256: str
    mount_point: str
    error: str | None

    @property
    def file(self) -> tuple[str, int]:
        return self.dev, self.ino


@dataclass(frozen=True)
class Ran:
    """A job that is over on all its nodes."""

    job: int
    code: int
    stdout: str
    stderr: str


class Reads:
    """Whether anybody, in whatever namespace, has read from a file since the last question.

    inotify(7) watches the inode: opening and stat are no reads, one byte is. It misses mmap(2).
    """

    IN_ACCESS = 1

    def __init__(self, file: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(file), self.IN_ACCESS) < 0:
            raise OSError(ctypes.get_errno(), "inotify", str(file))

    def happened(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._fd, 1 << 16))
        return False

    def close(self) -> None:
        os.close(self._fd)


class Held:
    """A job that keeps running until `stop`."""

    def __init__(self, site: Site, job: int, flag: Path) -> None:
        self.site = site
        self.job = job
        self._flag = flag

    def stop(self) -> None:
        """Returns when the job's Epilog is over."""
        if not self._flag.exists():
            self._flag.touch(mode=0o644)
        self.site.wait_over(self.job)


class Site:
    """A cluster with forestage, as its users, its admin and its disks know it."""

    _names = itertools.count(1)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    # What the admin does

    def configure(self, **keys: object) -> None:
        """Writes the configuration: the tests' own, and on top of it `keys`."""
        config = {
            "sources": ["/shared"],
            "low_watermark": "100%",
            "cold": "wait",
            "redirect": "bind",
            "deadline": "30s",
            "partitions": {"plain": {"enabled": False}},
            **keys,
        }
        # JSON is YAML.
        self.cluster.write("/etc/forestage/forestage.yaml", json.dumps(config))

    def command(self, *words: str, node: str = "n1") -> str:
        """What `forestage WORDS` prints for root on a node."""
        return self.cluster.run([CLI, *words], user="root", node=node).stdout

    def reset(self) -> None:
        """The tests' own configuration, and empty caches. Only while no job runs."""
        self.configure()
        for node in self.cluster.nodes:
            self.root(["rm", "-rf", CACHE], node)

    def root(self, argv: Sequence[str], node: str) -> str:
        return self.cluster.run(argv, user="root", node=node).stdout

    # What users do

    def image(
        self, name: str, *, mib: int = 1, seed: int = 0, owner: User = ALICE, mode: int = 0o644
    ) -> str:
        """Makes an image in the owner's directory, or replaces it by rename; its path."""
        path = f"/shared/{owner.name}/{name}.sqsh"
        images.make_image(self.cluster, path, mib=mib, name=name, seed=seed, owner=owner, mode=mode)
        return path

    def source(self, path: str) -> Path:
        """The file itself, of which no node's bind is in the way."""
        return self.cluster.host_path(path)

    def sha256(self, path: str) -> str:
        return images.sha256(self.source(path))

    def srun(
        self,
        image: str | None,
        *argv: str,
        options: Sequence[str] = (),
        node: str = "n1",
        user: str = "alice",
        comment: str | None = None,
    ) -> Ran:
        """Runs a job of one step on `node` (or several, comma-separated) to its very end."""
        return self.run(
            ["srun", *self._options(image, comment), *options, *(argv or RELEASE)], node, user
        )

    def run(self, argv: Sequence[str], node: str = "n1", user: str = "alice") -> Ran:
        """As `srun`, with any command that allocates: srun, salloc."""
        name = f"job{next(self._names)}"
        where = [f"--job-name={name}", f"--nodelist={node}", f"--nodes={node.count(',') + 1}"]
        done = self.cluster.run([argv[0], *where, *argv[1:]], user=user, check=False)
        job = self._number(name, done.stderr)
        self.wait_over(job)
        return Ran(job, done.returncode, done.stdout, done.stderr)

    def sbatch(self, script: str, *options: str, node: str = "n1", user: str = "alice") -> Ran:
        """A batch job to its very end; of several at once each has its own output."""
        name = f"job{next(self._names)}"
        where = [f"--nodelist={node}", f"--nodes={node.count(',') + 1}", f"--output={name}"]
        job = self.cluster.submit(f"#!/bin/sh\n{script}\n", *where, *options, user=user)
        self.wait_over(job)
        return Ran(job, 0, self.cluster.read(f"/shared/{user}/{name}"), "")

    @contextlib.contextmanager
    def holding(
        self,
        image: str | None,
        *,
        node: str = "n1",
        user: str = "alice",
        comment: str | None = None,
    ) -> Iterator[Held]:
        """A job that runs, its image opened, until `stop` or the end of the block."""
        name = f"job{next(self._names)}"
        started, flag = (self.source(f"/shared/{user}/{name}.{end}") for end in ("on", "off"))
        wait = f"touch /shared/{user}/{name}.on; until test -e /shared/{user}/{name}.off; "
        script = ["sh", "-c", f"{wait}do sleep 0.05; done"]
        where = [f"--job-name={name}", f"--nodelist={node}"]
        step = self.cluster.popen(
            ["srun", *where, *self._options(image, comment), *script], user=user
        )
        try:
            wait_until(
                lambda: started.exists() or step.poll() is not None, 90, lambda: f"no start: {name}"
            )
            if step.poll() is not None:
                raise ClusterError(f"{name} ended at once: {step.communicate()}")
            held = Held(self, self._number(name, ""), flag)
            yield held
            held.stop()
        finally:
            flag.touch()
            step.communicate(timeout=90)

    def wait_over(self, job: int) -> None:
        """Waits until the Epilog of a job is over on all its nodes."""
        squeue = ["squeue", "--noheader", "--jobs", str(job), "--format=%T"]

        def over() -> bool:
            ran = self.cluster.run(squeue, user="root", check=False)
            # A controller that is too busy to answer has not said that the job is over.
            forgotten = "Invalid job id" in ran.stderr
            return not ran.stdout and (ran.returncode == 0 or forgotten)

        wait_until(over, 90, lambda: f"job {job} is not over\n{self.cluster.overview()}")

    def _options(self, image: str | None, comment: str | None) -> list[str]:
        option = [f"--container-image={image}"] if image is not None else []
        return option + ([f"--comment={comment}"] if comment is not None else [])

    def _number(self, name: str, stderr: str) -> int:
        squeue = ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"]
        number = self.cluster.run(squeue, user="root").stdout.strip()
        if not number:
            raise ClusterError(f"there was no job {name}: {stderr}")
        return int(number)

    # What jobs saw

    def seen(self, job: int) -> list[Seen]:
        """What each task of a job found at its image's path, by node."""
        wanted = Seen.__dataclass_fields__
        reports = self.cluster.pyxis_reports(job)
        found = [Seen(**{k: v for k, v in one.items() if k in wanted}) for one in reports]  # type: ignore[arg-type]
        return sorted(found, key=lambda one: one.node)

    def saw(self, job: int) -> Seen:
        """The same for a job of which every task must have found the same."""
        (only,) = set(self.seen(job))
        return only

    def shows_source(self, seen: Seen) -> bool:
        """Whether a task was shown the shared file system's own file, with what it has now."""
        return seen.file == device_and_inode(self.source(seen.path))

    # What forestage did

    def outcomes(self, job: int, node: str = "n1", hook: str = "prolog") -> list[Outcome]:
        log = self.cluster.host_path("/var/log/forestage/events.jsonl", node)
        own = [event for event in events.read_events(log) if event.job == job]
        return [event.outcome for event in own if event.hook == hook]

    def outcome(self, job: int, node: str = "n1") -> Outcome:
        (only,) = self.outcomes(job, node)
        return only

    def results(self, job: int, node: str = "n1") -> list[str]:
        return [one.result for one in self.outcomes(job, node)]

    def words(self, job: int, node: str = "n1") -> list[str]:
        """The lines that the job's Prolog has written, on stdout and to the log."""
        # Not splitlines(): a control character that gets through must not look like a line's end.
        lines = self.cluster.read(HOOK_LOG, node).split("\n")
        return [line for line in lines if re.search(rf"\bprolog job={job}\b", line)]

    def cache(self, node: str = "n1") -> Cache:
        return Cache(self.cluster.host_path(CACHE, node))

    def entries(self, node: str = "n1") -> Mapping[str, StoredEntry]:
        """By key."""
        cache = self.cache(node)
        return {one.key: one for one in cache.list_entries()} if cache.entries.exists() else {}

    def cached_paths(self, node: str = "n1") -> list[str]:
        """The image of each entry, sorted; one with two versions appears twice."""
        stored = self.entries(node).values()
        return sorted(one.entry.identity.path for one in stored if one.entry)

    def copy(self, key: str, node: str = "n1") -> tuple[str, int]:
        """Device and inode of an entry's image on a node's NVMe."""
        return device_and_inode(self.cache(node).image_path(key))

    def redirected(self, node: str | None = "n1") -> list[str]:
        """The paths at which the node shows something of its cache."""
        table = mounts.parse_mountinfo(self.cluster.mounts(node))
        return [bind.point for bind, _ in mounts.list_binds_of_directory(table, CACHE)]

    def leases(self, node: str = "n1") -> list[Lease]:
        return LeaseDirectory(self.cluster.host_path("/run/forestage/leases", node)).list_leases()

    def await_stagers(self) -> None:
        """Waits until none lives: copies go on when their jobs have ended, and a stager has files
        of the disk open a moment longer than any hook waits for it."""
        wait_until(lambda: not self._stagers(), 60, lambda: f"stagers live on: {self._stagers()}")

    def end_stagers(self) -> None:
        """Kills them, and what they fork meanwhile: their copies end unfinished."""

        def over() -> bool:
            left = {node: self.named(node, STAGER) for node in self.cluster.nodes}
            for node in filter(left.get, left):
                # What one has forked bears its name, and ends with it: it may be gone by now.
                kill = ["kill", "-KILL", *left[node]]
                self.cluster.run(kill, user="root", node=node, check=False)
            return not any(left.values())

        wait_until(over, 60, lambda: f"stagers live on: {self._stagers()}")

    def await_keepers(self) -> None:
        """Waits until no image is read through any more."""

        def left() -> list[str]:
            return [pid for n in self.cluster.nodes for pid in self.named(n, KEEPER, SERVER)]

        wait_until(lambda: not left(), 60, lambda: f"keepers or servers live on: {left()}")

    def _stagers(self) -> list[str]:
        return [f"{n}: {pid}" for n in self.cluster.nodes for pid in self.named(n, STAGER)]

    def named(self, node: str, *names: str) -> list[str]:
        """The pids of such processes; the kernel keeps 15 characters of a name."""
        kept = [name[:15] for name in names]
        return [pid for pid, name in self.processes(node).items() if name in kept]

    def processes(self, node: str) -> dict[str, str]:
        """The names of all that live on a node, by pid."""
        found = {}
        for process in self.cluster.host_path("/proc", node).glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                found[process.name] = (process / "comm").read_text().strip()
        return found

    def leftovers(self) -> list[str]:
        """Whatever no finished job may leave behind, on all nodes."""
        found = [f"login: {path} is bound" for path in self.redirected(None)]
        for node in self.cluster.nodes:
            found += [f"{node}: {path} is bound" for path in self.redirected(node)]
            run, cache = self.cluster.host_path("/run/forestage", node), self.cache(node)
            for directory in (run / "leases", run / "redirects", cache.parts, cache.evicted):
                found += [f"{node}: {path}" for path in directory.glob("*")]
            # Else a user could hold the lock of one, and with it each hook (system/folders.py).
            ours = [one for one in (run, *run.rglob("*")) if one.is_dir()]
            found += [f"{node}: users can open {one}" for one in ours if one.stat().st_mode & 0o44]
        return found


def device_and_inode(path: Path) -> tuple[str, int]:
    """As the stand-in for pyxis reports them."""
    facts = path.stat()
    return f"{os.major(facts.st_dev)}:{os.minor(facts.st_dev)}", facts.st_ino
