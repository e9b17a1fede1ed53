"""What may go wrong while the nodes of a job help one another; for tests and for bench/peers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster import ClusterError
from fleet import Fleet
from host import wait_until

from forestage.events import Outcome

MANY_SECONDS = 600  # longer than any test
# Takes the port of the peer service; lets everybody connect, and says nothing.
SQUATTER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7717))
print("listens", flush=True)
kept = []
while True:
    kept.append(listener.accept())
"""


@dataclass(frozen=True)
class Scene:
    """A job to come: over these nodes, with this file; the last node is the one with bad luck."""

    fleet: Fleet
    path: str
    mib: int
    nodes: Sequence[str]

    @property
    def victim(self) -> str:
        return self.nodes[-1]

    @property
    def others(self) -> Sequence[str]:
        return self.nodes[:-1]


Act = Callable[[Scene], None]


def _nothing(scene: Scene) -> None:
    return


@dataclass(frozen=True)
class Mishap:
    """What is done before the job and during it; whether the victim is to have its copy as well.

    `source` is how often the image may be read from the shared file system in all, beyond once.
    """

    before: Act = _nothing
    during: Act = _nothing
    spared: bool = True
    source: float = 0.3


@dataclass(frozen=True)
class Result:
    """What became of the nodes that ought to be well; `seconds` from a node's start to its entry.

    `source` is how often the image was read from the shared file system.
    """

    seconds: float
    source: float
    outcomes: Mapping[str, Outcome]
    wrong: Sequence[str]


def kill_at(share: float) -> Act:
    def kill(scene: Scene) -> None:
        scene.fleet.await_progress(scene.path, scene.victim, share)
        scene.fleet.kill(scene.victim)

    return kill


def vanish(scene: Scene) -> None:
    scene.fleet.await_progress(scene.path, scene.victim, 0.3)
    scene.fleet.vanish(scene.victim)


def slow_down(scene: Scene) -> None:
    scene.fleet.slow(scene.victim, scene.fleet.links.node_mbit / 10)


def spoil(scene: Scene) -> None:
    """It has the entry, and in each chunk of it a byte has turned since."""
    _bring(scene, scene.victim)
    fleet = scene.fleet
    fleet.harm(scene.victim)
    (key,) = fleet.entries(scene.victim)
    image = fleet.cache(scene.victim).image_path(key)
    with image.open("r+b") as file:
        for start in range(0, image.stat().st_size, fleet.chunk):
            byte = os.pread(file.fileno(), 1, start + 100)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), start + 100)
    if not fleet.wrong(scene.path, [scene.victim]):
        raise ClusterError(f"{image} is still right")


def outdate(scene: Scene) -> None:
    """It has an entry of the file as it was, and its client of the shared file system says: is."""
    fleet = scene.fleet
    fleet.remount(scene.victim, remembers=MANY_SECONDS)
    _bring(scene, scene.victim)
    fleet.data(scene.path.rpartition("/")[2], scene.mib)


def come_late(seconds: float) -> Act:
    """Half of the nodes."""

    def late(scene: Scene) -> None:
        for node in scene.nodes[len(scene.nodes) // 2 :]:
            scene.fleet.late(node, seconds)

    return late


def fail_reads(scene: Scene) -> None:
    """Of all nodes but one."""
    # With `bind` a node that reads nothing of a file cannot see that it is an image.
    scene.fleet.configure(redirect="none")
    for node in scene.nodes[1:]:
        scene.fleet.remount(node, "failing")
        look = ["dd", f"if={scene.path}", "of=/dev/null", "count=1"]
        read = scene.fleet.cluster.run(look, user="root", node=node, check=False)
        if "error reading" not in read.stderr:
            raise ClusterError(f"{node} can still read {scene.path}: {read.stderr}")


def take_port(scene: Scene) -> None:
    fleet, node = scene.fleet, scene.victim
    fleet.end_services([node])
    fleet.harm(node)  # the squatter goes when the node is started anew
    squatter = fleet.cluster.popen(["python3", "-c", SQUATTER, node], user="root", node=node)
    if squatter.stdout is None or squatter.stdout.readline() != "listens\n":
        raise ClusterError(f"nobody listens: {squatter.communicate()}")


def stop_munge(scene: Scene) -> None:
    scene.fleet.stop_munge(scene.victim)


# Bounds are what may be read at the worst where all goes on at once on few processors: what each
# node may have read of the victim's share, before it heard of another that had. Direct, it would be
# as many images as nodes; bench/peers --hostile shows what it is.
MISHAPS: Mapping[str, Mishap] = {
    "none": Mishap(),
    "killed-10": Mishap(during=kill_at(0.1), spared=False, source=1.2),
    "killed-50": Mishap(during=kill_at(0.5), spared=False, source=1.2),
    "killed-90": Mishap(during=kill_at(0.9), spared=False, source=1.2),
    "vanished": Mishap(during=vanish, spared=False, source=1.2),
    "slow": Mishap(before=slow_down, spared=False, source=1.2),
    "wrong-bytes": Mishap(before=spoil, spared=False, source=1.2),
    "older-version": Mishap(before=outdate, spared=False, source=1.2),
    "late": Mishap(before=come_late(4.0), source=1.0),
    "late-20": Mishap(before=come_late(20.0), source=1.0),
    # The one that can reads it all.
    "source-fails": Mishap(before=fail_reads, source=0.3),
    "port-taken": Mishap(before=take_port, source=1.2),
    # It can neither ask nor be asked.
    "no-munge": Mishap(before=stop_munge, source=2.2),
}


def meet(fleet: Fleet, name: str, nodes: Sequence[str], mib: int, number: int = 0) -> Result:
    """A job over these nodes that has this bad luck, to its end. All is mended then.

    `number` keeps apart the files of those with the same mishap; events have their names.
    """
    mishap = MISHAPS[name]
    scene = Scene(fleet, fleet.data(f"image-{name}-{number}", mib), mib, nodes)
    mishap.before(scene)
    well = nodes if mishap.spared else scene.others
    before = fleet.read_of_store()
    job = fleet.start(scene.path, nodes)
    try:
        mishap.during(scene)
        copies = fleet.await_copies(scene.path, well)
        read = fleet.read_of_store() - before
        return Result(
            seconds=max(event.outcome.wait for event in copies.values()),
            source=read / fleet.source(scene.path).stat().st_size,
            outcomes={node: event.outcome for node, event in copies.items()},
            wrong=fleet.wrong(scene.path, well),
        )
    finally:
        fleet.give_up(job)
        fleet.source(scene.path).unlink(missing_ok=True)


def _bring(scene: Scene, node: str) -> None:
    job = scene.fleet.start(scene.path, [node])
    scene.fleet.await_copies(scene.path, [node])
    wait_until(lambda: not scene.fleet.leases(node), 30, lambda: f"job {job} goes on")
    scene.fleet.wait_over(job)
