"""Slurm's answers about jobs and nodes. For timers and people, never for a hook."""

import contextlib
import re
import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from forestage.errors import SlurmError
from forestage.slurm import pyslurm
from forestage.slurm.nodelist import expand_nodelist
from forestage.system import processes, run

TIMEOUT = 30.0  # seconds for one question; squeue itself tries a dead slurmctld for longer

# slurm.h, enum job_states from JOB_COMPLETE on. Whatever else Slurm may call a job, now or in
# another release (COMPLETING: its Epilog is not over), the job is not over.
OVER = frozenset(
    (
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
    )
)
UNKNOWN_JOB = "Invalid job id specified"  # slurm_errno.c, ESLURM_INVALID_JOB_ID

_LINE = re.compile(r"([0-9]+)\|([A-Z_]+)\|(\S*)", re.ASCII)
# setproctitle() in slurmstepd.c; the second may be `batch`, `extern`, `0`.
_MANAGER = re.compile(rb"slurmstepd: \[([0-9]{1,10})[.+]")


class JobState(msgspec.Struct, frozen=True):
    """What Slurm says of a job: its state in capitals, and its nodes as a list in brackets."""

    state: str
    nodes: str


def read_own_node_name(environ: Mapping[str, str]) -> str:
    """This node's name as Slurm has it, as far as that is known here."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


class SlurmClient(NamedTuple):
    """How Slurm is asked. `path` is where its commands are looked for, `conf` SLURM_CONF or "".

    `uses_pyslurm`: pyslurm is asked before them. It has $SLURM_CONF from this process. `node` is
    this one, as Slurm names it where that is known, else its host's name.
    """

    path: str
    conf: str = ""
    proc: Path = Path("/proc")
    uses_pyslurm: bool = False
    node: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "SlurmClient":
        """As who calls has it, with the usual directories behind it."""
        path = ":".join(filter(None, (environ.get("PATH", ""), run.PATH)))
        return cls(path, environ.get("SLURM_CONF", ""), node=read_own_node_name(environ))

    def with_pyslurm(self) -> "SlurmClient":
        """Asks pyslurm first where the installed one fits this release of Slurm."""
        with contextlib.suppress(SlurmError):
            if pyslurm.find_installed_version():
                return self._replace(
                    uses_pyslurm=pyslurm.is_compatible(self._run_in_time("squeue", "--version").out)
                )
        return self

    def find_job(self, job: int) -> JobState | None:
        """What becomes of a job; None: Slurm does not know it any more.

        Raises SlurmError where there is no answer, or one that may mean anything.
        """
        if self.uses_pyslurm:
            told = pyslurm.find_job(job, TIMEOUT)
            if told is not None:
                return JobState(told.state, told.nodes) if told.known else None
        # --local: a job of another cluster of the federation may have the same number.
        ran = self._run_in_time(
            "squeue", "--noheader", "--local", "--states=all", "--format=%A|%T|%N", f"--jobs={job}"
        )
        if ran.code == 1 and ran.err.rstrip().endswith(UNKNOWN_JOB) and not ran.out:
            return None
        if ran.code != 0:
            raise SlurmError(ran.format_ending())
        return parse_job_state(ran.out, job)

    def has_node(self, node: str) -> bool:
        """Whether this Slurm has such a node. Raises SlurmError where it does not answer."""
        if self.uses_pyslurm:
            told = pyslurm.find_node(node, TIMEOUT)
            if told is not None:
                return told.known
        ran = self._run_in_time("scontrol", "--oneliner", "show", "node", node)
        if ran.code == 0:
            return f"NodeName={node} " in ran.out
        if f"Node {node} not found" in ran.out + ran.err:
            return False
        raise SlurmError(ran.format_ending())

    def list_jobs_with_steps(self) -> frozenset[int]:
        """The jobs that have a step on this node: known without asking anybody."""
        return frozenset(self.list_step_managers().values())

    def list_step_managers(self) -> dict[int, int]:
        """The step managers (slurmstepd) of this node by their pids, each with its job."""
        found = {}
        for process, title in processes.list_root_processes(self.proc):
            manager = _MANAGER.match(title)
            if manager:
                found[int(process.name)] = int(manager[1])
        return found

    def run_command(
        self,
        words: Sequence[str],
        stop: threading.Event | None = None,
        limit: float | None = None,
        variables: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> run.ProcessResult:
        """Runs one of Slurm's commands, until `stop` or for `limit` seconds.

        `variables` are its own, beside SLURM_CONF. `most` as `max_bytes` of `run.run_program`.
        Raises SlurmError, Failed.
        """
        argv = [self.locate_command(words[0]), *words[1:]]
        given = {"SLURM_CONF": self.conf} if self.conf else {}
        given.update(variables or {})
        return run.run_program(argv, stop=stop, timeout=limit, variables=given, max_bytes=most)

    def query(
        self, *words: str, variables: Mapping[str, str] | None = None, most: int | None = None
    ) -> str:
        """Return what one of Slurm's commands prints, in time. Raises SlurmError if it fails."""
        ran = self._run_in_time(*words, variables=variables, most=most)
        if ran.code != 0:
            raise SlurmError(ran.format_ending())
        return ran.out

    def locate_command(self, name: str) -> str:
        """Where one of Slurm's commands is. Raises SlurmError."""
        there = shutil.which(name, path=self.path)
        if there is None:
            raise SlurmError(f"{name} is not installed", "its directory belongs into PATH")
        return there

    def _run_in_time(
        self, *words: str, variables: Mapping[str, str] | None = None, most: int | None = None
    ) -> run.ProcessResult:
        """How one of Slurm's commands ended, in time. Raises SlurmError."""
        ran = self.run_command(words, limit=TIMEOUT, variables=variables, most=most)
        if ran.code < 0:
            raise SlurmError(f"{words[0]} did not end within {TIMEOUT:.0f} s")
        return ran


def parse_job_state(listing: str, job: int) -> JobState | None:
    """Pure: the job's own line among those of its array or its other parts.

    Raises SlurmError where any line is of another form, or there is none at all.
    """
    lines = [_LINE.fullmatch(line.rstrip()) for line in listing.splitlines()]
    parsed = [line for line in lines if line is not None]
    own = [JobState(line[2], line[3]) for line in parsed if int(line[1]) == job]
    if not lines or len(parsed) < len(lines) or len(own) > 1:
        raise SlurmError(f"squeue's answer about job {job} cannot be understood: {listing[:200]!r}")
    return own[0] if own else None


def find_end_reason(state: JobState | None, node: str) -> str:
    """Pure: why a job is over on the node of that name, for people; "" where it may not be.

    `node` is "" where nobody knows it. A job without nodes waits, and may come (back) to this one.
    """
    if state is None:
        return "Slurm does not know the job any more"
    if state.state in OVER:
        return f"the job is {state.state}"
    if not (state.nodes and node):
        return ""
    nodes = expand_nodelist(state.nodes)
    return f"the job is {state.state} on other nodes" if nodes and node not in nodes else ""
