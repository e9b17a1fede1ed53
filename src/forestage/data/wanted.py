"""What data a job wants on this node: written by its Prolog, read by its steps and its Epilog.

/run/forestage/leases/<job>.data    JSON of `Wanted`, beside the lease and gone with it
"""

import contextlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from forestage.cache.lease import Leases
from forestage.cache.node import Node
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.slurm.lines import Fields
from forestage.system import lock, records


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


class Tree(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a directory is (data/tree.py): its key and resolved path, or why it has none."""

    state: Literal["looking", "copying", "ready", "declined"]
    key: str = ""
    path: str = ""
    reason: str = ""
    detail: str = ""


class Wanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """`room` in bytes is for the job's own directory, in memory with `ram`; None: it wants none.

    `refused` says why it has none though, `off` that for this reason it gets nothing else either;
    `reason` is that in one word.
    `restart` is the run of the job, as Slurm counts them. `trees` has the directories by their
    paths as the job names them.
    """

    requests: tuple[Request, ...] = ()
    room: int | None = None
    ram: bool = False
    refused: str = ""
    off: bool = False
    reason: str = ""
    trees: dict[str, Tree] = {}
    restart: int = 0


def note(leases: Leases, job: int, wanted: Wanted) -> None:
    """Under the space lock, with a lease that says so. Raises OSError."""
    records.write(leases.data(job), msgspec.json.encode(wanted))


def read(leases: Leases, job: int) -> Wanted:
    """What was noted; nothing where nothing can be read."""
    with contextlib.suppress(OSError, records.Damaged):
        return records.load(leases.data(job), Wanted)
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
    lease = node.leases.read(job.id)
    return lease is not None and lease.data and read(node.leases, job.id).restart == job.restart
