"""Findings about enroot's own files: binds that a redirect breaks, and what dead jobs left."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from forestage.check.finding import Finding
from forestage.slurm import enroot, queue
from forestage.system.terminal import count
from forestage.system.tree import Files

MOST = 3  # lines that are told of; the others go with them
HOMES = "/home"

_VARIABLE = re.compile(r"\$\([^)]*\)|\$\{[^}]*\}|\$[A-Za-z_][A-Za-z0-9_]*")
_OF_JOB = re.compile(r"pyxis_([0-9]{1,10})([._][0-9]+)?")  # pyxis_slurmstepd.c: job and step


def findings(files: Files, sources: tuple[str, ...]) -> Iterator[Finding]:
    """Nothing where enroot has no configuration."""
    settings = enroot.settings(files)
    binds = tuple(enroot.plain_binds(files, {}))
    reals = files.reals((HOMES, *sources, *(one.source for one in binds)))
    below = [f"{reals[source].rstrip('/')}/" for source in sources]
    for bind in islice((one for one in binds if _holds(reals[one.source], below)), MOST):
        yield _breaks(
            f"{bind.file}:{bind.line} binds {bind.source}, where images lie, without what is"
            " mounted below it",
            f"{bind.file}: rbind instead of bind in line {bind.line}",
        )
    if enroot.says_yes(settings.get("ENROOT_MOUNT_HOME", "")) and _holds(reals[HOMES], below):
        yield _breaks(
            f"{enroot.CONF} has ENROOT_MOUNT_HOME, and images may lie in users' home directories",
            f"{enroot.CONF}: ENROOT_MOUNT_HOME no (users who need theirs:"
            " --container-mounts=$HOME), or sources: without /home",
        )
    yield from _left_behind(files, settings)


def _breaks(what: str, change: str) -> Finding:
    consequence = (
        "An image below it is not redirected for jobs that are seen to mount it; while one is for"
        " another job (bind), containers with that mount fail to start: Invalid argument"
    )
    return Finding("bind-over-redirects", "warning", what, consequence, change)


def _holds(bound: str, sources: Sequence[str]) -> bool:
    """Pure: whether a redirect may lie below a bound directory; sources end in a slash."""
    real = f"{bound.rstrip('/')}/"
    return any(one.startswith(real) or real.startswith(one) for one in sources)


def _left_behind(files: Files, settings: dict[str, str]) -> Iterator[Finding]:
    """Root file systems of steps that are over. pyxis removes them unless it was killed."""
    pattern = _VARIABLE.sub("*", settings.get("ENROOT_DATA_PATH", ""))
    if not pattern.startswith("/") or pattern.strip("/*") == "":
        return
    live = {str(job) for job in queue.Slurm("", proc=files.at("/proc")).at_work()}
    left = []
    for found in sorted(files.root.glob(f"{pattern.strip('/')}/pyxis_*")):
        job = _OF_JOB.fullmatch(found.name)
        if job and job[1] not in live:
            left.append(found)
    if left:
        first = Path("/", left[0].relative_to(files.root))
        yield Finding(
            "containers-left",
            "warning",
            f"{count(len(left), 'root file system')} of steps that are over, such as {first}",
            "Nobody removes them, and the cache has that much less room on the same disk",
            f"as their owner: enroot remove --force {first.name} (forestage deletes nothing of"
            " enroot's)",
        )
