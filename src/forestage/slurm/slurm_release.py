"""The release of Slurm on this node, as 22.05: `slurmd -V` says it, which asks no daemon."""

import re
from collections.abc import Iterable

from forestage.errors import Failed
from forestage.system import run
from forestage.system.tree import RootedTree

COMMENT_IN_PROLOG = "22.05"
"""The first release that tells a Prolog the job's comment, and knows PrologFlags=DeferBatch."""

RELATIVE_HOOKS = "23.11"
"""The first release in which a Prolog= or Epilog= without a directory is a file beside slurm.conf,
and slurmctld sends it to configless nodes (CHANGELOG of 23.11.0rc1, configless_slurm.html)."""

TIMEOUT = 5.0  # seconds for `slurmd -V`

_RELEASE = re.compile(r"\b([0-9]{2})\.([0-9]{1,2})\b", re.ASCII)


def find_slurm_release(files: RootedTree, plugin_folders: Iterable[str]) -> str:
    """The release of this node's slurmd, "" where that cannot be told. Runs it."""
    beside = [f"{one.partition('/lib')[0]}/sbin/slurmd" for one in plugin_folders]
    program = files.find_program("slurmd") or next(filter(files.is_executable, beside), "")
    if not program:
        return ""
    try:
        ran = run.run_program([str(files.host_path(program)), "-V"], timeout=TIMEOUT)
    except (Failed, OSError):
        return ""
    return parse_release(ran.out) if ran.code == 0 else ""


def parse_release(text: str) -> str:
    """Pure: 22.05 of `slurm-wlm 22.05.8`: a SPANK plugin has to match no more than that.

    And of pyslurm's "22.5.1".
    """
    found = _RELEASE.search(text)
    return f"{found[1]}.{int(found[2]):02d}" if found else ""
