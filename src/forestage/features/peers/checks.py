"""Findings about peers: whether this node can prove itself, is asked, and can find the others.

Where `peers.enabled` is `auto`, each of them is a note: jobs read the shared file system as they do
without peers. A finding about other nodes is a note with any value, as it is no fault of this node.
"""

import contextlib
import functools
import ipaddress
import socket
import sys
from collections.abc import Iterator, Sequence

from forestage.check import slurm_site as sites
from forestage.check.finding import CheckFinding, FindingLevel
from forestage.check.slurm_site import ParsedSlurmConf
from forestage.clock import Clock
from forestage.config import Config, ServiceAddress
from forestage.errors import ForestageError
from forestage.features.contexts import CheckFacts
from forestage.features.peers import (
    activation,
    addresses,
    auth,
    node_list,
    proven_node,
    silent_nodes,
)
from forestage.features.peers.addresses import NodeAddresses
from forestage.paths import NodePaths
from forestage.slurm import nodelist
from forestage.system import as_user
from forestage.system.tree import HANGS, RootedTree

MAX_SAMPLED_NAMES = 16  # names that are resolved, of any number
PEER_SERVICE = "forestage-peer.service"
MAX_PRINTED_NAMES = 8  # nodes that a finding names, of any number
_LISTEN = "0A"  # /proc/net/tcp, TCP_LISTEN
_EACH_READS = (
    "The nodes of a job each read an image from the shared file system, in place of once for all"
)


def findings(facts: CheckFacts) -> Iterator[CheckFinding | str]:
    """Prove this node to itself, look who listens, and resolve names of other nodes."""
    yield "the peer service and the names of nodes"
    target, config = facts.target, facts.settings.node_config
    conf = None if facts.site is None else facts.site.conf
    if target.is_root:  # others read neither the key nor the service's sign
        yield from _find_peer_problems(facts.files, target.places, config, conf, target.clock)


def wants_unit(config: Config) -> bool:
    """Return whether the configuration allows a peer service on this node. Pure."""
    return activation.may_serve(config)


def _find_peer_problems(
    files: RootedTree, places: NodePaths, config: Config, conf: ParsedSlurmConf | None, clock: Clock
) -> Iterator[CheckFinding]:
    if not activation.may_serve(config):
        return
    peers = config.peers
    level: FindingLevel = "note" if activation.is_automatic(config) else "warning"
    has_munge = False
    try:
        prover = auth.make_authenticator(peers.key_file, places)
        auth.check_authenticator(prover)
        has_munge = isinstance(prover, auth.MungeAuthenticator)
    except (ForestageError, OSError) as error:
        yield CheckFinding(
            "peer-proof",
            level,
            f"this node cannot prove to other nodes who it is: {error}",
            f"It gets no chunk from them and sends none. {_EACH_READS}",
            "systemctl enable --now munge, or peers.key_file",
        )
    is_served = activation.is_service_running(places, clock.monotonic())
    yield from _find_service_problems(files, peers.port, is_served, level)
    silent = sorted(silent_nodes.list_silent_nodes(places, clock.monotonic()))
    if silent:
        yield CheckFinding(
            "peer-silent",
            "note",
            f"the peer service of {_format_some_names(silent)}"
            " did not answer within the last minutes",
            "Copies here do without these nodes for five minutes, and read more of the shared file"
            " system",
            f"forestage check there; firewalls must let compute nodes reach port {peers.port}",
        )
    nodes = _list_candidate_nodes(places, conf, clock.wall())
    if has_munge and is_served and len(nodes) > 1 and proven_node.find_proven_node(places) is None:
        yield CheckFinding(
            "peer-unproven",
            "note",
            "no other node has shown yet that it has the same munge key",
            "Debian makes a key for each node. Nodes with different keys give each other nothing",
            "a job on several nodes shows it; /etc/munge/munge.key has to be the same on all",
        )
    yield from _find_unresolved_names(_sample_names(nodes), addresses.load_addresses(peers, places))


def _find_service_problems(
    files: RootedTree, port: int, is_served: bool, level: FindingLevel
) -> Iterator[CheckFinding]:
    """Yield what keeps other nodes from this node's service."""
    if sites.lacks_enabled_unit(files, PEER_SERVICE):
        yield CheckFinding(
            "peer-service",
            level,
            f"{PEER_SERVICE} is not enabled",
            _EACH_READS,
            "forestage enable --yes, on each node (or peers.enabled: false)",
        )
        return
    tables = [files.read_text_or_none(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    known = [table for table in tables if table is not None]
    listening = [address for table in known for address in _list_listeners(table, port)]
    if known and not listening:
        yield CheckFinding(
            "peer-service",
            level,
            f"no process listens on port {port}: the peer service does not run",
            _EACH_READS,
            f"journalctl -u {PEER_SERVICE} says why; systemctl restart {PEER_SERVICE}"
            if files.find_mode("/run/systemd/system") is not None
            else "slurm.conf: HealthCheckProgram=/usr/lib/forestage/bin/forestage-health starts it",
        )
    elif known and not is_served:
        yield CheckFinding(
            "peer-port",
            level,
            f"another program than the peer service listens on port {port}",
            _EACH_READS,
            f"ss -ltnp shows which: end it, and systemctl restart {PEER_SERVICE}; or peers.port, on"
            " all nodes",
        )
    elif known and all(address.is_loopback for address in listening):
        yield CheckFinding(
            "peer-loopback",
            level,
            f"the peer service listens at {listening[0]} alone, which no other node reaches",
            "It gives this node's chunks to nobody",
            "the address of the node's own name (DNS, /etc/hosts), or peers.listen",
        )


def _list_listeners(
    table: str, port: int
) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Yield the addresses at which a process listens on a port, from /proc/net/tcp or tcp6."""
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 3 and words[3] == _LISTEN and words[1].endswith(f":{port:04X}"):
            yield _parse_address(words[1].partition(":")[0])


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address as /proc/net/tcp has it: words of 32 bits in the machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def _list_candidate_nodes(places: NodePaths, conf: ParsedSlurmConf | None, now: float) -> list[str]:
    """Return nodes that copies may ask: by root's list, else the fixed ones of slurm.conf."""
    with contextlib.suppress(OSError):
        if listed := node_list.read_up_nodes(places, now):
            return list(listed)
    lists = () if conf is None else conf.nodes
    return [name for one in lists for name in nodelist.expand_nodelist(one)]


def _sample_names(names: list[str]) -> list[str]:
    """Return a few of many, from all over the list. Pure."""
    step = max(1, len(names) // MAX_SAMPLED_NAMES)
    return names[::step][:MAX_SAMPLED_NAMES]


def _find_unresolved_names(names: list[str], known: NodeAddresses) -> Iterator[CheckFinding]:
    """Whether this node's name service knows the names by which other nodes are asked."""
    works = [functools.partial(_has_address, known.node_address(name)) for name in names]
    found = as_user.run_each_in_child(works, bool, HANGS, 2 * HANGS, MAX_SAMPLED_NAMES)
    bad = [name for name, known in zip(names, found, strict=True) if not known]
    if bad:
        yield CheckFinding(
            "peer-names",
            "note",
            f"{len(bad)} of {len(names)} nodes that were tried have no address here:"
            f" {_format_some_names(bad)}",
            "Those nodes are asked for no chunk, and a copy may wait for the name service",
            "DNS, or /etc/hosts on each node: the names of slurm.conf's NodeName, or NodeAddr",
        )


def _format_some_names(names: Sequence[str]) -> str:
    """Return a list of nodes that people can read. Pure."""
    more = f" and {len(names) - MAX_PRINTED_NAMES} more" if len(names) > MAX_PRINTED_NAMES else ""
    return ", ".join(names[:MAX_PRINTED_NAMES]) + more


def _has_address(address: ServiceAddress) -> bool:
    tried = (address.host, address.fallback_host)
    return any(is_resolvable(name) for name in tried if name)


def is_resolvable(name: str) -> bool:
    """Return whether the name service knows an address for a name. It may take its time."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False
