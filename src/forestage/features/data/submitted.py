"""What is said of a job's data where the job is submitted (features/prepare/hints.py)."""

import os

from forestage.slurm.hints import Request


def must_be_possible(request: Request) -> None:
    """Raise Declined where its names alone say that no node would show it there. Pure."""
    if request.kind == "fill":
        from forestage.features.data import job_dir_fill

        job_dir_fill.name_in_job_dir(request)
    elif request.kind == "mount":
        from forestage.features.data import squashfs_mount

        squashfs_mount.check_mount_allowed(os.path.normpath(request.at), ())
