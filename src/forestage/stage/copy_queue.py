"""The queue of this node's copies: at most `max_copies` at once, those that jobs need first.

    need      is so while                               its copy
    now       a job reads the image through a keeper,   goes first
              or a hook waits for it
    later     a job has a lease on it                   goes next
    none      no lease names it: the jobs are over      begins when nobody else waits, and gives its
                                                        place up to whoever does

Among copies of one need, a user with fewer copies under way goes first, then who asked first. A
copy that a job needs keeps its place until it ends, or stalls: so the copies that one user's jobs
need get no more than `max_user_share` of the places, one at least, and the others are there when
somebody else asks. Each stager judges for itself, from the same records; places are taken under the
space lock.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from forestage.cache import arrival_map, evict
from forestage.cache.node import Node
from forestage.cache.part import Part, PartRecord, boot_id
from forestage.clock import Deadline
from forestage.config import Config
from forestage.errors import CopyStopped, Failed
from forestage.system import files, lock

POLL = 0.1  # seconds
WATCH = 0.2  # seconds between two looks of a copy under way
LETS_GO = 10.0  # seconds; WATCH, and what the threads of a copy are reading
CALLED = 60.0  # seconds after a Prolog, in which its job counts though nothing else shows it
STALLED_AFTER = 60.0  # seconds without a chunk, after which a copy gives up its place

CopyNeed = Literal["now", "later", "none"]
CopyTurn = Literal["go", "wait", "stop"]
_RANK = {"now": 0, "later": 1, "none": 2}


def evict_for_files(node: Node) -> bool:
    """Evict as an Epilog does, for a disk that takes no more files; return whether anything went.

    Such a disk counts as full (evict.plan_to_watermark), however many bytes are free.
    """
    went = False
    with contextlib.suppress(Failed, OSError):
        while evict.evict_to_watermark(node.cache, node.leases, node.config):
            went = True
    return went


class QueuedCopy(msgspec.Struct, frozen=True):
    """A copy in the queue, or under way if it is `has_slot`; `since` in monotonic seconds.

    `has_begun`: it has its room as well. `expected`: it is for jobs that may never come.
    """

    key: str
    uid: int
    since: float
    need: CopyNeed = "later"
    has_slot: bool = False
    has_begun: bool = False
    expected: bool = False


def choose_turn(key: str, copies: Sequence[QueuedCopy], slots: int, user_slots: int) -> CopyTurn:
    """Pure: what the copy of this key does now; `slots` copies may be under way at once.

    Of these, one user's jobs get `user_slots` for copies that they need.
    """
    placed = [copy for copy in copies if copy.has_slot]
    free = max(0, slots - len(placed))
    if any(copy.key == key for copy in placed):
        idle = sorted((c for c in placed if c.need == "none"), key=lambda c: (-c.since, c.key))
        begin = _list_beginning(copies, free + len(idle), user_slots)
        needed = sum(copy.need != "none" for copy in begin)
        gives_way = [copy.key for copy in idle][: max(0, needed - free)]
        return "stop" if key in gives_way else "go"
    return (
        "go" if key in [copy.key for copy in _list_beginning(copies, free, user_slots)] else "wait"
    )


def _list_beginning(
    copies: Sequence[QueuedCopy], free_slots: int, user_slots: int
) -> list[QueuedCopy]:
    """Pure: those that begin if so many places are free."""
    # What nobody needs gives way, and so holds nothing up.
    busy = Counter(copy.uid for copy in copies if copy.has_slot and copy.need != "none")
    begin: list[QueuedCopy] = []
    for copy in order_waiting(copies):
        if len(begin) < free_slots and (copy.need == "none" or busy[copy.uid] < user_slots):
            begin.append(copy)
            busy[copy.uid] += copy.need != "none"
    return begin


def order_waiting(copies: Sequence[QueuedCopy]) -> list[QueuedCopy]:
    """Pure: those that wait, in the order in which they begin."""
    left = [copy for copy in copies if not copy.has_slot]
    running = Counter(copy.uid for copy in copies if copy.has_slot)
    line: list[QueuedCopy] = []
    while left:
        first = min(left, key=lambda c: (_RANK[c.need], running[c.uid], c.since, c.key))
        left.remove(first)
        line.append(first)
        running[first.uid] += 1
    return line


def estimate_wait(
    key: str,
    copies: Sequence[QueuedCopy],
    slots: int,
    user_slots: int,
    left: Mapping[str, float | None],
) -> float:
    """Pure: seconds, at least, until the copy of this key, which waits, has a place.

    `left` is what each copy under way needs until its end; None where that cannot be said.
    """
    (own,) = (copy for copy in copies if copy.key == key)
    mine = [copy for copy in copies if copy.uid == own.uid]
    return max(
        _estimate_wait_for_slot(key, copies, slots, left),
        _estimate_wait_for_slot(key, mine, user_slots, left),
    )


def _estimate_wait_for_slot(
    key: str, copies: Sequence[QueuedCopy], slots: int, left: Mapping[str, float | None]
) -> float:
    # Those that nobody needs give way.
    ends = sorted(left.get(c.key) or 0.0 for c in copies if c.has_slot and c.need != "none")
    ahead = [copy.key for copy in order_waiting(copies)].index(key)
    if ahead < slots - len(ends) or not ends:
        return 0.0
    return ends[min(ahead - (slots - len(ends)), len(ends) - 1)]


def wait_for_slot(node: Node, key: str, owner: PartRecord, stop: threading.Event) -> PartRecord:
    """Waits for a place, and takes it; returns the owner with it. Raises CopyStopped."""
    while True:
        if _choose_turn_now(node, key) == "go":
            with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
                if _choose_turn_now(node, key) == "go":  # nobody took the place in between
                    owner = msgspec.structs.replace(owner, placed=True)
                    node.cache.part(key).write_record(owner)
                    return owner
        if stop.wait(POLL):
            raise CopyStopped


def _choose_turn_now(node: Node, key: str) -> CopyTurn:
    return choose_turn(
        key, list_live_copies(node, key), node.config.max_copies, slots_per_user(node.config)
    )


def slots_per_user(config: Config) -> int:
    """Pure: how many of the places the copies get that one user's jobs need."""
    return max(1, config.max_user_share.resolve_bytes(config.max_copies))


@contextlib.contextmanager
def stop_when_displaced(node: Node, key: str, stop: threading.Event) -> Iterator[None]:
    """Sets `stop` once this copy, which is under way, is to give up its place."""

    def watch() -> None:
        with contextlib.suppress(OSError):  # of the disk: the copy itself will meet it
            if _choose_turn_now(node, key) == "stop":
                stop.set()

    with repeat_in_thread(watch, WATCH, "queue"):
        yield


@contextlib.contextmanager
def stop_when_requested(node: Node, key: str, stop: threading.Event) -> Iterator[None]:
    """Sets `stop` once a job has a lease on the key, whose own stager goes on with what is here.

    That one has the job's nodes for peers and no `prefetch.bandwidth`. Without such a limit, any
    job that begins on the node ends the copy. So does any copy that is asked for: the link is its.
    """
    alone = node.config.prefetch.bandwidth is None

    def watch() -> None:
        leased = _find_leased_keys(node)
        if (alone and has_job_begun_recently(node)) or leased is None or key in leased:
            stop.set()
        with contextlib.suppress(OSError):  # of the disk: the copy itself will meet it
            if any(one.has_slot for one in list_requested_copies(node)):
                stop.set()

    with repeat_in_thread(watch, WATCH, "expected"):
        yield


def list_requested_copies(node: Node) -> Iterator[QueuedCopy]:
    """The copies that somebody waits for: all but those for pending jobs. Raises OSError."""
    return (copy for copy in list_live_copies(node) if not copy.expected)


def wait_for_expected_copies(node: Node) -> bool:
    """Waits, as a copy that has a place, until those end that hold room for expected jobs.

    Returns whether there were any.
    """
    end = Deadline.after(LETS_GO, node.clock)
    found = False
    while (
        any(one.expected and one.has_begun for one in list_live_copies(node)) and end.seconds_left()
    ):
        found = True
        node.clock.sleep(POLL)
    return found


def has_job_begun_recently(node: Node) -> bool:
    """Whether a job began here within CALLED, though nothing else may show it.

    One that began before a copy and after its pass has looked for jobs ends the copy as well.
    """
    found = files.lstat_or_none(node.places.hook_call_mark("prolog"))
    return found is not None and abs(node.clock.wall() - found.st_mtime) < CALLED


def list_live_copies(node: Node, own: str = "") -> list[QueuedCopy]:
    """The copies of this node that live: `own`, the caller's, and those whose lock is held.

    One whose source hangs cannot even be killed; it loses its place, or a few of them would keep
    everybody else waiting for ever. Raises OSError.
    """
    now = node.clock.wall()
    leased = _find_leased_keys(node)
    found = []
    for directory in node.cache.parts.iterdir():
        part, key = Part(directory), directory.name
        owner = part.find_record()
        if (
            owner is None
            or (owner.placed and part.idle_seconds(now) > STALLED_AFTER)
            or owner.boot != boot_id()
            or (key != own and lock.is_free(node.cache.key_lock(key)))
        ):
            continue
        need: CopyNeed = "later" if leased is None or key in leased else "none"
        waits = arrival_map.is_served(node.places.through / key) or part.is_waited_for(now)
        if need == "later" and waits:  # neither a job that is over nor a keeper that was killed
            need = "now"
        begun = owner.phase == "copying"
        state = (need, owner.placed, begun, bool(owner.expected))
        found.append(QueuedCopy(key, owner.uid, owner.since, *state))
    return found


def _find_leased_keys(node: Node) -> frozenset[str] | None:
    """The keys that jobs need; None where a lease cannot be read, and may name any."""
    try:
        return node.leases.leased_keys()
    except (Failed, OSError):
        return None


@contextlib.contextmanager
def repeat_in_thread(act: Callable[[], None], every: float, name: str) -> Iterator[None]:
    """Calls `act` every so many seconds, first after that long, in a thread of that name.

    The thread has ended when the block is left, however it is left. What `act` raises ends the
    thread and not the work.
    """
    over = threading.Event()

    def again() -> None:
        while not over.wait(every):
            act()

    thread = threading.Thread(target=again, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
