"""Findings about enroot's own files: binds that a redirect breaks, and what dead jobs left."""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from forestage.check import node_findings
from forestage.check.finding import CheckFinding
from forestage.slurm import enroot, slurm_client
from forestage.slurm.enroot import EnrootSetup
from forestage.system.terminal import format_count
from forestage.system.tree import RootedTree

HOOK_BYTES = 64 * 1024
ENROOT_HOOK_NAMES = {
    *("10-aptfix.sh", "10-cgroups.sh", "10-devices.sh", "10-home.sh", "10-localtime.sh"),
    *("10-shadow.sh", "98-nvidia.sh", "99-mellanox.sh", "50-slurm-pmi.sh", "50-slurm-pytorch.sh"),
    *("50-mig-config.sh", "50-sharp.sh"),
}
"""The hooks that enroot 4.1 comes with, of which one alone binds a directory: the user's home."""
MAX_BIND_FINDINGS = 3  # lines that are told of; the others go with them
HOMES_DIRECTORY = "/home"

_MOUNTS = re.compile(r"ENROOT_MOUNTS|enroot-mount")
_VARIABLE = re.compile(r"\$\([^)]*\)|\$\{[^}]*\}|\$[A-Za-z_][A-Za-z0-9_]*")
_CONTAINER_NAME = re.compile(
    r"pyxis_([0-9]{1,10})([._][0-9]+)?"
)  # pyxis_slurmstepd.c: job and step


def read_node_enroot_setup(files: RootedTree) -> EnrootSetup:
    """What enroot goes by on this node: the one that slurmd's steps find, if that is known."""
    pid = node_findings.find_slurmd_pid(files)
    environ = os.fsdecode((pid and files.read_bytes_or_none(f"/proc/{pid}/environ")) or b"").split(
        "\0"
    )
    paths = [one.removeprefix("PATH=") for one in environ if one.startswith("PATH=/")]
    return enroot.read_enroot_setup(files, *paths[:1])


def format_enroot_summary(files: RootedTree, site: EnrootSetup) -> str:
    """Pure: what was read, for people; "" for a node without enroot."""
    if not site.program:
        return ""
    fstabs = [name for name in files.list_names(site.mounts) if name.endswith(".fstab")]
    plain = format_count(len([*enroot.list_site_binds(files, site)]), "bind")
    return (
        f"{site.program}, configured in {site.sysconf}; {site.mounts}:"
        f" {format_count(len(fstabs), 'fstab')}, {plain} without what is mounted below"
    )


def list_findings(
    files: RootedTree, sources: tuple[str, ...], site: EnrootSetup
) -> Iterator[CheckFinding]:
    """Nothing where enroot has no configuration."""
    settings = site.settings
    if site.program and not site.is_told and files.find_mode(site.sysconf) is None:
        yield CheckFinding(
            "enroot-unread",
            "unknown",
            f"{site.program} does not say where its configuration lies, and there is no"
            f" {site.sysconf}",
            "A directory that containers bind without rbind would be missed: with an image below it"
            " they do not start (Invalid argument)",
            f"ln -s DIRECTORY {site.sysconf}, where enroot's configuration lies in another",
        )
    # A variable in one is a job's.
    binds = [
        one
        for one in enroot.list_site_binds(files, site)
        if one.source.startswith("/") and "$" not in one.source
    ]
    reals = files.resolve_paths((HOMES_DIRECTORY, *sources, *(one.source for one in binds)))
    below = [f"{reals[source].rstrip('/')}/" for source in sources]
    for bind in islice(
        (one for one in binds if _may_contain_image(reals[one.source], below)), MAX_BIND_FINDINGS
    ):
        yield _make_bind_finding(
            f"{bind.file}:{bind.line} binds {bind.source}, where images lie, without what is"
            " mounted below it",
            f"{bind.file}: rbind instead of bind in line {bind.line}",
        )
    if enroot.is_true_setting(settings.get("ENROOT_MOUNT_HOME", "")) and _may_contain_image(
        reals[HOMES_DIRECTORY], below
    ):
        yield _make_bind_finding(
            f"{site.conf} has ENROOT_MOUNT_HOME, and images may lie in users' home directories",
            f"{site.conf}: ENROOT_MOUNT_HOME no (users who need theirs:"
            " --container-mounts=$HOME), or sources: without /home",
        )
    yield from _list_hook_findings(files, site)
    yield from _list_leftover_findings(files, settings)


def _list_hook_findings(files: RootedTree, site: EnrootSetup) -> Iterator[CheckFinding]:
    """The site's hooks that mount: what they bind is known to nobody before they run."""
    folder = f"{site.sysconf}/hooks.d"
    for name in files.list_names(folder):
        text = files.read_text_or_none(f"{folder}/{name}", HOOK_BYTES) or ""
        if name.endswith(".sh") and name not in ENROOT_HOOK_NAMES and _MOUNTS.search(text):
            yield CheckFinding(
                "bind-by-hook",
                "warning",
                f"{folder}/{name} mounts into containers, and may do so without rbind",
                "forestage cannot tell what a program binds: if that is a directory with an image"
                " below it, containers of a staged image do not start (Invalid argument)",
                f"{folder}/{name}: rbind in what it writes to ENROOT_MOUNTS",
            )


def _make_bind_finding(what: str, change: str) -> CheckFinding:
    consequence = (
        "An image below it is not redirected for jobs that are seen to mount it; while one is for"
        " another job (bind), containers with that mount fail to start: Invalid argument"
    )
    return CheckFinding("bind-over-redirects", "warning", what, consequence, change)


def _may_contain_image(bound: str, sources: Sequence[str]) -> bool:
    """Pure: whether a redirect may lie below a bound directory; sources end in a slash."""
    real = f"{bound.rstrip('/')}/"
    return any(one.startswith(real) or real.startswith(one) for one in sources)


def _list_leftover_findings(files: RootedTree, settings: dict[str, str]) -> Iterator[CheckFinding]:
    """Root file systems of steps that are over. pyxis removes them unless it was killed."""
    pattern = _VARIABLE.sub("*", settings.get("ENROOT_DATA_PATH", ""))
    if not pattern.startswith("/") or pattern.strip("/*") == "":
        return
    live = {
        str(job)
        for job in slurm_client.SlurmClient(
            "", proc=files.host_path("/proc")
        ).list_jobs_with_steps()
    }
    left = []
    for found in sorted(files.root.glob(f"{pattern.strip('/')}/pyxis_*")):
        job = _CONTAINER_NAME.fullmatch(found.name)
        if job and job[1] not in live:
            left.append(found)
    if left:
        first = Path("/", left[0].relative_to(files.root))
        yield CheckFinding(
            "containers-left",
            "warning",
            f"{format_count(len(left), 'root file system')} of steps that are over, such as"
            f" {first}",
            "Nobody removes them, and the cache has that much less room on the same disk",
            f"as their owner: enroot remove --force {first.name} (forestage deletes nothing of"
            " enroot's)",
        )
