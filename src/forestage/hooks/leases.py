"""What a job's lease holds: entries, redirects that come later, and where the job saves to."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from forestage.bind import redirect
from forestage.cache import disk_probe
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.errors import Declined, ForestageError
from forestage.hooks.container_binds import SAVE_PATH_TIMEOUT
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.sources import opening
from forestage.system import lock

SHORT_LOCK_TIMEOUT = 1.0  # seconds to wait for the space lock where nothing depends on it


def read_or_make_lease(node: Node, job: Job) -> Lease:
    """The job's lease, or a new one, not yet written. Under the space lock.

    Raises Failed; Declined where another user's job of that number has one.
    """
    lease = node.leases.find_lease(job.id)
    if lease is None:
        mine, now = job.user.without_groups(), node.clock.wall()
        return Lease(
            job.id,
            mine,
            now,
            str(node.cache.root),
            node=job.node,
            start=job.start,
            restart=job.restart,
        )
    if not lease.belongs_to(job.user.uid):
        raise declined_as_other_job(job.id)
    return lease


def declined_as_other_job(job: int) -> Declined:
    """Return why nothing is done for a job whose number's records are another user's. Pure."""
    return Declined("other-job", f"another user's job {job} has not ended on this node")


@contextlib.contextmanager
def hold_entry(node: Node, job: Job, key: str, limit: HookDeadlines) -> Iterator[Lease]:
    """Holds the entry for the job; an error gives back what the job did not hold before."""
    with _hold_space_lock(node, limit):
        lease = read_or_make_lease(node, job)
        is_new = all(use.key != key for use in lease.uses)
        if not is_new:
            # A requeued job's, perhaps, which a sweep takes for that of the job as it was.
            node.leases.touch_lease(job.id)
        else:
            lease = lease.with_use(EntryUse(key))
            node.leases.write_lease(lease)
    with contextlib.ExitStack() as on_error:
        # A job may name one image twice: what the first request got stays. So does what a step
        # took, as another one may run with it by now.
        if is_new and job.step is None:
            on_error.callback(release_entry, node, job, key)
        yield lease
        on_error.pop_all()


def save_job_notes(
    node: Node, job: Job, lock_timeout: float, to_steps: bool = False, **said: object
) -> None:
    """Notes what is said to a job, with its lease; `to_steps`: each has to ask a helper for it.

    Waits so many seconds for the space lock. Raises Failed, OSError.
    """
    with lock.held_if_writable(node.cache.space_lock, lock_timeout):
        node.leases.add_notes_and_keep_lease(read_or_make_lease(node, job), **said)
        if to_steps:
            node.leases.set_hints_flag(job.id)


def change_job_lease(node: Node, job: Job, change: Callable[[Lease], None]) -> None:
    """Calls `change` with the job's lease, if it has one, under the space lock.

    Not where somebody holds that for long: no job's bytes depend on it. Raises Failed, OSError.
    """
    with (
        contextlib.suppress(lock.LockTimeout),
        lock.held(node.cache.space_lock, SHORT_LOCK_TIMEOUT),
    ):
        lease = node.leases.find_own_lease(job.id, job.user.uid)
        if lease is not None:
            change(lease)


def release_entry(node: Node, job: Job, key: str) -> None:
    """Has the job's lease hold the entry no longer; what stays in it goes in the Epilog."""
    change_job_lease(node, job, lambda lease: node.leases.write_or_drop(lease.without_entry(key)))


def request_redirect(node: Node, job: Job, image: SourceImage) -> None:
    """Has the stager redirect the path for this job, once the entry is here."""
    use = EntryUse(image.key, image.path)
    change_job_lease(node, job, lambda lease: node.leases.write_lease(lease.with_use(use)))


def record_save_path(
    node: Node, job: Job, requests: Sequence[Request], limit: HookDeadlines
) -> Job:
    """Notes where the job saves its container: no redirect of the node stays there, or comes.

    --container-save meets one as a read-only file, whoever made it, and needs no image beside it.
    Returns the job with that path resolved; where this could not be noted, as it is: then it gets
    no redirect at all (serve._choose_redirect).
    """
    if not job.saves or node.config.redirect == "none":
        return job
    if requests and not any(request.is_redirected for request in requests):
        return job
    # A name that is no text can be in no lease, and so never has a redirect either.
    with contextlib.suppress(ForestageError, OSError, UnicodeEncodeError):
        path = os.path.join(job.work_dir, job.saves)
        saved, may = opening.resolve_save_path(
            path, job.user, min(SAVE_PATH_TIMEOUT, limit.end.seconds_left())
        )
        job = msgspec.structs.replace(job, saves=saved)
        with lock.held_if_writable(node.cache.space_lock, limit.end.seconds_left()):
            lease = read_or_make_lease(node, job)
            # Who cannot write there is in nobody's way, and nobody in theirs.
            if not may:
                return job
            # Before those that lie there go: the stager may lay one.
            node.leases.write_or_drop(lease.with_save_path(saved))
        redirect.unmount_stale_binds(node.cache, frozenset({saved}), "", job.user, limit.end)
    return job


def drop_own_redirect(node: Node, job: Job, path: str, limit: HookDeadlines) -> None:
    """Takes off the job's own redirect of a path whose directory its container binds.

    Not another job's: a step may call any directory its home.
    """
    with lock.held(node.cache.space_lock, limit.end.seconds_left()):
        lease = node.leases.find_own_lease(job.id, job.user.uid)
        if lease is not None and lease.without_redirect(path) != lease:
            node.leases.write_lease(lease.without_redirect(path))
        if path in node.leases.list_redirected_paths():
            return
    redirect.unmount_stale_binds(node.cache, frozenset({path}), "", job.user, limit.end)


@contextlib.contextmanager
def _hold_space_lock(node: Node, limit: HookDeadlines) -> Iterator[None]:
    """Holds the space lock. Who has it may hang with the disk: then it is not waited for."""
    left = limit.end.seconds_left()
    hang = disk_probe.probe_disk(node.places, node.cache, left)
    with contextlib.ExitStack() as held:
        try:
            patience = left if hang is None else min(SHORT_LOCK_TIMEOUT, left)
            held.enter_context(lock.held(node.cache.space_lock, patience))
        except lock.LockTimeout as busy:
            raise (
                busy if hang is None else disk_probe.declined_by_hang(node.cache, hang, left)
            ) from None
        yield
