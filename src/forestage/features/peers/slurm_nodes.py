"""The nodes of the cluster: all of them as slurmctld has them, their addresses, and how many.

slurm.conf, which costs slurmctld nothing, has the nodes that are always there.
"""

import re
from pathlib import Path

import msgspec

from forestage.slurm import slurm_conf
from forestage.slurm.nodelist import expand_nodelist
from forestage.slurm.slurm_client import SlurmClient

_FACT = re.compile(r"(?:^| )(NodeName|NodeAddr|NodeHostName|State|Partitions)=(\S*)", re.ASCII)


class SlurmNodeState(msgspec.Struct, frozen=True):
    """What Slurm says of a node; `states` such as IDLE, DOWN, POWERED_DOWN.

    `address` is its NodeAddr: an address or a name, of itself if slurm.conf has none.
    """

    name: str
    host: str
    states: tuple[str, ...]
    partitions: tuple[str, ...]
    address: str = ""


def list_nodes(slurm: SlurmClient) -> tuple[SlurmNodeState, ...]:
    """Return all nodes, by one question to slurmctld. Raises SlurmError."""
    return parse_nodes(slurm.query("scontrol", "--all", "--oneliner", "show", "node"))


def parse_nodes(listing: str) -> tuple[SlurmNodeState, ...]:
    """Return the nodes that `scontrol --oneliner show node` prints. Pure."""
    found = []
    for line in listing.splitlines():
        # The first of a name: a reason or a comment, which may say anything, comes behind.
        facts: dict[str, str] = {}
        for name, value in _FACT.findall(line):
            facts.setdefault(name, value)
        if name := facts.get("NodeName"):
            states = tuple(facts.get("State", "").replace("*", "+NOT_RESPONDING").split("+"))
            partitions = tuple(filter(None, facts.get("Partitions", "").split(",")))
            host, address = facts.get("NodeHostName", name), facts.get("NodeAddr", "")
            found.append(SlurmNodeState(name, host, states, partitions, address))
    return tuple(found)


def query_node_address(slurm: SlurmClient, name: str) -> str:
    """Return NodeAddr of one node as slurmctld has it, "" if it has none. Raises SlurmError.

    The answer has this node alone: slurmctld sends `scontrol show node NAME` all of them.
    """
    words = ("--noheader", "--local", "--all", "--Node", "--format=%o", f"--nodes={name}")
    return next(iter(slurm.query("sinfo", *words).split()), "")


def count_configured_nodes(named: str, root: Path) -> int:
    """Return how many nodes slurm.conf has that are always there, 0 if that cannot be read.

    `named` is $SLURM_CONF or "".
    """
    try:
        conf = slurm_conf.locate_conf(named, root)
        return sum(
            len(expand_nodelist(one))
            for one in slurm_conf.list_node_names(conf, slurm_conf.read_conf_text)
        )
    except (OSError, ValueError):
        return 0


def find_configured_address(named: str, root: Path, node: str) -> str:
    """Return NodeAddr that slurm.conf has of a node that is always there, "" if it has none.

    Without one slurmd is found by NodeHostname, and that is the node's name if it is not set.
    `named` is $SLURM_CONF or "".
    """
    try:
        for said in slurm_conf.node_lines(
            slurm_conf.locate_conf(named, root), slurm_conf.read_conf_text
        ):
            names = expand_nodelist(said["nodename"])
            if node in names:
                listed = said.get("nodeaddr") or said.get("nodehostname") or said["nodename"]
                found = expand_nodelist(listed) or (listed,)  # no list: an IPv6 address
                # One for all, where several slurmds run on a host.
                return found[names.index(node)] if len(found) == len(names) else found[0]
    except (OSError, ValueError):
        pass
    return ""
