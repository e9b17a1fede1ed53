"""Answers to users without root: all about their own jobs, of the rest what is no secret.

Whoever asks is known by the kernel (admin/ask_service.py) or by munge (peers/server.py); root may
see everything. Of other users no name, path or job gets into an answer, and whether somebody else's
job was here does not either.
"""

import contextlib
from collections.abc import Iterator

import msgspec

from forestage.admin import explain, job_images, recent
from forestage.admin.explain import History
from forestage.admin.job_images import Seen
from forestage.cache import evict
from forestage.cache.lease import Lease, Leases
from forestage.cache.node import Node
from forestage.config import switch
from forestage.errors import Failed, ForestageError, NotFound
from forestage.events import Bad, Copied, Event, Handled, losses, read
from forestage.paths import Places
from forestage.slurm.hints import MAX_HINTED
from forestage.system.terminal import Facts, Piece, count
from forestage.units import format_size, printable

MAX_ANSWER = 256 * 1024  # bytes; of a job with more to tell, its first runs are left out
MAX_LEASE = MAX_ANSWER // 2  # bytes; of one that holds more, its images are


class Public(msgspec.Struct, frozen=True):
    """What every user of a node may know. Sizes are bytes; `cache` is None where none is in use.

    `hit_ratio` is that of the latest `starts` (admin/recent.py); None where there are none.
    """

    enabled: bool
    cache: "Space | None" = None
    hit_ratio: float | None = None
    starts: int = 0


class Space(msgspec.Struct, frozen=True):
    """What the cache takes of what it may take, in bytes."""

    used: int
    max_size: int

    @property
    def percent(self) -> int:
        return round(100 * self.used / self.max_size) if self.max_size else 100


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer, as JSON. `problem` says why there is no other."""

    history: History | None = None
    public: Public | None = None
    images: Seen | None = None
    problem: str = ""


def about_job(places: Places, job: int, uid: int) -> bytes:
    """The answer about a job, for one user; at most MAX_ANSWER bytes. Raises OSError."""
    try:
        found = explain.gather(places, job) if uid == 0 else own(places, job, uid)
    except NotFound as nothing:
        return encoded(Answer(problem=str(nothing)))
    return bounded(found)


def own(places: Places, job: int, uid: int) -> History:
    """The history of a user's own job, made of nothing but this user's events and lease.

    Raises NotFound in the same words for another user's job and for none.
    """
    lease: Lease | None = None
    with contextlib.suppress(Failed, OSError):  # whose a damaged lease is, nobody knows
        lease = Leases(places.leases).read(job)
    if lease is not None and lease.user.uid != uid:
        lease = None
    own = own_events(read(places.events), uid)
    lost = losses.find_loss(places.lost_events)
    return explain.history(job, own, lease, yours=True, lost=lost)


def own_events(events: Iterator[Event], uid: int) -> Iterator[Event]:
    """Pure: a user's own events, and those of bad entries, of which they see what their jobs read.

    Job ids come again, so the job alone does not say whose it is.
    """
    return (event for event in events if event.uid == uid or isinstance(event.outcome, Bad))


def about_images(node: Node, job: int, uid: int) -> bytes:
    """The answer about the images of a user's own job, and whether their copies go on.

    It may be another user's job that has one copied; of that, what came of it. Raises OSError.
    """
    own: list[Event] = []
    for event in read(node.places.events):
        if event.uid == uid or uid == 0:
            own.append(event)
        elif isinstance(event.outcome, Copied):
            outcome = msgspec.structs.replace(event.outcome, detail="")
            own.append(msgspec.structs.replace(event, outcome=outcome))
    requests = dict.fromkeys(
        event.outcome.request
        for event in own
        if event.job == job and isinstance(event.outcome, Handled)
    )
    return encoded(Answer(images=job_images.look(node, own, job, list(requests)[:MAX_HINTED])))


def bounded(found: History) -> bytes:
    """Pure: the answer, without a job's first runs where it would be too long.

    And without the images that it holds, if these alone are too many.
    """
    problems = found.problems
    if found.lease and len(msgspec.json.encode(found.lease)) > MAX_LEASE:
        held = f"{count(len(found.lease.images), 'image')} that it holds are left out"
        problems = (*problems, f"{held}; root sees them on the node")
        lease = msgspec.structs.replace(found.lease, images=())
        found = msgspec.structs.replace(found, lease=lease, problems=problems)
    left_out = 0
    while len(text := encoded(Answer(history=found))) > MAX_ANSWER and found.runs:
        first = (len(found.runs) + 1) // 2
        left_out += first
        said = f"{count(left_out, 'run')} before these are left out; root sees them on the node"
        found = msgspec.structs.replace(found, runs=found.runs[first:], problems=(*problems, said))
    return text


def encoded(answer: Answer) -> bytes:
    return msgspec.json.encode(answer)


def decoded(text: bytes) -> Answer:
    """Raises NotFound for what is no answer, or says that there is none."""
    try:
        answer = msgspec.json.decode(text, type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ForestageError(f"the node's answer cannot be understood: {error}") from None
    if answer.problem:
        raise NotFound(printable(answer.problem))
    return answer


def public(node: Node) -> Public:
    """What everyone may know. Never raises for what is wrong with the cache."""
    lately = recent.starts(node.places.events, node.clock.wall())
    enabled = not switch.why_off(node.places, node.config, node.clock.wall())
    space = None
    with contextlib.suppress(ForestageError, OSError):
        if (node.cache.root / "format").exists():
            room = evict.measure(node.cache, node.cache.stored_entries(), node.config)
            space = Space(room.used, room.max_size)
    return Public(enabled, space, lately.hit_ratio, lately.tried)


def pieces(found: Public) -> list[Piece]:
    """Pure: what `forestage status` prints for users."""
    facts = [("staging", "on" if found.enabled else "switched off")]
    if found.cache is None:
        facts.append(("cache", "not in use"))
    else:
        used, most = format_size(found.cache.used), format_size(found.cache.max_size)
        facts.append(("cache", f"{used} of {most} ({found.cache.percent}% full)"))
    ratio = "no start is recorded"
    if found.hit_ratio is not None:
        ratio = f"{found.hit_ratio:.0%} of {count(found.starts, 'start')}"
    facts.append(("hits", ratio))
    return [Facts(tuple(facts))]
