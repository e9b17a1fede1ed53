"""Where caches lay since the boot: by that a bind of ours is known, whatever `cache:` says now.

    /run/forestage/claims/origins.json    `KnownOrigins`; gone at a boot, as all binds are

A bind outlives what named its cache: the configuration may name another one, and the mount of the
cache's disk may be gone (umount --lazy). So the device and the path there, as mountinfo has them
for a bind, are noted before the first bind of a cache is made. Below that path, ours is what is
named as an image of a cache is; that form on any other file system is none of ours.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from forestage.cache.layout import Cache
from forestage.system import folders, lock, mounts, records
from forestage.system.mounts import BindOrigin, MountInfo

FILE = "origins.json"
LOCK_TIMEOUT = 5.0  # seconds; a process that mounts from another cache notes that then
# Of an entry, of one that was evicted, or that is a part again; the kernel adds the last word.
_IMAGE = re.compile(r"(entries|evicted|parts)/([^/]+)/image(//deleted)?", re.DOTALL)


class RedirectBind(msgspec.Struct, frozen=True):
    """One of our binds as the kernel shows it. `key` is "" where the entry is gone or going.

    `cache` is the root of the cache that has the entry, a path without links.
    """

    mount: MountInfo
    key: str
    cache: str = ""

    @property
    def path(self) -> str:
        return self.mount.point


class CacheOrigin(msgspec.Struct, frozen=True):
    """Where the cache with this root lies, or lay."""

    root: str
    origin: BindOrigin


class KnownOrigins(msgspec.Struct, frozen=True):
    """origins.json: for each cache's root, where the cache lay while binds of it were made."""

    origins: Mapping[str, tuple[BindOrigin, ...]] = {}


class KnownCaches(msgspec.Struct, frozen=True):
    """The root of the node's cache, a path without links, and what origins.json says of each.

    It is read without the mount table. A process that reads the table for something else anyway
    finds the binds with this and that table.
    """

    root: str
    noted: KnownOrigins

    def list_origins(self, table: list[MountInfo]) -> tuple[CacheOrigin, ...]:
        """Return where the cache lies in a mount table, and where each lay since the boot. Pure.

        Where no mount is known above it, the first has no device, and so no bind.
        """
        now = mounts.find_bind_origin(table, self.root) or BindOrigin("", f"{self.root}/")
        known = _drop_gone_file_systems(self.noted, table).origins
        noted = [CacheOrigin(root, one) for root, places in known.items() for one in places]
        return tuple(dict.fromkeys((CacheOrigin(self.root, now), *noted)))

    def list_binds(self, table: list[MountInfo]) -> list[RedirectBind]:
        """Return the binds of these caches in a mount table, in its order. Pure."""
        return list_binds(table, self.list_origins(table))


def read_known_caches(cache: Cache) -> KnownCaches:
    """Return by what binds of this cache, and of the node's earlier ones, are found in a table."""
    return KnownCaches(cache.real_root, _read_known_origins(cache))


def list_origins(cache: Cache, table: list[MountInfo] | None = None) -> tuple[CacheOrigin, ...]:
    """Return where the cache lies in this process' mount table, and where each lay since the boot.

    Where no mount is known above it, the first has no device, and so no bind.
    """
    return read_known_caches(cache).list_origins(mounts.list_mounts() if table is None else table)


def record_origin(cache: Cache, table: list[MountInfo]) -> None:
    """Note where the cache lies in this mount table, before a bind of it is made.

    Raises lock.LockTimeout, OSError.
    """
    real = cache.real_root
    now = mounts.find_bind_origin(table, real)
    if now is None or now in _read_known_origins(cache).origins.get(real, ()):
        return
    folders.ensure_directory(cache.claims, folders.PRIVATE)
    # The space lock of each cache is another one.
    with lock.held(cache.claims / "origins.lock", LOCK_TIMEOUT):
        known = _drop_gone_file_systems(_read_known_origins(cache), table).origins
        noted = {**known, real: (*known.get(real, ()), now)}
        records.write(cache.claims / FILE, msgspec.json.encode(KnownOrigins(noted)))


def list_binds(table: Iterable[MountInfo], origins: Iterable[CacheOrigin]) -> list[RedirectBind]:
    """Return the binds of these caches in a mount table, in its order. Pure."""
    found: dict[int, RedirectBind] = {}
    table = list(table)
    for one in origins:
        for mount, inside in mounts.list_binds_of_origin(table, one.origin):
            if named := _IMAGE.fullmatch(inside):
                key = named[2] if named[1] == "entries" and not named[3] else ""
                found.setdefault(mount.id, RedirectBind(mount, key, one.root))
    return [found[mount.id] for mount in table if mount.id in found]


def _drop_gone_file_systems(known: KnownOrigins, table: Iterable[MountInfo]) -> KnownOrigins:
    """Return what is known without file systems that are gone, as far as that can be told. Pure.

    The kernel gives the number of one without a device of its own (btrfs, overlay, tmpfs) to the
    next, which may be a user's, in a namespace of theirs. A disk keeps its number.
    """
    here = {mount.device for mount in table}

    def may_be_there(origin: BindOrigin) -> bool:
        return origin.device in here or not origin.device.startswith("0:")

    return KnownOrigins(
        {root: tuple(filter(may_be_there, places)) for root, places in known.origins.items()}
    )


def _read_known_origins(cache: Cache) -> KnownOrigins:
    try:
        return records.find(cache.claims / FILE, KnownOrigins) or KnownOrigins()
    except OSError:
        return KnownOrigins()
