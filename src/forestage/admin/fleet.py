"""One command on many nodes: `forestage ls -w n[1-64]`, folded as `clush -b` folds.

ClusterShell runs `forestage … --json` on each node, over ssh or as a tiny job of srun's, and what
the nodes answer becomes one table. Rows that are the same on several nodes are one row. A node that
does not answer in time is named and makes the exit status 11; all others are shown.
"""

import contextlib
import operator
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from forestage.admin import evict, explain, nodes, show, status, switching, verify
from forestage.admin.evict import Evictions
from forestage.admin.inventory import Item
from forestage.admin.status import Status
from forestage.errors import ForestageError, SlurmError
from forestage.events import Bad, Handled, Released
from forestage.slurm.queue import Slurm
from forestage.system.terminal import Line, Piece, Table, count, short
from forestage.units import format_duration, format_size

# Where the packages put the command on every node.
COMMAND = "/usr/lib/forestage/bin/forestage"
OURS = "forestage: "  # how a message of the command itself begins
# A job beside others, where the partition allows that, which is over in a moment. It has no
# comment: a hint, even stage=off, would leave a lease for the answer to show.
SRUN = ("--nodes=1", "--ntasks=1", "--oversubscribe", "--mpi=none", "--chdir=/", "--quiet")
NONE = ("-", "0")  # cells that say nothing
FEW = ("damaged", "leases", "copies", "failure", "why")
CONNECT = 10  # seconds for a node's sshd to answer

By = Literal["ssh", "srun"]
Progress = Callable[[str], None]
Cells = tuple[str, ...]
T = TypeVar("T")


class Question(msgspec.Struct, frozen=True):
    """What is asked of which nodes. `options` are more of srun's, `within` is seconds for each."""

    nodes: tuple[str, ...]
    words: tuple[str, ...]
    by: By = "ssh"
    within: float = 60.0
    at_once: int = 64
    options: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True):
    """One node's. `document` is "" where there is none; then `problem` says why.

    `code` is the command's exit status; None: it was not reached, or did not end in time.
    """

    node: str
    code: int | None
    document: str = ""
    problem: str = ""


def command(question: Question, srun: str, name: str) -> str:
    """Pure: what a shell runs: on the node by ssh, here for srun, where %h is the node."""
    words = shlex.join([COMMAND, question.words[0], "--json", *question.words[1:]])
    if question.by == "ssh":
        return words
    minutes = int(question.within // 60) + 1
    limits = (f"--immediate={max(1, int(question.within))}", f"--time={minutes}")
    job = shlex.join([srun, *SRUN, f"--job-name={name}", *limits, *question.options])
    return f"{job.replace('%', '%%')} --nodelist=%h -- {words.replace('%', '%%')}"


def ask(question: Question, slurm: Slurm, token: str, progress: Progress) -> tuple[Reply, ...]:
    """Runs the command on all nodes; returns their answers in the order of the nodes.

    `token` makes the name of srun's jobs unique, so that none of them outlives this command. Raises
    SlurmError where srun is missing, ForestageError where ssh is.
    """
    from ClusterShell.Event import EventHandler
    from ClusterShell.Task import Task, task_self
    from ClusterShell.Worker.Exec import ExecWorker
    from ClusterShell.Worker.Ssh import WorkerSsh

    srun = shutil.which("srun", path=slurm.path)
    if question.by == "srun" and srun is None:
        raise SlurmError("srun is not installed", "add its directory to PATH, or use --by ssh")
    if question.by == "ssh" and shutil.which("ssh") is None:  # of which ClusterShell says nothing
        raise ForestageError("ssh is not installed", "use --by srun")
    left = set(question.nodes)

    class Count(EventHandler):  # type: ignore[misc]
        def ev_hup(self, worker: Any, node: str, rc: int) -> None:
            left.discard(node)
            progress(
                f"{len(question.nodes) - len(left)} of {count(len(question.nodes), 'node')} done"
            )

    name = f"forestage-{token}"
    task: Task = task_self()
    task.set_info("fanout", question.at_once)
    task.set_info("connect_timeout", CONNECT)
    kind = WorkerSsh if question.by == "ssh" else ExecWorker
    worker = kind(
        ",".join(question.nodes),
        handler=Count(),
        timeout=question.within,
        command=command(question, srun or "", name),
        stderr=True,
    )
    try:
        with contextlib.ExitStack() as interrupted:
            interrupted.callback(task.abort)  # which forgets all answers
            task.schedule(worker)
            task.resume()
            interrupted.pop_all()
    finally:
        if question.by == "srun" and left:  # an srun that was killed leaves its job
            with contextlib.suppress(SlurmError):  # it has a time limit as well
                slurm.cancel(name)
    late = set(map(str, worker.iter_keys_timeout())) | left
    codes = {str(node): rc for rc, found in worker.iter_retcodes() for node in found}
    return tuple(
        answer(
            node,
            None if node in late else codes.get(node),
            _text(worker.node_buffer(node)),
            _text(worker.node_error(node)),
            f"no answer within {format_duration(question.within)}",
        )
        for node in question.nodes
    )


def _text(buffer: bytes | None) -> str:
    return (buffer or b"").decode(errors="replace")


def answer(node: str, code: int | None, out: str, err: str, late: str) -> Reply:
    """Pure: a node's answer: its document, the command's own message, or why there is neither."""
    if code is None:
        return Reply(node, None, problem=late)
    document = ""
    for found in re.finditer(r"^[\[{]", out, re.MULTILINE):  # a login script may print as well
        with contextlib.suppress(msgspec.DecodeError):
            msgspec.json.decode(out[found.start() :])
            document = out[found.start() :]
            break
    if document:
        return Reply(node, code, document)
    lines = [line.removeprefix("srun: ") for line in err.splitlines() if line.strip()]
    own = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
    if own:
        return Reply(node, code, problem=own[0])
    said = [line.removeprefix("error: ") for line in lines]
    return Reply(node, None, problem=(said or [f"it ended with {code} and no answer"])[0])


def exit_code(answers: Iterable[Reply], unreached: int) -> int:
    """Pure: `unreached` if a node did not answer, else the highest of theirs."""
    codes = [one.code for one in answers]
    return unreached if None in codes else max((code or 0 for code in codes), default=0)


def document(answers: Iterable[Reply]) -> dict[str, object]:
    """Pure: what --json prints: each node with its own document, or the problem."""
    found = []
    for one in answers:
        known: dict[str, object] = {"node": one.node, "code": one.code}
        known |= {"answer": msgspec.Raw(one.document.encode())} if one.document else {}
        found.append(known | ({"problem": one.problem} if one.problem else {}))
    return {"nodes": found}


def folded(rows: Iterable[tuple[str, Cells]]) -> Iterator[Cells]:
    """Pure: rows of several nodes, each row once, with its nodes first."""
    by_row: dict[Cells, list[str]] = {}
    for node, row in rows:
        found = by_row.setdefault(row, [])
        found += [node] if node not in found else []
    for row, found in by_row.items():
        yield (nodes.fold(found), *row)


def pieces(answers: Sequence[Reply], view: "View") -> list[Piece]:
    """Pure: what is printed: the view's table, then who did not answer, or could not."""
    rows: list[tuple[str, Cells]] = []
    problems = [(one.node, (one.problem,)) for one in answers if one.problem]
    for one in answers:
        if not one.document:
            continue
        try:
            rows += [(one.node, row) for row in view.rows(one.document)]
        except msgspec.DecodeError as error:
            why = f"its answer cannot be understood; another release? ({error})"
            problems.append((one.node, (why,)))
    table: list[Piece] = [view.table(rows)] if rows else []
    empty = [one.node for one in answers if one.document and one.node not in dict(rows)]
    table += [Line(f"{nodes.fold(empty)}: {view.nothing}")] if empty and not problems else []
    return [*table, *(Line(f"{found}: {why}") for found, why in folded(problems))]


class View(msgspec.Struct, frozen=True):
    """How one command's documents become rows, the columns of these, and what no row means.

    Columns named `few` are left out where all nodes have none: a terminal is 80 columns wide.
    """

    columns: Cells
    rows: Callable[[str], Iterable[Cells]]
    nothing: str = "nothing"
    few: Cells = ()
    gathered: Callable[[list[tuple[str, Cells]]], Iterable[Cells]] = folded

    def table(self, rows: list[tuple[str, Cells]]) -> Table:
        columns, found = ("nodes", *self.columns), tuple(self.gathered(rows))
        said = [
            number
            for number, column in enumerate(columns)
            if not column.startswith(self.few) or any(row[number] not in NONE for row in found)
        ]
        pick = operator.itemgetter(*said)
        return Table(pick(columns), tuple(map(pick, found)))


def _decoded(document: str, kind: type[T]) -> T:
    return msgspec.json.decode(document, type=kind)


def _status(document: str) -> Iterator[Cells]:
    found = _decoded(document, Status)
    yield *status.facts(found).values(), status.state(found)[1] or "-"


def _entries(document: str) -> Iterator[Cells]:
    for item in sorted(_decoded(document, list[Item]), key=lambda one: one.path):
        size, state = format_size(item.bytes), show.state(item) or "-"
        yield short(item.key), item.kind or "-", size, state, item.path or "-"


def _oneline(document: str) -> list[Cells]:
    return [(status.oneline(_decoded(document, Status)),)]


def _evicted(document: str) -> list[Cells]:
    return evict.rows(_decoded(document, Evictions))


def _verified(document: str) -> Iterator[Cells]:
    done = _decoded(document, verify.VerifyReport)
    for one in done.verdicts:
        word = f"{one.result} ({one.against})" if one.against != "nothing" else one.result
        word += ", evicted" if one.evicted else ""
        why = "; ".join(filter(None, (one.detail, one.error, one.stays)))
        yield short(one.key), format_size(one.size), word, one.path + (f" ({why})" if why else "")


def _switched(document: str) -> list[Cells]:
    return [switching.row(_decoded(document, switching.Switched))]


def _explained(document: str) -> Iterator[Cells]:
    """The last cell is the seconds, for `_by_time`."""
    for one in _decoded(document, explain.History).runs:
        hook = one.hook if one.step is None else f"step {explain.STEPS.get(one.step, one.step)}"
        for made in one.explained:
            outcome = made.outcome
            result = outcome.result + (f" ({outcome.reason})" if outcome.reason else "")
            if isinstance(outcome, Released | Bad):
                yield hook, result, "-", f"{one.total:.6f}"
                continue
            request = outcome.request if isinstance(outcome, Handled) else ""
            yield hook, result, outcome.image or request or "-", f"{outcome.wait:.6f}"


def _by_time(rows: list[tuple[str, Cells]]) -> Iterator[Cells]:
    """Pure: rows that differ in their last cell only are one, with the span of it."""
    took: dict[Cells, list[tuple[float, str]]] = {}
    for node, row in rows:
        took.setdefault(row[:-1], []).append((float(row[-1]), node))
    for (*cells, image), found in took.items():
        least, (most, slowest) = min(found)[0], max(found)
        text, fastest = format_duration(most), format_duration(least)
        if text != fastest:
            text = f"{fastest} to {text} ({slowest})"
        yield nodes.fold([node for _, node in found]), *cells, text, image


VIEWS = {
    "status": View((*status.COLUMNS, "why"), _status, few=FEW),
    "status --oneline": View(("status",), _oneline),
    "ls": View(("key", "kind", "size", "state", "path"), _entries, "no entry"),
    "evict": View(evict.COLUMNS, _evicted, "nothing to evict"),
    "verify": View(("key", "size", "result", "path"), _verified, "no entry"),
    "off": View(switching.COLUMNS, _switched),
    "on": View(switching.COLUMNS, _switched),
    "explain": View(("hook", "result", "took", "path"), _explained, gathered=_by_time),
}
