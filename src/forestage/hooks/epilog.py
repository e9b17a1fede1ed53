"""The Epilog: drops the job's lease, unmounts redirects that nobody needs, evicts.

It may run again for the same job, and works on the cache that the lease names: the configuration
may have changed since, or be broken.
"""

import contextlib
from pathlib import Path

import msgspec

from forestage.cache import doubt, elsewhere, evict, redirect, unmount
from forestage.cache.layout import Cache
from forestage.cache.lease import Lease, Leases
from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import Config
from forestage.errors import Failed
from forestage.events import Released
from forestage.paths import Places
from forestage.slurm.job import Job
from forestage.slurm.timeouts import Limits
from forestage.system import lock
from forestage.units import printable


def epilog(
    config: Config | None, places: Places, clock: Clock, job: Job, limits: Limits
) -> list[Released]:
    """Releases what the job held here; may be run again. Returns one outcome, also for a failure.

    Works on the cache that the lease names: the configuration may have changed since, or be broken
    (`config` is None), and the job's redirects must go all the same. Where the lease is damaged
    too, nothing is known of either, and the sweep has to clean up.
    """
    leases = Leases(places.leases)
    # Half for each of the two times that the lock is needed.
    limit = lock.SPACE_TIMEOUT if limits.epilog is None else limits.epilog
    patience = min(lock.SPACE_TIMEOUT, limit / 2)
    try:
        lease = leases.read(job.id)
    except Failed as failed:
        if config is None:
            return [_failed(failed)]
        lease = None  # damaged; what it held is unknown, but the other leases tell what is needed
    except OSError as error:
        return [_failed(Failed("io", str(error)))]
    cache = Cache(Path(lease.cache)) if lease else None
    try:
        if config is not None:
            node = Node.of(config, places, clock)
            cache = cache or node.cache
        done = Released(result="released")
        if cache:
            done = _release(cache, leases, lease, places, clock, job, patience)
            _clear(cache, leases, lease, places, job, patience)
        made = cache is not None and cache.locks.is_dir()
        evicted = evict.tidy(cache, leases, config, patience) if cache and made and config else ()
    except lock.Busy as busy:
        # A lease of an ended job would keep its entry for ever. Dropping it needs no lock, and the
        # next Epilog unmounts the redirects that nobody needs any more.
        leases.drop(job.id)
        return [_failed(busy)]  # the sweep takes away the job's directory
    except Failed as failed:
        return [_failed(failed)]
    except OSError as error:
        return [_failed(Failed("io", str(error)))]
    return [msgspec.structs.replace(done, evicted=evicted)]


def _clear(
    cache: Cache,
    leases: Leases,
    lease: Lease | None,
    places: Places,
    job: Job,
    patience: float,
) -> None:
    """Removes what few jobs have: data, and what steps were shown of registries' images."""
    if lease is None or lease.data:
        from forestage.data import job_dir, looks, tree

        with contextlib.suppress(Failed, OSError):  # the sweep does it
            tree.let_go(cache, leases, patience)
        looks.end(cache, job.id)
        job_dir.end(cache, job.id)
    if places.images.exists():
        from forestage.registry import kept, place

        if (cache.looks / str(job.id)).exists():  # registry/agreed.py
            from forestage.data import looks

            looks.end(cache, job.id)
        with contextlib.suppress(OSError):  # the sweep does it
            place.forget(places, job.id)
            kept.tidy(cache)


def _failed(failed: Failed) -> Released:
    return Released(result="failed", reason=failed.reason, detail=str(failed))


def _release(
    cache: Cache,
    leases: Leases,
    lease: Lease | None,
    places: Places,
    clock: Clock,
    job: Job,
    patience: float,
) -> Released:
    with contextlib.ExitStack() as claims:
        with lock.held_if_writable(cache.space_lock, patience):
            if lease is not None:
                with contextlib.suppress(OSError):  # only a note for evict
                    _note_use(cache, lease, clock.wall())
            going = let_go(cache, leases, lease, places, job.id, claims, clock.wall())
        done = Released("released", unmounted=len(going))
        try:
            unmount.unmount(going, lambda bind: job.user)
            # Else nothing can have been inherited. Of a step's redirect the node sees nothing.
            if going or (lease is not None and lease.uses):
                _clear_elsewhere(cache, leases, clock.wall())
        except unmount.StillMounted as stays:
            # A dead file server is no fault of the node. It shows nothing, redirect or not.
            detail = printable(_stuck(stays.stuck, lease))
            done = Released("released", unmounted=stays.off, reason=stays.reason, detail=detail)
    doubt.look(places, cache, clock)  # this job may have failed for it, the next one need not
    return done


def _clear_elsewhere(cache: Cache, leases: Leases, now: float) -> None:
    """In other mount namespaces. What stays there is told by the sweep, which tries again."""
    with contextlib.suppress(Failed, OSError):
        elsewhere.clear(cache, leases, now)


def _stuck(stuck: list[str], lease: Lease | None) -> str:
    """Pure: what stays redirected. Other users' paths are in no event of this one's."""
    own = [f"{use.path} (" for use in lease.uses if use.path] if lease else []
    named = [one for one in stuck if any(one.startswith(path) for path in own)]
    others = len(stuck) - len(named)
    return f"still redirected: {', '.join(named + [f'{others} of other jobs'] * (others > 0))}"


def let_go(
    cache: Cache,
    leases: Leases,
    lease: Lease | None,
    places: Places,
    job: int,
    claims: contextlib.ExitStack,
    now: float | None = None,
) -> list[unmount.Going]:
    """Drops the lease, then claims each redirect that no lease mentions; returns these.

    Under the space lock, which nothing that may hang is done under: they are unmounted after it.
    `lease` is None where it is damaged. Raises OSError, Failed.
    """
    leases.drop(job)
    # Whatever no lease mentions goes, so a redirect that a killed hook left goes too.
    return redirect.claim_unneeded(cache, leases, places, lease, claims, now)


def _note_use(cache: Cache, lease: Lease, now: float) -> None:
    """The end of a job is a use as well: a week-long job's image is not the least recently used."""
    for use in lease.uses:
        if cache.read(use.key) is not None:
            cache.touch(use.key, now, lease.user.uid)
