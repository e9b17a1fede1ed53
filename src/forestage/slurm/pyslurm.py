"""Slurm's answers through pyslurm, where the site has installed one that fits its release.

Nothing here is needed: the commands answer the same, and decide wherever this is in doubt. pyslurm
loads libslurm, which may end the process that loads it, or wait for a dead slurmctld for minutes;
so each question is asked in a child, with a time limit. No hook imports it, and no package of ours
has it: it is GPL, and fits one release of Slurm (docs/decisions/0015).
"""

import errno
from collections.abc import Callable
from importlib import metadata
from typing import Any

import msgspec

from forestage.errors import Declined
from forestage.slurm import slurm_release
from forestage.system import as_user

INVALID_JOB, INVALID_NODE = 2017, 2018  # slurm_errno.h: ESLURM_INVALID_JOB_ID, …_NODE_NAME


class SlurmAnswer(msgspec.Struct, frozen=True):
    """What Slurm says of a job or a node; both are "" of what it does not know."""

    known: bool
    state: str = ""
    nodes: str = ""


def find_installed_version() -> str:
    """The version of pyslurm, or ""; it is not loaded."""
    try:
        return metadata.version("pyslurm")
    except metadata.PackageNotFoundError:
        return ""


def is_compatible(version: str) -> bool:
    """Whether the pyslurm is for this release of Slurm: the text of `squeue --version`."""
    own = slurm_release.parse_release(find_installed_version())
    return own != "" and own == slurm_release.parse_release(version)


def find_job(number: int, timeout: float) -> SlurmAnswer | None:
    """What Slurm says of a job; None where that is not clear."""

    def ask(pyslurm: Any) -> SlurmAnswer:
        found = pyslurm.Job.load(number)
        if found.id != number:  # of an array, perhaps another task's
            raise OSError(errno.EINVAL, "another job")
        return SlurmAnswer(True, str(found.state), str(found.allocated_nodes or ""))

    return _query_in_child(ask, INVALID_JOB, timeout)


def find_node(name: str, timeout: float) -> SlurmAnswer | None:
    """Whether Slurm has such a node; None where that is not clear."""

    def ask(pyslurm: Any) -> SlurmAnswer:
        return SlurmAnswer(str(pyslurm.Node.load(name).name) == name)

    return _query_in_child(ask, INVALID_NODE, timeout)


def _query_in_child(
    ask: Callable[[Any], SlurmAnswer], unknown: int, timeout: float
) -> SlurmAnswer | None:
    def work() -> as_user.ChildResult[SlurmAnswer]:
        try:
            import pyslurm  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:  # its libslurm is gone, or another
            raise OSError(errno.ENOENT, str(error)) from None
        try:
            return ask(pyslurm), []
        except pyslurm.RPCError as error:
            if error.errno == unknown:
                return SlurmAnswer(False), []
            raise OSError(errno.EIO, str(error)) from None

    try:
        told, fds = as_user.run_in_child(work, SlurmAnswer, timeout)
    except (OSError, Declined):
        return None
    assert not fds
    return told
