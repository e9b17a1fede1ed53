"""A file's bare name where an image is named: pyxis takes img.sqsh for an image of a registry."""

import os
import stat

from forestage.errors import Declined, ForestageError
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.system import as_user

IMAGE_SUFFIXES = (".sqsh", ".squashfs", ".sqfs", ".sfs", ".simg", ".sif")
LOOKUP_TIMEOUT = 1.0  # seconds for the look


def find_bare_name_refusal(job: Job, request: Request, seconds: float) -> Declined | None:
    """Return what names the file, if the request is the bare name of one in the job's directory.

    Only for names that end as files of images do: few images of registries are looked for. A child
    looks, as the user, for `seconds` at most, and never longer than LOOKUP_TIMEOUT: a file server
    that hangs costs the job no more.
    """
    name = request.path
    if name.startswith(("/", ".")) or not name.endswith(IMAGE_SUFFIXES) or not name.isprintable():
        return None
    path = os.path.join(job.work_dir, name)
    if request.kind != "image" or job.hints.off or not path.startswith("/"):
        return None

    def work() -> as_user.ChildResult[bool]:
        as_user.set_effective_user(job.user)
        return stat.S_ISREG(os.stat(path).st_mode), []  # noqa: PTH116

    try:
        is_there, _ = as_user.run_in_child(work, bool, min(LOOKUP_TIMEOUT, seconds))
    except (ForestageError, OSError):
        return None
    what = f"{name} is an image of a registry to pyxis; the file {path} lies here: write ./{name}"
    return Declined("bare-name", what) if is_there else None
