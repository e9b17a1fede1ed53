"""Names of nodes in a list as Slurm writes it: n[1-4,7]. Pure.

A step's list is a user's word: its length is known before the names are made, and nothing in a name
can be a port or a path.
"""

import re

MAX_NODES = 65536  # of a job

_SPANS = r"\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\]"
_HOST = rf"[A-Za-z0-9](?:[A-Za-z0-9._-]|{_SPANS})*"
_LIST = re.compile(rf"{_HOST}(?:,{_HOST})*", re.ASCII)
_NAME = re.compile(_HOST, re.ASCII)
_BRACKETS = re.compile(r"\[([^]]*)\]")


def expand(nodelist: str) -> tuple[str, ...]:
    """Pure: the names in a list as Slurm writes it; () where it is none, or too long."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    if not _LIST.fullmatch(nodelist) or _at_most(nodelist) > MAX_NODES:
        return ()
    try:
        # Without groups: looking these up would read files and run programs.
        return tuple(NodeSet(nodelist, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return ()


def _at_most(nodelist: str) -> int:
    """Pure: how many names there may be in it; to be known before they are made."""
    total = 0
    for name in _NAME.findall(nodelist):
        count = 1
        for within in _BRACKETS.findall(name):
            spans = [span.partition("-") for span in within.split(",")]
            count *= sum(max(0, int(high or low) - int(low)) + 1 for low, _, high in spans)
        total += count
    return total
