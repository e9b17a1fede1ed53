"""What data leaves behind: released by the Epilog for one job, by the sweep for all that are over.

Whoever adds a view that outlives its step adds a line to both.
"""

import contextlib

from forestage.cache.layout import Cache
from forestage.cache.lease import LeaseDirectory
from forestage.errors import Failed
from forestage.features.data import directory, job_dir, retry, shared_scan
from forestage.system import lock


def release_job_data(cache: Cache, leases: LeaseDirectory, job: int, patience: float) -> None:
    """Once the job's lease is dropped. `patience` is in seconds, for the space lock.

    Raises Failed, OSError; what is left then is for the sweep.
    """
    with contextlib.suppress(Failed, OSError):  # another job's may be in the way
        directory.detach_unused_devices(cache, leases, patience)
    shared_scan.delete_job_scans(cache, job)
    job_dir.remove_job_dirs(cache, job)


def release_ended_jobs_data(cache: Cache, leases: LeaseDirectory, now: float) -> tuple[str, ...]:
    """Of all jobs that have no lease any more; returns the names of their own directories.

    `now` is wall time. Raises Failed, OSError.
    """
    directory.detach_unused_devices(cache, leases, lock.SPACE_TIMEOUT)
    shared_scan.delete_stale_scans(cache, leases)
    retry.delete_old_notes(cache, now)
    return job_dir.remove_leftovers(cache, leases)
