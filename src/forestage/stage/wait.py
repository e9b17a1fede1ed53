"""Waits in a hook until an image is in the cache, for as long as that can still succeed.

One stager copies each key; every hook of the node that wants it waits, for its own stager's
messages or for another hook's stager to release the key's lock. At the deadline the hook goes on,
and so does the copy, unless `abort` stops it.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from forestage.cache.image import Image
from forestage.cache.layout import Cache
from forestage.cache.lease import Leases
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.slurm.job import Job
from forestage.stage.source import OpenImage
from forestage.system import lock
from forestage.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from forestage.stage.stager import Channel, Message

Came = Literal["hit", "joined", "copied"]

TRIES = 3  # stagers that may be killed under one hook before it gives up
HANDSHAKE = 1.0  # seconds in which a stager has left the hook's session, which Slurm will kill
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25  # seconds between polls; many hooks may wait for one copy
OBSERVE = 2.0  # seconds of a copy that show its rate
SPEEDUP_MARGIN = 1.3  # give up only if even a copy so much faster than seen misses the deadline


class StagerEnd(msgspec.Struct, frozen=True):
    """How one stager ended. `own` is whether this hook started it; the last message is its only."""

    own: bool
    message: "Message | None" = None


def obtain(
    node: Node,
    job: Job,
    opened: OpenImage,
    deadline: Deadline,
    watch: "Callable[[Eta], None] | None" = None,
) -> Came:
    """Finds the image in the cache, or waits until a stager has published it.

    Returns whether it was there (`hit`), came by a copy that another job asked for (`joined`) or by
    one of this hook's (`copied`). Raises Declined (no-room, deadline, changed, ...), Failed.
    `watch` is called now and then while it waits.
    """
    if node.cache.find(opened.image) is not None:
        return "hit"
    killed = 0
    while killed < TRIES:
        end = _one_stager(node, job, opened, Eta(node, opened.image, deadline, watch))
        message = end.message
        if node.cache.find(opened.image) is not None:
            found = message is not None and message.state == "found"
            return "copied" if end.own and not found else "joined"
        if message is not None and message.state == "failed":
            error = Failed if message.node_failed else Declined
            raise error(message.reason, message.detail)
        # A killed stager closes its socket before the kernel drops its lock, so that "busy" may
        # still mean the one just counted: only own stagers count, other waits end at the deadline.
        killed += end.own
    raise Failed("copy", f"the copy of {opened.image.path} was killed {TRIES} times")


def _one_stager(node: Node, job: Job, opened: OpenImage, eta: "Eta") -> StagerEnd:
    """Waits for the end of one stager: this hook's own, or the one that has the key already."""
    # Here, since a hit needs none of it.
    from forestage.stage import stager
    from forestage.stage.pipeline import Task

    with stager.start(Task(node, job, opened)) as channel:
        try:
            first = channel.recv(max(HANDSHAKE, eta.deadline.left()))
        except EOFError:
            return StagerEnd(own=True)
        if first is not None and first.state == "busy":
            return _wait(eta, _lock_released(node, opened.image))
        return _wait(eta, _last_message(channel))


Poll = Callable[[float], StagerEnd | None]
"""Sleeps for up to so many seconds; returns how the stager ended, None while it goes on."""


def _last_message(channel: "Channel") -> Poll:
    def poll(seconds: float) -> StagerEnd | None:
        try:
            message = channel.recv(seconds)
        except EOFError:
            return StagerEnd(own=True)
        if message is None or message.state == "started":
            return None
        return StagerEnd(own=True, message=message)

    return poll


def _lock_released(node: Node, wanted: Image) -> Poll:
    def poll(seconds: float) -> StagerEnd | None:
        node.clock.sleep(seconds)
        return StagerEnd(own=False) if lock.is_free(node.cache.key_lock(wanted.key)) else None

    return poll


def _wait(eta: "Eta", poll: Poll) -> StagerEnd:
    """Waits for a stager's end. Raises Declined once that cannot come in time."""
    seconds = FIRST_PAUSE
    while not eta.hopeless():
        end = poll(min(seconds, eta.deadline.left()))
        if end is not None:
            return end
        seconds = min(LONGEST_PAUSE, seconds * 1.3)
    raise Declined("deadline", eta.summary())


class Eta:
    """Whether a copy can end before the deadline, judged by its rate so far."""

    def __init__(
        self,
        node: Node,
        wanted: Image,
        deadline: Deadline,
        watch: "Callable[[Eta], None] | None" = None,
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
        return self.needs is not None and self.needs > left * SPEEDUP_MARGIN

    def summary(self) -> str:
        """Returns, for the user, why the job does not wait."""
        so_far = f"{format_size(self.done)} of {format_size(self.size)} of {self.path} are here"
        if self.needs is None:
            return so_far
        return f"{so_far}, the rest takes {format_duration(self.needs)} more"

    def progress(self) -> str:
        """Returns, for a user who waits, how far the copy is, how fast, and how long it takes."""
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
