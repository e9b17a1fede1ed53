"""What the Epilog of a job releases of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forestage.cache.layout import Cache
    from forestage.hooks.epilog import EpilogFacts


def after_lease_drop(end: EpilogFacts, cache: Cache) -> None:
    """Release the job's data. Raises Failed, OSError."""
    from forestage.features.data import release

    release.release_job_data(cache, end.leases, end.job.id, end.patience)
