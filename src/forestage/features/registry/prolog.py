"""What the Prolog does with an image of a registry: it leaves that to the job's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from forestage.slurm import companion

if TYPE_CHECKING:
    from forestage.features.contexts import BeforeLeaseFacts
    from forestage.slurm.job import Job


def before_lease(facts: BeforeLeaseFacts) -> Job:
    """Return the job without the image that its steps import: to the core it would be a path."""
    return drop_reference(facts.job) if has_import(facts) else facts.job


def drop_reference(job: Job) -> Job:
    """Return the job without the request for an image of a registry. Pure."""
    left = tuple(request for request in job.requests if request != job.reference)
    return msgspec.structs.replace(job, requests=left)


def has_import(facts: BeforeLeaseFacts) -> bool:
    """Return whether the job names an image of a registry that its steps import.

    They do not if there is no store, or if pyxis would not ask our importer for it.
    """
    config, job = facts.node.config, facts.job
    asked = config.registry.enabled and config.registry.store and not job.hints.off
    if job.reference is None or not asked or config.redirect != "spank":
        return False
    return companion.is_own_importer(companion.find_importer(facts.slurm_conf))
