"""The Epilog: drops the job's lease, unmounts redirects that no job needs, evicts.

    1. hooks/boundary.py has stopped the job's Prolog if that still works in the background
    2. features release what they find by the lease: `before_lease_drop`
    3. note when the job's entries were last used, for evict
    4. under the space lock: drop the lease, and claim each redirect that no lease names
    5. unmount these on the node (bind/unmount.py), and what is left of them in other mount
       namespaces (bind/namespaces.py)
    6. features release the rest: `after_lease_drop`
    7. evict down to the low watermark (cache/evict.py, `evict_to_watermark`)

Without a lease, or where its cache's disk hangs or is another one, some of them are left out: the
sweep (commands/sweep.py) does the same later. For what a feature does in step 6 it has a sweep of
its own (`sweep.in_each_cache`): the sweep never calls `after_lease_drop`. Only features with a mark
of the job are imported; without a lease, all that have a part in an Epilog.

It may run again for the same job, and works on the cache that the lease names: the configuration
may have changed since, or be broken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from forestage.bind import namespaces, redirect, unmount
from forestage.cache import disk_errors, disk_probe, evict
from forestage.cache.layout import Cache
from forestage.cache.lease import Lease, LeaseDirectory
from forestage.cache.node import Node, configured_root
from forestage.clock import Clock
from forestage.config import Config
from forestage.errors import Declined, Failed, classify_node_error
from forestage.events import ReleaseOutcome
from forestage.features import FEATURES, Feature, list_with_job_marks
from forestage.hooks.hook_worker import NO_HOOK_PIPE, HookPipe
from forestage.paths import NodePaths
from forestage.slurm.job import Job
from forestage.slurm.timeouts import HookTimeLimits
from forestage.system import lock, mounts
from forestage.system.mounts import MountInfo
from forestage.system.probe import HangReport
from forestage.units import make_printable

OTHER_JOB_TEXT = "the number is another job's by now"  # nothing of that is released
HUNG_DISK_LOCK_TIMEOUT = 1.0  # seconds for the space lock while the disk hangs


class EpilogFacts(msgspec.Struct, frozen=True):
    """A job that is over on this node; also what the doors of features are told (contexts.py).

    `lease` is None where there is none or it is damaged. `patience` is in seconds, for the space
    lock.
    """

    job: Job
    lease: Lease | None
    leases: LeaseDirectory
    places: NodePaths
    clock: Clock
    patience: float


def run_epilog(
    config: Config | None,
    places: NodePaths,
    clock: Clock,
    job: Job,
    limits: HookTimeLimits,
    report: Callable[[ReleaseOutcome], None],
    watched: HookPipe = NO_HOOK_PIPE,
) -> None:
    """Releases what the job held here; may be run again. `report` gets the outcome, also a failure.

    And one more where a feature's part fails in an expected way. What else such a part raises goes
    on after that: it keeps neither the core nor another feature from its own.

    Works on the cache that the lease names: the configuration may have changed since, or be broken
    (`config` is None), and the job's redirects must go all the same. Where the lease is damaged
    too, nothing is known of either, and the sweep has to clean up.
    """
    leases = LeaseDirectory(places.leases)
    # Half for each of the two times that the lock is needed.
    limit = lock.SPACE_TIMEOUT if limits.epilog_killed_after is None else limits.epilog_killed_after
    patience = min(lock.SPACE_TIMEOUT, limit / 2)
    watched.report_time_limit(2 * patience)
    lease, damage = None, None
    try:
        lease = leases.find_lease(job.id)
    except Failed as failed:
        damage = failed  # what it held is unknown, but the other leases tell what is needed
    except OSError as error:
        return report(_make_failed_outcome(error))
    if lease and is_lease_of_other_job(lease, job):
        return report(ReleaseOutcome("released", detail=OTHER_JOB_TEXT))
    end = EpilogFacts(job, lease, leases, places, clock, patience)
    # Before anything is dropped: the marks go with the lease. Without one nothing is known.
    features = list_with_job_marks(job.id, str(places.run)) if lease else FEATURES
    before: list[Callable[[], None]] = []
    if features:  # none, of a job with only images
        from forestage.features.doors import EPILOG_BEFORE_LEASE_DROP, make_door_calls

        before = make_door_calls(EPILOG_BEFORE_LEASE_DROP, features, end)

    def release() -> None:
        if damage and config is None:
            raise damage
        cache = _find_cache(lease, config, places, clock, watched)
        if cache is None:
            return report(ReleaseOutcome("released"))
        watched.report_cache(str(cache.root))
        return _release_job(end, cache, config, features, report)

    try:
        run_parts([*before, release])
    except (Failed, OSError) as error:
        report(_make_failed_outcome(error))


def run_parts(parts: Sequence[Callable[[], object]]) -> None:
    """Runs these in order, each also after one that raised; what was raised last goes on.

    After what is no Exception, such as ^C, none is run.
    """
    with contextlib.ExitStack() as stack:  # the last in it is the first out
        for part in reversed(parts):
            stack.push(_make_exit_callback(part))


def _make_exit_callback(part: Callable[[], object]) -> Callable[..., None]:
    def leave(kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            part()

    return leave


def _release_job(
    end: EpilogFacts,
    cache: Cache,
    config: Config | None,
    features: Sequence[Feature],
    report: Callable[[ReleaseOutcome], None],
) -> None:
    """Releases what the job held, also where the disk hangs; else features do so, and it evicts."""
    try:
        hang = disk_probe.probe_disk(end.places, cache, end.patience)
        if hang is not None:
            return report(_release_without_disk(end, cache, hang))
        # The disk may have been unmounted while the job ran (umount --lazy). What lies below may be
        # a cache of several nodes, and this one does not see the leases of the others.
        is_its_disk = cache.find_other_disk() is None
        if is_its_disk:
            record_last_use(cache, end.lease, end.clock.wall())
        done = _drop_lease_and_unmount(end, cache)
    except lock.LockTimeout as busy:
        # A lease of an ended job would keep its entry for ever. Dropping it needs no lock, and the
        # next Epilog unmounts the redirects that nobody needs any more.
        _drop_lease_unlocked(end.leases, end.job)
        return report(_make_failed_outcome(busy))  # the sweep takes away the job's directory
    except (Failed, OSError) as error:
        return report(_make_failed_outcome(error))
    except Declined as later:
        return report(ReleaseOutcome("released", detail=str(later)))
    after: list[Callable[[], None]] = []
    if features:
        from forestage.features.doors import EPILOG_AFTER_LEASE_DROP, make_door_calls

        after = make_door_calls(EPILOG_AFTER_LEASE_DROP, features, end, cache)
    room_of = config if is_its_disk else None
    return run_parts([*after, lambda: report(_evict_after_job(end, cache, room_of, done))])


def _evict_after_job(
    end: EpilogFacts, cache: Cache, config: Config | None, done: ReleaseOutcome
) -> ReleaseOutcome:
    """Evicts, where a configuration says how full the cache may be; returns the outcome."""
    try:
        if config is None or not cache.locks.is_dir():
            return done
        evicted = evict.evict_to_watermark(cache, end.leases, config, end.patience)
    except (Failed, OSError) as error:
        return _make_failed_outcome(error)
    return msgspec.structs.replace(done, evicted=evicted)


def _find_cache(
    lease: Lease | None, config: Config | None, places: NodePaths, clock: Clock, watched: HookPipe
) -> Cache | None:
    """Return the cache that the lease names, else the configured one; None if neither is known."""
    if lease:
        return Cache(Path(lease.cache), places.claims, places.known_disks)
    if config is None:
        return None
    watched.report_cache(configured_root(config, places))
    return Node.from_config(config, places, clock).cache


def is_lease_of_other_job(lease: Lease, job: Job) -> bool:
    """Return whether a lease of the job's number is another user's, or a later run's. Pure.

    One that began before the job is what an earlier run left, if Slurm did not move its start.
    """
    later = bool(lease.start and job.start) and lease.start > job.start
    return not lease.belongs_to(job.user.uid) or later


def _make_failed_outcome(error: Failed | OSError) -> ReleaseOutcome:
    failed = error if isinstance(error, Failed) else classify_node_error(error)
    return ReleaseOutcome(result="failed", reason=failed.reason, detail=str(failed))


def _drop_lease_and_unmount(end: EpilogFacts, cache: Cache) -> ReleaseOutcome:
    leases, lease = end.leases, end.lease
    with contextlib.ExitStack() as claims:
        with lock.held_if_writable(cache.space_lock, end.patience):
            # Who had the lock may have been a Prolog of another job of this number.
            now_there = _find_lease(leases, end.job.id)
            if now_there is not None and is_lease_of_other_job(now_there, end.job):
                raise Declined("other-job", OTHER_JOB_TEXT)
            now = end.clock.wall()
            table = mounts.list_mounts()
            going = drop_lease_and_claim_binds(
                cache, leases, end.places, end.job.id, claims, table, now
            )
        done = ReleaseOutcome("released", unmounted=len(going))
        try:
            unmount.unmount_binds(going, lambda bind: end.job.user)
            # Else nothing can have been inherited. Of a step's redirect the node sees nothing.
            if going or (lease is not None and lease.uses):
                # What stays in other mount namespaces the sweep tells, and tries again.
                with contextlib.suppress(Failed, OSError):
                    now = end.clock.wall()
                    namespaces.unmount_in_namespaces(
                        cache, leases, now, first_uid=end.job.user.uid, here=table
                    )
        except unmount.UnmountError as stays:
            # A dead file server is no fault of the node. It shows nothing, redirect or not.
            detail = make_printable(_format_stuck_redirects(stays.stuck, lease))
            done = ReleaseOutcome(
                "released", unmounted=stays.removed, reason=stays.reason, detail=detail
            )
    # This job may have failed for it, the next one need not.
    disk_errors.scan_kernel_log(end.places, cache, end.clock)
    return done


def _format_stuck_redirects(stuck: list[str], lease: Lease | None) -> str:
    """Pure: what stays redirected. Other users' paths are in no event of this one's."""
    own = [f"{use.path} (" for use in lease.uses if use.path] if lease else []
    named = [one for one in stuck if any(one.startswith(path) for path in own)]
    others = len(stuck) - len(named)
    return f"still redirected: {', '.join(named + [f'{others} of other jobs'] * (others > 0))}"


def drop_lease_and_claim_binds(
    cache: Cache,
    leases: LeaseDirectory,
    places: NodePaths,
    job: int,
    claims: contextlib.ExitStack,
    table: list[MountInfo],
    now: float | None = None,
) -> list[unmount.ClaimedBind]:
    """Drops the lease, then claims each redirect that no lease mentions; returns these.

    Under the space lock, which nothing that may hang is done under: they are unmounted after it.
    Raises OSError, Failed.
    """
    leases.drop_lease(job)
    # Whatever no lease mentions goes, so a redirect that a killed hook left goes too.
    return redirect.claim_unneeded_binds(cache, leases, places, claims, table, now)


def record_last_use(cache: Cache, lease: Lease | None, now: float) -> None:
    """Notes for evict when the job's images were last used: at its end, however long it ran.

    Not under the space lock: it writes to the disk, and who waits for that would keep the lock.
    """
    with contextlib.suppress(OSError):  # only a note
        for use in lease.uses if lease else ():
            if cache.find_entry_by_key(use.key) is not None:
                cache.record_use(use.key, now, lease.user.uid if lease else None)


def _release_without_disk(end: EpilogFacts, cache: Cache, hang: HangReport) -> ReleaseOutcome:
    """Releases what needs no writes to the cache's disk; the sweep does the rest once it answers.

    Its job may have ended for that disk, and the next one need not wait for it.
    """
    done = ReleaseOutcome("released")
    end = msgspec.structs.replace(end, patience=min(HUNG_DISK_LOCK_TIMEOUT, end.patience))
    with contextlib.suppress(Failed, OSError):  # who has the lock may hang with the disk
        done = _drop_lease_and_unmount(end, cache)
    _drop_lease_unlocked(end.leases, end.job)
    return _make_unfinished_outcome(disk_probe.declined_by_hang(cache, hang), done.unmounted)


def drop_lease_of_hung_epilog(places: NodePaths, job: Job, why: Declined) -> ReleaseOutcome:
    """Drops the lease of a job whose Epilog hangs, without the lock, which it may hold."""
    with contextlib.suppress(OSError):
        _drop_lease_unlocked(LeaseDirectory(places.leases), job)
    return _make_unfinished_outcome(why)


def _drop_lease_unlocked(leases: LeaseDirectory, job: Job) -> None:
    """Drops the job's lease, without the lock. Raises OSError."""
    lease = _find_lease(leases, job.id)
    if lease is None or not is_lease_of_other_job(lease, job):
        leases.drop_lease(job.id)


def _find_lease(leases: LeaseDirectory, job: int) -> Lease | None:
    """Return the lease of this number; None also where it is damaged: whose it is, nobody knows."""
    with contextlib.suppress(Failed, OSError):
        return leases.find_lease(job)
    return None


def _make_unfinished_outcome(why: Declined, unmounted: int = 0) -> ReleaseOutcome:
    """Pure: the outcome of an Epilog that leaves the cache to the sweep."""
    detail = f"{why}; the sweep does the rest"
    return ReleaseOutcome("released", reason=why.reason, detail=detail, unmounted=unmounted)
