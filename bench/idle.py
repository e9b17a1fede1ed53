"""When nothing of a job is left on a cluster's nodes, and how busy the machine is otherwise."""

from __future__ import annotations

import os
from collections import Counter

from host import wait_until
from jobs import Site


class Idle:
    """Knows what lives on the nodes while no job is there: as it is when this is made."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._at_rest = {node: self._living(node) for node in site.cluster.nodes}

    def wait(self) -> None:
        """Waits until jobs, copies, servers and Prologs in the background have ended."""
        self._site.cluster.wait_idle()
        wait_until(lambda: not self._busy(), 300, lambda: f"live on: {self._busy()}")

    def _busy(self) -> list[str]:
        found = []
        for node, at_rest in self._at_rest.items():
            found += [f"{node}: {name}" for name in self._living(node) - at_rest]
        return found

    def _living(self, node: str) -> Counter[str]:
        # By name: a slurmd that reads slurm.conf again becomes another process.
        return Counter(self._site.processes(node).values())


class Load:
    """Of the machine, from when this was made on: a figure says little without it."""

    def __init__(self) -> None:
        self._start = os.getloadavg()[0]

    def __str__(self) -> str:
        return f"load {self._start:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
