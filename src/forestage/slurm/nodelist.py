"""Names of nodes in a list as Slurm writes it: n[1-4,7]. Pure.

A step's list is a user's word: its length is known before the names are made, and nothing in a name
can be a port or a path.
"""

import re

MAX_NODES = 65536  # of a job

_SPANS = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_HOST = rf"[A-Za-z0-9](?:[A-Za-z0-9._-]|{_SPANS})*"
# Texts, which re compiles when they are needed: most hooks have one node.
_LIST = rf"{_HOST}(?:,{_HOST})*"
_BRACKETS = r"\[([^]]*)\]"


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Pure: the names in a list as Slurm writes it; () where it is none, or too long."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    if not re.fullmatch(_LIST, nodelist, re.ASCII) or _count_names_at_most(nodelist) > MAX_NODES:
        return ()
    try:
        # Without groups: looking these up would read files and run programs.
        return tuple(NodeSet(nodelist, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return ()


def _count_names_at_most(nodelist: str) -> int:
    """Pure: how many names there may be in it; to be known before they are made."""
    total = 0
    for name in re.findall(_HOST, nodelist, re.ASCII):
        count = 1
        for within in re.findall(_BRACKETS, name):
            spans = [span.partition("-") for span in within.split(",")]
            count *= sum(max(0, int(high or low) - int(low)) + 1 for low, _, high in spans)
        total += count
    return total
