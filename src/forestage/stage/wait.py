"""How did it get here, and is it worth the wait? One stager for each key; every hook only waits."""

import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from forestage.cache.image import Image, Look
from forestage.cache.layout import Cache, Entry
from forestage.cache.lease import Leases
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.slurm.job import Job
from forestage.system import lock
from forestage.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    import socket

    from forestage.stage.stager import Word

Came = Literal["hit", "joined", "copied"]

TRIES = 3  # stagers that may die under one hook before it gives up
HANDSHAKE = 1.0  # seconds in which a stager has left the hook's session, that Slurm is to kill
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25  # seconds between looks; many hooks may wait for one copy
OBSERVE = 2.0  # seconds of a copy that tell its rate
DOUBT = 1.3  # how much faster than seen a copy may yet become


class Staged(msgspec.Struct, frozen=True):
    """An entry that is here, and how it came."""

    entry: Entry
    result: Came


def stage(
    node: Node,
    job: Job,
    looked: Look,
    deadline: Deadline,
    watch: "Callable[[Outlook], None] | None" = None,
) -> Staged:
    """Finds the image in the cache, or waits until a stager has brought it there.

    Raises Declined (no-room, deadline, changed, ...), Failed. At the deadline the copy goes on.
    `watch` is called now and then while it waits.
    """
    entry = node.cache.find(looked.image)
    if entry is not None:
        return Staged(entry, "hit")
    killed = 0
    while killed < TRIES:
        result, word = _once(node, job, looked, Outlook(node, looked.image, deadline, watch))
        entry = node.cache.find(looked.image)
        if entry is not None:
            found = word is not None and word.state == "found"
            return Staged(entry, "joined" if found else result)
        if word is not None and word.state == "failed":
            raise (Failed if word.ours else Declined)(word.reason, word.detail)
        # Whoever had the key may be the one just counted, which dies slowly: its line is closed
        # before its lock is free. Such waits end at the deadline.
        killed += result == "copied"
    raise Failed("copy", f"the copy of {looked.image.path} was killed {TRIES} times")


def _once(node: Node, job: Job, looked: Look, outlook: "Outlook") -> "tuple[Came, Word | None]":
    """One stager from its start, or somebody else's, to its end; its last word if it was ours."""
    # Here, since a hit needs none of it.
    from forestage.stage import stager
    from forestage.stage.pipeline import Task

    with stager.start(Task(node, job, looked)) as line:
        try:
            first = stager.hear(line, max(HANDSHAKE, outlook.deadline.left()))
        except EOFError:
            return "copied", None
        if first is not None and first.state == "busy":
            return "joined", _wait(outlook, _theirs(node, looked.image))
        return "copied", _wait(outlook, _ours(line))


class _Over(Exception):
    """The stager has ended; `word` is its last, if it had one."""

    def __init__(self, word: "Word | None") -> None:
        self.word = word


def _ours(line: "socket.socket") -> Callable[[float], None]:
    """Sleeps until the stager at the other end says its last word. Raises _Over then."""
    from forestage.stage import stager

    def pause(seconds: float) -> None:
        try:
            word = stager.hear(line, seconds)
        except EOFError:
            raise _Over(None) from None
        if word is not None and word.state != "started":
            raise _Over(word)

    return pause


def _theirs(node: Node, wanted: Image) -> Callable[[float], None]:
    """Sleeps until the key's lock is free, whoever held it. Raises _Over then."""

    def pause(seconds: float) -> None:
        node.clock.sleep(seconds)
        if lock.is_free(node.cache.key_lock(wanted.key)):
            raise _Over(None)

    return pause


def _wait(outlook: "Outlook", pause: Callable[[float], None]) -> "Word | None":
    """Waits for the stager's end; raises Declined once that cannot come in time."""
    seconds = FIRST_PAUSE
    try:
        while not outlook.hopeless():
            pause(min(seconds, outlook.deadline.left()))
            seconds = min(LONGEST_PAUSE, seconds * 1.3)
    except _Over as over:
        return over.word
    raise Declined("deadline", outlook.told())


class Outlook:
    """Whether a copy can end before the deadline, judged by what it has done so far."""

    def __init__(
        self,
        node: Node,
        wanted: Image,
        deadline: Deadline,
        watch: "Callable[[Outlook], None] | None" = None,
    ) -> None:
        self.part = node.cache.part(wanted.key)
        self.clock = node.clock
        self.size = wanted.size
        self.path = wanted.path
        self.deadline = deadline
        self.watch = watch
        self.done = 0
        self.rate = ""
        self.needs: float | None = None

    def hopeless(self) -> bool:
        """True at the deadline, or when even a faster copy than this would miss it."""
        if self.watch is not None:
            self.watch(self)
        left = self.deadline.left()
        if left == 0.0:
            return True
        owner = self.part.owner()
        if owner is None or owner.phase != "copying" or not owner.lives():
            return False
        took = self.clock.monotonic() - owner.began
        if took < OBSERVE:
            return False
        self.done = self.part.copied(owner)
        self.rate = format_rate(self.done - owner.resumed, took)
        self.needs = remaining(self.done - owner.resumed, self.size - self.done, took)
        return self.needs is not None and self.needs > left * DOUBT

    def told(self) -> str:
        """For the user, why the job does not wait."""
        so_far = f"{format_size(self.done)} of {format_size(self.size)} of {self.path} are here"
        if self.needs is None:
            return so_far
        return f"{so_far}, the rest takes {format_duration(self.needs)} more"

    def progress(self) -> str:
        """For a user who waits: how far it is, how fast, and how long still."""
        if self.needs is None:
            return f"the copy of {self.path} to this node is about to begin"
        percent, left = 100 * self.done // self.size, format_duration(self.needs)
        return f"copying {self.path} to this node: {percent}%, {self.rate}, {left} left"


def remaining(copied: int, rest: int, took: float) -> float | None:
    """Pure: seconds until `rest` bytes are in, at the rate of `copied` in `took` seconds."""
    return rest * took / copied if copied > 0 else None


def abort(cache: Cache, leases: Leases, job: int, key: str) -> None:
    """Stops the copy, unless another job than `job` waits for it or already uses it."""
    try:
        others = [lease for lease in leases.all() if lease.job != job]
    except Failed:
        return  # a damaged lease may be that of a job that waits
    if any(use.key == key for lease in others for use in lease.uses):
        return
    owner = cache.part(key).owner()
    if owner is not None and owner.lives() and not lock.is_free(cache.key_lock(key)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGTERM)
