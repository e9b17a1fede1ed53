"""Findings about a host where jobs are submitted: whether `--stage` is known there, and checked.

Nothing else of forestage has to be there, and no slurmd: the release is not compared.
"""

from collections.abc import Iterator

from forestage.admin import site as sites
from forestage.check.finding import Finding
from forestage.check.plugins import HELPER
from forestage.system.tree import Files


def findings(files: Files, conf: str) -> Iterator[Finding]:
    """Reads slurm.conf and plugstack.conf; `conf` is $SLURM_CONF or ""."""
    site = sites.find(files, conf)
    if site is None:
        yield Finding(
            "slurm-conf",
            "unknown",
            "slurm.conf cannot be read",
            "Whether jobs can be submitted with --stage here cannot be told",
            "SLURM_CONF=/path/to/slurm.conf forestage check --login",
        )
        return
    ours = site.stack.companion
    if ours is None or not ours.exists:
        yield Finding(
            "login-no-option",
            "warning",
            f"{site.stack.file} names no companion that is installed here",
            "srun, sbatch and salloc refuse --stage on this host: users write the comment",
            "install the package forestage-spank for this host's Slurm"
            + ("" if site.stack.includes else ", and the line that `forestage enable` prints"),
        )
        return
    if ours.line.required:
        yield Finding(
            "companion-required",
            "warning",
            f"{ours.line.where} says `required`",
            "If the plugin cannot be loaded, as after an upgrade of Slurm, no job can be submitted",
            f"{ours.line.file}: `optional` in its place",
        )
    program = ours.line.argument("helper") or HELPER
    if not (files.mode(program) or 0) & 0o111:
        yield Finding(
            "login-no-check",
            "warning",
            f"{program} is not there, or not executable",
            "A wrong --stage is submitted, and its job's first step says so",
            "install the package forestage, or accept that",
        )
