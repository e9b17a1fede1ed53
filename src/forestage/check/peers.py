"""Findings about peers: whether this node can prove itself, is asked, and can find the others."""

import contextlib
import functools
import socket
from collections.abc import Iterator

from forestage.admin.site import Conf
from forestage.check.finding import Finding
from forestage.config import Peering
from forestage.errors import ForestageError
from forestage.paths import Places
from forestage.peers import auth, node_list
from forestage.slurm import nodelist
from forestage.system import as_user
from forestage.system.tree import HANGS, Files

SAMPLE = 16  # names that are resolved, of any number
_LISTEN = "0A"  # /proc/net/tcp, TCP_LISTEN


def findings(
    files: Files, places: Places, peers: Peering, conf: Conf | None, now: float
) -> Iterator[Finding]:
    """Where peers are on: prove this node to itself, and look who listens.

    And resolve names of other nodes.
    """
    try:
        auth.check(auth.prover(peers.key_file, places.munge))
    except (ForestageError, OSError) as error:
        yield Finding(
            "peer-proof",
            "warning",
            f"peers are on, and this node cannot prove who it is: {error}",
            "It gets no chunk from other nodes and sends none: each cold start reads the shared"
            " file system once per node",
            "systemctl enable --now munge, or peers.key_file",
        )
    tables = [files.text(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    known = [table for table in tables if table is not None]
    if known and not any(_listens(table, peers.port) for table in known):
        yield Finding(
            "peer-service",
            "warning",
            f"peers are on, but no process listens on port {peers.port}",
            "Other nodes wait for this one's chunks in vain, then read the shared file system",
            "systemctl enable --now forestage-peer",
        )
    yield from _names(_sample(_nodes(places, conf, now)))


def _nodes(places: Places, conf: Conf | None, now: float) -> list[str]:
    """Return nodes that copies may ask: by root's list, else the fixed ones of slurm.conf."""
    with contextlib.suppress(OSError):
        if listed := node_list.read(places, now):
            return list(listed)
    lists = () if conf is None else conf.nodes
    return [name for one in lists for name in nodelist.expand(one)]


def _sample(names: list[str]) -> list[str]:
    """Return a few of many, from all over the list. Pure."""
    step = max(1, len(names) // SAMPLE)
    return names[::step][:SAMPLE]


def _names(names: list[str]) -> Iterator[Finding]:
    """Whether this node's name service knows the names by which other nodes are asked."""
    works = [functools.partial(resolve, name) for name in names]
    found = as_user.each(works, bool, HANGS, 2 * HANGS, SAMPLE)
    bad = [name for name, known in zip(names, found, strict=True) if not known]
    if bad:
        yield Finding(
            "peer-names",
            "warning",
            f"peers are on, and {len(bad)} of {len(names)} node names that were tried do not"
            f" resolve here: {', '.join(bad)}",
            "Those nodes are asked for no chunk: each cold start reads the shared file system once"
            " per node, and may wait for the name service",
            "DNS, or /etc/hosts on each node: the names of slurm.conf's NodeName",
        )


def resolve(name: str) -> bool:
    """Return whether the name service knows an address for a name. It may take its time."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def _listens(table: str, port: int) -> bool:
    """Whether /proc/net/tcp shows that somebody listens on a port, at any address."""
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 3 and words[3] == _LISTEN and words[1].endswith(f":{port:04X}"):
            return True
    return False
