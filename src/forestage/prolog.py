"""What happens when a job starts: look, stage, lease, redirect; one outcome for each image."""

import os

import msgspec

from forestage import asuser, image, lock, redirect, stage
from forestage.cache import Cache, Entry
from forestage.clock import Clock, Deadline
from forestage.config import Config
from forestage.errors import Declined, Failed
from forestage.events import Outcome, printable
from forestage.image import Look
from forestage.job import Asked, Job
from forestage.lease import Lease, Leases, Use
from forestage.places import Places

TRIES = 2  # looks at a source that changes while it is copied, before the original path is left


class Node(msgspec.Struct, frozen=True):
    """What a sequence works on: this node's cache, leases and places, under one configuration."""

    config: Config
    places: Places
    cache: Cache
    leases: Leases
    clock: Clock

    @classmethod
    def of(cls, config: Config, places: Places, clock: Clock) -> "Node":
        # The kernel's mount table knows the cache by its real path only.
        cache = Cache(places.root / os.path.realpath(config.cache).lstrip("/"))
        return cls(config, places, cache, Leases(places.leases), clock)


def misread(job: Job) -> list[Outcome]:
    """Pure: the outcome of a job that names no image, but tried to tell us something."""
    if not job.hints.problems:
        return []
    detail = printable("; ".join(job.hints.problems))
    return [Outcome(result="declined", reason="bad-hint", detail=detail)]


def prolog(node: Node, job: Job) -> list[Outcome]:
    """Stages all that the job asks for. Never raises for a request: each gets its outcome."""
    if not node.config.enabled:
        disabled = Declined("disabled", "`enabled: false`")
        return [outcome_of(asked, disabled) for asked in job.asked]
    deadline = Deadline.after(_patience(node.config, job), node.clock)
    return [_request(node, job, asked, deadline) for asked in job.asked]


def _patience(config: Config, job: Job) -> float:
    """Seconds this job may wait. Pure: the hint moves the deadline, under the admin's cap."""
    if job.hints.wait is None:
        return config.deadline
    return min(job.hints.wait, config.max_stage_wait)


def _request(node: Node, job: Job, asked: Asked, deadline: Deadline) -> Outcome:
    start = node.clock.monotonic()
    try:
        outcome = _serve(node, job, asked, deadline)
    except Declined as declined:
        outcome = outcome_of(asked, declined)
    except asuser.TooSlow as slow:
        outcome = outcome_of(asked, Declined("source-hangs", f"the source does not answer: {slow}"))
    except lock.Busy as busy:
        outcome = outcome_of(asked, Failed("busy", str(busy)))
    except OSError as error:
        outcome = outcome_of(asked, Failed("io", str(error)))
    return msgspec.structs.replace(outcome, wait=round(node.clock.monotonic() - start, 4))


def outcome_of(asked: Asked, declined: Declined) -> Outcome:
    """Pure: the outcome of a request that was not served."""
    return Outcome(
        result="failed" if isinstance(declined, Failed) else "declined",
        asked=printable(asked.path),
        via=asked.via,
        reason=declined.reason,
        detail=printable(str(declined)),
    )


def _serve(node: Node, job: Job, asked: Asked, deadline: Deadline) -> Outcome:
    path = image.wanted_path(asked, job.work_dir)
    node.cache.prepare(node.config.require_mount)
    for _ in range(TRIES):
        looked = _look(node, job, path, deadline)
        try:
            if job.hints.off:
                raise Declined("off", "the job says stage=off")
            lease, staged = _stage_and_lease(node, job, looked, deadline)
        except stage.Changed:
            continue
        finally:
            looked.close()
        laid = _redirect(node, job, looked, lease, deadline)
        return Outcome(
            result=staged.result,
            asked=printable(asked.path),
            via=asked.via,
            image=looked.image.path,
            key=looked.image.key,
            redirect=laid,
            bytes=staged.bytes,
            size=looked.image.size,
        )
    raise Declined("changed", f"{path} kept changing while it was copied")


def _look(node: Node, job: Job, path: str, deadline: Deadline) -> Look:
    """Looks under our binds, and takes those off that show something else than the look found."""
    bound = redirect.binds(node.cache)
    hidden = [bind.mount for bind in bound]
    try:
        seen, source = image.look(path, job.user, node.config.sources, hidden, deadline.left())
    except OSError as error:
        # What this user may not see, no bind may show: an older copy may be more generous.
        _unveil(node, frozenset({path}), "")
        raise image.declined_by(error, path) from None
    key = seen.image.key if seen.image else ""
    if bound:
        _unveil(node, frozenset({path, seen.path}), key)
    wanted = image.judge(seen, node.config.max_image_size)
    if source is None:
        raise Declined("missing", f"{path} could not be opened")
    return Look(wanted, source)


def _unveil(node: Node, paths: frozenset[str], key: str) -> None:
    if redirect.stale(redirect.binds(node.cache), paths, key):
        with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
            redirect.take_off(redirect.stale(redirect.binds(node.cache), paths, key))


def _stage_and_lease(
    node: Node, job: Job, looked: Look, deadline: Deadline
) -> tuple[Lease, stage.Staged]:
    """Between a look-up and its lease the entry may be evicted; then it is staged once more."""
    for _ in range(TRIES):
        staged = stage.stage(node.cache, node.leases, node.config, looked, job.user, deadline)
        with lock.held(node.cache.space_lock, lock.SPACE_TIMEOUT):
            if node.cache.find(looked.image) is not None:
                return _take_lease(node, job, staged.entry), staged
    raise Failed("evicted", f"{looked.image.path} was evicted as soon as it was staged")


def _take_lease(node: Node, job: Job, entry: Entry) -> Lease:
    now = node.clock.wall()
    before = node.leases.read(job.id) or Lease(job.id, job.user, now, str(node.cache.root))
    lease = before.with_use(Use(entry.key))
    node.leases.write(lease)
    node.cache.touch(entry.key, now)
    return lease


def _redirect(node: Node, job: Job, looked: Look, lease: Lease, deadline: Deadline) -> str:
    if node.config.redirect == "none":
        return "none"
    saved = os.path.join(job.work_dir, job.saves) if job.saves else ""
    if saved and os.path.normpath(saved) == looked.image.path:
        # --container-save to the image's own path: pyxis would meet a read-only file.
        return "none"
    try:
        _, laid = redirect.lay(node.cache, node.places, node.leases, lease, looked.image, deadline)
    except FileNotFoundError:
        raise Declined("changed", f"{looked.image.path} was removed just now") from None
    return laid
