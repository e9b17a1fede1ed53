"""Directories that the job's container binds: no redirect may lie below one (slurm/enroot.py).

Such a container would not start. So the path stays as it is, and the image is not copied for a job
that could not use the copy. Where a redirect serves the whole node, what containers of other jobs
bind is not known; `forestage check` finds what the site has all of them bind.
"""

import os
import pwd
from pathlib import Path

from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.slurm import enroot
from forestage.slurm.job import Job
from forestage.stage import source


def must_not_hold(path: str, job: Job, root: Path, end: Deadline) -> None:
    """Raises Declined (below-bind) where the job's container binds what this path lies below.

    `path` is resolved, and what the site binds is taken as it is written. Raises as_user.TooSlow,
    OSError.
    """

    def text(name: str) -> str | None:
        try:
            return (root / name.lstrip("/")).read_text(errors="replace")
        except OSError:
            return None

    def names(name: str) -> list[str]:
        try:
            return sorted(os.listdir(root / name.lstrip("/")))  # noqa: PTH208 - names are wanted
        except OSError:
            return []

    home = job.home or _home(job.user.uid)
    bound = [one.source for one in enroot.plain_binds(text, names, {"HOME": home})]
    wanted = job.mounts_home
    if wanted is None:
        wanted = enroot.says_yes(enroot.settings(text, names).get("ENROOT_MOUNT_HOME", ""))
    if wanted and home.startswith("/"):
        # A link, often. As the user: it is a path of theirs, on a server that may hang.
        bound += [home, source.resolve(home, job.user, end.left())]
    for directory in bound:
        if path.startswith(f"{os.path.normpath(directory).rstrip('/')}/"):
            raise Declined(
                "below-bind",
                f"the container binds {directory}, and would not start with a redirect below it"
                " (--container-mounts binds what is mounted below, too)",
            )


def _home(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""
