"""`forestage prefetch` beside other work of a cluster, every few seconds: one node is the host."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections import Counter

from jobs import CLI, Site

HOST = "n1"
KEYS = {
    "peers": {"enabled": True},
    "prefetch": {"host": HOST, "bandwidth": "2M"},
}
NO_LIST = 3  # as what a pass ends whose host gave none
EVERY = 3.0  # seconds; the timer's is a minute


class Passes:
    """What the units of a cluster's nodes run: the host's peer service, and each node's passes."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.tally: Counter[str] = Counter()
        self.problems: list[str] = []
        self._service: subprocess.Popen[str] | None = None
        self._passes: dict[str, subprocess.Popen[str]] = {}
        self._begun = 0.0

    def go_on(self) -> None:
        """Starts what has ended, by itself or with its node."""
        if self._service is None or self._service.poll() is not None:
            self._service = self._start(HOST, "peer")
        if time.monotonic() < self._begun + EVERY:
            return
        self._begun = time.monotonic()
        for node in self.site.cluster.nodes:
            running = self._passes.get(node)
            if running is None or running.poll() is not None:
                self._note(node)
                self._passes[node] = self._start(node, "prefetch", "--json")

    def end(self) -> None:
        """Returns when all of it has ended."""
        for node, running in self._passes.items():
            running.wait(timeout=600)
            self._note(node)
        self._passes.clear()
        if self._service is not None:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                self.site.cluster.signal(self._service, signal.SIGTERM)
            self._service.wait(timeout=60)

    def _start(self, node: str, *words: str) -> subprocess.Popen[str]:
        argv = [CLI, *words, "--node", node]
        with open(self._log(node, words[0]), "w") as log:
            return self.site.cluster.popen(argv, user="root", node=node, stdout=log, stderr=log)

    def _log(self, node: str, word: str) -> str:
        return str(self.site.cluster.state / f"log/{word}-{node}.log")

    def _note(self, node: str) -> None:
        """What the last pass of a node came to; one that was killed with its node is none."""
        running = self._passes.get(node)
        if running is None or running.returncode < 0 or running.returncode > 128:
            return
        with open(self._log(node, "prefetch")) as log:
            said = log.read()
        self.tally["prefetch passes"] += 1
        self.tally["prefetch copying"] += said.count('"state": "copying"')
        if running.returncode not in (0, NO_LIST) or "Traceback" in said:
            self.problems.append(f"prefetch on {node}: {running.returncode} {said}")
