"""Caches that were configured before: what jobs left there goes by the sweep, entries by an admin.

They are known by caches.json (known_disks.py), and by leases.

    the earlier cache                    what jobs left     its entries
    lies on its disk                     go by the sweep    go by `forestage evict --all --cache`
    is used by another forestage         stays              stay
    its disk is missing, or hangs        stays              stay

A file of the configuration that is missing makes the right cache an earlier one: no entry must go
for that. Another forestage is one with another /run, in a container perhaps: it has leases that
this one does not see, and leaves a mark in the cache (Cache.mark_in_use).
"""

import contextlib
import os
import shutil
from pathlib import Path

from forestage.cache import disk_probe, known_disks
from forestage.cache.layout import Cache
from forestage.cache.node import Node
from forestage.errors import Failed, NotFoundError
from forestage.system import files, lock

_OURS = ("entries", "parts", "jobs", "evicted")  # these must be empty before the rest goes
_REST = ("looks", "hot", "instances", "locks")


def list_earlier_caches(node: Node) -> tuple[Cache, ...]:
    """Return the caches that were configured before, whether or not they are there."""
    known = [one.root for one in known_disks.read_known_disks(node.places.known_disks).caches]
    roots = dict.fromkeys((*known, *node.leases.list_cache_roots()))
    return tuple(
        Cache(Path(root), node.places.claims, node.places.known_disks)
        for root in roots
        if root not in (node.cache.real_root, str(node.cache.root))
    )


def check_exclusive_use(node: Node, cache: Cache) -> None:
    """Raise unless this forestage alone uses an earlier cache, and it lies on its own disk.

    Raises NotFoundError where no cache is there, Declined, Failed, OSError.
    """
    disk_probe.check_writable(node.places, cache)
    if not is_other_cache(cache, node.cache):
        raise NotFoundError(
            f"no cache lies at {cache.root}", "mount its disk, if it is not mounted"
        )
    cache.check_used_alone()
    cache.prepare(require_mount=False)
    known = known_disks.read_known_disks(node.places.known_disks).find_location(cache.real_root)
    if (
        known is not None
        and (now := cache.read_current_location()).file_system != known.file_system
    ):
        raise Failed(
            "cache-other-disk",
            f"{cache.root} was made on {known.file_system}, and {now.file_system} is there now",
            "mount its disk",
        )


def is_other_cache(cache: Cache, now: Cache) -> bool:
    """Return whether a cache lies there that is not the one of `now` by another path.

    The same disk may be mounted twice. Raises OSError.
    """
    found, there = (
        files.lstat_or_none(cache.root / "format"),
        files.lstat_or_none(now.root / "format"),
    )
    return found is not None and not (there and os.path.samestat(found, there))


def remove_if_empty(cache: Cache) -> bool:
    """Remove an earlier cache that has nothing in it; return whether it had nothing.

    Directories of others stay, and those above. Raises lock.LockTimeout, OSError.
    """
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        there = [cache.root / name for name in _OURS if (cache.root / name).is_dir()]
        if any(any(one.iterdir()) for one in there):
            return False
        for one in there:
            one.rmdir()
        for name in _REST:
            shutil.rmtree(cache.root / name, ignore_errors=True)
        for file in (cache.root / "CACHEDIR.TAG", cache.root / "format"):
            file.unlink(missing_ok=True)  # the latter last: until then the command can be repeated
    with contextlib.suppress(OSError):  # something of somebody else's lies there
        cache.root.rmdir()
    if cache.known_disks is not None:
        known_disks.forget_disk(cache.known_disks, os.fspath(cache.root))
    return True
