"""Nodes as admins name them: a ClusterShell node set with the site's own groups, or a partition."""

import sys
from pathlib import Path

from forestage.errors import NotFound
from forestage.slurm.queue import Slurm


def expand(text: str) -> tuple[str, ...]:
    """The nodes of a ClusterShell node set, groups included. Raises ValueError.

    ClusterShell would also read the sample groups that its wheel puts below the interpreter's own
    prefix, and `@all` would be nodes that no site has.
    """
    from ClusterShell import Defaults, NodeSet, NodeUtils

    paths = Defaults.config_paths("groups.conf")
    paths = [path for path in paths if Path(sys.prefix) not in Path(path).parents]
    groups = NodeUtils.GroupResolverConfig(paths, illegal_chars=NodeSet.ILLEGAL_GROUP_CHARS)
    try:
        found = tuple(NodeSet.NodeSet(text, resolver=groups))
    except NodeUtils.GroupResolverError:
        raise ValueError(f"a group of {text!r} is not in ClusterShell's groups.conf") from None
    except NodeSet.NodeSetException as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError(f"{text!r} names no node")
    return found


def fold(nodes: "tuple[str, ...] | list[str]") -> str:
    """The node set of these names: n[1-3]."""
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(nodes)))


def of_partition(name: str, slurm: Slurm) -> tuple[str, ...]:
    """All nodes of a partition. Raises NotFound where it has none, SlurmError."""
    found = slurm.partition_nodes(name)
    if not found:
        raise NotFound(f"Slurm has no partition {name}, or it has no node", "see `sinfo`")
    return found
