"""Which disk each cache was made on, remembered outside of it: what lies below may be another one.

    /var/lib/forestage/caches.json    `KnownDisks`; read by each hook, written by few

    at the mount point is            so the cache
    the file system it was made on   is used
    another one of this node         is on a new disk: used at once, with a line in the log
    nothing                          would be on the disk below: not used, `cache-other-disk`
    a network file system            would be shared by nodes: not used, `cache-on-network`

Two nodes whose caches lie on one shared disk evict what the other's jobs have leased. Where nothing
is remembered (a first use, a diskless node, a container) `require_mount` alone decides. It is
written when a cache is made, by the sweep for a cache that is there, and by an admin who accepts
the disk that is there now: never for a hit. Where it cannot be written, nothing is remembered.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.system import file_systems, folders, lock, mounts, records
from forestage.system.files import open_descriptor
from forestage.system.mounts import MountInfo

VERSION = 1
LOCK_TIMEOUT = 5.0  # seconds; another hook makes the same cache then


class CacheLocation(msgspec.Struct, frozen=True):
    """Where one cache lies: its `root`, a path without links, and the mount point above it.

    `file_system` is what tells that one from others (system/file_systems.read_identity).
    """

    root: str
    point: str
    file_system: str


class KnownDisks(msgspec.Struct, frozen=True):
    """caches.json: a cache for each root that was used."""

    version: int = VERSION
    caches: tuple[CacheLocation, ...] = ()

    def find_location(self, root: str) -> CacheLocation | None:
        """Return what is remembered of the cache with this root. Pure."""
        return next((one for one in self.caches if one.root == root), None)


def read_known_disks(file: Path) -> KnownDisks:
    """Return what is remembered; nothing if that cannot be read, or another release wrote it."""
    try:
        known = records.find(file, KnownDisks)
    except OSError:
        known = None
    return known if known is not None and known.version == VERSION else KnownDisks()


def read_current_location(root: Path, real: str, under: MountInfo) -> CacheLocation:
    """Return the disk that a cache lies on now, or would: `under` is the mount. Raises OSError."""
    there = root
    while not there.exists():
        there = there.parent
    return CacheLocation(real, under.point, file_systems.read_identity(there, under.kind))


def is_on_its_disk(known: CacheLocation, root: Path) -> bool:
    """Return whether a cache lies on the file system that is remembered of it, and not that of `/`.

    A file system is remembered only as a disk of this node, so the mount table has no more to say.
    """
    kind = known.file_system.partition(" ")[0]
    try:
        with open_descriptor(root, os.O_PATH) as cache, open_descriptor("/", os.O_PATH) as top:
            is_beside = mounts.read_mount_id(cache) != mounts.read_mount_id(top)
        is_known = bool(kind) and file_systems.read_identity(root, kind) == known.file_system
    except OSError:
        return False
    return is_beside and is_known


def is_below_its_disk(known: CacheLocation, root: Path, under: MountInfo) -> bool:
    """Return whether a cache would lie on what is below its own disk: `under` is the mount.

    Where the file system there cannot be identified (an automount, or its disk is failing), it
    counts as another one: an error here must keep no Epilog from releasing what its job held.
    """
    now = CacheLocation(known.root, under.point, "")
    with contextlib.suppress(OSError):
        now = read_current_location(root, known.root, under)
    return is_unmounted(known, now)


def is_unmounted(known: CacheLocation, now: CacheLocation) -> bool:
    """Return whether nothing is mounted where the cache's disk was, and another one is below. Pure.

    A mount that is nearer to the cache is a disk that an admin has mounted for it. The very file
    system may be reached by another mount point: in a container, or through a bind mount.
    """
    is_above = now.point != known.point and len(now.point) < len(known.point)
    return is_above and (not now.file_system or now.file_system != known.file_system)


def remember_disk(
    file: Path, now: CacheLocation, is_accepted: bool = False
) -> CacheLocation | None:
    """Remember the disk of a cache; return the one that it has replaced, if any.

    One that is remembered stays as it is if the file system is the same, unless an admin has
    accepted what is there now. It also stays if its disk was unmounted since the caller looked:
    then the one below would be taken for the cache's from now on. Raises OSError, Failed.
    """
    folders.ensure_directory(file.parent, folders.PRIVATE)
    with lock.held(file.with_suffix(".lock"), LOCK_TIMEOUT):
        known = read_known_disks(file)
        before = known.find_location(now.root)
        is_kept = before is not None and (
            before.file_system == now.file_system or is_unmounted(before, now)
        )
        if is_kept and not is_accepted:
            return None
        others = tuple(one for one in known.caches if one.root != now.root)
        records.write(file, msgspec.json.encode(KnownDisks(caches=(*others, now))))
    return before


def forget_disk(file: Path, root: str) -> None:
    """Forget the cache with this root, which is gone. Raises OSError, Failed."""
    with lock.held(file.with_suffix(".lock"), LOCK_TIMEOUT):
        left = tuple(one for one in read_known_disks(file).caches if one.root != root)
        records.write(file, msgspec.json.encode(KnownDisks(caches=left)))
