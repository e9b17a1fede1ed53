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

from forestage import asuser, child, chunks, copy, digest, events, evict, image, lock, log, redirect
from forestage.cache import Entry
from forestage.chunks import Source
from forestage.errors import Declined, Failed
from forestage.events import Outcome
from forestage.image import Image, Look
from forestage.job import Job
from forestage.node import Node
from forestage.part import Owner, Part, boot_id
from forestage.units import format_rate

NAME = "forestage-stage"  # in ps(1); the kernel keeps 15 characters
LOOK_TIMEOUT = 60.0  # seconds; nobody waits for the stager's own looks
QUEUE_POLL = 0.1  # seconds
SAY_EVERY = 10.0  # seconds

# A file server's clock may tick in seconds: a change within the same tick leaves the identity as it
# is. So a copy starts only when the source's last change is a full tick old.
COARSE_TICK_NS = 2_000_000_000
FINE_TICK_NS = 20_000_000


class Word(msgspec.Struct, frozen=True):
    """What a stager tells the hook that started it. `ours`: the node is at fault, not the request.

    First `started`, or `busy` (another stager has the key) and no more; last `published` or
    `failed`. An end without a last word means that it was killed.
    """

    state: Literal["started", "busy", "published", "failed"]
    reason: str = ""
    detail: str = ""
    ours: bool = False


class Task(msgspec.Struct, frozen=True):
    """What to copy, where to, and for which job first."""

    node: Node
    job: Job
    looked: Look

    @property
    def image(self) -> Image:
        return self.looked.image

    @property
    def key(self) -> str:
        return self.looked.image.key

    @property
    def part(self) -> Part:
        return self.node.cache.part(self.key)


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
        child.let_go({theirs.fileno(), task.looked.source})
        Path("/proc/self/comm").write_text(NAME)
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
        return Word("published")  # by another stager, between the hook's look and our lock
    start = task.node.clock.monotonic()
    evicted: list[str] = []
    error: Declined | None = None
    try:
        _bring(task, stop, evicted)
    except Declined as declined:
        error = declined
    except chunks.Truncated:
        error = _changed(task)
    except chunks.Stopped:
        error = Declined("stopped", f"the copy of {task.image.path} was stopped")
    except asuser.TooSlow:
        error = Declined("source-hangs", f"{task.image.path} does not answer")
    except lock.Busy as busy:
        error = Failed("busy", str(busy))
    except OSError as failure:
        error = _meaning(task, failure)
    took = task.node.clock.monotonic() - start
    _report(task, evicted, error, took)
    if error is None:
        return Word("published")
    if error.reason in ("changed", "no-room"):
        task.node.cache.drop_part(task.key)
    return Word("failed", error.reason, str(error), isinstance(error, Failed))


def _changed(task: Task) -> Declined:
    return Declined("changed", f"{task.image.path} was changed while it was copied")


def _meaning(task: Task, error: OSError) -> Declined:
    """Pure: what an error in the middle of a copy means."""
    if error.errno == errno.ESTALE:  # the file server has another file under this name
        return _changed(task)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Declined("no-room", f"the cache's disk filled up: {error}")
    return Failed("io", str(error))


def _bring(task: Task, stop: threading.Event, evicted: list[str]) -> None:
    """Queue, room, copy, check, publish. The caller holds the key's lock.

    `evicted` grows by the keys that had to make room, also where the copy fails later.
    """
    node, part = task.node, task.part
    tuning = copy.tuning(node.config)
    engine = copy.engine(node.config, tuning)
    owner = Owner(
        pid=os.getpid(),
        boot=boot_id(),
        image=task.image,
        chunk=tuning.chunk,
        engine=node.config.engine,
        job=task.job.id,
        since=node.clock.monotonic(),
    )
    if not part.resumable(owner):
        node.cache.drop_part(task.key)
    part.write_owner(owner)
    _await_turn(task, owner, stop)
    node.clock.sleep(settling(task.image, node.clock.wall()))
    source = _open_source(task)
    _reserve(task, engine, source, evicted)
    owner = msgspec.structs.replace(
        owner, phase="copying", began=node.clock.monotonic(), resumed=part.copied(owner)
    )
    part.write_owner(owner)
    with _spoken(task, owner):
        engine.copy(source, part, stop)
    _check_unchanged(task)
    _mirror(task)
    digests = part.digests()
    entry = Entry(
        key=task.key,
        identity=task.image.identity,
        access=task.image.access,
        created=node.clock.wall(),
        engine=node.config.engine,
        chunk=tuning.chunk,
        digest=digest.of_image(digests),
    )
    node.cache.publish(entry)


def _await_turn(task: Task, owner: Owner, stop: threading.Event) -> None:
    """Waits until fewer than `max_copies` live stagers of this node asked before this one."""
    while _ahead(task, owner) >= task.node.config.max_copies:
        if stop.wait(QUEUE_POLL):
            raise chunks.Stopped


def _ahead(task: Task, owner: Owner) -> int:
    """How many live stagers come first; a dead one's lock is free."""
    cache = task.node.cache
    ahead = 0
    for directory in cache.parts.iterdir():
        other = Part(directory).owner()
        if (
            other is not None
            and directory.name != task.key
            and other.boot == owner.boot
            and (other.since, directory.name) < (owner.since, task.key)
            and not lock.is_free(cache.key_lock(directory.name))
        ):
            ahead += 1
    return ahead


def settling(wanted: Image, now: float) -> float:
    """Pure: seconds to wait until a further change of the source must show in its times."""
    times = (wanted.identity.mtime_ns, wanted.identity.ctime_ns)
    tick = FINE_TICK_NS if any(time % 1_000_000_000 for time in times) else COARSE_TICK_NS
    age = int(now * 1_000_000_000) - max(times)
    # A time in the future is another machine's clock; waiting for it could take for ever.
    return (tick - age) / 1_000_000_000 if 0 <= age < tick else 0.0


def _open_source(task: Task) -> Source:
    looked, wish = task.looked, task.node.config.direct
    # Major 0 is no block device: what a network file system does past its cache is its own affair.
    local = os.major(os.fstat(looked.source).st_dev) != 0
    direct = None
    if wish == "on" or (wish == "auto" and local):
        direct = image.open_direct(looked, LOOK_TIMEOUT)
    return Source(looked.source, direct, task.image.size)


def _reserve(task: Task, engine: copy.Engine, source: Source, evicted: list[str]) -> None:
    """Makes room and takes it at once, so that no copy fails half-way for want of space."""
    node = task.node
    for attempt in (1, 2):
        need = max(0, task.image.size - task.part.allocated())
        evicted += evict.make_room(node.cache, node.leases, node.config, task.image.path, need)
        try:
            engine.reserve(source, task.part)
        except OSError as error:
            # Another copy, or somebody else on this disk, was faster; look once more.
            if error.errno != errno.ENOSPC or attempt == 2:
                raise
        else:
            return


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
        f"image={owner.image.path} key={owner.image.key}"
        f" copied={done} of={owner.image.size}"
        f" rate={format_rate(done - owner.resumed, took).replace(' ', '')}"
    )


def _check_unchanged(task: Task) -> None:
    """Both the open file and what the path now leads to must be as before. Raises Declined."""
    wanted, node = task.image, task.node
    if image.identify(task.looked.source, wanted.path) != wanted.identity:
        raise _changed(task)
    hidden = [bind.mount for bind in redirect.binds(node.cache)]
    try:
        seen, fd = image.look(wanted.path, task.job.user, node.config.sources, hidden, LOOK_TIMEOUT)
    except OSError:
        raise _changed(task) from None
    if fd is not None:
        os.close(fd)
    if seen.image != wanted:
        raise _changed(task)


def _mirror(task: Task) -> None:
    """Gives the copy the source's owner, group, mode, ACL and time: only who could read it may."""
    wanted = task.image
    fd = os.open(task.part.image, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != wanted.size:
            raise Failed("copy", f"the copy of {wanted.path} has another size than its source")
        os.fchown(fd, wanted.access.uid, wanted.access.gid)
        if wanted.access.acl:
            try:
                os.setxattr(fd, image.ACL, wanted.access.acl)
            except OSError as error:
                # Without its ACL the mode's group bits would mean something else.
                raise Failed("acl", f"the cache's file system takes no ACL: {error}") from None
        # Last: chown clears set-id bits.
        os.fchmod(fd, wanted.access.mode)
        os.utime(fd, ns=(wanted.identity.mtime_ns, wanted.identity.mtime_ns))
    finally:
        os.close(fd)


def _report(task: Task, evicted: list[str], error: Declined | None, took: float) -> None:
    """The copy's own event and line: the hook that asked may be long gone."""
    node, job = task.node, task.job
    outcome = Outcome(
        result="copied" if error is None else "failed" if isinstance(error, Failed) else "declined",
        image=task.image.path,
        key=task.key,
        reason=error.reason if error else "",
        detail=events.printable(str(error)) if error else "",
        bytes=0 if error else task.image.size,
        size=task.image.size,
        wait=round(took, 4),
        evicted=tuple(evicted),
    )
    log.say(f"stager job={job.id} {events.summary(job, [outcome], took)}", by_slurm=True)
    events.record(node.places.events, node.clock.wall(), "stager", job, [outcome], took)
