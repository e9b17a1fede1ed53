"""What data leaves behind: released by the Epilog for one job, by the sweep for all that are over.

Whoever adds a view that outlives its step adds a line to both.
"""

import contextlib

from forestage.cache.layout import Cache
from forestage.cache.lease import LeaseDirectory
from forestage.errors import Failed
from forestage.features.data import agreement, directory, job_dir, retry
from forestage.system import lock


def of_job(cache: Cache, leases: LeaseDirectory, job: int, patience: float) -> None:
    """Once the job's lease is dropped. `patience` is in seconds, for the space lock.

    Raises Failed, OSError; what is left then is for the sweep.
    """
    with contextlib.suppress(Failed, OSError):  # another job's may be in the way
        directory.let_go(cache, leases, patience)
    agreement.end(cache, job)
    job_dir.end(cache, job)


def of_all(cache: Cache, leases: LeaseDirectory, now: float) -> tuple[str, ...]:
    """Of all jobs that have no lease any more; returns the names of their own directories.

    `now` is wall time. Raises Failed, OSError.
    """
    directory.let_go(cache, leases, lock.SPACE_TIMEOUT)
    agreement.sweep(cache, leases)
    retry.tidy(cache, now)
    return job_dir.sweep(cache, leases)
