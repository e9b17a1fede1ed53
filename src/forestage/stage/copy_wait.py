"""Starts the copy of an image, and waits in a hook until it ends or cannot come in time.

One stager copies each key; a hook that waits does so for its own stager's messages, or for another
hook's stager to release the key's lock. At the deadline the hook goes on, and so does the copy.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from forestage.cache import disk_probe
from forestage.cache.node import Node
from forestage.cache.part import PartRecord
from forestage.cache.source_image import SourceImage
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.slurm.job import Job
from forestage.sources.source import OpenImage
from forestage.system import lock
from forestage.units import format_duration, format_size

if TYPE_CHECKING:
    from forestage.system.daemon import StartChannel, StartReport

Arrival = Literal["hit", "joined", "copied"]

TRIES = 3  # stagers that may be killed under one hook before it gives up
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25  # seconds between polls; many hooks may wait for one copy
OBSERVE = 2.0  # seconds of a copy that show its rate
SPEEDUP_MARGIN = 1.3  # give up only if even a copy so much faster than seen misses the deadline


ProgressCallback = Callable[[Callable[[], str]], None]
"""Called now and then during a wait, with what makes the line that the user may read of it."""


def ignore_progress(line: Callable[[], str]) -> None:
    """The progress that nobody reads."""


class StagerEnd(msgspec.Struct, frozen=True):
    """How one stager ended; `is_own`: this hook started it. The last message is its only."""

    is_own: bool
    message: "StartReport | None" = None


@contextlib.contextmanager
def ensure_copy_started(node: Node, job: Job, opened: OpenImage) -> "Iterator[StartChannel | None]":
    """Sees to it that the image is in the cache, then yields None, or that it is being copied.

    The copy is not waited for: its stager outlives the hook from now on. Raises OSError.
    """
    if node.cache.find_entry(opened.image) is not None:
        yield None
        return
    with _start_stager(node, job, opened) as channel:
        yield channel


def wait_for_copy(
    node: Node,
    job: Job,
    opened: OpenImage,
    copying: "StartChannel | None",
    deadline: Deadline,
    report_progress: ProgressCallback = ignore_progress,
    only_until_begun: bool = False,
) -> Arrival:
    """Waits until a stager has published the image.

    `copying` is what `ensure_copy_started` yielded.

    With `only_until_begun` no longer than until the copy has the room that it needs.

    Returns whether it was there (`hit`), came by a copy that another job asked for (`joined`) or by
    one of this hook's (`copied`). Raises Declined (no-room, deadline, changed, ...), Failed.
    `report_progress` is called now and then while it waits.
    """
    if copying is None:
        return "hit"
    eta = CopyEstimate(
        node,
        opened.image,
        deadline,
        report_progress,
        leased=job.id != 0,
        until_begun=only_until_begun,
    )
    killed = 0
    with contextlib.ExitStack() as later:
        while True:
            end = _wait_for_stager(eta, _make_poll(copying, node, opened.image))
            message = end.message
            if node.cache.find_entry(opened.image) is not None:
                found = message is not None and message.state == "found"
                return "copied" if end.is_own and not found else "joined"
            if message is not None and message.state == "failed":
                error = Failed if message.node_failed else Declined
                raise error(message.reason, message.detail)
            # A killed stager closes its socket before the kernel drops its lock, so that "busy" may
            # still mean the one just counted: only own stagers count, other waits end at the
            # deadline.
            killed += end.is_own
            if killed == TRIES:
                what = f"the copy of {opened.image.path} was killed {TRIES} times"
                raise Failed("copy", what)
            copying = later.enter_context(_start_stager(node, job, opened))


def _start_stager(node: Node, job: Job, opened: OpenImage) -> "StartChannel":
    """A stager that Slurm does not kill with the hook's process group any more.

    Raises Declined where it would only hang with the disk.
    """
    disk_probe.check_writable(node.places, node.cache)
    # Here, since a hit needs none of it.
    from forestage.stage import stager, task

    return stager.start_stager(task.CopyTask(node, job, opened))


Poll = Callable[[float], StagerEnd | None]
"""Sleeps for up to so many seconds; returns how the stager ended, None while it goes on."""


def _make_poll(channel: "StartChannel", node: Node, wanted: SourceImage) -> Poll:
    """Waits for the end of one stager: this hook's own, or the one that has the key already."""
    is_other = False

    def poll(seconds: float) -> StagerEnd | None:
        nonlocal is_other
        if is_other:
            node.clock.sleep(seconds)
            free = lock.is_free(node.cache.key_lock(wanted.key))
            return StagerEnd(is_own=False) if free else None
        message = channel.receive_message(seconds)
        is_other = message is not None and message.state == "busy"
        if message is None or message.state in ("started", "busy"):
            return None
        return StagerEnd(is_own=True, message=message)

    return poll


def _wait_for_stager(eta: "CopyEstimate", poll: Poll) -> StagerEnd:
    """Waits for a stager's end. Raises Declined once that cannot come in time."""
    seconds = FIRST_PAUSE
    while not eta.should_stop_waiting():
        end = poll(min(seconds, eta.deadline.seconds_left()))
        if end is not None:
            return end
        seconds = min(LONGEST_PAUSE, seconds * 1.3)
    raise Declined("deadline", eta.format_summary())


class CopyEstimate:
    """Whether a copy can end before the deadline, judged by its rate so far.

    `leased`: a job that runs waits, for which a copy that was only expected ends.
    """

    def __init__(
        self,
        node: Node,
        wanted: SourceImage,
        deadline: Deadline,
        watch: ProgressCallback = ignore_progress,
        leased: bool = False,
        until_begun: bool = False,
    ) -> None:
        self.node = node
        self.key = wanted.key
        self.part = node.cache.part(wanted.key)
        self.clock = node.clock
        self.size = wanted.size
        self.path = wanted.path
        self.deadline = deadline
        self.watch = watch
        self.leased = leased
        self.until_begun = until_begun
        self.copied_bytes = 0
        self.seconds_left: float | None = None
        self.seconds_until_slot = 0.0

    def should_stop_waiting(self) -> bool:
        """True at the deadline, or when even a faster copy than this would miss it.

        Also once the copy has begun, where that is all that is waited for.
        """
        self.watch(self.format_progress)
        left = self.deadline.seconds_left()
        if left == 0.0:
            return True
        self.part.mark_waited_for(self.clock.wall())
        owner = self.node.cache.find_stager(self.key)
        if owner is None or (owner.expected and self.leased):
            return False  # the job's own comes, which has no `prefetch.bandwidth`
        if owner.phase == "queued":
            self.seconds_until_slot = 0.0 if owner.placed else self._seconds_until_slot()
            return self.seconds_until_slot > left * SPEEDUP_MARGIN
        if self.until_begun:
            return True
        took = self.clock.monotonic() - owner.began
        if took < OBSERVE:
            return False
        self.copied_bytes = self.part.copied_bytes(owner)
        self.seconds_left = _estimate_seconds_left(owner, self.copied_bytes, took)
        return self.seconds_left is not None and self.seconds_left > left * SPEEDUP_MARGIN

    def _seconds_until_slot(self) -> float:
        """Seconds, at least, until a place for this copy is free."""
        from forestage.stage import copy_queue

        copies = copy_queue.list_live_copies(self.node)
        if self.key not in (copy.key for copy in copies if not copy.has_slot):
            return 0.0  # it has a place by now, or has ended
        left = {copy.key: self._seconds_left_of(copy.key) for copy in copies if copy.has_slot}
        config = self.node.config
        share = copy_queue.slots_per_user(config)
        return copy_queue.estimate_wait(self.key, copies, config.max_copies, share, left)

    def _seconds_left_of(self, key: str) -> float | None:
        """Seconds that another copy needs, at its rate so far."""
        part = self.node.cache.part(key)
        owner = part.find_record()
        took = self.clock.monotonic() - owner.began if owner else 0.0
        if owner is None or owner.phase != "copying" or took < OBSERVE:
            return None
        return _estimate_seconds_left(owner, part.copied_bytes(owner), took)

    def format_summary(self) -> str:
        """Returns, for the user, why the job does not wait."""
        if self.seconds_until_slot:
            begins = format_duration(self.seconds_until_slot)
            return f"{self.path} is queued behind other copies for {begins} more, at least"
        so_far = (
            f"{format_size(self.copied_bytes)} of {format_size(self.size)} of {self.path} are here"
        )
        if self.seconds_left is None:
            return so_far
        return f"{so_far}, the rest takes {format_duration(self.seconds_left)} more"

    def format_progress(self) -> str:
        """Returns, for a user who waits, how far the copy is and about how long it takes."""
        if self.seconds_left is None:
            return f"waiting for the copy of {self.path}, which is about to begin"
        percent, left = (
            100 * self.copied_bytes // self.size,
            5 * max(1, round(self.seconds_left / 5)),
        )
        return (
            f"waiting for the copy of {self.path}: {percent}% are here,"
            f" about {format_duration(left)} left"
        )


def _estimate_seconds_left(owner: PartRecord, done: int, took: float) -> float | None:
    """Pure: seconds that a copy needs, of which `done` bytes are here; None where nobody can say.

    An image's tail, which comes first, may have 4 KiB: less than a chunk is no rate.
    """
    came = done - owner.resumed
    return (owner.image.size - done) * took / came if came >= owner.chunk else None
