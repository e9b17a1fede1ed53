"""Handles one image that a job names, from the user's word to the path that shows the local copy.

Prolog and step share this path; it reads from top to bottom in `_handle`. Whatever a request comes
to is its outcome: nothing that is expected to go wrong leaves `handle` as an exception. The lease
is taken before the entry is used, and before the copy exists, so that nothing evicts it in between.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from forestage.cache import image, redirect
from forestage.cache.image import Image
from forestage.cache.lease import Lease, Use
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, Failed, ForestageError
from forestage.events import Handled
from forestage.slurm.job import Job, Request
from forestage.stage import source, wait
from forestage.stage.source import OpenImage
from forestage.stage.wait import Eta
from forestage.system import lock
from forestage.units import printable

GIVE_UP = 1.0  # seconds to wait for the space lock where nothing depends on it
SOURCE_TRIES = 2  # times that a source may change while it is copied before its path is left alone
MAX_USES = 1000  # of one job, some 200 bytes each: a job must not fill /run


class Wait(msgspec.Struct, frozen=True):
    """How long a hook goes on: `copy` limits waiting for a copy, `end` limits everything.

    `in_vain` says what a wait that brought no copy leaves: nothing (`release` the lease), the lease
    for the job's next step (`keep`), or a copy that the job's steps will wait for (`hand-over`).
    `watch` is called now and then during a wait.
    """

    end: Deadline
    copy: Deadline
    in_vain: Literal["release", "keep", "hand-over"] = "release"
    watch: Callable[[Eta], None] | None = None


class Answer(msgspec.Struct, frozen=True):
    """What a request came to, and its image where one was found."""

    outcome: Handled
    image: Image | None = None


def handle(
    node: Node, job: Job, request: Request, limit: Wait, refusal: Declined | None = None
) -> Answer:
    """Stages one image and redirects its path. Never raises for a request.

    `refusal` is why nothing may be staged now (switched off, misconfigured); the path is looked at
    all the same where the node has redirects, since none may show this job an outdated file.
    """
    start = node.clock.monotonic()
    refusal = refusal or _refusal(node, job, request)
    try:
        answer = _handle(node, job, request, limit, refusal)
    except Failed as failed:
        answer = Answer(of_error(request, failed))
    except (ForestageError, OSError) as error:
        answer = Answer(of_error(request, refusal or error))
    took = round(node.clock.monotonic() - start, 4)
    return Answer(msgspec.structs.replace(answer.outcome, wait=took), answer.image)


def _handle(
    node: Node, job: Job, request: Request, limit: Wait, refusal: Declined | None
) -> Answer:
    if refusal and not redirect.binds(node.cache):
        raise refusal
    path = image.wanted_path(request, job.work_dir)
    changed = ""
    for _ in range(SOURCE_TRIES):
        with source.open_as(job.user, path, node, limit.end) as opened:
            try:
                _check(node, opened.image, refusal)
                with _lease(node, job, opened, limit) as lease:
                    came = _obtain(node, job, opened, limit)
                    if came == "started":
                        return _answer(request, opened, came, "spank")
                    with contextlib.suppress(FileNotFoundError):  # only a note for evict
                        node.cache.touch(opened.image.key, node.clock.wall())
                    return _answer(
                        request, opened, came, _redirect(node, job, opened, lease, limit)
                    )
            except Declined as error:
                if error.reason != "changed":
                    return Answer(of_error(request, error, opened.image), opened.image)
                changed = str(error)  # what lies there now may stay
    raise Declined("changed", f"{SOURCE_TRIES} times, {changed}")


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


def _refusal(node: Node, job: Job, request: Request) -> Declined | None:
    """Returns why nothing may be staged for this request on this node, if it may not."""
    try:
        # First: a registry's name must not count as a failure of the cache, which may drain the
        # node.
        image.wanted_path(request, job.work_dir)
        if job.hints.off:
            return Declined("off", "the job says stage=off")
        node.cache.prepare(node.config.require_mount)
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


def _answer(
    request: Request, opened: OpenImage, result: Literal["started"] | wait.Came, shown: str
) -> Answer:
    outcome = Handled(result, request=printable(request.path), via=request.via, redirect=shown)
    return Answer(_about(outcome, opened.image), opened.image)


def _about(outcome: Handled, found: Image) -> Handled:
    return msgspec.structs.replace(outcome, image=found.path, key=found.key, size=found.size)


def _obtain(node: Node, job: Job, opened: OpenImage, limit: Wait) -> Literal["started"] | wait.Came:
    """Waits until the entry is here; `started` if the job's steps wait for it instead."""
    try:
        return wait.obtain(node, job, opened, limit.copy, limit.watch)
    except Declined as declined:
        if declined.reason != "deadline":
            raise
        if limit.in_vain == "hand-over":
            return "started"
        if node.config.on_deadline == "abort":
            wait.abort(node.cache, node.leases, job.id, opened.image.key)
        raise


@contextlib.contextmanager
def _lease(node: Node, job: Job, opened: OpenImage, limit: Wait) -> Iterator[Lease]:
    """Holds the entry for the job; an error gives back what the job did not hold before."""
    key = opened.image.key
    now = node.clock.wall()
    with lock.held(node.cache.space_lock, limit.end.left()):
        lease = node.leases.read(job.id) or Lease(
            job.id, job.user, now, str(node.cache.root), node=job.node
        )
        is_new = all(use.key != key for use in lease.uses)
        if not is_new:
            # A requeued job's, perhaps, which a sweep takes for that of the job as it was.
            node.leases.confirm(job.id)
        elif len(lease.uses) >= MAX_USES:
            raise Declined("too-many", f"the job holds {MAX_USES} images of this node already")
        else:
            lease = lease.with_use(Use(key))
            node.leases.write(lease)
    with contextlib.ExitStack() as on_error:
        # A job may name one image twice: what the first request got stays.
        if is_new and limit.in_vain != "keep":
            on_error.callback(_give_back, node, job, key)
        yield lease
        on_error.pop_all()


def _give_back(node: Node, job: Job, key: str) -> None:
    # The deadline may be over, so no waiting: what stays in the lease goes in the Epilog.
    with contextlib.suppress(lock.Busy), lock.held(node.cache.space_lock, GIVE_UP):
        lease = node.leases.read(job.id)
        if lease is not None:
            node.leases.put(lease.without(key))


def _redirect(node: Node, job: Job, opened: OpenImage, lease: Lease, limit: Wait) -> str:
    """Makes the path show the entry, unless the site or the job's own use of it forbids that."""
    if node.config.redirect == "none":
        return "none"
    if job.saves:
        path = os.path.join(job.work_dir, job.saves)
        saved = source.resolve(path, job.user, limit.end.left())
        # --container-save meets a read-only file where a redirect lies, whoever made it.
        redirect.unmount_stale(node.cache, frozenset({saved}), "", job.user, limit.end)
        if saved == opened.image.path:
            return "none"
    if node.config.redirect == "spank":
        return "spank"
    return redirect.mount(node.cache, node.places, node.leases, lease, opened.image, limit.end)
