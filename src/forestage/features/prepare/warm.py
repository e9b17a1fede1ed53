"""Has nodes copy images before a job wants them: `forestage warm`, one tiny job per node.

Slurm decides who may use a node and when, and the node's own Prolog does the rest, as for any job:
it opens the images as the user who asks. There is one job for each node, so that one that is busy
or down holds up no other. The answer (warm_node.py) comes through srun, so no shared directory is
needed.

An interrupted command leaves no job behind. An srun that is killed leaves its job, so the jobs are
cancelled by a name that no other job has, and each srun ends with its job.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import quote

import msgspec
from ClusterShell import Defaults, NodeSet, NodeUtils

from forestage.clock import Clock
from forestage.errors import NotFoundError, SlurmError
from forestage.features.prepare.job_images import ImageResult
from forestage.features.prepare.warm_node import WarmNodeReport
from forestage.slurm.hints import MAX_HINTED_PATHS
from forestage.slurm.slurm_client import SlurmClient
from forestage.system.run import ProcessResult
from forestage.system.terminal import OutputBlock, TextLine, TextTable, format_count
from forestage.units import format_duration

# Where the packages put the interpreter on every node; the hooks start the same one.
PYTHON = "/usr/lib/forestage/bin/python3"
# A job beside others, where the partition allows that; no MPI, and no directory of ours.
SRUN = ("--nodes=1", "--ntasks=1", "--oversubscribe", "--mpi=none", "--chdir=/", "--quiet")
# srun's task has its job's number in the environment; nothing else goes through the shell.
SCRIPT = 'exec "$0" -I -m forestage.features.prepare.warm_node "$SLURM_JOB_ID" "$@"'
MAX_NAMED = 4  # nodes that the progress names
CANCEL_TIMEOUT = 10.0  # seconds for cancelled jobs to end
CANCEL_EVERY = 0.5  # seconds between two scancels
SIGNAL_POLL = 0.5  # seconds until a signal is noticed, at the most

MAX_IMAGES = MAX_HINTED_PATHS


class WarmRequest(msgspec.Struct, frozen=True):
    """What is wanted. `images` are absolute paths as the nodes have them.

    `options` are more of srun's. `wait` is a hint; `busy` the seconds after which a node that Slurm
    has not given is left out.
    """

    images: tuple[str, ...]
    nodes: tuple[str, ...]
    options: tuple[str, ...] = ()
    wait: str = ""
    busy: float = 300.0
    at_once: int = 64


class WarmNodeResult(msgspec.Struct, frozen=True):
    """One node. `seconds`: until its job was over, the wait for the node included.

    `job` is 0 and `problem` says why where there is no answer.
    """

    node: str
    seconds: float
    job: int = 0
    images: tuple[ImageResult, ...] = ()
    problem: str = ""

    @property
    def is_warm(self) -> bool:
        return bool(self.images) and all(one.is_here for one in self.images)


class WarmReport(msgspec.Struct, frozen=True):
    """All nodes, in the order of the node set; `failed` have not got every image."""

    failed: int
    nodes: tuple[WarmNodeResult, ...]


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the nodes of a ClusterShell node set, groups included. Raises ValueError.

    ClusterShell would also read the sample groups that its wheel puts below the interpreter's own
    prefix, and `@all` would be nodes that no site has.
    """
    paths = Defaults.config_paths("groups.conf")
    paths = [path for path in paths if Path(sys.prefix) not in Path(path).parents]
    groups = NodeUtils.GroupResolverConfig(paths, illegal_chars=NodeSet.ILLEGAL_GROUP_CHARS)
    try:
        found = tuple(NodeSet.NodeSet(text, resolver=groups))
    except NodeUtils.GroupResolverError:
        raise ValueError(f"a group of {text!r} is not in ClusterShell's groups.conf") from None
    except NodeSet.NodeSetException as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError(f"{text!r} names no node")
    return found


def list_partition_nodes(name: str, slurm: SlurmClient) -> tuple[str, ...]:
    """Return all nodes of a partition, each once.

    Raises NotFoundError if it has none, SlurmError.
    """
    words = ("--noheader", "--local", "--Node", "--format=%N", f"--partition={name}")
    found = tuple(dict.fromkeys(slurm.query("sinfo", *words).split()))
    if not found:
        raise NotFoundError(f"Slurm has no partition {name}, or it has no node", "see `sinfo`")
    return found


def format_comment(order: WarmRequest) -> str:
    """Pure: the hint, as slurm/hints.py reads it: commas, spaces and `;` separate names there."""
    paths = ",".join(quote(image, safe="/", errors="surrogateescape") for image in order.images)
    return f"stage={paths}" + (f" stage-wait={order.wait}" if order.wait else "")


def format_srun_command(order: WarmRequest, node: str, name: str) -> list[str]:
    """Pure: srun's command line for one node."""
    return [
        *("srun", *SRUN, f"--job-name={name}", f"--nodelist={node}"),
        *(f"--immediate={max(1, round(order.busy))}", f"--comment={format_comment(order)}"),
        *(*order.options, "--"),
        *("sh", "-c", SCRIPT, PYTHON, *order.images),
    ]


def parse_node_result(node: str, ran: ProcessResult, seconds: float) -> WarmNodeResult:
    """Pure: what the job printed among whatever else there is (a TaskProlog may print, too)."""
    took = round(seconds, 3)
    for line in reversed(ran.out.splitlines()):
        try:
            report = msgspec.json.decode(line, type=WarmNodeReport)
        except msgspec.DecodeError:
            continue
        return WarmNodeResult(node, took, report.job, report.images)
    return WarmNodeResult(node, took, problem=find_problem(ran.code, ran.err))


def find_problem(code: int, err: str) -> str:
    """Return srun's first error, from which others follow, or its exit status. Pure."""
    lines = [line.removeprefix("srun: ") for line in err.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*errors, *lines, f"it ended with {code} and no answer"][0]


def warm_nodes(
    order: WarmRequest,
    slurm: SlurmClient,
    clock: Clock,
    token: str,
    progress: Callable[[str], None],
) -> WarmReport:
    """Runs the jobs and waits for all. Raises SlurmError where Slurm's commands are missing.

    `token` makes the jobs' name unique, so that an interrupt cancels these and no others.
    """
    slurm.locate_command("srun")
    name, kill = f"forestage-warm-{token}", threading.Event()

    def ask(node: str) -> WarmNodeResult:
        began = clock.monotonic()
        ran = slurm.run_command(format_srun_command(order, node, name), kill)
        return parse_node_result(node, ran, clock.monotonic() - began)

    answers: dict[str, WarmNodeResult] = {}
    futures: dict[Future[WarmNodeResult], str] = {}
    pool = ThreadPoolExecutor(min(order.at_once, len(order.nodes)))
    with pool, contextlib.ExitStack() as interrupted:  # its last callback comes first
        interrupted.callback(kill.set)
        interrupted.callback(_cancel_jobs, slurm, clock, name, futures)
        interrupted.callback(lambda: [future.cancel() for future in futures])
        for node in order.nodes:
            futures[pool.submit(ask, node)] = node
        left = set(futures)
        while left:
            progress(format_progress(order, answers))
            # In short turns: CPython may sleep through a signal that comes just before a wait,
            # and wakes only for the next one.
            over, left = wait(left, SIGNAL_POLL, FIRST_COMPLETED)
            answers |= {futures[one]: one.result() for one in over}
        interrupted.pop_all()
    nodes = tuple(answers[node] for node in order.nodes)
    return WarmReport(sum(not one.is_warm for one in nodes), nodes)


def _cancel_jobs(
    slurm: SlurmClient, clock: Clock, name: str, futures: "Iterable[Future[WarmNodeResult]]"
) -> None:
    """Cancels the jobs until no srun is left, for CANCEL_TIMEOUT at most."""
    end = clock.monotonic() + CANCEL_TIMEOUT
    while True:  # more than once: an srun may be about to submit its job
        with contextlib.suppress(SlurmError):
            slurm.query("scancel", f"--name={name}")
        if not wait(futures, CANCEL_EVERY).not_done or clock.monotonic() >= end:
            return


def format_progress(order: WarmRequest, answers: dict[str, WarmNodeResult]) -> str:
    """Pure: one line while it goes on."""
    missing = [node for node in order.nodes if node not in answers]
    named = ", ".join(missing[:MAX_NAMED]) + (", ..." if len(missing) > MAX_NAMED else "")
    done = f"{len(answers)} of {format_count(len(order.nodes), 'node')} done"
    waiting = f"waiting for {named}" if named else ""
    return "; ".join(filter(None, (done, _format_totals(answers.values()), waiting)))


def _format_totals(answers: Iterable[WarmNodeResult]) -> str:
    """Pure: "3 hit, 1 no answer"."""
    results: Counter[str] = Counter()
    for one in answers:
        results.update(image.result for image in one.images)
        results.update([] if one.images else ["no answer"])
    return ", ".join(f"{number} {result}" for result, number in results.most_common())


def format_output(done: WarmReport) -> list[OutputBlock]:
    """Pure: what `warm` prints."""
    columns = ("node", "result", "staged", "job", "took", "image or reason")
    rows: list[tuple[str, ...]] = []
    for one in done.nodes:
        took = format_duration(one.seconds)
        if not one.images:
            rows.append((one.node, "no answer", "-", "-", took, one.problem))
        for image in one.images:
            why = ": ".join(filter(None, (image.reason, image.detail)))
            what = f"{image.image} ({why})" if why else image.image
            staged = "-" if image.wait is None else format_duration(image.wait)
            rows.append((one.node, image.result, staged, str(one.job), took, what))
    warm = len(done.nodes) - done.failed
    head = f"{warm} of {format_count(len(done.nodes), 'node')} warm: {_format_totals(done.nodes)}"
    return [TextLine(head, heading=True), TextTable(columns, rows)]
