"""What the core tells the doors of features: a frozen value for each door, with facts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from forestage.cache.lease import Lease, Leases
    from forestage.cache.node import Node
    from forestage.clock import Clock
    from forestage.paths import Places
    from forestage.slurm.job import Job


class JobEnd(msgspec.Struct, frozen=True):
    """epilog.py: a job that is over on this node.

    `lease` is None where there is none or it is damaged. `may_have_data` is whether the job's
    comment may have named any. `patience` is in seconds, for the space lock.
    """

    job: Job
    lease: Lease | None
    may_have_data: bool
    leases: Leases
    places: Places
    clock: Clock
    patience: float


class SweepFacts(msgspec.Struct, frozen=True):
    """sweep.py: the node as a sweep has it; `node.cache` may be one that was configured before.

    `me` is its name in Slurm, `staying` are the jobs with a lease that are not over.
    """

    node: Node
    me: str
    staying: frozenset[int]
    dry_run: bool
