"""Have these nodes copied these images? `forestage warm`: a tiny job with the hint on each node.

Slurm itself says who may use a node and when, and the node's own Prolog does the rest, as for any
job: it looks at the images as the user who asks. There is a job for each node, so that one that is
busy or down holds up no other. The answer comes through srun, so no shared directory is needed.
"""

import contextlib
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from forestage.clock import Clock
from forestage.errors import SlurmError
from forestage.slurm.job import MAX_HINTED
from forestage.slurm.queue import TIMEOUT, Slurm
from forestage.system import run
from forestage.system.run import Ran
from forestage.system.terminal import Column, Line, Piece, Table, count
from forestage.units import format_duration
from forestage.warmed import Report, Said

# Where the packages put the interpreter on every node; the hooks start the same one.
PYTHON = "/usr/lib/forestage/bin/python3"
# srun's task has its job's number in the environment; nothing else goes through the shell.
SCRIPT = 'exec "$0" -I -m forestage.warmed "$SLURM_JOB_ID" "$@"'
NAMED = 4  # nodes that the progress names
PATIENCE = 10.0  # seconds for cancelled jobs to end
AGAIN = 0.5  # seconds between two scancels
HEED = 0.5  # seconds until a signal is heeded, at the most

MAX_IMAGES = MAX_HINTED


class Order(msgspec.Struct, frozen=True):
    """What is wanted. `busy`: seconds for which Slurm may take to give a node; `wait`: a hint.

    `options` are more of srun's. `images` are absolute paths as the nodes have them.
    """

    images: tuple[str, ...]
    nodes: tuple[str, ...]
    options: tuple[str, ...] = ()
    wait: str = ""
    busy: float = 300.0
    at_once: int = 64


class Answer(msgspec.Struct, frozen=True):
    """One node. `seconds`: until its job was over, the wait for the node included.

    `job` is 0 and `problem` says why where there is no answer.
    """

    node: str
    seconds: float
    job: int = 0
    images: tuple[Said, ...] = ()
    problem: str = ""

    @property
    def is_warm(self) -> bool:
        return bool(self.images) and all(one.is_here for one in self.images)


class Warmed(msgspec.Struct, frozen=True):
    """All nodes, in the order of the node set; `failed` have not got every image."""

    failed: int
    nodes: tuple[Answer, ...]


class Asking(NamedTuple):
    """What all threads of one command share; `name` is that of its jobs, and of no others."""

    order: Order
    slurm: Slurm
    clock: Clock
    name: str
    stop: threading.Event


def nodes_of(text: str) -> tuple[str, ...]:
    """The nodes of a ClusterShell node set, groups included. Raises ValueError."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        found = tuple(NodeSet(text))
    except NodeSetException as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError(f"{text!r} names no node")
    return found


def comment(order: Order) -> str:
    """Pure: the hint, as job.py reads it: commas, blanks and `;` part names there."""
    paths = ",".join(quote(image, safe="/", errors="surrogateescape") for image in order.images)
    return f"stage={paths}" + (f" stage-wait={order.wait}" if order.wait else "")


def argv(order: Order, node: str, name: str, since: float) -> list[str]:
    """Pure: srun's command line for one node."""
    return [
        *("srun", f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--nodelist={node}"),
        # Beside other jobs where the partition allows that; no MPI, and no directory of ours.
        *("--oversubscribe", "--mpi=none", "--chdir=/", "--quiet"),
        *(f"--immediate={max(1, round(order.busy))}", f"--comment={comment(order)}"),
        *(*order.options, "--"),
        *("sh", "-c", SCRIPT, PYTHON, f"{since:.3f}", *order.images),
    ]


def answer(node: str, ran: Ran, seconds: float) -> Answer:
    """Pure: what the job printed among whatever else there is (a TaskProlog may print, too)."""
    took = round(seconds, 3)
    for line in reversed(ran.out.splitlines()):
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:
            continue
        return Answer(node, took, report.job, report.images)
    words = [line.removeprefix("srun: ") for line in ran.err.splitlines() if line.strip()]
    return Answer(node, took, problem=_why(words) or f"srun ended with {ran.code} and no answer")


def _why(words: list[str]) -> str:
    """Pure: the first of srun's words says what is wrong, later ones what follows from it."""
    errors = [word.removeprefix("error: ") for word in words if word.startswith("error: ")]
    return (errors or words or [""])[0]


def warm(
    order: Order, slurm: Slurm, clock: Clock, token: str, tell: Callable[[str], None]
) -> Warmed:
    """Runs the jobs and waits for all. Raises SlurmError where Slurm's commands are missing.

    `token` makes the jobs' name one that no other has, so that ^C cancels these and no others.
    """
    if shutil.which("srun", path=slurm.path) is None:
        raise SlurmError("srun is not installed", "its directory belongs into PATH")
    asking = Asking(order, slurm, clock, f"forestage-warm-{token}", threading.Event())
    pool = ThreadPoolExecutor(max_workers=min(order.at_once, len(order.nodes)))
    answers: dict[str, Answer] = {}
    futures: dict[Future[Answer], str] = {}
    with contextlib.ExitStack() as always, contextlib.ExitStack() as undo:
        always.callback(pool.shutdown, cancel_futures=True)
        undo.callback(_cancel, asking, futures)  # ^C: no job of ours may stay behind
        for node in order.nodes:
            futures[pool.submit(_ask, asking, node)] = node
        tell(progress(order, answers))
        for future in _ended(futures):
            answers[futures[future]] = future.result()
            tell(progress(order, answers))
        undo.pop_all()
    return summed(answers[node] for node in order.nodes)


def _ended(futures: "dict[Future[Answer], str]") -> "Iterator[Future[Answer]]":
    """Each of them once it is over.

    Not for ever in one wait: CPython may sleep through a signal that comes just before it, and
    wakes only for the next.
    """
    left = set(futures)
    while left:
        over, left = wait(left, HEED, FIRST_COMPLETED)
        yield from over


def _ask(asking: Asking, node: str) -> Answer:
    """In a thread of its own: the job of one node, from its submission to its end."""
    began = asking.clock.monotonic()
    words = argv(asking.order, node, asking.name, asking.clock.wall())
    ran = _run(asking.slurm, words, asking.stop)
    return answer(node, ran, asking.clock.monotonic() - began)


def _run(slurm: Slurm, words: list[str], stop: threading.Event, limit: float | None = None) -> Ran:
    variables = {"SLURM_CONF": slurm.conf} if slurm.conf else {}
    there = shutil.which(words[0], path=slurm.path)
    if there is None:
        raise SlurmError(f"{words[0]} is not installed", "its directory belongs into PATH")
    return run.run([there, *words[1:]], stop=stop, timeout=limit, variables=variables)


def _cancel(asking: Asking, futures: "dict[Future[Answer], str]") -> None:
    """Returns when no srun is left, after PATIENCE at the latest. An srun that is killed leaves
    its job behind, so Slurm is to end the jobs, and they the sruns."""
    for future in futures:
        future.cancel()
    words = ["scancel", f"--name={asking.name}"]
    end = asking.clock.monotonic() + PATIENCE
    try:
        # Again and again: an srun may just have begun to ask for its job.
        while True:
            _run(asking.slurm, words, threading.Event(), TIMEOUT)
            left = wait(futures, AGAIN).not_done
            if not left or asking.clock.monotonic() >= end:
                return
    finally:
        asking.stop.set()


def summed(answers: Iterable[Answer]) -> Warmed:
    """Pure."""
    nodes = tuple(answers)
    return Warmed(sum(not one.is_warm for one in nodes), nodes)


def progress(order: Order, answers: dict[str, Answer]) -> str:
    """Pure: one line while it goes on."""
    missing = [node for node in order.nodes if node not in answers]
    named = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
    done = f"{len(answers)} of {count(len(order.nodes), 'node')} done"
    told = ", ".join(_totals(answers.values()))
    return "; ".join(filter(None, (done, told, f"waiting for {named}" if named else "")))


def _totals(answers: Iterable[Answer]) -> Iterator[str]:
    """Pure: "3 hit", "1 no answer"."""
    results: Counter[str] = Counter()
    for one in answers:
        results.update(image.result for image in one.images)
        results.update(() if one.images else ("no answer",))
    for result, number in results.most_common():
        yield f"{number} {result}"


def pieces(done: Warmed) -> list[Piece]:
    """Pure: what `warm` prints."""
    columns = (
        Column("node"),
        Column("result"),
        Column("staged", right=True),
        Column("job", right=True),
        Column("took", right=True),
        Column("image or reason", folds=True),
    )
    rows = tuple(row for one in done.nodes for row in _rows(one))
    warm = len(done.nodes) - done.failed
    head = f"{warm} of {count(len(done.nodes), 'node')} warm: {', '.join(_totals(done.nodes))}"
    return [Line(head, heading=True), Table(columns, rows)]


def _rows(one: Answer) -> Iterator[tuple[str, ...]]:
    took = format_duration(one.seconds)
    if not one.images:
        yield (one.node, "no answer", "-", "-", took, one.problem)
    for image in one.images:
        why = ": ".join(filter(None, (image.reason, image.detail)))
        what = f"{image.image} ({why})" if why else image.image
        staged = "-" if image.wait is None else format_duration(image.wait)
        yield (one.node, image.result, staged, str(one.job), took, what)
