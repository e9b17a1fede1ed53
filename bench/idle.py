"""When nothing of a job is left on a cluster's nodes."""

from __future__ import annotations

from host import wait_until
from jobs import Site


class IdleNodes:
    """Knows how many processes nodes have while no job is there: as many as when this is made.

    Their names and numbers are others when a slurmd has read slurm.conf again.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._at_rest = {node: len(site.processes(node)) for node in site.cluster.nodes}

    def wait(self) -> None:
        """Waits until jobs, copies, servers and Prologs in the background have ended."""
        self._site.cluster.wait_idle()
        wait_until(lambda: not self._busy(), 300, lambda: f"too many live on: {self._busy()}")

    def _busy(self) -> dict[str, list[str]]:
        living = {node: [*self._site.processes(node).values()] for node in self._at_rest}
        return {node: names for node, names in living.items() if len(names) > self._at_rest[node]}
