"""What happens when a job ends: drop its lease, take off redirects nobody needs, evict."""

from pathlib import Path

from forestage import evict, lock, redirect
from forestage.cache import Cache
from forestage.clock import Clock
from forestage.config import Config
from forestage.errors import Failed
from forestage.events import Outcome
from forestage.lease import Lease, Leases
from forestage.places import Places


def epilog(config: Config | None, places: Places, clock: Clock, job: int) -> list[Outcome]:
    """Releases what the job held here; may be run again. Gives one outcome, also for a failure."""
    try:
        return [_release(config, places, clock, job)]
    except Failed as failed:
        reason, detail = failed.reason, str(failed)
    except lock.Busy as busy:
        reason, detail = "busy", str(busy)
    except OSError as error:
        reason, detail = "io", str(error)
    return [Outcome(result="failed", reason=reason, detail=detail)]


def _release(config: Config | None, places: Places, clock: Clock, job: int) -> Outcome:
    """The lease, the redirects, then the room.

    Works on the cache that the lease names: the configuration may have changed since, or be broken
    (`config` is None), and the job's redirects must go all the same.
    """
    leases = Leases(places.leases)
    try:
        lease = leases.read(job)
    except Failed:
        lease = None  # damaged; its entries are unknown, but clear() needs only the other leases
    if lease is None and config is None:
        raise Failed("lease-damaged", f"{leases.file(job)} and the configuration cannot be read")
    root = lease.cache if lease else config.cache if config else ""
    cache = Cache(Path(root))
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        if lease is not None:
            _note_use(cache, lease, clock.wall())
        leases.drop(job)
        # Whatever no lease mentions goes, so a redirect that a killed hook left goes too.
        released = redirect.clear(cache, leases, places)
    evicted = evict.tidy(cache, leases, config) if config else ()
    return Outcome(result="released", released=released, evicted=evicted)


def _note_use(cache: Cache, lease: Lease, now: float) -> None:
    """The end of a job is a use as well: a week-long job's image is not the least recently used."""
    for use in lease.uses:
        if cache.read(use.key) is not None:
            cache.touch(use.key, now)
