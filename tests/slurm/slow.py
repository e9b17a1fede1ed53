"""A shared file system of a test cluster that is as slow as it is told: tests/faults/farfs.c."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import images
from cluster import Cluster
from host import wait_until
from spec import ALICE, INSIDE_STATE

from parking import with_fuse

POINT, FOLDER = "/shared/far", "/shared/.far"


class SlowSource:
    """Mounted at /shared/far of each node; made by `mounted`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._control = cluster.state / "far"
        self._control.touch()

    def image(self, name: str, mib: int = 1, seed: int = 0) -> str:
        """Makes an image of alice's, or replaces it by rename; its path on the nodes."""
        self._make(name, mib, seed)
        return f"{POINT}/{name}.sqsh"

    def _make(self, name: str, mib: int, seed: int) -> None:
        images.make_image(self.cluster, self.hidden(name), mib=mib, name=name, seed=seed)

    def hidden(self, name: str) -> str:
        """Where an image lies as the file server sees it."""
        return f"{FOLDER}/{name}.sqsh"

    def sha256(self, name: str) -> str:
        return images.sha256(self.cluster.host_path(self.hidden(name)))

    def behaves(self, **words: int) -> None:
        """How it behaves from now on, in the words of farfs.c."""
        new = self._control.with_suffix(".new")
        new.write_text("".join(f"{word} {number}\n" for word, number in words.items()))
        new.replace(self._control)

    def calls(self, *nodes: str) -> Counter[str]:
        """How often these nodes, or all, have called it so far, by the name of the call."""
        files = [self.control(node).with_suffix(".calls") for node in nodes or self.cluster.nodes]
        return Counter(word for file in files for word in file.read_text().split())

    def control(self, node: str) -> Path:
        """What the node's own server reads, by another name for each."""
        return self.cluster.state / f"far-{node}"


@contextlib.contextmanager
def mounted(cluster: Cluster) -> Iterator[SlowSource]:
    """On all nodes of the cluster, before any test looks at their mounts."""
    with_fuse("farfs", cluster.state)
    slow = SlowSource(cluster)
    for folder in (POINT, FOLDER):
        cluster.run(["install", "-d", "-o", ALICE.name, folder], user="root")
    null = subprocess.DEVNULL
    servers = []
    for node in cluster.nodes:
        control = slow.control(node)
        control.unlink(missing_ok=True)
        control.symlink_to("far")
        argv = [str(INSIDE_STATE / "farfs"), FOLDER, str(INSIDE_STATE / control.name), POINT]
        argv.append("allow_other,default_permissions")
        servers.append(cluster.popen(argv, user="root", node=node, stdout=null, stderr=null))
    try:
        for node in cluster.nodes:
            wait_until(
                lambda: f" {POINT} " in cluster.mounts(node),  # noqa: B023
                30,
                lambda: "farfs does not mount",
            )
        yield slow
    finally:
        slow.behaves()
        for node in cluster.nodes:
            cluster.run(["umount", "--lazy", POINT], user="root", node=node, check=False)
        for server in servers:
            server.wait(60)
