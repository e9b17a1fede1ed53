"""The process that copies. It outlives the hook that started it, and is the only one of its key.

Slurm kills a Prolog's process group at its timeout and again at its normal end, so the stager
leaves the group, the session and the hook's output before the hook goes on. It holds the key's lock
as long as it lives; whoever else wants the key waits for the entry, or for the lock to be free.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from forestage import counters, events, log, trace
from forestage.cache.part import PROCESS_NAME, Owner, Part
from forestage.errors import Declined, Failed
from forestage.events import Outcome
from forestage.stage import chunks, opened, pipeline
from forestage.stage.pipeline import Task
from forestage.system import child, lock
from forestage.units import format_rate, printable

QUEUE_POLL = 0.1  # seconds
SAY_EVERY = 10.0  # seconds
HANGS = 60.0  # seconds without a chunk, after which a copy gives its place in the queue away


class Word(msgspec.Struct, frozen=True):
    """What a stager tells the hook that started it. `ours`: the node is at fault, not the request.

    First `started`, or `busy` (another stager has the key) and no more; last `found` (another has
    just published it), `published` or `failed`. An end without a last word: it was killed.
    """

    state: Literal["started", "busy", "found", "published", "failed"]
    reason: str = ""
    detail: str = ""
    ours: bool = False


class Figures:
    """What a copy will have taken: keys evicted for it, seconds for the bytes, and which of these
    were here before, came from peers or went to them.
    """

    def __init__(self) -> None:
        self.evicted: list[str] = []
        self.copying = 0.0
        self.resumed = 0
        self.from_peers = 0
        self.served = 0


def start(task: Task) -> socket.socket:
    """Starts a stager; the answer is where its `Word`s arrive."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _live(task, theirs)
    theirs.close()
    return ours


def hear(line: socket.socket, timeout: float) -> Word | None:
    """The stager's next word; None after `timeout` seconds. Raises EOFError at its end."""
    line.settimeout(max(0.001, timeout))
    try:
        data = line.recv(65536)
    except TimeoutError:
        return None
    if not data:
        raise EOFError
    return msgspec.json.decode(data, type=Word)


def _live(task: Task, theirs: socket.socket) -> None:
    """The stager's whole life. It must never return into the hook's code above it."""
    try:
        os.setsid()
        os.chdir("/")  # nobody's directory is to be busy because of a copy
        child.leave_job()
        task = task.taken()
        child.let_go({theirs.fileno(), task.looked.source})
        Path("/proc/self/comm").write_text(PROCESS_NAME)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        try:
            # The half second is for those who only try whether the lock is free.
            with lock.held(task.node.cache.key_lock(task.key), 0.5):
                _tell(theirs, Word("started"))
                _tell(theirs, _serve(task, stop))
        except lock.Busy:
            _tell(theirs, Word("busy"))
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            log.say(f"stager job={task.job.id} result=failed detail={error!r}", by_slurm=True)
        os._exit(0 if error is None else 1)


def _tell(theirs: socket.socket, word: Word) -> None:
    with contextlib.suppress(OSError):  # the hook has gone on
        theirs.send(msgspec.json.encode(word), socket.MSG_NOSIGNAL)


def _serve(task: Task, stop: threading.Event) -> Word:
    """The copy, its event and its log line; every expected error becomes a word."""
    if task.node.cache.find(task.image) is not None:
        return Word("found")  # another stager published it between the hook's look and our lock
    start = task.node.clock.monotonic()
    figures = Figures()
    error = _tried(task, stop, figures)
    took = task.node.clock.monotonic() - start
    _report(task, figures, error, took)
    if error is None:
        return Word("published")
    if error.reason in ("changed", "no-room") or not task.part.digests().strip(b"\0"):
        task.node.cache.drop_part(task.key)  # no use to whoever comes next
    return Word("failed", error.reason, str(error), isinstance(error, Failed))


def _tried(task: Task, stop: threading.Event, figures: Figures) -> Declined | None:
    """The copy; every expected error becomes what the hook raises."""
    path = task.image.path
    try:
        _copy(task, stop, figures)
    except Declined as declined:
        return declined
    except chunks.Truncated:
        return opened.changed(path, "it ends before its size says so")
    except chunks.Unreadable as unreadable:
        return _of_source(task, unreadable.error)
    except chunks.Stopped:
        return Declined("stopped", f"the copy of {path} was stopped")
    except OSError as failure:
        return _meaning(failure)
    return None


def _copy(task: Task, stop: threading.Event, figures: Figures) -> None:
    """Queue, room, bytes, entry; `figures` grow on the way, also where a later step fails."""
    owner = pipeline.claim(task)
    trace.point("claimed")
    _await_turn(task, owner, stop)
    owner, source = pipeline.ready(task, owner, figures.evicted)
    figures.resumed = owner.resumed
    served = _served(task)
    with _spoken(task, owner):
        figures.from_peers = pipeline.fetch(task, source, stop)
    figures.served = max(0, _served(task) - served)
    figures.copying = task.node.clock.monotonic() - owner.began
    pipeline.publish(task)


def _served(task: Task) -> int:
    """Bytes of this key that the node's peer service gave away; it writes them once a second."""
    if not task.node.config.peers.enabled:
        return 0
    with contextlib.suppress(OSError):  # only a figure
        given = counters.read(task.node.places.peer)
        return given.of(task.key) if given else 0
    return 0


def _of_source(task: Task, error: OSError) -> Declined:
    """Pure: what an error of the shared file system means; it is no fault of the node."""
    if error.errno == errno.ESTALE:  # the file server has another file under this name
        return opened.changed(task.image.path)
    return Declined("source-error", f"{task.image.path} cannot be read: {error}")


def _meaning(error: OSError) -> Declined:
    """Pure: what an error of the cache's disk means."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Declined("no-room", f"the cache's disk filled up: {error}")
    return Failed("io", str(error))


def _await_turn(task: Task, owner: Owner, stop: threading.Event) -> None:
    """Waits until fewer than `max_copies` live stagers of this node asked before this one."""
    while _ahead(task, owner) >= task.node.config.max_copies:
        if stop.wait(QUEUE_POLL):
            raise chunks.Stopped


def _ahead(task: Task, owner: Owner) -> int:
    """How many live stagers come first; a dead one's lock is free.

    One whose source hangs cannot even be killed; it loses its place, or a few of them would keep
    everybody else waiting for ever.
    """
    cache, cache_now = task.node.cache, task.node.clock.wall()
    ahead = 0
    for directory in cache.parts.iterdir():
        part = Part(directory)
        other = part.owner()
        if (
            other is not None
            and not _hangs(part, other, cache_now)
            and directory.name != task.key
            and other.boot == owner.boot
            and (other.since, directory.name) < (owner.since, task.key)
            and not lock.is_free(cache.key_lock(directory.name))
        ):
            ahead += 1
    return ahead


def _hangs(part: Part, owner: Owner, now: float) -> bool:
    return owner.phase == "copying" and part.stood_still(now) > HANGS


@contextlib.contextmanager
def _spoken(task: Task, owner: Owner) -> Iterator[None]:
    """While a long copy goes on, a line in the log now and then."""
    ended = threading.Event()

    def speak() -> None:
        while not ended.wait(SAY_EVERY):
            log.say(f"stager job={owner.job} {progress_line(task, owner)}", by_slurm=True)

    thread = threading.Thread(target=speak, name="speak", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def progress_line(task: Task, owner: Owner) -> str:
    """How far the copy is, for the log."""
    done = task.part.copied(owner)
    took = task.node.clock.monotonic() - owner.began
    return (
        f"image={events.field(owner.image.path)} key={owner.image.key}"
        f" copied={done} of={owner.image.size}"
        f" rate={format_rate(done - owner.resumed, took).replace(' ', '')}"
    )


def _report(task: Task, figures: Figures, error: Declined | None, took: float) -> None:
    """The copy's own event and line: the hook that asked may be long gone."""
    node, job = task.node, task.job
    outcome = Outcome(
        result="copied" if error is None else "failed" if isinstance(error, Failed) else "declined",
        image=task.image.path,
        key=task.key,
        reason=error.reason if error else "",
        detail=printable(str(error)) if error else "",
        bytes=0 if error else task.image.size,
        size=task.image.size,
        wait=round(took, 4),
        copying=round(figures.copying, 4),
        resumed=figures.resumed,
        from_peers=figures.from_peers,
        served=figures.served,
        evicted=tuple(figures.evicted),
    )
    log.say(f"stager job={job.id} {events.summary(job, [outcome], took)}", by_slurm=True)
    try:
        events.record(node.places.events, node.clock.wall(), "stager", job, [outcome], took)
    except OSError as failure:  # a full log disk is no reason to lose a copy
        log.say(f"stager job={job.id} result=unrecorded detail={str(failure)!r}", by_slurm=True)
