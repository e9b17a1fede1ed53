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
AT_ONCE = 5  # jobs of one test; this machine may have two cores
TASKS = 16


def accompanied(nodes: int = 4, companion: str = "", **conf: str) -> ClusterSpec:
    """A cluster whose steps have the companion. `conf` are lines of slurm.conf."""
    return dataclasses.replace(hooked(nodes, **conf), companion=companion)


class Tables:
    """Whether a node's own mount table has changed since, however short a mount was there."""

    def __init__(self, site: Site) -> None:
        tables = {n: site.cluster.host_path("/proc/1/mountinfo", n) for n in site.cluster.nodes}
        self._open = {node: os.open(table, os.O_RDONLY) for node, table in tables.items()}

    def changed(self) -> list[str]:
        """The nodes whose table has. The kernel reports every change: proc(5), mountinfo."""
        poll = select.poll()
        nodes = {fd: node for node, fd in self._open.items()}
        for fd in nodes:
            poll.register(fd, select.POLLPRI)
        return sorted(nodes[fd] for fd, _ in poll.poll(0))

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)


# How a user may ask. Each way gets an image that no other has asked for, and a node.

Way = Callable[[Site, str, str], Ran]


def _by_script(script: str) -> Way:
    """The image, its file's name and the command that shows it stand in the script in braces."""

    def ask(site: Site, image: str, node: str) -> Ran:
        file = image.rpartition("/")[2]
        return site.sbatch(script.format(image=image, file=file, show=SHOW), node=node)

    return ask


WAYS: Mapping[str, Way] = {
    "srun": lambda site, image, node: site.srun(image, node=node),
    "sbatch-option": lambda site, image, node: site.sbatch(
        f"srun {SHOW}", f"--container-image={image}", node=node
    ),
    "inner": _by_script("srun --container-image={image} {show}"),
    "salloc": lambda site, image, node: site.run(
        ["salloc", "srun", f"--container-image={image}", *RELEASE], node
    ),
    "exported": _by_script("export PYXIS_CONTAINER_IMAGE={image}\nsrun {show}"),
    "relative": _by_script("srun --container-image=./{file} {show}"),
    # To the directory that the step asks for, which is not that of its job.
    "relative-chdir": _by_script(
        "mkdir -p below\nsrun --chdir=/shared/alice/below --container-image=../{file} {show}"
    ),
    # Such a step has no PATH.
    "export-none": _by_script("srun --export=NONE --container-image={image} /bin/{show}"),
    "many-tasks": _by_script(
        f"srun -n{TASKS} --overcommit --overlap --container-image={{image}} {{show}}"
    ),
}


@dataclass(frozen=True)
class Asked:
    """What is known of one way, when its job is over."""

    node: str
    ran: Ran
    seen: Sequence[Seen]
    wrong: Sequence[str]


def all_ways(site: Site) -> dict[str, Asked]:
    """A job for each of them, some at a time."""

    def ask(number: int, way: str) -> Asked:
        image = site.image(way, mib=2, seed=number)
        node = site.cluster.nodes[number % len(site.cluster.nodes)]
        ran = WAYS[way](site, image, node)
        seen = site.seen(ran.job)
        return Asked(node, ran, seen, wrong(site, image, seen))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(WAYS, pool.map(ask, itertools.count(), WAYS), strict=True))


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
        for event in events.read_events(log)
        if event.hook == "stager" and event.outcome.image == image
    ]


def served(site: Site, job: int, node: str) -> list[Outcome]:
    """What the companion's helper did for the steps of a job."""
    return site.outcomes(job, node, hook="step")
