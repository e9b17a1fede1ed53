"""Steps on a cluster with the SPANK companion: how they ask for an image, and what they saw."""

from __future__ import annotations

import dataclasses
import itertools
import os
import select
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jobs import RELEASE, Ran, Seen, Site, hooked
from spec import ClusterSpec

from forestage import events
from forestage.events import Outcome

SHOW = " ".join(RELEASE)
ABSOLUTE = "/bin/cat /etc/os-release"  # for steps that have no PATH
AT_ONCE = 5  # jobs of one test; this machine may have two cores
TASKS = 16

_names = itertools.count(1)


def accompanied(nodes: int = 4, companion: str = "", **conf: str) -> ClusterSpec:
    """A cluster whose steps have the companion. `conf` are lines of slurm.conf."""
    spec = hooked(nodes)
    return dataclasses.replace(spec, companion=companion, slurm_conf={**spec.slurm_conf, **conf})


class Tables:
    """Whether a node's own mount table has changed since, however short a mount was there."""

    def __init__(self, site: Site) -> None:
        tables = {n: site.cluster.host_path("/proc/1/mountinfo", n) for n in site.cluster.nodes}
        self._open = {node: os.open(table, os.O_RDONLY) for node, table in tables.items()}

    def changed(self) -> list[str]:
        """The nodes whose table has. The kernel tells of every change: proc(5), mountinfo."""
        poll = select.poll()
        nodes = {fd: node for node, fd in self._open.items()}
        for fd in nodes:
            poll.register(fd, select.POLLPRI)
        return sorted(nodes[fd] for fd, _ in poll.poll(0))

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)


def batch(
    site: Site, script: str, *options: str, node: str = "n1", user: str = "alice", code: int = 0
) -> Ran:
    """A batch job to its very end; of several at once each has its own output."""
    name = f"batch{next(_names)}"
    where = [f"--nodelist={node}", f"--nodes={node.count(',') + 1}", f"--output={name}"]
    text = f"#!/bin/sh\n{script}\n"
    job = site.cluster.submit(text, *where, *options, user=user)
    site.wait_over(job)
    return Ran(job, code, site.cluster.read(f"/shared/{user}/{name}"), "")


# How a user may ask. Each way gets an image that no other has asked for, and a node.

Way = Callable[[Site, str, str], Ran]


def _file(image: str) -> str:
    return image.rpartition("/")[2]


def _options(site: Site, image: str, node: str) -> Ran:
    return batch(site, f"srun {SHOW}", f"--container-image={image}", node=node)


def _inner(site: Site, image: str, node: str) -> Ran:
    return batch(site, f"srun --container-image={image} {SHOW}", node=node)


def _salloc(site: Site, image: str, node: str) -> Ran:
    return site.run(["salloc", "srun", f"--container-image={image}", *RELEASE], node)


def _exported(site: Site, image: str, node: str) -> Ran:
    return batch(site, f"export PYXIS_CONTAINER_IMAGE={image}\nsrun {SHOW}", node=node)


def _relative(site: Site, image: str, node: str) -> Ran:
    return batch(site, f"srun --container-image=./{_file(image)} {SHOW}", node=node)


def _above(site: Site, image: str, node: str) -> Ran:
    """Relative to the directory that the step asks for, which is not that of its job."""
    step = f"srun --chdir=/shared/alice/below --container-image=../{_file(image)} {SHOW}"
    return batch(site, f"mkdir -p below\n{step}", node=node)


def _export_none(site: Site, image: str, node: str) -> Ran:
    return batch(site, f"srun --export=NONE --container-image={image} {ABSOLUTE}", node=node)


def _many_tasks(site: Site, image: str, node: str) -> Ran:
    step = f"srun -n{TASKS} --overcommit --overlap --container-image={image} {SHOW}"
    return batch(site, step, node=node)


WAYS: Mapping[str, Way] = {
    "srun": lambda site, image, node: site.srun(image, node=node),
    "sbatch-option": _options,
    "inner": _inner,
    "salloc": _salloc,
    "exported": _exported,
    "relative": _relative,
    "relative-chdir": _above,
    "export-none": _export_none,
    "many-tasks": _many_tasks,
}


@dataclass(frozen=True)
class Told:
    """What is known of one way, when its job is over."""

    image: str
    node: str
    ran: Ran
    seen: Sequence[Seen]
    wrong: Sequence[str]


def tell(site: Site, way: str, number: int) -> Told:
    image = site.image(way, mib=2, seed=number)
    node = site.cluster.nodes[number % len(site.cluster.nodes)]
    ran = WAYS[way](site, image, node)
    seen = site.seen(ran.job)
    return Told(image, node, ran, seen, wrong(site, image, seen))


def all_ways(site: Site) -> dict[str, Told]:
    """All of them, some at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        told = pool.map(lambda one: tell(site, one[1], one[0]), enumerate(WAYS))
        return dict(zip(WAYS, told, strict=True))


# What became of it


def wrong(site: Site, image: str, seen: Sequence[Seen]) -> list[str]:
    """What is not as it should be: each task is shown its own node's copy, which was made once."""
    digest = site.sha256(image)
    # An entry can be used before its stager has written down that it made it.
    site.await_stagers()
    found = [] if seen else [f"nobody looked at {image}"]
    for one in seen:
        here = keys(site, image, one.node)
        if copies(site, image, one.node) != ["copied"] or len(here) != 1:
            found.append(f"{one.node}: {len(here)} of {copies(site, image, one.node)}")
        elif (one.file, one.sha256, one.error) != (site.copy(here[0], one.node), digest, None):
            found.append(f"not the copy {site.copy(here[0], one.node)}, {digest}: {one}")
        elif one.mount_point != image:
            found.append(f"seen at another place: {one}")
    return found


def seen_at(site: Site, path: str) -> list[Seen]:
    """By whatever job, as its image's path was written."""
    jobs = {int(str(one["job"])) for one in site.cluster.pyxis_reports() if one["path"] == path}
    return [one for job in sorted(jobs) for one in site.seen(job) if one.path == path]


def keys(site: Site, image: str, node: str) -> list[str]:
    stored = site.entries(node).items()
    return [key for key, one in stored if one.entry and one.entry.identity.path == image]


def copies(site: Site, image: str, node: str) -> list[str]:
    """How each copy of that image to that node ended."""
    log = site.cluster.host_path("/var/log/forestage/events.jsonl", node)
    return [
        event.outcome.result
        for event in events.read(log)
        if event.hook == "stager" and event.outcome.image == image
    ]


def served(site: Site, job: int, node: str) -> list[Outcome]:
    """What the companion's helper did for the steps of a job."""
    return site.outcomes(job, node, hook="step")
