"""What a sweep removes of data whose jobs are over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forestage.features.data import job_dir, release

if TYPE_CHECKING:
    from forestage.commands.sweep import SweepReport
    from forestage.features.contexts import SweepFacts


def in_each_cache(facts: SweepFacts) -> Mapping[str, tuple[object, ...]]:
    """Remove what these jobs had, and return the names of their directories.

    Raises Failed, OSError.
    """
    node = facts.node
    if not facts.dry_run:
        return {
            "job_dirs": release.release_ended_jobs_data(node.cache, node.leases, node.clock.wall())
        }
    left = job_dir.list_leftovers(node.cache, facts.jobs_with_lease)
    return {"job_dirs": tuple(one.directory.name for one in left)}


def fields() -> Mapping[str, str]:
    """Return the report's field for the jobs' directories. Pure."""
    return {"job_dirs": "parts"}


def lines(report: SweepReport) -> list[str]:
    """Return a line for each job's directory. Pure."""
    would = "would be " if report.dry_run else ""
    return [f"directory of job {name}: {would}deleted" for name in report.added.get("job_dirs", ())]
