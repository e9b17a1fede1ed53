"""What jobs under load have left, seen and written down, against what they ought to have."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import images
import tricks
from jobs import CACHE, HOOK_LOG, Site
from loading import Load, Run
from registry import STORE

from forestage import events
from forestage.events import EventRecord
from forestage.system import mounts

LONGEST = 2048  # bytes that one event may take, or one line of a hook
# The node's first process, Slurm's, and those that mount what the node has besides.
DAEMONS = sorted(["python3", "slurmd", *[tricks.SERVER] * tricks.SERVERS])
SPARE_FILES = 8  # that slurmd may have open now and not before


@dataclass(frozen=True)
class Traces:
    """What a node has, apart from its entries. `files` are those that slurmd has open."""

    processes: Sequence[str]
    mounts: Sequence[str]
    run: Sequence[str]
    cache: Sequence[str]
    files: int

    @classmethod
    def of(cls, site: Site, node: str) -> Traces:
        path = site.cluster.host_path
        table = (line.split() for line in path("/proc/1/mountinfo", node).read_text().splitlines())
        ours = "/proc/sys/kernel/random/boot_id"  # see load.HOOK
        run, cache = path("/run/forestage", node), path(CACHE, node)
        kept = (cache / "entries", cache / "locks", cache / "instances", cache / "hot")
        processes = site.processes(node)
        slurmd = [pid for pid, name in processes.items() if name == "slurmd"]
        return cls(
            processes=sorted(processes.values()),
            mounts=sorted(f"{row[3]} {row[4]}" for row in table if row[4] != ours),
            run=sorted(
                str(one.relative_to(run))
                for one in run.rglob("*")
                if one.parent.name not in ("claims", "locks", "probes", "unanswered")
                if run / "users" not in one.parents  # a file for each user
            ),
            cache=sorted(
                str(one.relative_to(cache))
                for one in cache.rglob("*")
                if not any(folder in one.parents for folder in kept)
            ),
            files=sum(len(_listed(site, node, f"{pid}/fd")) for pid in slurmd),
        )

    @property
    def at_rest(self) -> bool:
        return self.processes == DAEMONS

    def grown(self, before: Traces) -> list[str]:
        """What there is now that was not there before any job was."""
        layout = ["called.epilog", "called.prolog", "called.sweep", "companion", "config.json"]
        layout += ["conf.d.json", "locks"]
        layout += ["expected.json", "prefetched.json", "peer.json", "peer.sign"]
        layout += ["proven.json", "nodes.json"]
        layout += ["background", "collected", "disk.json", "disk.lock", "mounting", "users"]
        layout += ["leases", "redirects", "served", "through", "claims", "probes", "images"]
        layout += ["unanswered"]
        folders = ["CACHEDIR.TAG", "entries", "evicted", "format", "jobs", "locks", "looks"]
        folders += ["parts", "instances", "hot"]
        more = [f"mounted: {one}" for one in _more(self.mounts, before.mounts)]
        more += [f"runs: {one}" for one in _more(self.processes, before.processes)]
        more += [f"in /run/forestage: {one}" for one in _more(self.run, layout)]
        more += [f"in the cache: {one}" for one in _more(self.cache, folders)]
        if self.files > before.files + SPARE_FILES:
            more.append(f"slurmd has {self.files} files open, and had {before.files}")
        return more


def _more(now: Sequence[str], then: Sequence[str]) -> list[str]:
    return sorted((Counter(now) - Counter(then)).elements())


def _listed(site: Site, node: str, folder: str) -> list[str]:
    return [one.name for one in site.cluster.host_path(f"/proc/{folder}", node).iterdir()]


def shown_elsewhere(site: Site, node: str) -> list[str]:
    """The binds of copies that processes which have left their jobs still see.

    The bytes of an entry that is evicted stay with them (docs/security.md).
    """
    found = []
    for pid in site.processes(node):
        process = site.cluster.host_path(f"/proc/{pid}", node)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            table = mounts.parse_mountinfo((process / "mountinfo").read_text())
            over = {(mount.parent, mount.point) for mount in table}
            found += [
                f"{node}: process {pid} sees {bind.root} at {bind.point}"
                for bind, _ in mounts.list_binds_of_directory(table, CACHE)
                if (bind.id, bind.point) not in over and not bind.root.endswith("//deleted")
            ]
    return found


# What jobs saw


def misread(load: Load) -> list[str]:
    """Every task that was shown other bytes than it might have, or none; and tasks that did not."""
    wrong = _outdated(load) + _untrue(load)
    looked: Counter[tuple[int, str]] = Counter()
    pictures = {picture.path: picture for picture in load.sources.now()}
    for one in load.site.cluster.pyxis_reports():
        path = str(one["path"])
        run, picture = load.runs[int(str(one["job"]))], pictures.get(path)
        if picture is None:  # a trick's own, which may not even be there
            wrong += [f"{one}: {run}"] * (not _is_a_version(load, one))
            continue
        looked[run.job, picture.path] += 1
        trouble = picture.trouble(run.plan.user)
        if one["error"] != trouble:
            wrong.append(f"{one['error']}, not {trouble}: {run}")
        elif not one["sha256"] and not _is_calm(run):
            continue  # its reading was cut short
        elif not trouble and one["sha256"] not in load.sources.shown(picture, run.since[picture]):
            was = load.sources.shown(picture, 1)
            which = was.index(one["sha256"]) + 1 if one["sha256"] in was else "none"
            wrong.append(f"version {which} and not {run.since[picture]} of {len(was)}: {one} {run}")
    for run in load.runs.values():
        if _is_calm(run) and run.plan.ends == "COMPLETED":
            wrong += [
                f"{looked[run.job, picture.path]} tasks looked at {picture.name}: {run}"
                for picture in set(run.plan.pictures)
                if looked[run.job, picture.path] != run.plan.looks(picture)
            ]
    return wrong


def _outdated(load: Load) -> list[str]:
    """Steps that were shown a file without the write that had landed before."""
    last: dict[int, Mapping[str, object]] = {}
    for one in load.site.cluster.pyxis_reports():
        if str(one["path"]).rpartition("/")[2] in tricks.LATEST:
            job = int(str(one["job"]))
            last[job] = max(last.get(job, one), one, key=lambda one: int(str(one["step"])))
    landed = dict(line.split() for line in load.site.cluster.read(tricks.LANDED).splitlines())
    return [
        f"not {sha256}, which had landed: {last[int(job)]} {load.runs[int(job)]}"
        for job, sha256 in landed.items()
        if _is_calm(load.runs[int(job)]) and last[int(job)]["sha256"] != sha256
    ]


def _untrue(load: Load) -> list[str]:
    """Jobs that read other bytes of the directory than it has, where holes are lied about."""
    files = sorted(load.site.source(tricks.TREE).iterdir())
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    read = [line.split() for line in load.site.cluster.read(tricks.READ).splitlines()]
    runs = [(load.runs[int(job)], found) for job, found in read]
    return [f"read {found}: {run}" for run, found in runs if _is_calm(run) and found != digest]


def _is_a_version(load: Load, report: Mapping[str, object]) -> bool:
    """Whether a task was shown, if anything, what the picture that a trick has copied ever was."""
    name = str(report["path"]).rpartition("/")[2]
    if name in tricks.LATEST:  # see _outdated
        return True
    if report["path"] == tricks.LIED:
        right = report["sha256"] == images.sha256(load.site.source(tricks.LIED))
        return right or not _is_calm(load.runs[int(str(report["job"]))])
    of_trick = [one for one in load.sources.now() if one.path.endswith(f"/{name}")]
    for picture in of_trick:
        return report["sha256"] in ("", *load.sources.shown(picture, 1))
    stored = load.site.source(STORE).glob("*/*.sqsh")  # a registry's
    return report["sha256"] in ("", *map(images.sha256, stored))


def _is_calm(run: Run) -> bool:
    """Whether nothing has befallen it."""
    return not (run.again or run.fate_came)


def misfortunes(load: Load) -> list[str]:
    """Jobs that did not end as they would have without forestage."""
    wrong = []
    for run in load.runs.values():
        ends = {run.plan.ends}
        if run.fate_came and run.plan.fate == "cancelled":
            ends.add("CANCELLED")
        if run.rebooted:  # its steps may have failed with the node
            ends |= {"FAILED", "NODE_FAIL"}
        if run.state not in ends:
            wrong.append(str(run))
    return wrong


# What was written down


def events_of(site: Site, node: str) -> Iterator[EventRecord]:
    return events.read_events(site.cluster.host_path("/var/log/forestage/events.jsonl", node))


def tally(load: Load) -> Counter[str]:
    """How often each came about."""
    reports = load.site.cluster.pyxis_reports()
    found: Counter[str] = Counter(tasks=len(reports))
    found["tasks reading through"] = sum(r["mount_fs"] == "fuse.forestage" for r in reports)
    found["tasks reading a copy"] = sum(str(r["mount_point"]).endswith(".sqsh") for r in reports)
    found["tasks reading a copy"] -= found["tasks reading through"]
    for done in load.site.cluster.read(tricks.DONE).split():
        found[f"trick {done}"] += 1
    for node in load.site.cluster.nodes:
        for event in events_of(load.site, node):
            outcome = event.outcome
            found[f"{event.hook} {outcome.result} {outcome.reason}".strip()] += 1
            found["entries evicted"] += len(getattr(outcome, "evicted", ()))
    return found


def failed(load: Load) -> list[str]:
    """Outcomes that say: a fault of ours."""
    return [
        f"{node}: {event}"
        for node in load.site.cluster.nodes
        for event in events_of(load.site, node)
        if event.outcome.result == "failed"
    ]


def wordy(load: Load) -> list[str]:
    """What was written that is more than a job's due, or is not what a hook should write."""
    wrong = []
    for node in load.site.cluster.nodes:
        count: Counter[int] = Counter()
        for event in events_of(load.site, node):
            count[event.job] += 1
        for line in load.site.cluster.read(HOOK_LOG, node).splitlines():
            found = re.match(r"forestage: \w+ job=(\d+) ", line)
            if found is None or len(line) > LONGEST:
                wrong.append(f"{node}: {line}")
            else:
                count[int(found[1])] += 1
        log = load.site.cluster.read("/var/log/forestage/events.jsonl", node)
        wrong += [f"{node}: {line}" for line in log.splitlines() if len(line) > LONGEST]
        wrong += [
            f"{node}: {lines} lines for {load.runs[job]}"
            for job, lines in count.items()
            if job and lines > _due(load.runs[job])
        ]
    return wrong


def _due(run: Run) -> int:
    """Lines in all: of each hook and stager one, in the log and among the events."""
    images = len(run.plan.pictures)
    steps = images + 1  # and the batch script
    hooks = 2 * (images + steps) + 1
    if run.plan.trick:  # each step asks for all that the comment names
        images, steps = images + len(tricks.OF_HOLES), steps + tricks.STEPS
        hooks = 2 * (images + steps + images * steps) + 1
    return 2 * hooks * (run.restarts + 1 + run.rebooted)
