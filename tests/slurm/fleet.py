"""A cluster with a network, whose nodes help one another: what its admin, or misfortune, does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import net
from cluster import Cluster
from host import wait_until
from jobs import CACHE, CLI, HOOK_LOG, Site, hooked
from spec import ALICE, REPO, STORE, ClusterSpec, Net

import squashfs
from forestage import events
from forestage.cache.part import list_missing_chunks
from forestage.events import EventRecord

MIB = 1 << 20
EVENTS = "/var/log/forestage/events.jsonl"
LATE = "/run/late"  # on a node: seconds by which its Prologs begin later
# A real node has come up earlier or later than the others: here its Prolog only waits.
PROLOG = (
    f"#!/bin/sh\ntest ! -e {LATE} || /bin/sleep $(/bin/cat {LATE})\n"
    f"exec {REPO}/prolog/forestage >>{HOOK_LOG} 2>&1\n"
)


def networked(nodes: int, links: Net) -> ClusterSpec:
    spec = hooked(nodes, nvme_mib=768)
    files = {**spec.files, "/etc/prolog": PROLOG}
    return dataclasses.replace(spec, net=links, files=files)


class Fleet(Site):
    """As `Site`, with services on its nodes, and links that can be broken."""

    def __init__(self, cluster: Cluster, chunk: int = MIB) -> None:
        super().__init__(cluster)
        self.chunk = chunk
        self._services: dict[str, subprocess.Popen[str]] = {}
        self._harmed: set[str] = set()
        self._slowed: set[str] = set()
        self._late: set[str] = set()
        self.links = cluster.spec.net or Net()

    # What the admin does

    def configure(self, **keys: object) -> None:
        """Peers are on, unless `peers` says otherwise."""
        peers = {"enabled": True, "listen": "{node}"}
        given = {"chunk_size": self.chunk, "deadline": "600s", "peers": peers, **keys}
        super().configure(**given)

    def serve(self, nodes: Iterable[str]) -> None:
        """Starts the peer service; returns when each answers."""
        for node in nodes:
            with open(self._service_log(node), "w") as log:
                self._services[node] = self.cluster.popen(
                    [CLI, "peer", "--node", node], user="root", node=node, stdout=log, stderr=log
                )
        for node in nodes:
            wait_until(
                lambda node=node: "serves at" in self.service_said(node),  # type: ignore[misc]
                60,
                lambda node=node: f"no service on {node}: {self.service_said(node)}",  # type: ignore[misc]
            )

    def service_said(self, node: str) -> str:
        return self._service_log(node).read_text()

    def end_services(self, nodes: Iterable[str] | None = None) -> None:
        for node in list(self._services) if nodes is None else nodes:
            service = self._services.pop(node)
            # Its port is free only when it has ended itself.
            with contextlib.suppress(ProcessLookupError):
                self.cluster.signal(service, signal.SIGTERM)
            service.communicate(timeout=60)

    def _service_log(self, node: str) -> Path:
        return self.cluster.state / "log" / f"peer-{node}.log"

    # What users do

    def data(self, name: str, mib: int) -> str:
        """Makes a file that nothing can compress; its path. No node has read a byte of it."""
        path = f"/shared/{ALICE.name}/{name}"
        target = self.source(path)
        fresh = target.with_name(f"{name}.new")
        with fresh.open("wb") as file:
            for _ in range(mib):
                file.write(squashfs.beginning(os.urandom(MIB)))
        os.chown(fresh, ALICE.uid, ALICE.uid)
        fresh.replace(target)
        return path

    def start(self, path: str, nodes: Sequence[str], script: str = "true") -> int:
        """A job that will use the file on all these nodes; its ID."""
        where = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--output=out-%j"]
        return self.cluster.submit(
            f"#!/bin/sh\n{script}\n", *where, f"--comment=stage={path}", "--no-requeue"
        )

    def give_up(self, job: int) -> None:
        """Ends a job, some of whose nodes may be dead, and brings these back."""
        self.cluster.run(["scancel", str(job)], user="root", check=False)
        self.mend()
        self.wait_over(job)

    # What forestage did

    def copies(self, path: str, nodes: Iterable[str]) -> dict[str, EventRecord]:
        """The last word of each node's stager about this file, of those that are done."""
        found = {}
        for node in nodes:
            log = self.cluster.host_path(EVENTS, node)
            for event in events.read_events(log):
                if event.hook == "stager" and event.outcome.image == path:
                    found[node] = event
        return found

    def await_copies(
        self, path: str, nodes: Sequence[str], seconds: float = 120
    ) -> dict[str, EventRecord]:
        """Waits until the stagers of all these nodes are done with the file."""
        wait_until(
            lambda: len(self.copies(path, nodes)) == len(nodes),
            seconds,
            lambda: f"not on all: {self.progress(path, nodes)}\n{self.logs(nodes)}",
            every=0.5,  # the nodes share the processors with whoever looks
        )
        return self.copies(path, nodes)

    def progress(self, path: str, nodes: Iterable[str]) -> Mapping[str, float]:
        """How much of the file is in, on each node that has begun; from 0 to 1."""
        size = self.source(path).stat().st_size
        count = -(-size // self.chunk)
        shares = {}
        for node in nodes:
            cache = self.cluster.host_path(CACHE, node)
            maps = [*cache.glob("parts/*/map"), *cache.glob("entries/*/map")]
            with contextlib.suppress(FileNotFoundError):  # published in this moment
                left = [
                    len(list_missing_chunks(one.read_bytes(), size, self.chunk)) for one in maps
                ]
                shares[node] = 1 - min(left, default=count) / count
        return shares

    def await_progress(self, path: str, node: str, share: float) -> None:
        """Only one file is being copied."""
        wait_until(
            lambda: self.progress(path, [node]).get(node, 0) >= share,
            60,
            lambda: f"{node} stays below {share}\n{self.logs([node])}",
        )

    def logs(self, nodes: Iterable[str]) -> str:
        """What hooks and services have said, for a human to read."""
        said = []
        for node in nodes:
            log = self.cluster.host_path(HOOK_LOG, node)
            said += [f"--- {node}", log.read_text()[-1500:] if log.exists() else ""]
            said += [self.service_said(node)[-500:]] if node in self._services else []
        return "\n".join(said)

    def wrong(self, path: str, nodes: Iterable[str]) -> list[str]:
        """The nodes that have no entry of the file, or other bytes in it."""
        found = []
        for node in nodes:
            entries = [key for key, one in self.entries(node).items() if _is_of(one, path)]
            images = [self.cache(node).image_path(key) for key in entries]
            if not any(_same(self.source(path), image) for image in images):
                found.append(f"{node}: {entries}")
        return found

    def sent_by_store(self) -> int:
        """Bytes on the file server's link towards the nodes, since the cluster began."""
        command = ["ip", "-j", "-s", "link", "show", "dev", net.port(STORE)]
        facts = json.loads(self.cluster.run(command, user="root").stdout)
        return int(facts[0]["stats64"]["rx"]["bytes"])

    def read_of_store(self) -> int:
        """Bytes that the file server itself has read, of files and (few) of requests."""
        script = "cat /proc/$(cat /run/brick.pid)/io"
        facts = self.cluster.run(["sh", "-c", script], user="root").stdout
        return int(dict(line.split(": ") for line in facts.splitlines())["rchar"])

    # What happens to nodes; `mend` undoes it

    def kill(self, node: str) -> None:
        """Its processes die at once; who talks to it gets an error."""
        self._harmed.add(node)
        self.cluster.node_kill(node)

    def vanish(self, node: str) -> None:
        """The cable is pulled: nobody gets an error."""
        self._harmed.add(node)
        self._login("ip", "link", "set", net.port(node), "down")

    def slow(self, node: str, mbit: float) -> None:
        self._slowed.add(node)
        self._shape(node, mbit)

    def late(self, node: str, seconds: float) -> None:
        """Its Prologs begin so much later."""
        self._late.add(node)
        self.cluster.write(LATE, str(seconds), node)

    def remount(self, node: str, volume: str = "client", **options: object) -> None:
        """Another view of the shared file system; see net.py."""
        self._harmed.add(node)
        self.root(["umount", "--lazy", "/shared"], node)
        script = f"import net; net.mount({volume!r}, **{options!r})"
        where = {"PYTHONPATH": str(REPO / "tests/slurm")}
        self.cluster.run(["python3", "-B", "-c", script], user="root", node=node, env=where)

    def stop_munge(self, node: str) -> None:
        self._harmed.add(node)
        self.root(["pkill", "--pidfile", f"/run/munge/{node}.pid"], node)

    def harm(self, node: str) -> None:
        """The test itself does something to it."""
        self._harmed.add(node)

    def mend(self) -> None:
        """All is as it was before. Harmed nodes are started anew, with empty caches."""
        for node in self._slowed:
            self._shape(node, self.links.node_mbit)
        for node in self._late - self._harmed:
            self.root(["rm", LATE], node)
        for node in sorted(self._harmed):
            self._login("ip", "link", "set", net.port(node), "up")
            self.cluster.node_reboot(node)
            self.root(["rm", "-rf", CACHE], node)
            if (service := self._services.pop(node, None)) is not None:
                service.communicate(timeout=60)
        self.serve(self._harmed)
        for kind in (self._slowed, self._late, self._harmed):
            kind.clear()

    def _shape(self, node: str, mbit: float) -> None:
        self._login(*net.shape(net.port(node), mbit))
        self.root(net.shape("eth0", mbit), node)

    def _login(self, *argv: str) -> None:
        self.cluster.run(argv, user="root")


def _is_of(stored: object, path: str) -> bool:
    entry = getattr(stored, "entry", None)
    return entry is not None and entry.identity.path == path


def _same(one: Path, other: Path) -> bool:
    return subprocess.run(["cmp", "--quiet", str(one), str(other)]).returncode == 0
