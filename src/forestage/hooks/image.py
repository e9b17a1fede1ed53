"""Handles the images that a job names, from the user's word to the path that shows the local copy.

Prolog and step share this path; it reads from top to bottom in `_handled` and `_served`. Whatever a
request comes to is its outcome: nothing that is expected to go wrong leaves `handle` as an
exception. The lease is taken before the entry is used, and before the copy exists, so that nothing
evicts it in between.

    cold: wait      the hook waits; at its deadline the job starts as with `shared`
    cold: shared    the job reads the source; with `redirect: bind` the stager lays the redirect
    cold: through   a step reads through the copy as it comes in, or as `shared` where it cannot
"""

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forestage.cache import baseline, disk, doubt, image, redirect, room
from forestage.cache.image import Image
from forestage.cache.lease import Lease, Use
from forestage.cache.node import Node
from forestage.clock import Clock, Deadline
from forestage.config import Config
from forestage.errors import Declined, Failed, ForestageError
from forestage.events import Handled, Result
from forestage.hooks.binds import LOOK, Binds
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.stage import source, wait
from forestage.stage.source import OpenImage
from forestage.stage.wait import Progress, quiet
from forestage.system import lock
from forestage.units import printable

if TYPE_CHECKING:
    from forestage.stage.stager import Channel

SMALL = 64 * 1024 * 1024  # bytes; most disks and links bring so many in within SHORTLY
SHORTLY = 1.0  # seconds that a small image is waited for: shorter than what reading twice costs
UNSERVED = ("declined", "failed")
GIVE_UP = 1.0  # seconds to wait for the space lock where nothing depends on it
SOURCE_TRIES = 2  # times that a source may change while it is copied before its path is left alone


class Wait(msgspec.Struct, frozen=True):
    """How long a hook goes on: `end` limits everything, `copy` waiting for copies.

    `copy` is None where the job starts without them; of SMALL ones the hook waits until `small`
    all the same. `through`: what can be read through is not waited for until `copy`. `watch` is
    called now and then during a wait. `fill` is how long a step waits for what its job has put into
    its own directory; `progress` is called now and then while it waits for data. `ready`: whether
    the hook waits until what is to be read through can be opened.
    """

    end: Deadline
    copy: Deadline | None
    small: Deadline
    watch: Progress = quiet
    fill: Deadline | None = None
    progress: Progress = quiet
    ready: bool = True
    through: bool = False

    @classmethod
    def of(
        cls, clock: Clock, end: float, copy: float | None, small: bool = True, ready: bool = True
    ) -> "Wait":
        """From now on, in seconds; `small`: whether small images are waited for."""
        return cls(
            Deadline.after(max(end, copy or 0.0), clock),
            None if copy is None else Deadline.after(copy, clock),
            Deadline.after(SHORTLY if small else 0.0, clock),
            ready=ready,
        )

    def for_copy(self, size: int) -> Deadline:
        """Returns how long to wait for the copy of an image of `size` bytes, at first."""
        none = Deadline(0.0, self.end.clock)
        asked = None if self.through else self.copy
        return asked or (self.small if size <= SMALL else none)


class Answer(msgspec.Struct, frozen=True):
    """What a request came to, and its image where one was found.

    `socket` is where the tasks of a step get the file through which they read; `decided` is by what
    it was decided that a redirect is in no container's way (Binds.decided).
    """

    outcome: Handled
    image: Image | None = None
    socket: Path | None = None
    decided: tuple[str, ...] = ()


def wished(config: Config, hint: float | None, longest: float) -> float | None:
    """Pure: seconds that a job wants to wait for its copies; None: not at all.

    `hint` is its stage-wait=. It replaces the admin's `deadline:`, also where the job would start
    from the shared path. `longest` is what `deadline: auto` means.
    """
    if hint == 0:
        return None
    if hint is not None:
        return min(hint, config.max_stage_wait)
    if config.start != "wait":
        return None
    return longest if config.deadline is None else config.deadline


def handle(
    node: Node,
    job: Job,
    requests: Sequence[Request],
    limit: Wait,
    refusal: Declined | None = None,
) -> list[Answer]:
    """Stages images and redirects their paths. Never raises for a request: each gets its answer.

    All their copies are under way before one of them is waited for.
    `refusal` is why nothing may be staged now (switched off, misconfigured); the path is looked at
    all the same where the node has redirects, since none may show this job an outdated file.
    """
    job = _note_saves(node, job, limit)
    bound = Binds(node.places.root, job, limit.end)
    shows = node.config.redirect != "none" and not all(one.is_data for one in requests)
    with bound if shows and refusal is None else contextlib.nullcontext():
        runs = [_run(node, job, request, limit, refusal, bound) for request in requests]
        begun = [next(run) for run in runs]
        answers = [one or next(filter(None, run)) for one, run in zip(begun, runs, strict=True)]
    return _leave_room(node, job, answers)


def _leave_room(node: Node, job: Job, answers: list[Answer]) -> list[Answer]:
    """Evicts for what the job's containers take if enroot unpacks them on the cache's disk.

    For the largest, whose outcome says what went: steps come one after the other, mostly. It is
    only a favour: a job that finds too little has no more without us.
    """
    needs = {
        number: room.unpacked(node.cache, node.config, one.image)
        for number, one in enumerate(answers)
        if one.image and one.image.kind == "image" and one.outcome.result not in UNSERVED
    }
    number = max(needs, key=lambda number: needs[number], default=None)
    if number is None or not needs[number]:
        return answers
    with contextlib.suppress(ForestageError, OSError):
        disk.must_take(node.places, node.cache, GIVE_UP)
        if not room.is_free(node.cache, node.config, needs[number]) and room.is_beside(
            node.cache, node.places.root, GIVE_UP
        ):
            # Mostly there is enough.
            from forestage.cache import evict

            whose = (needs[number], job.user.uid, GIVE_UP)
            keys = evict.leave_room(node.cache, node.leases, node.config, *whose)
            outcome = msgspec.structs.replace(answers[number].outcome, evicted=keys)
            answers[number] = msgspec.structs.replace(answers[number], outcome=outcome)
    return answers


def _run(
    node: Node, job: Job, request: Request, limit: Wait, refusal: Declined | None, bound: Binds
) -> Iterator[Answer | None]:
    """Yields the request's answer, and None before it where a copy has been started."""
    start = node.clock.monotonic()
    refusal = refusal or _refusal(node, job, request, limit)
    try:
        answer = yield from _handled(node, job, request, limit, refusal, bound)
    except Failed as failed:
        answer = Answer(of_error(request, failed))
    except (ForestageError, OSError) as error:
        answer = Answer(of_error(request, refusal or error))
    took = round(node.clock.monotonic() - start, 4)
    outcome = msgspec.structs.replace(answer.outcome, wait=took)
    answer = msgspec.structs.replace(answer, outcome=outcome, decided=bound.decided)
    yield measured(node, answer)


def measured(node: Node, answer: Answer) -> Answer:
    """The answer with what its start would have taken without the copy that is here."""
    if answer.image is None or answer.outcome.result not in ("hit", "joined", "copied"):
        return answer
    takes = 0.0
    with contextlib.suppress(OSError):  # only a figure
        takes = baseline.seconds(node.cache, node.config, answer.image.key)
    outcome = msgspec.structs.replace(answer.outcome, baseline=takes)
    return msgspec.structs.replace(answer, outcome=outcome)


def _handled(
    node: Node, job: Job, request: Request, limit: Wait, refusal: Declined | None, bound: Binds
) -> Generator[None, None, Answer]:
    if refusal and not redirect.binds(node.cache):
        raise refusal
    path = image.wanted_path(request, job.work_dir)
    changed = ""
    for _ in range(SOURCE_TRIES):
        with source.open_as(job.user, path, node, limit.end) as opened:
            try:
                _check(node, opened.image, refusal)
                # Data shows elsewhere.
                if not request.is_data and node.config.redirect != "none":
                    _keep_clear_of_binds(node, job, opened.image, limit, bound)
                wanted = _of_kind(opened, request)
                with (
                    leased(node, job, wanted.image.key, limit) as lease,
                    wait.begun(node, job, wanted) as copying,
                ):
                    if copying:
                        yield
                    return _served(node, job, request, wanted, lease, copying, limit, bound)
            except Declined as error:
                if error.reason != "changed":
                    return Answer(of_error(request, error, opened.image), opened.image)
                changed = str(error)  # what lies there now may stay
    raise Declined("changed", f"{SOURCE_TRIES} times, {changed}")


def _served(
    node: Node,
    job: Job,
    request: Request,
    opened: OpenImage,
    lease: Lease,
    copying: "Channel | None",
    limit: Wait,
    bound: Binds,
) -> Answer:
    """The entry, if it comes in time; else what the job does meanwhile."""
    found = opened.image
    first = limit.for_copy(found.size)
    try:
        came = wait.obtain(node, job, opened, copying, first, limit.watch)
    except Declined as late:
        if late.reason != "deadline":
            raise
        meanwhile = _meanwhile(node, job, request, opened, limit, late)
        if meanwhile is None:
            came = "joined"
        elif until := _rather(node, job, found, meanwhile, limit):
            came = wait.obtain(node, job, opened, copying, until, limit.watch)
        else:
            return meanwhile
    if not request.is_data and node.config.redirect != "none":
        _keep_clear_of_binds(node, job, found, limit, bound)  # what its own fstab says is known now
    # The use is noted at its end (hooks/epilog.py): a hit writes nothing to a disk that may hang.
    way = _way(node, job, found)
    if way == "bind":
        way = redirect.mount(node.cache, node.places, node.leases, lease, found, limit.end)
    return _answer(request, opened.image, came, way)


def _rather(node: Node, job: Job, found: Image, meanwhile: Answer, limit: Wait) -> Deadline | None:
    """How long the job would rather wait for its copy than read the source meanwhile, if at all."""
    reads_source = limit.through and not meanwhile.socket
    return limit.copy if reads_source and _way(node, job, found) == "spank" else None


def _meanwhile(
    node: Node, job: Job, request: Request, opened: OpenImage, limit: Wait, late: Declined
) -> Answer | None:
    """What the job does while its image is copied; None where that has just ended."""
    way = _way(node, job, opened.image)
    if way == "bind":
        _ask_for_redirect(node, job, opened.image)
        # The stager publishes, then looks who asked: one of the two sees the other.
        if limit.copy is None and node.cache.find(opened.image):
            return None
        way = "later"
    if limit.copy is not None and not limit.through:
        return Answer(of_error(request, late, opened.image), opened.image)
    if way != "spank":
        return _answer(request, opened.image, "started", way)
    return _through(node, job, request, opened, limit.ready)


def _through(node: Node, job: Job, request: Request, opened: OpenImage, ready: bool) -> Answer:
    """Has the step read through the copy, or leaves it the shared path where that cannot be.

    The Prolog has all ready for the first step.
    """
    way = "none" if job.step is not None else "spank"
    if node.config.start != "through":
        return _answer(request, opened.image, "started", way)
    # A hit needs none of it.
    from forestage.stage.task import Task
    from forestage.through import keeper

    try:
        socket = keeper.start(Task(node, job, opened), wait=ready)
    except Declined as why:
        answer = _answer(request, opened.image, "started", way)
        detail = printable(str(why))
        outcome = msgspec.structs.replace(answer.outcome, reason=why.reason, detail=detail)
        return msgspec.structs.replace(answer, outcome=outcome)
    result: Result = "started" if job.step is None else "through"
    return msgspec.structs.replace(_answer(request, opened.image, result, "spank"), socket=socket)


def of_error(request: Request, error: Exception, found: Image | None = None) -> Handled:
    """Pure: the outcome of a request that was not served."""
    if not isinstance(error, Declined):
        error = Failed("io", str(error))
    outcome = Handled(
        result="failed" if isinstance(error, Failed) else "declined",
        request=printable(request.path),
        via=request.via,
        reason=error.reason,
        detail=printable(str(error)),
    )
    return _about(outcome, found) if found else outcome


def has_control(text: str) -> bool:
    """Pure: whether a text holds what ends a line or a field, or moves a terminal's cursor."""
    return any(ord(char) < 32 or ord(char) == 127 for char in text)


def _refusal(node: Node, job: Job, request: Request, limit: Wait) -> Declined | None:
    """Returns why nothing may be staged for this request on this node, if it may not."""
    try:
        # First: a registry's name must not count as a failure of the cache, which may drain the
        # node.
        image.wanted_path(request, job.work_dir)
        if job.hints.off:
            return Declined("off", "the job says stage=off")
        disk.must_serve(node.places, node.cache, limit.end.left())
        node.cache.prepare(node.config.require_mount)
        doubt.must_not_be(node.places)
    except Declined as declined:
        return declined
    except OSError as error:
        return Failed("io", str(error))
    return None


def _check(node: Node, found: Image, refusal: Declined | None) -> None:
    """Raises Declined where this image must not be staged for the job."""
    if refusal:
        raise refusal
    if node.config.redirect == "spank" and has_control(found.path):
        # The step could not tell the companion, whose lines have fields between tabs.
        raise Declined("bad-path", "the path resolves to a name with control characters")


def _of_kind(opened: OpenImage, request: Request) -> OpenImage:
    """Pure: the same, to be copied as what the request is: an image or data."""
    kind = "data" if request.is_data else "image"
    return msgspec.structs.replace(opened, image=msgspec.structs.replace(opened.image, kind=kind))


def _keep_clear_of_binds(node: Node, job: Job, found: Image, limit: Wait, bound: Binds) -> None:
    """Raises Declined where the job's container binds a directory above.

    Then no redirect of this job's stays; where another job needs one, this container may not start.
    """
    try:
        entry = node.cache.read(found.key)
        bound.must_not_hold(found.path, entry.binds if entry else ())
    except Declined:
        # A Prolog does not see what a step asks for, and may have laid one.
        _spare(node, job, found.path, limit)
        raise


def fetch(node: Node, job: Job, request: Request, limit: Wait) -> Answer:
    """Has an image copied that the job may use later, and does not hold yet.

    Without a lease: the job may be over by now. Raises Declined, Failed, OSError.
    """
    refusal = _refusal(node, job, request, limit)
    path = image.wanted_path(request, job.work_dir)
    with source.open_as(job.user, path, node, limit.end) as opened:
        _check(node, opened.image, refusal)
        with wait.begun(node, job, opened) as copying:
            return _answer(request, opened.image, "started" if copying else "hit", "none")


def _answer(request: Request, found: Image, result: Result, shown: str) -> Answer:
    outcome = Handled(result, request=printable(request.path), via=request.via, redirect=shown)
    return Answer(_about(outcome, found), found)


def _about(outcome: Handled, found: Image) -> Handled:
    return msgspec.structs.replace(outcome, image=found.path, key=found.key, size=found.size)


def lease_of(node: Node, job: Job) -> Lease:
    """The job's lease, or a new one, not yet written. Under the space lock. Raises Failed."""
    return node.leases.read(job.id) or Lease(
        job.id, job.user, node.clock.wall(), str(node.cache.root), node=job.node
    )


@contextlib.contextmanager
def _space(node: Node, limit: Wait) -> Iterator[None]:
    """Holds the space lock. Who has it may hang with the disk: then it is not waited for."""
    left = limit.end.left()
    hang = disk.hangs(node.places, node.cache, left)
    with contextlib.ExitStack() as held:
        try:
            patience = left if hang is None else min(GIVE_UP, left)
            held.enter_context(lock.held(node.cache.space_lock, patience))
        except lock.Busy as busy:
            raise busy if hang is None else disk.declined(node.cache, hang) from None
        yield


@contextlib.contextmanager
def leased(node: Node, job: Job, key: str, limit: Wait) -> Iterator[Lease]:
    """Holds the entry for the job; an error gives back what the job did not hold before."""
    with _space(node, limit):
        lease = lease_of(node, job)
        is_new = all(use.key != key for use in lease.uses)
        if not is_new:
            # A requeued job's, perhaps, which a sweep takes for that of the job as it was.
            node.leases.confirm(job.id)
        else:
            lease = lease.with_use(Use(key))
            node.leases.write(lease)
    with contextlib.ExitStack() as on_error:
        # A job may name one image twice: what the first request got stays. So does what a step
        # took, as another one may run with it by now.
        if is_new and job.step is None:
            on_error.callback(give_back, node, job, key)
        yield lease
        on_error.pop_all()


def give_back(node: Node, job: Job, key: str) -> None:
    """Has the job's lease hold the entry no longer. Best effort."""
    # The deadline may be over, so no waiting: what stays in the lease goes in the Epilog.
    with contextlib.suppress(lock.Busy), lock.held(node.cache.space_lock, GIVE_UP):
        lease = node.leases.read(job.id)
        if lease is not None:
            node.leases.put(lease.without(key))


def _ask_for_redirect(node: Node, job: Job, found: Image) -> None:
    """Has the stager redirect the path for this job, once the entry is here."""
    # Whoever holds the lock for so long: the job reads the right bytes without it, only slower.
    with contextlib.suppress(lock.Busy), lock.held(node.cache.space_lock, GIVE_UP):
        lease = node.leases.read(job.id)
        if lease is not None:
            node.leases.write(lease.with_use(Use(found.key, found.path)))


def _way(node: Node, job: Job, found: Image) -> str:
    """How the path is to show the entry: bind, spank, or none for the site's sake or the job's."""
    if node.config.redirect == "none":
        return "none"
    if job.saves:
        lease = node.leases.read(job.id)
        if lease is None or job.saves not in lease.saves or job.saves == found.path:
            return "none"
    return node.config.redirect


def _note_saves(node: Node, job: Job, limit: Wait) -> Job:
    """Notes where the job saves its container: no redirect of the node stays there, or comes.

    --container-save meets one as a read-only file, whoever made it, and needs no image beside it.
    Returns the job with that path resolved; where this could not be noted, as it is: then it gets
    no redirect at all (_way).
    """
    if not job.saves or node.config.redirect == "none":
        return job
    # A name that is no text can be in no lease, and so never has a redirect either.
    with contextlib.suppress(ForestageError, OSError, UnicodeEncodeError):
        path = os.path.join(job.work_dir, job.saves)
        saved, may = source.saved_to(path, job.user, min(LOOK, limit.end.left()))
        job = msgspec.structs.replace(job, saves=saved)
        with lock.held_if_writable(node.cache.space_lock, limit.end.left()):
            lease = lease_of(node, job)
            # Who cannot write there is in nobody's way, and nobody in theirs.
            if not may:
                return job
            # Before those that lie there go: the stager may lay one.
            node.leases.put(lease.saving(saved))
        redirect.unmount_stale(node.cache, frozenset({saved}), "", job.user, limit.end)
    return job


def _spare(node: Node, job: Job, path: str, limit: Wait) -> None:
    """Takes off the job's own redirect of a path whose directory its container binds.

    Not another job's: a step may call any directory its home.
    """
    with lock.held(node.cache.space_lock, limit.end.left()):
        lease = node.leases.read(job.id)
        if lease is not None and lease.unredirected(path) != lease:
            node.leases.write(lease.unredirected(path))
        if path in node.leases.redirected():
            return
    redirect.unmount_stale(node.cache, frozenset({path}), "", job.user, limit.end)
