"""One command on many nodes: `forestage ls -w n[1-64]`, folded as `clush -b` folds.

ClusterShell names the nodes and runs `forestage --answer …` on each, over ssh or as a tiny job of
srun's. A node answers with its document and with what it would print; of what all print, equal rows
of a table are one row, and equal sentences one sentence, each with its nodes. So a command needs
nothing of its own to be asked of many nodes. A node that does not answer in time is named and makes
the exit status 11; all others are shown.
"""

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from ClusterShell import Defaults, NodeSet, NodeUtils
from ClusterShell.Event import EventHandler
from ClusterShell.Task import task_self
from ClusterShell.Worker.Exec import ExecWorker
from ClusterShell.Worker.Ssh import WorkerSsh

from forestage.errors import ForestageError, NotFound, SlurmError
from forestage.slurm.queue import Slurm
from forestage.system.terminal import Facts, Line, Piece, Table, count
from forestage.units import format_duration, parse_duration

# Where the packages put the command on every node.
COMMAND = "/usr/lib/forestage/bin/forestage"
OURS = "forestage: "  # how a message of the command itself begins
# A job beside others, where the partition allows that; no MPI, and no directory of ours. For -w it
# has no comment: a hint, even stage=off, would leave a lease for the answer to show.
SRUN = ("--nodes=1", "--ntasks=1", "--oversubscribe", "--mpi=none", "--chdir=/", "--quiet")
NONE = ("-", "0")  # cells that say nothing
TOOK = "took"  # the column whose cells do not tell rows apart
CONNECT = 10  # seconds for a node's sshd to answer

By = Literal["ssh", "srun"]
Progress = Callable[[str], None]
Cells = tuple[str, ...]
T = TypeVar("T", bound=Hashable)


class Question(msgspec.Struct, frozen=True):
    """What is asked of which nodes. `options` are more of srun's, `within` is seconds for each."""

    nodes: tuple[str, ...]
    words: tuple[str, ...]
    by: By = "ssh"
    within: float = 60.0
    at_once: int = 64
    options: tuple[str, ...] = ()


class Said(msgspec.Struct, frozen=True):
    """What `forestage --answer COMMAND` prints: what `--json` does, and what people would read."""

    document: msgspec.Raw
    pieces: tuple[Piece, ...]


class Reply(msgspec.Struct, frozen=True):
    """One node's. Where there is no answer, `problem` says why.

    `code` is the command's exit status; None: it was not reached, or did not end in time.
    """

    node: str
    code: int | None
    answer: Said | None = None
    problem: str = ""


# --- the nodes


def expand(text: str) -> tuple[str, ...]:
    """The nodes of a ClusterShell node set, groups included. Raises ValueError.

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


def fold(nodes: Iterable[str]) -> str:
    """The node set of these names: n[1-3]."""
    return str(NodeSet.NodeSet.fromlist(list(nodes)))


def of_partition(name: str, slurm: Slurm) -> tuple[str, ...]:
    """All nodes of a partition. Raises NotFound where it has none, SlurmError."""
    found = slurm.partition_nodes(name)
    if not found:
        raise NotFound(f"Slurm has no partition {name}, or it has no node", "see `sinfo`")
    return found


# --- asking them


def command(question: Question, srun: str, name: str) -> str:
    """Pure: what a shell runs: on the node by ssh, here for srun, where %h is the node."""
    words = shlex.join([COMMAND, "--answer", *question.words])
    if question.by == "ssh":
        return words
    minutes = int(question.within // 60) + 1
    limits = (f"--immediate={max(1, int(question.within))}", f"--time={minutes}")
    job = shlex.join([srun, *SRUN, f"--job-name={name}", *limits, *question.options])
    return f"{job.replace('%', '%%')} --nodelist=%h -- {words.replace('%', '%%')}"


def ask(question: Question, slurm: Slurm, token: str, progress: Progress) -> tuple[Reply, ...]:
    """Runs the command on all nodes; returns their replies in the order of the nodes.

    `token` makes the name of srun's jobs unique, so that none of them outlives this command. Raises
    SlurmError where srun is missing, ForestageError where ssh is.
    """
    srun, name = _program(question.by, slurm), f"forestage-{token}"
    left = set(question.nodes)
    worker = _worker(question, command(question, srun, name), left, progress)
    try:
        _run(worker, question.at_once)
    finally:
        if question.by == "srun" and left:  # an srun that was killed leaves its job
            with contextlib.suppress(SlurmError):  # it has a time limit as well
                slurm.cancel(name)
    late = set(map(str, worker.iter_keys_timeout())) | left
    codes = {str(node): rc for rc, found in worker.iter_retcodes() for node in found}
    return tuple(
        reply(
            node,
            None if node in late else codes.get(node),
            _text(worker.node_buffer(node)),
            _text(worker.node_error(node)),
            f"no answer within {format_duration(question.within)}",
        )
        for node in question.nodes
    )


def _program(by: By, slurm: Slurm) -> str:
    """srun's path; "" for ssh, whose absence ClusterShell does not mention."""
    if by == "srun":
        return slurm.program("srun")
    if shutil.which("ssh") is None:
        raise ForestageError("ssh is not installed", "use --by srun")
    return ""


def _worker(question: Question, line: str, left: set[str], progress: Progress) -> Any:
    """ClusterShell's, which takes nodes from `left` as they end."""
    number = len(question.nodes)

    class Count(EventHandler):  # type: ignore[misc]
        def ev_hup(self, worker: Any, node: str, rc: int) -> None:
            left.discard(node)
            progress(f"{number - len(left)} of {count(number, 'node')} done")

    return (WorkerSsh if question.by == "ssh" else ExecWorker)(
        ",".join(question.nodes),
        handler=Count(),
        timeout=question.within,
        command=line,
        stderr=True,
    )


def _run(worker: Any, at_once: int) -> None:
    task = task_self()
    task.set_info("fanout", at_once)
    task.set_info("connect_timeout", CONNECT)
    with contextlib.ExitStack() as interrupted:
        interrupted.callback(task.abort)  # which forgets all answers
        task.schedule(worker)
        task.resume()
        interrupted.pop_all()


def _text(buffer: bytes | None) -> str:
    return (buffer or b"").decode(errors="replace")


def reply(node: str, code: int | None, out: str, err: str, late: str) -> Reply:
    """Pure: a node's answer, the command's own message, or why there is neither."""
    if code is None:
        return Reply(node, None, problem=late)
    for found in re.finditer(r"^[\[{]", out, re.MULTILINE):  # a login script may print as well
        with contextlib.suppress(msgspec.DecodeError):
            text = out[found.start() :]
            msgspec.json.decode(text)
            return _understood(node, code, text)
    own = [line.removeprefix(OURS) for line in err.splitlines() if line.startswith(OURS)]
    if own:
        return Reply(node, code, problem=own[0])
    return Reply(node, None, problem=problem(code, err))


def problem(code: int, err: str) -> str:
    """Pure: why there is no answer: the first error, from which others follow, or the status."""
    lines = [line.removeprefix("srun: ") for line in err.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*errors, *lines, f"it ended with {code} and no answer"][0]


def _understood(node: str, code: int, text: str) -> Reply:
    try:
        return Reply(node, code, msgspec.json.decode(text, type=Said))
    except msgspec.DecodeError as error:
        why = f"its answer cannot be understood; another release? ({error})"
        return Reply(node, code, problem=why)


# --- what they have said


def exit_code(replies: Iterable[Reply], unreached: int) -> int:
    """Pure: `unreached` if a node did not answer, else the highest of theirs."""
    codes = [one.code for one in replies]
    return unreached if None in codes else max((code or 0 for code in codes), default=0)


def document(replies: Iterable[Reply]) -> dict[str, object]:
    """Pure: what --json prints: each node with its own document, or the problem."""
    found = []
    for one in replies:
        known: dict[str, object] = {"node": one.node, "code": one.code}
        known |= {"answer": one.answer.document} if one.answer else {}
        found.append(known | ({"problem": one.problem} if one.problem else {}))
    return {"nodes": found}


def pieces(replies: Sequence[Reply]) -> list[Piece]:
    """Pure: what people read: tables, then sentences, then who did not answer, or could not."""
    tables: dict[Cells, list[tuple[str, Cells]]] = {}
    blocks: list[tuple[str, tuple[Line | Facts, ...]]] = []
    for one in replies:
        said = one.answer.pieces if one.answer else ()
        for piece in said:
            if isinstance(piece, Table):
                tables.setdefault(piece.columns, []).extend((one.node, row) for row in piece.rows)
        blocks += [(one.node, block) for block in _blocks(said)]
    problems = [(one.node, one.problem) for one in replies if one.problem]
    return [
        *(_table(columns, rows) for columns, rows in tables.items()),
        *(piece for nodes, block in _by_node(blocks) for piece in _headed(nodes, block)),
        *(Line(f"{nodes}: {problem}") for nodes, problem in _by_node(problems)),
    ]


def _by_node(said: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Pure: what several nodes said, each thing once, with its nodes."""
    found: dict[T, list[str]] = {}
    for node, one in said:
        found.setdefault(one, []).append(node)
    return ((fold(nodes), one) for one, nodes in found.items())


def _blocks(said: Iterable[Piece]) -> Iterator[tuple[Line | Facts, ...]]:
    """Pure: each sentence with what is indented below it; tables are apart."""
    block: list[Line | Facts] = []
    for piece in said:
        if isinstance(piece, Table) or piece == Line(""):
            continue
        if block and not piece.indent:
            yield tuple(block)
            block = []
        block.append(piece)
    if block:
        yield tuple(block)


def _headed(nodes: str, block: tuple[Line | Facts, ...]) -> list[Piece]:
    """Pure: a block that says whose it is."""
    first, *rest = block
    if isinstance(first, Facts):
        return [Line(f"{nodes}:", heading=True), *(_indented(one) for one in block)]
    head = msgspec.structs.replace(first, text=f"{nodes}: {first.text}")
    return [*([Line("")] if rest else []), head, *rest]


def _indented(piece: Line | Facts) -> Line | Facts:
    return msgspec.structs.replace(piece, indent=piece.indent + 2)


def _table(columns: Cells, rows: Sequence[tuple[str, Cells]]) -> Table:
    """Pure: one table of several nodes', without columns that say nothing: terminals are narrow."""
    folded = list(_folded(columns, rows))
    named = ("nodes", *columns)
    kept = [at for at in range(len(named)) if any(row[at] not in NONE for row in folded)]
    return Table(tuple(named[at] for at in kept), [tuple(row[at] for at in kept) for row in folded])


def _folded(columns: Cells, rows: Iterable[tuple[str, Cells]]) -> Iterator[Cells]:
    """Pure: each row once, its nodes first; rows that differ in the time alone are one."""
    at = columns.index(TOOK) if TOOK in columns else len(columns)
    found: dict[Cells, list[tuple[str, Cells]]] = {}
    for node, row in rows:
        found.setdefault(row[:at] + row[at + 1 :], []).append((node, row[at : at + 1]))
    for row, took in found.items():
        yield (fold(node for node, _ in took), *row[:at], *_span(took), *row[at:])


def _span(took: Sequence[tuple[str, Cells]]) -> Cells:
    """Pure: a cell from the shortest to the longest time, and whose that is; none for none."""
    timed = sorted(
        (parse_duration(text), node, text) for node, cell in took for text in cell if text != "-"
    )
    if not timed:
        return took[0][1]
    (*_, fastest), (_, slowest, text) = timed[0], timed[-1]
    return (text if text == fastest else f"{fastest} to {text} ({slowest})",)
