"""Findings about enroot's own files: binds that a redirect breaks, and what dead jobs left.

A mount below a directory that a container binds without rbind makes that bind fail with EINVAL in
the container's user namespace: enroot's fstab lines (mounts.d) and its home directory.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from forestage.check.finding import Finding
from forestage.slurm import queue
from forestage.system.terminal import count
from forestage.system.tree import Files

ETC = "/etc/enroot"
CONF = f"{ETC}/enroot.conf"
MOST = 3  # lines that are told of; the others go with them

_VARIABLE = re.compile(r"\$\([^)]*\)|\$\{[^}]*\}|\$[A-Za-z_][A-Za-z0-9_]*")
_OF_JOB = re.compile(r"pyxis_([0-9]{1,10})([._][0-9]+)?")  # pyxis_slurmstepd.c: job and step


def findings(files: Files, sources: tuple[str, ...]) -> Iterator[Finding]:
    """Nothing where enroot has no configuration."""
    known = settings(files)
    yield from _binds(files, sources)
    yield from _home(files, sources, known)
    yield from _left_behind(files, known)


def settings(files: Files) -> dict[str, str]:
    """enroot.conf and what lies beside it: a name, white space, a value that a shell expands."""
    found = {}
    parts = [f"{CONF}.d/{name}" for name in files.names(f"{CONF}.d") if name.endswith(".conf")]
    for path in (CONF, *parts):
        for line in (files.text(path) or "").splitlines():
            name, *value = line.partition("#")[0].split(None, 1)[:2] or [""]
            if value:
                found[name] = value[0].strip().strip("\"'")
    return found


def _binds(files: Files, sources: tuple[str, ...]) -> Iterator[Finding]:
    folder = f"{ETC}/mounts.d"
    told = 0
    for name in files.names(folder):
        if not name.endswith(".fstab"):
            continue
        lines = (files.text(f"{folder}/{name}") or "").splitlines()
        for number, line in enumerate(lines, 1):
            fields = line.partition("#")[0].split()
            if len(fields) < 4 or "bind" not in fields[3].split(",") or told == MOST:
                continue
            bound = fields[0].rstrip("/") or "/"
            if _holds(files, bound, sources):
                told += 1
                yield _breaks(
                    f"{folder}/{name}:{number} binds {bound}, where images lie, without what is"
                    " mounted below it",
                    f"{folder}/{name}: rbind instead of bind in line {number}",
                )


def _home(files: Files, sources: tuple[str, ...], settings: dict[str, str]) -> Iterator[Finding]:
    wanted = settings.get("ENROOT_MOUNT_HOME", "").lower() in ("y", "yes", "true", "1")
    if wanted and _holds(files, "/home", sources):
        yield _breaks(
            f"{CONF} has ENROOT_MOUNT_HOME, and images may lie in users' home directories",
            f"{CONF}: ENROOT_MOUNT_HOME no (users who need theirs: --container-mounts=$HOME), or"
            " sources: without /home",
        )


def _breaks(what: str, change: str) -> Finding:
    consequence = (
        "While an image below it is redirected (bind: for any job of the node), containers with"
        " that mount fail to start: Invalid argument"
    )
    return Finding("bind-over-redirects", "warning", what, consequence, change)


def _holds(files: Files, bound: str, sources: tuple[str, ...]) -> bool:
    """Whether a redirect may lie below a bound directory."""
    if "$" in bound:  # a user's: whatever it is, it is nothing of which is known here
        return False
    real = f"{files.real(bound).rstrip('/')}/"
    below = [f"{files.real(source).rstrip('/')}/" for source in sources]
    return any(one.startswith(real) or real.startswith(one) for one in below)


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
