"""What becomes of one request: look, lease, stage, redirect; shared by the Prolog and the step."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from forestage.cache import image, redirect
from forestage.cache.image import Image, Look
from forestage.cache.layout import Cache
from forestage.cache.lease import Lease, Leases, Use
from forestage.cache.node import Node
from forestage.clock import Clock, Deadline
from forestage.config import Config
from forestage.errors import Declined, Failed
from forestage.events import Outcome, Result
from forestage.paths import Places
from forestage.slurm.job import Asked, Job
from forestage.stage import wait as stage
from forestage.stage.wait import Outlook
from forestage.system import as_user, lock
from forestage.units import printable

GIVE_UP = 1.0  # seconds to wait for the space lock where nothing hangs on it
LOOK = 15.0  # seconds at most for one look: that is no copy, a file server that takes longer hangs
TRIES = 2  # looks at a source that changes while it is copied, before the original path is left
MAX_USES = 1000  # of one job, some 200 bytes each: a job must not fill /run


class Patience(msgspec.Struct, frozen=True):
    """Until when a hook goes on: `copy` with waiting for a copy, `end` with anything at all.

    `in_vain` says what a wait that brought no copy leaves: nothing (`release` the lease), the lease
    for the job's next step (`keep`), or a copy that the job's steps will wait for (`hand-over`).
    """

    end: Deadline
    copy: Deadline
    in_vain: Literal["release", "keep", "hand-over"] = "release"
    watch: Callable[[Outlook], None] | None = None


class Served(msgspec.Struct, frozen=True):
    """A request's outcome, and the image that the look found, if it found one."""

    outcome: Outcome
    image: Image | None = None


def serve(node: Node, job: Job, asked: Asked, patience: Patience) -> Served:
    """Stages one image. Never raises for a request: whatever becomes of it is its outcome."""
    return told(asked, node.clock, lambda: _serve(node, job, asked, patience))


def told(asked: Asked, clock: Clock, work: Callable[[], Served]) -> Served:
    """What `work` gave, and how long it took; every expected error becomes an outcome."""
    start = clock.monotonic()
    try:
        served = work()
    except Declined as declined:
        served = Served(outcome_of(asked, declined))
    except OSError as error:
        served = Served(outcome_of(asked, Failed("io", str(error))))
    took = round(clock.monotonic() - start, 4)
    return Served(msgspec.structs.replace(served.outcome, wait=took), served.image)


def outcome_of(asked: Asked, declined: Declined) -> Outcome:
    """Pure: the outcome of a request that was not served."""
    return Outcome(
        result="failed" if isinstance(declined, Failed) else "declined",
        asked=printable(asked.path),
        via=asked.via,
        reason=declined.reason,
        detail=printable(str(declined)),
    )


def refuse(node: Node, job: Job, asked: Asked, why: str, end: Deadline) -> Served:
    """Nothing is staged, as the admin has switched that off.

    But a redirect of another job's must not show this one an older file than lies there: where the
    node has any, the path is looked at, and what is stale is taken off.
    """

    def work() -> Served:
        _bare(node, job, asked, end)
        raise Declined("disabled", why)

    return told(asked, node.clock, work)


def misconfigured(
    places: Places, clock: Clock, job: Job, refused: Declined, end: Deadline
) -> list[Outcome]:
    """The outcomes where the configuration is broken. What leases tell of older redirects helps."""
    leases = Leases(places.leases)
    for root in leases.caches():
        node = Node(Config(sources=("/",)), places, Cache(Path(root)), leases, clock)
        for asked in job.asked:
            _bare_at_best(node, job, asked, end)
    return [outcome_of(asked, refused) for asked in job.asked]


def _bare(node: Node, job: Job, asked: Asked, end: Deadline) -> None:
    """Takes off redirects that would show a job which is not served older bytes than lie there."""
    if redirect.binds(node.cache):
        try:
            _look(node, job, image.wanted_path(asked, job.work_dir), end).close()
        except Failed:
            raise
        except Declined:
            pass  # he reads, or does not read, the original


def _bare_at_best(node: Node, job: Job, asked: Asked, end: Deadline) -> None:
    """The same where there is another problem to tell of."""
    with contextlib.suppress(Declined, OSError, as_user.TooSlow, lock.Busy):
        _bare(node, job, asked, end)


def _serve(node: Node, job: Job, asked: Asked, patience: Patience) -> Served:
    path = image.wanted_path(asked, job.work_dir)
    try:
        node.cache.prepare(node.config.require_mount)
    except (Failed, OSError):
        _bare_at_best(node, job, asked, patience.end)  # what may not be used may not show anything
        raise
    how = ""
    for _ in range(TRIES):
        looked = _look(node, job, path, patience.end)
        try:
            if job.hints.off:
                raise Declined("off", "the job says stage=off")
            result, laid = _stage(node, job, looked, patience)
        except Declined as declined:
            if declined.reason == "changed":
                how = str(declined)
                continue  # what lies there now may stay
            return _about(outcome_of(asked, declined), looked)
        finally:
            looked.close()
        outcome = Outcome(
            result=result,
            asked=printable(asked.path),
            via=asked.via,
            redirect=laid,
            bytes=looked.image.size if result == "copied" else 0,
        )
        return _about(outcome, looked)
    raise Declined("changed", f"{TRIES} times, {how}")


def has_control(text: str) -> bool:
    """Pure: whether a text holds what ends a line or a field, or moves a terminal's cursor."""
    return any(ord(char) < 32 or ord(char) == 127 for char in text)


def _about(outcome: Outcome, looked: Look) -> Served:
    """Pure: with what is known once the look has found an image."""
    wanted = looked.image
    facts = {"image": wanted.path, "key": wanted.key, "size": wanted.size}
    return Served(msgspec.structs.replace(outcome, **facts), wanted)


def _stage(node: Node, job: Job, looked: Look, patience: Patience) -> tuple[Result, str]:
    """Leased before it is there: a finished copy must not be evicted before its first use."""
    lease, is_new = _take_lease(node, job, looked, patience.end)
    with contextlib.ExitStack() as undo:
        # A job may ask for one image under two names: what the first got stays.
        if is_new and patience.in_vain != "keep":
            undo.callback(_give_up, node, job, looked)
        try:
            result = stage.stage(node, job, looked, patience.copy, patience.watch).result
        except Declined as declined:
            if declined.reason != "deadline":
                raise
            if patience.in_vain == "hand-over":
                undo.pop_all()
                return "started", "spank"
            if node.config.on_deadline == "abort":
                stage.abort(node.cache, node.leases, job.id, looked.image.key)
            raise
        with contextlib.suppress(FileNotFoundError):  # only a note for evict
            node.cache.touch(looked.image.key, node.clock.wall())
        laid = _redirect(node, job, looked, lease, patience.end)
        undo.pop_all()
        return result, laid


def _take_lease(node: Node, job: Job, looked: Look, end: Deadline) -> tuple[Lease, bool]:
    """The job's lease with this entry in it, and whether it was not in it before."""
    now = node.clock.wall()
    key = looked.image.key
    with lock.held(node.cache.space_lock, end.left()):
        before = node.leases.read(job.id) or Lease(
            job.id, job.user, now, str(node.cache.root), node=job.node
        )
        if any(use.key == key for use in before.uses):
            # A requeued job's, perhaps, which a sweep takes for that of the job as it was.
            node.leases.confirm(job.id)
            return before, False
        if len(before.uses) >= MAX_USES:
            raise Declined("too-many", f"the job holds {MAX_USES} images of this node already")
        lease = before.with_use(Use(key))
        node.leases.write(lease)
    return lease, True


def _give_up(node: Node, job: Job, looked: Look) -> None:
    # The deadline may be over, so no waiting: what stays in the lease goes in the Epilog.
    with contextlib.suppress(lock.Busy), lock.held(node.cache.space_lock, GIVE_UP):
        lease = node.leases.read(job.id)
        if lease is not None:
            node.leases.put(lease.without(looked.image.key))


def _look(node: Node, job: Job, path: str, end: Deadline) -> Look:
    """Looks under our binds, and takes those off that show something else than the look found."""
    bound = redirect.binds(node.cache)
    caches = [node.cache.real]
    limit = min(LOOK, end.left())
    try:
        seen, line = image.glance(path, job.user, node.config.sources, caches, limit)
    except OSError as error:
        # What this user may not see, no bind may show: an older copy may be more generous. But a
        # bind that refuses him as well stays: it is another user's, and it is right.
        if bound and (shown := _shown(node, job, path, end)):
            # So ends the name of an entry that was evicted while a redirect still shows it.
            names = (path, shown, shown.removesuffix(" (deleted)"))
            _unveil(node, job, frozenset(names), "", end)
        raise image.declined_by(error, path) from None
    with contextlib.ExitStack() as undo:
        undo.callback(line.close)
        if bound:
            key = seen.image.key if seen.image else ""
            _unveil(node, job, frozenset({path, seen.path}), key, end)
        wanted = image.judge(seen, node.config.max_image_size)
        if node.config.redirect == "spank" and has_control(wanted.path):
            # The step could not tell the companion, whose lines have fields between tabs.
            raise Declined("bad-path", "the path resolves to a name with control characters")
        undo.pop_all()
        return Look(wanted, job.user, -1, line)


def _shown(node: Node, job: Job, path: str, end: Deadline) -> str:
    """What the user opens by this path as it is now, redirects and all; "" for nothing."""
    limit = min(LOOK, end.left())
    try:
        seen, line = image.glance(path, job.user, node.config.sources, (), limit)
    except OSError:
        return ""
    line.close()
    return seen.path


def _unveil(node: Node, job: Job, paths: frozenset[str], key: str, end: Deadline) -> None:
    """Takes off what shows something else than `key` at the paths."""
    if redirect.stale(redirect.binds(node.cache), paths, key):
        with lock.held_if_writable(node.cache.space_lock, end.left()):
            redirect.take_off(redirect.stale(redirect.binds(node.cache), paths, key), job.user)


def _redirect(node: Node, job: Job, looked: Look, lease: Lease, end: Deadline) -> str:
    if node.config.redirect == "none":
        return "none"
    if job.saves:
        saved = image.resolve(os.path.join(job.work_dir, job.saves), job.user, end.left())
        # --container-save meets a read-only file where a redirect lies, whoever laid it.
        _unveil(node, job, frozenset({saved}), "", end)
        if saved == looked.image.path:
            return "none"
    if node.config.redirect == "spank":
        return "spank"
    return redirect.lay(node.cache, node.places, node.leases, lease, looked.image, end)[1]
