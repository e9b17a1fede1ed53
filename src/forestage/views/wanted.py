"""What data a job wants on this node: written by its Prolog, read by its steps and its Epilog.

It is `data` of what was said to the job (cache/said.py).
"""

import contextlib
from collections.abc import Sequence

import msgspec

from forestage.cache.lease import Leases
from forestage.cache.node import Node
from forestage.cache.said import Tree, Wanted
from forestage.errors import Failed
from forestage.slurm.job import Job
from forestage.slurm.lines import Fields
from forestage.system import lock


def disentangled(lines: Sequence[Fields]) -> list[Fields]:
    """Pure: the lines, which are `in_order`, without directories in each other's way.

    One that lies in another is in that one's copy, too. One in which something else is mounted
    stays the shared one, as the copy has other inodes.
    """
    mounted = [one[-2] for one in lines if one[0] in ("served", "folder")]
    kept: list[Fields] = []
    trees: list[str] = []
    for line in lines:
        if line[0] == "device" and line[3] == "erofs":
            at = f"{line[-2]}/"
            if any(one.startswith(at) for one in mounted) or any(map(at.startswith, trees)):
                continue
            trees.append(at)
        kept.append(line)
    return kept


def in_order(lines: Sequence[Fields]) -> list[Fields]:
    """Pure: the lines as the companion is to follow them: no mount hides one that came before."""
    return sorted(lines, key=lambda line: 0 if line[0] == "env" else len(line[-2]))


def note(leases: Leases, job: int, wanted: Wanted) -> None:
    """Under the space lock, with a lease. Raises Failed, OSError."""
    leases.note(job, data=wanted)


def read(leases: Leases, job: int) -> Wanted:
    """What was noted; nothing where nothing can be read."""
    with contextlib.suppress(OSError, Failed):
        return leases.said(job).data or Wanted()
    return Wanted()


def note_tree(node: Node, job: Job, path: str, tree: Tree) -> None:
    """Notes how far a directory is, if this run of the job is still here.

    Raises lock.Busy, OSError.
    """
    with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
        if is_here(node, job):
            noted = read(node.leases, job.id)
            trees = {**noted.trees, path: tree}
            note(node.leases, job.id, msgspec.structs.replace(noted, trees=trees))


def is_here(node: Node, job: Job) -> bool:
    """Whether this very run of a job still wants data here: it may have ended, or been requeued."""
    if node.leases.read(job.id) is None:
        return False
    data = node.leases.said(job.id).data
    return data is not None and data.restart == job.restart
