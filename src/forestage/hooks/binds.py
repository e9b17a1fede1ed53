"""Directories that the job's container binds: no redirect may lie below one (slurm/enroot.py).

Such a container would not start. So the path stays as it is, and the image is not copied for a job
that could not use the copy. Where a redirect serves the whole node, what containers of other jobs
bind is not known; `forestage check` finds what the site has all of them bind.
"""

import contextlib
import os
import pwd
from pathlib import Path

from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.slurm import enroot
from forestage.slurm.job import Job
from forestage.system import as_user
from forestage.system.tree import Files

HOME = "/\0"  # stands for it until it is known; no directory has such a name
LOOK = 5.0  # seconds for the user's home, or for where a job saves to


def must_not_hold(path: str, job: Job, root: Path, end: Deadline) -> None:
    """Raises Declined (below-bind) where the job's container binds what this path lies below.

    `path` is resolved, and what the site binds is taken as it is written. Raises as_user.TooSlow,
    OSError.
    """
    files = Files(root)
    bound = [one.source for one in enroot.plain_binds(files, {"HOME": HOME})]
    wanted = job.mounts_home
    if wanted is None:
        wanted = enroot.says_yes(enroot.settings(files).get("ENROOT_MOUNT_HOME", ""))
    if wanted or any(HOME in one for one in bound):
        written, resolved = home(job, min(LOOK, end.left()))
        bound = [one.replace(HOME, written) for one in bound]
        bound += [written, resolved] if wanted and written else []
    for directory in bound:
        if path.startswith(f"{os.path.normpath(directory).rstrip('/')}/"):
            raise Declined(
                "below-bind",
                f"the container binds {directory}, and would not start with a redirect below it"
                " (--container-mounts binds what is mounted below, too)",
            )


def home(job: Job, timeout: float) -> tuple[str, str]:
    """The home directory, and where it leads, as it is a link often; both "" for none.

    In a child: users may be known to a directory server, and their homes lie on one that may hang.
    Raises as_user.TooSlow.
    """

    def work() -> as_user.Found[tuple[str, str]]:
        home = job.home
        with contextlib.suppress(KeyError):
            home = home or pwd.getpwuid(job.user.uid).pw_dir
        as_user.become(job.user)
        # What is no text is in no fstab, and an image below it in no lease.
        if not home.startswith("/") or not home.isprintable():
            return ("", ""), []
        return (home, os.path.realpath(home)), []

    return as_user.call(work, tuple[str, str], timeout)[0]
