"""What happens when a job starts: look, stage, lease, redirect; one outcome for each image."""

import contextlib
import os

import msgspec

from forestage import asuser, deadline, image, lock, redirect, stage
from forestage.clock import Deadline
from forestage.deadline import Limits
from forestage.errors import Declined, Failed
from forestage.events import Outcome
from forestage.image import Look
from forestage.job import Asked, Job
from forestage.lease import Lease, Use
from forestage.node import Node
from forestage.units import printable

GIVE_UP = 1.0  # seconds to wait for the space lock where nothing hangs on it
TRIES = 2  # looks at a source that changes while it is copied, before the original path is left


def misread(job: Job) -> list[Outcome]:
    """Pure: the outcome of a job that names no image, but tried to tell us something."""
    if not job.hints.problems:
        return []
    detail = printable("; ".join(job.hints.problems))
    return [Outcome(result="declined", reason="bad-hint", detail=detail)]


def prolog(node: Node, job: Job, limits: Limits) -> list[Outcome]:
    """Stages all that the job asks for. Never raises for a request: each gets its outcome."""
    config = node.config
    if not config.enabled:
        disabled = Declined("disabled", "`enabled: false`")
        return [outcome_of(asked, disabled) for asked in job.asked]
    patience = deadline.patience(limits, config.deadline, job.hints.wait, config.max_stage_wait)
    end = Deadline.after(patience, node.clock)
    return [_request(node, job, asked, end) for asked in job.asked]


def _request(node: Node, job: Job, asked: Asked, end: Deadline) -> Outcome:
    start = node.clock.monotonic()
    try:
        outcome = _serve(node, job, asked, end)
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


def _serve(node: Node, job: Job, asked: Asked, end: Deadline) -> Outcome:
    path = image.wanted_path(asked, job.work_dir)
    node.cache.prepare(node.config.require_mount)
    for _ in range(TRIES):
        looked = _look(node, job, path, end)
        try:
            if job.hints.off:
                raise Declined("off", "the job says stage=off")
            staged, laid = _stage(node, job, looked, end)
        except Declined as declined:
            if declined.reason == "changed":
                continue  # what lies there now may stay
            return _about(outcome_of(asked, declined), looked)
        finally:
            looked.close()
        outcome = Outcome(
            result=staged.result,
            asked=printable(asked.path),
            via=asked.via,
            redirect=laid,
            bytes=looked.image.size if staged.result == "copied" else 0,
        )
        return _about(outcome, looked)
    raise Declined("changed", f"{path} kept changing while it was staged")


def _about(outcome: Outcome, looked: Look) -> Outcome:
    """Pure: with what is known once the look has found an image."""
    wanted = looked.image
    return msgspec.structs.replace(outcome, image=wanted.path, key=wanted.key, size=wanted.size)


def _stage(node: Node, job: Job, looked: Look, end: Deadline) -> tuple[stage.Staged, str]:
    """Leased before it is there: a finished copy must not be evicted before its first use."""
    lease, is_new = _take_lease(node, job, looked, end)
    with contextlib.ExitStack() as undo:
        # A job may ask for one image under two names: what the first got stays.
        if is_new:
            undo.callback(_give_up, node, job, looked)
        staged = stage.stage(node, job, looked, end)
        with contextlib.suppress(FileNotFoundError):  # only a note for evict
            node.cache.touch(looked.image.key, node.clock.wall())
        laid = _redirect(node, job, looked, lease, end)
        undo.pop_all()
        return staged, laid


def _take_lease(node: Node, job: Job, looked: Look, end: Deadline) -> tuple[Lease, bool]:
    """The job's lease with this entry in it, and whether it was not in it before."""
    now = node.clock.wall()
    key = looked.image.key
    with lock.held(node.cache.space_lock, end.left()):
        before = node.leases.read(job.id) or Lease(job.id, job.user, now, str(node.cache.root))
        if any(use.key == key for use in before.uses):
            return before, False
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
    try:
        seen, line = image.glance(path, job.user, node.config.sources, caches, end.left())
    except OSError as error:
        # What this user may not see, no bind may show: an older copy may be more generous. But a
        # bind that refuses him as well stays: it is another user's, and it is right.
        if bound and _opens(node, job, path, end):
            _unveil(node, job, frozenset({path}), "", end)
        raise image.declined_by(error, path) from None
    with contextlib.ExitStack() as undo:
        undo.callback(line.close)
        if bound:
            key = seen.image.key if seen.image else ""
            _unveil(node, job, frozenset({path, seen.path}), key, end)
        wanted = image.judge(seen, node.config.max_image_size)
        undo.pop_all()
        return Look(wanted, job.user, -1, line)


def _opens(node: Node, job: Job, path: str, end: Deadline) -> bool:
    """Whether the user can open the path as it is now, redirects and all."""
    try:
        seen, line = image.glance(path, job.user, node.config.sources, (), end.left())
    except OSError:
        return False
    line.close()
    return seen.image is not None


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
    return redirect.lay(node.cache, node.places, node.leases, lease, looked.image, end)[1]
