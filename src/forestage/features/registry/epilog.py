"""What the Epilog of a job removes of the images that its steps have from registries."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forestage.hooks.epilog import EpilogFacts


def before_lease_drop(end: EpilogFacts) -> None:
    """Delete the files of the job's steps.

    The process that takes a lease for a step later knows by these files whether to give it back
    (step_image.py).
    """
    if not end.places.images.exists():
        return
    from forestage.features.registry import step_files

    with contextlib.suppress(OSError):  # what stays is for the sweep
        step_files.delete_job_files(end.places, end.job.id)
