"""Entries and leases of this node as people name and see them.

Only reads: no lock is taken, so an entry may be evicted between `read_inventory` and what a command
does with it, and every command must expect that.
"""

import contextlib
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping

import msgspec

from forestage.cache import disk_probe, evict
from forestage.cache.layout import Entry, StoredEntry
from forestage.cache.lease import Lease, LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.errors import Failed, NotFoundError

MIN_PREFIX_DIGITS = 4  # hex digits of a key that name an entry, as in git

_PREFIX_PATTERN = re.compile(rf"[0-9a-f]{{{MIN_PREFIX_DIGITS},32}}", re.ASCII | re.IGNORECASE)


class InventoryItem(msgspec.Struct, frozen=True):
    """An entry and who uses it. Bytes are on disk, times in seconds since the epoch.

    `entry` is None where the entry is damaged: it is never served, only evicted. `kind` is "" then.
    `unused`: it was copied for pending jobs, and none has used it so far.
    """

    key: str
    path: str
    bytes: int
    used: float
    jobs: tuple[int, ...]
    pinned: bool
    superseded: bool
    entry: Entry | None
    kind: str = ""
    unused: bool = False

    @property
    def damaged(self) -> bool:
        return self.entry is None

    @property
    def created(self) -> float:
        return self.entry.created if self.entry else 0.0


class CacheInventory(msgspec.Struct, frozen=True):
    """Every entry and every lease of the node; `problems`: one sentence per unreadable lease."""

    items: tuple[InventoryItem, ...] = ()
    leases: tuple[Lease, ...] = ()
    problems: tuple[str, ...] = ()

    def with_keys(self, keys: Container[str]) -> "CacheInventory":
        """The holdings with only those entries that have these keys."""
        items = tuple(item for item in self.items if item.key in keys)
        return msgspec.structs.replace(self, items=items)


class LeasedImage(msgspec.Struct, frozen=True):
    """One image of a lease; `path` is "" where it is no longer known."""

    key: str
    path: str
    redirected: bool


class LeaseHolder(msgspec.Struct, frozen=True):
    """A job that holds a lease, `since` in seconds since the epoch."""

    job: int
    user: str
    since: float
    images: tuple[LeasedImage, ...]


def is_cache_made(node: Node) -> bool:
    """Whether the cache exists; the first job with an image creates it.

    Raises Declined where its disk hangs, Failed where it must not be used, PermissionError for
    users who may not read it.
    """
    cache = node.cache
    disk_probe.check_readable(node.places, cache)
    try:
        (cache.root / "format").stat()
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.lexists(cache.root):
            cache.check_on_its_disk(node.config.require_mount)
            return False
    cache.prepare(node.config.require_mount)
    return True


def read_inventory(node: Node) -> CacheInventory:
    """Reads the node; a cache that does not exist yet is empty. Raises Failed, PermissionError."""
    return read_inventory_and_entries(node)[0]


def read_inventory_and_entries(node: Node) -> tuple[CacheInventory, list[StoredEntry] | None]:
    """Gather the holdings and the entries that they were made of, so that nothing reads them twice.

    The entries are None where the cache does not exist yet. Raises as `read_inventory` does.
    """
    held = read_leases(node.leases)
    if not is_cache_made(node):
        return held, None
    stored = node.cache.list_entries()
    return msgspec.structs.replace(held, items=make_items(stored, held.leases)), stored


def read_leases(leases: LeaseDirectory) -> CacheInventory:
    """The leases alone, by job. Raises PermissionError for users who may not read them."""
    with contextlib.suppress(FileNotFoundError):  # a fresh boot
        os.scandir(leases.directory).close()  # glob() is silent about a directory it may not read
    found: list[Lease] = []
    problems: list[str] = []
    for job in leases.list_jobs():
        try:
            lease = leases.find_lease(job)
        except Failed as failed:
            problems.append(str(failed))
        else:
            found += [lease] if lease else []
    return CacheInventory((), tuple(found), tuple(problems))


def group_jobs_by_key(leases: Iterable[Lease]) -> dict[str, list[int]]:
    """Pure: the jobs that hold a lease on each key, each job once."""
    jobs: dict[str, list[int]] = {}
    for lease in leases:
        for key in dict.fromkeys(use.key for use in lease.uses):
            jobs.setdefault(key, []).append(lease.job)
    return jobs


def make_items(
    stored_entries: Iterable[StoredEntry], leases: Iterable[Lease]
) -> tuple[InventoryItem, ...]:
    """Pure: the entries, most recently used first."""
    everything = list(stored_entries)
    jobs = group_jobs_by_key(leases)
    old = evict.list_superseded_keys(everything)
    items = [
        InventoryItem(
            key=one.key,
            path=one.entry.identity.path if one.entry else "",
            bytes=one.bytes,
            used=one.used,
            jobs=tuple(jobs.get(one.key, ())),
            pinned=one.pinned,
            superseded=one.key in old,
            entry=one.entry,
            kind=one.entry.kind if one.entry else "",
            unused=one.is_unused and one.key not in jobs,
        )
        for one in everything
    ]
    return tuple(sorted(items, key=lambda item: (-item.used, item.key)))


def may_be_key(word: str) -> bool:
    """Pure: whether this may be an entry's key, or its beginning."""
    return bool(_PREFIX_PATTERN.fullmatch(word))


def pick_items(
    items: Iterable[InventoryItem], word: str, resolve: Callable[[str], str]
) -> tuple[InventoryItem, ...]:
    """The entries that KEY|PATH names, newest first: one for a key, any number for a path.

    Raises NotFoundError where there is none, or where several keys begin so.
    """
    items = tuple(items)
    if exact := tuple(item for item in items if item.key == word):
        return exact
    if may_be_key(word):
        fitting = tuple(item for item in items if item.key.startswith(word.lower()))
        if len(fitting) > 1:
            keys = ", ".join(sorted(item.key for item in fitting))
            raise NotFoundError(
                f"{word} is the beginning of several keys: {keys}", "write more of it"
            )
        if fitting:
            return fitting
    # Resolving walks the shared file system; the path as `ls` prints it needs none of that.
    found = _list_items_at(items, os.path.abspath(word)) or _list_items_at(items, resolve(word))
    if not found:
        short = re.fullmatch(r"[0-9a-fA-F]+", word, re.ASCII) and len(word) < MIN_PREFIX_DIGITS
        hint = (
            f"of a key, write {MIN_PREFIX_DIGITS} digits or more" if short else "see `forestage ls`"
        )
        raise NotFoundError(f"no entry has the key or path {word}", hint)
    return found


def _list_items_at(items: Iterable[InventoryItem], path: str) -> tuple[InventoryItem, ...]:
    found = (item for item in items if item.entry and item.path == path)
    return tuple(sorted(found, key=lambda item: item.created, reverse=True))


def make_holder(
    lease: Lease, paths: Mapping[str, str], redirected_paths: Container[str] | None = None
) -> LeaseHolder:
    """Pure: a lease for people; `paths` is key -> path, as far as known.

    `redirected_paths` are the paths that the node redirects now: a lease names one before that,
    while the copy goes on.
    """
    return LeaseHolder(
        job=lease.job,
        user=lease.user.name or str(lease.user.uid),
        since=lease.since,
        images=tuple(
            LeasedImage(
                use.key,
                use.path or paths.get(use.key, ""),
                bool(use.path) and (redirected_paths is None or use.path in redirected_paths),
            )
            for use in lease.uses
        ),
    )


class LocalCopy(msgspec.Struct, frozen=True):
    """The file that has an image's present bytes."""

    image: str
    key: str
    copy: str


def locate_local_copy(node: Node, wanted: SourceImage) -> LocalCopy:
    """The local copy of exactly this image. Raises NotFoundError, which says what the cache has."""
    if node.cache.find_entry(wanted):
        return LocalCopy(wanted.path, wanted.key, str(node.cache.image_path(wanted.key)))
    if any(item.path == wanted.path for item in read_inventory(node).items):
        raise NotFoundError(
            f"the cache holds another version of {wanted.path}, not the present one"
        )
    raise NotFoundError(f"the cache does not hold {wanted.path}")
