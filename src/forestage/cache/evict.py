"""Evicts entries: a pure plan from what is here, who uses it and the room, and its execution.

Order: damaged entries, superseded ones, data above its share of the room, those of users who take
more than theirs, then the least recently used; leased and pinned ones never. For a user above their
share nobody else's entry goes, and for data no image. Plans are made and entries renamed away under
the space lock; they are read before it is taken, and their bytes are deleted after it. Where a sum
(entry_sum.py) says that there is room, no entry is read.

`plan` decides, `_evict_planned` renames away. These call them:

    make_room           for a copy (stage/pipeline.py)
    evict_for_job       for a container (hooks/serve.py), or a job's own directory
                        (features/data/job_dir.py)
    evict_to_watermark  down to the low watermark: Epilog, sweep, commands/evict.py,
                        stage/copy_queue.py
    evict_keys          what is named: commands/evict.py, or the sweep, of what another node
                        found wrong

Leased or not, entries with wrong bytes go by commands/verify.py and views/through/local_image.py,
and a damaged one makes place for its new copy in `Cache.publish`.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from forestage.cache import entry_sum
from forestage.cache.layout import Cache, StoredEntry, tree_bytes
from forestage.cache.lease import LeaseDirectory
from forestage.cache.part import Part, boot_id
from forestage.config import Config
from forestage.errors import Declined
from forestage.system import lock
from forestage.units import format_size

NOBODY: Mapping[int, int] = {}
FILES = 64  # that a disk must be able to take at rest: a copy makes ten at the most


class CacheSpace(msgspec.Struct, frozen=True):
    """Bytes: free on the file system, used by the cache, and the limits of the configuration.

    `low`, `share` (of one user) and `data` are parts of what the cache may take: `max_size`, or
    less where others have filled the disk. `data_under_way` are bytes of parts of data.
    """

    free: int
    used: int
    max_size: int
    min_free: int
    low: int
    share: int
    data: int = 1 << 62
    data_under_way: int = 0

    @property
    def max_cache_bytes(self) -> int:
        """The most that entries may take now: less than `max_size` where others fill the disk.

        Evicting does not change it: what is no longer used is free.
        """
        return _max_entry_bytes(self.max_size, self.min_free, self.used + self.free)

    @property
    def percent_used(self) -> int:
        """How full the cache is, of what it may take now."""
        return round(100 * self.used / self.max_cache_bytes) if self.max_cache_bytes else 100


class EvictionGoal(msgspec.Struct, frozen=True):
    """When evicting may stop: at least `free` bytes free and at most `used` used by the cache."""

    free: int
    used: int


class EvictionPlan(msgspec.Struct, frozen=True):
    """Keys to evict, in order; `is_enough` tells whether the goal is met once they are gone."""

    victims: tuple[str, ...]
    freed: int
    is_enough: bool


def goal_for_copy(room: CacheSpace, size: int) -> EvictionGoal:
    """Pure: what must be so before `size` bytes may be reserved."""
    return EvictionGoal(free=room.min_free + size, used=room.max_size - size)


def goal_at_rest(room: CacheSpace) -> EvictionGoal:
    """Pure: what the Epilog and the timer leave behind, so that the next copy need not wait."""
    return EvictionGoal(free=room.min_free, used=room.low)


def plan(
    stored: Iterable[StoredEntry],
    leased: frozenset[str],
    room: CacheSpace,
    goal: EvictionGoal,
    superseded_path: str = "",
    copies: Mapping[int, int] = NOBODY,
    user: int | None = None,
    data: int = 0,
    now: float = math.inf,
) -> EvictionPlan:
    """Pure: the entries to evict, in order; `user` is who asks for room, None where nobody does.

    Damaged entries go first, then superseded ones (an older identity of a path that has a newer
    entry, or of `superseded_path`), then data above its share, then entries of users above theirs
    until they are within it, then the least recently used. The last only if `user` is not above
    theirs. Leased and pinned entries never go. `data` are the bytes of data that room is made for:
    other data goes until all of it, copies under way included, is within its share, and no image.

    A user takes what is only theirs: entries that nobody else has used, and `copies`, the bytes
    that their copies will have. Root has no share to keep to: what it warms is for all.
    """
    everything = list(stored)
    old = list_superseded_keys(everything, superseded_path, now)
    left = sorted(
        (s for s in everything if s.key not in leased and not s.pinned),
        key=lambda s: (s.entry is not None, s.key not in old, s.used),
    )
    picked = _VictimSelection(room, goal, everything, copies, data)
    left = picked.select(left, lambda one: one.entry is None or one.key in old)
    left = picked.select(left, lambda one: one.is_data and picked.excess > 0)
    if data:
        left = [one for one in left if one.is_data]
    left = picked.select(left, lambda one: picked.is_above(one.user))
    picked.select(left, lambda one: not picked.is_above(user))
    return EvictionPlan(tuple(picked.victims), picked.freed, picked.is_enough)


class _VictimSelection:
    """The victims of a plan so far, and what is left to do.

    `bytes_of_user` are the bytes that are only one user's, by uid; `excess` is how far data are
    above their share, which counts where room is made for `data`.
    """

    def __init__(
        self,
        room: CacheSpace,
        goal: EvictionGoal,
        stored: Iterable[StoredEntry],
        copies: Mapping[int, int],
        data: int,
    ) -> None:
        self.room, self.goal, self.for_data = room, goal, data > 0
        self.victims: list[str] = []
        self.freed = 0
        self.bytes_of_user = Counter(copies)
        self.excess = data + room.data_under_way - room.data
        for one in stored:
            self.bytes_of_user[one.user or 0] += one.bytes
            self.excess += one.bytes if one.is_data else 0

    def is_above(self, user: int | None) -> bool:
        """Whether a user has more than their share; root has none."""
        return bool(user) and self.bytes_of_user[user or 0] > self.room.share

    @property
    def is_enough(self) -> bool:
        return _is_goal_met(self.room, self.goal, self.freed) and not (
            self.for_data and self.excess > 0
        )

    def select(
        self, left: Iterable[StoredEntry], may_go: Callable[[StoredEntry], bool]
    ) -> list[StoredEntry]:
        """Picks of these, in their order, who may go, until it is enough; returns who stay."""
        stay = []
        for one in left:
            if self.is_enough or not may_go(one):
                stay.append(one)
                continue
            self.victims.append(one.key)
            self.freed += one.bytes
            self.bytes_of_user[one.user or 0] -= one.bytes
            self.excess -= one.bytes if one.is_data else 0
        return stay


def _is_goal_met(room: CacheSpace, goal: EvictionGoal, freed: int) -> bool:
    return room.free + freed >= goal.free and room.used - freed <= goal.used


def list_superseded_keys(
    stored: Iterable[StoredEntry], path: str = "", now: float = math.inf
) -> frozenset[str]:
    """Pure: the keys whose path has a newer entry, and all those of `path`.

    An entry that was made later than `now` is older than one that was not: it is of before the
    node's clock was set back.
    """
    stored = list(stored)
    newest: dict[str, tuple[bool, float, str]] = {}
    for one in stored:
        if one.entry is not None:
            its = one.entry.identity.path
            made = one.entry.created
            newest[its] = max(newest.get(its, (False, 0.0, "")), (made <= now, made, one.key))
    return frozenset(
        one.key
        for one in stored
        if one.entry is not None
        and (one.entry.identity.path == path or newest[one.entry.identity.path][2] != one.key)
    )


def measure_space(cache: Cache, stored: Iterable[StoredEntry], config: Config) -> CacheSpace:
    """The cache's room now. Parts under way count as used: their space is reserved."""
    return _measure_with_parts(cache, config, sum(one.bytes for one in stored))


def _measure_with_parts(cache: Cache, config: Config, entries: int) -> CacheSpace:
    """The room beside these bytes of entries, and beside the parts."""
    parts = {part: _tree_bytes_or_zero(part) for part in cache.parts.iterdir()}
    data = sum(size for part, size in parts.items() if _is_data_part(Part(part)))
    room = _space_under_limits(cache, config, entries + sum(parts.values()))
    return msgspec.structs.replace(room, data_under_way=data)


def estimate_least_space(cache: Cache, config: Config) -> CacheSpace:
    """A lower bound of the room from statvfs(2) alone: all that is used counts as the cache's.

    No entry is looked at, so that ten thousand of them cost a hook no more than ten. On a disk of
    the cache's own the bound is exact.
    """
    disk = os.statvfs(cache.root)
    return _space_under_limits(cache, config, (disk.f_blocks - disk.f_bfree) * disk.f_frsize)


def is_space_free(cache: Cache, config: Config, size: int) -> bool:
    """Whether nothing has to go for a copy of `size` bytes.

    By statvfs(2) alone, as `estimate_least_space`.
    """
    room = estimate_least_space(cache, config)
    return _is_goal_met(room, goal_for_copy(room, size), 0) and _has_free_inodes(cache)


def find_space_by_sum(cache: Cache, config: Config) -> CacheSpace | None:
    """The room by the sum of the entries that is kept: no entry is looked at. None without one.

    Too low a sum lets the cache grow by so much, but `free` is what statvfs(2) says: the disk does
    not fill. Raises OSError.
    """
    total = entry_sum.read_sum(cache.entry_sum)
    return _measure_with_parts(cache, config, total.bytes) if total else None


def _has_room(cache: Cache, config: Config, goal: Callable[[CacheSpace], EvictionGoal]) -> bool:
    """Whether nothing has to go for the goal, as far as that is known without reading entries."""
    room = estimate_least_space(cache, config)
    if _is_goal_met(room, goal(room), 0):
        return True
    summed = find_space_by_sum(cache, config)
    return summed is not None and _is_goal_met(summed, goal(summed), 0)


def _has_room_for_data(cache: Cache, config: Config, size: int) -> bool:
    """Whether nothing has to go for a copy of data, of which all may take a share of the room."""
    total = entry_sum.read_sum(cache.entry_sum)
    if total is None:
        return False
    room = _measure_with_parts(cache, config, total.bytes)
    has_share = total.data + room.data_under_way + size <= room.data
    return has_share and _is_goal_met(room, goal_for_copy(room, size), 0)


def _needs_no_eviction(cache: Cache, config: Config) -> bool:
    return _has_free_inodes(cache) and _has_room(cache, config, goal_at_rest)


def recount_entries(cache: Cache) -> None:
    """Reads all entries and corrects their sum. Raises lock.LockTimeout, OSError."""
    known = cache.list_entries()
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        _list_entries_and_correct_sum(cache, known)


def _list_entries_and_correct_sum(cache: Cache, known: Iterable[StoredEntry]) -> list[StoredEntry]:
    """The entries, of which the `known` ones were read before; corrects their sum.

    The caller holds the space lock.
    """
    before = entry_sum.begin_count(cache.entry_sum)
    stored = cache.list_entries(known)
    data = sum(one.bytes for one in stored if one.is_data)
    entry_sum.end_count(cache.entry_sum, before, sum(one.bytes for one in stored), data)
    return stored


def _space_under_limits(cache: Cache, config: Config, used: int) -> CacheSpace:
    disk = os.statvfs(cache.root)
    total = disk.f_blocks * disk.f_frsize
    free = disk.f_bavail * disk.f_frsize
    max_size, min_free = config.max_size.resolve_bytes(total), config.min_free.resolve_bytes(total)
    may_take = _max_entry_bytes(max_size, min_free, used + free)
    of_data = config.data.share.resolve_bytes(may_take)
    return CacheSpace(
        free=free,
        used=used,
        max_size=max_size,
        min_free=min_free,
        low=config.low_watermark.resolve_bytes(may_take),
        share=config.max_user_share.resolve_bytes(may_take),
        data=of_data,
    )


def _max_entry_bytes(max_size: int, min_free: int, others_left: int) -> int:
    """Pure: the most that entries may take, of the bytes that nobody else has."""
    return max(0, min(max_size, others_left - min_free))


def sum_copy_bytes_by_user(cache: Cache, excluded_keys: Container[str] = ()) -> Counter[int]:
    """Return the bytes on disk of the copies under way by their users' uids, without some keys."""
    found: Counter[int] = Counter()
    for directory in cache.parts.iterdir():
        owner = Part(directory).find_record()
        if owner is not None and directory.name not in excluded_keys:
            found[owner.uid] += _tree_bytes_or_zero(directory)
    return found


def make_room(
    cache: Cache,
    leases: LeaseDirectory,
    config: Config,
    path: str,
    size: int,
    user: int | None = None,
    data: bool = False,
    keys_to_keep: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Evicts until `size` bytes for a copy of `path` fit; returns their keys.

    `user` is the uid of who asks, `data` whether it is no image; `keys_to_keep` are keys that do
    not go for it, as if they were leased. Raises Declined, and evicts nothing, where even
    everything that may go for them would not do.
    """

    def has_room() -> bool:
        if data:
            return _has_room_for_data(cache, config, size)
        return _has_room(cache, config, partial(goal_for_copy, size=size))

    # Before the lock, since it takes long where there are many; looked at once more under it.
    known = () if has_room() else cache.list_entries()
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        if has_room():
            return ()
        stored = _list_entries_and_correct_sum(cache, known)
        room = measure_space(cache, stored, config)
        goal = goal_for_copy(room, size)
        if not _is_goal_met(room, goal, 0):
            # What might be resumed one day goes before anything that is whole.
            drop_dead_parts(cache, lambda part: True)
            room = measure_space(cache, stored, config)
        if data and room.data_under_way + size > room.data:
            drop_dead_parts(cache, _is_data_part)
            room = measure_space(cache, stored, config)
        if not data and _is_goal_met(room, goal, 0):
            return ()
        under_way = sum_copy_bytes_by_user(cache)
        under_way[user or 0] += size
        kept = leases.leased_keys() | keys_to_keep
        taken = size if data else 0
        made = plan(stored, kept, room, goal, path, under_way, user, taken, time.time())
        if not made.is_enough:
            raise Declined(
                "no-room",
                f"needs {format_size(size)}; {format_size(room.free)} are free, of which"
                f" {format_size(room.min_free)} stay free, and {format_size(made.freed)} can be"
                f" evicted (the cache may take {format_size(room.max_size)}, data"
                f" {format_size(room.data)}, one user {format_size(room.share)} where others'"
                " entries would have to go)",
            )
        victims = _evict_planned(cache, made)
    cache.delete_evicted()
    return victims


def evict_for_job(
    cache: Cache,
    leases: LeaseDirectory,
    config: Config,
    need: int,
    user: int,
    timeout: float,
    others: Mapping[int, int] = NOBODY,
) -> tuple[str, ...]:
    """Evicts until `need` bytes beside `min_free` are free for a job; nothing if that cannot be.

    Returns the keys. It is the user's room: nobody else's entry goes for more than their share.
    `others` are the bytes, by uid, that jobs have beside the entries; they count for the shares.
    `timeout` in seconds is for the space lock. Raises lock.LockTimeout, Failed, OSError.
    """
    known = cache.list_entries()
    with lock.held(cache.space_lock, timeout):
        stored = _list_entries_and_correct_sum(cache, known)
        under_way = sum_copy_bytes_by_user(cache) + Counter(others)
        under_way[user] += need
        room = measure_space(cache, stored, config)
        goal = EvictionGoal(free=room.min_free + need, used=room.used)
        leased, now = leases.leased_keys(), time.time()
        made = plan(stored, leased, room, goal, copies=under_way, user=user, now=now)
        if not made.is_enough:  # what others have on the disk would empty the cache for nothing
            return ()
        victims = _evict_planned(cache, made)
    cache.delete_evicted()
    return victims


def evict_to_watermark(
    cache: Cache,
    leases: LeaseDirectory,
    config: Config,
    timeout: float = lock.SPACE_TIMEOUT,
    known: Iterable[StoredEntry] | None = None,
) -> tuple[str, ...]:
    """Evicts to the low watermark, as far as leases and pins allow; returns the keys.

    `timeout` in seconds is for the space lock; `known` are entries that were read just before.
    Raises lock.LockTimeout.
    """
    if known is None:
        known = () if _needs_no_eviction(cache, config) else cache.list_entries()
    with lock.held(cache.space_lock, timeout):
        drop_dead_parts(cache, _is_unresumable)
        made = plan_to_watermark(
            cache, leases.leased_keys, config, lambda: _list_entries_and_correct_sum(cache, known)
        )
        victims = _evict_planned(cache, made)
    cache.delete_evicted()
    return victims


def plan_to_watermark(
    cache: Cache,
    leased: Callable[[], frozenset[str]],
    config: Config,
    read: Callable[[], list[StoredEntry]] | None = None,
) -> EvictionPlan:
    """What `evict_to_watermark` evicts, with these keys leased.

    Who only wants to know needs no lock for it.

    `read` gives the entries, if they are needed. Parts that no copy can resume count as gone.
    """
    if _needs_no_eviction(cache, config):
        return EvictionPlan((), 0, is_enough=True)
    is_full = not _has_free_inodes(cache)
    stored = read() if read else cache.list_entries()
    room = measure_space(cache, stored, config)
    dead = list_dead_parts(cache, _is_unresumable)
    gone = sum(_tree_bytes_or_zero(cache.part_dir(key)) for key in dead)
    free = -1 if is_full else room.free + gone  # less than any `min_free`, 0 too
    room = msgspec.structs.replace(room, free=free, used=room.used - gone)
    under_way, now = sum_copy_bytes_by_user(cache, dead), time.time()
    return plan(stored, leased(), room, goal_at_rest(room), copies=under_way, now=now)


def _has_free_inodes(cache: Cache) -> bool:
    """Whether the disk takes more files; one that takes none is as full as one without space."""
    disk = os.statvfs(cache.root)
    return not disk.f_files or disk.f_favail >= FILES  # btrfs has 0 of 0


def evict_keys(cache: Cache, leases: LeaseDirectory, keys: Iterable[str]) -> tuple[str, ...]:
    """Evicts these keys, except leased and pinned ones; returns those that were evicted."""
    with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
        wanted = frozenset(keys) - leases.leased_keys()
        here = [directory.name for directory in cache.entries.iterdir()]
        victims = tuple(key for key in here if key in wanted and not cache.is_pinned(key))
        for key in victims:
            cache.evict_entry(key)
    cache.delete_evicted()
    return victims


def _evict_planned(cache: Cache, made: EvictionPlan) -> tuple[str, ...]:
    """Evicts what was planned, but what was pinned since the entries were read; returns the keys.

    Renamed under the lock, deleted after it: unlinking tens of gigabytes takes seconds.
    """
    victims = tuple(key for key in made.victims if not cache.is_pinned(key))
    for key in victims:
        cache.evict_entry(key)
    return victims


def list_dead_parts(cache: Cache, unwanted: Callable[[Part], bool]) -> tuple[str, ...]:
    """The keys of unwanted parts whose stager has died: nobody holds their key's lock."""
    parts = [Part(directory) for directory in cache.parts.iterdir()]
    keys = [part.directory.name for part in parts if unwanted(part)]
    return tuple(key for key in keys if lock.is_free(cache.key_lock(key)))


def drop_dead_parts(cache: Cache, unwanted: Callable[[Part], bool]) -> tuple[str, ...]:
    """Deletes what `list_dead_parts` names; returns the keys."""
    dropped = []
    for key in list_dead_parts(cache, unwanted):
        with contextlib.suppress(lock.LockTimeout), lock.held(cache.key_lock(key), 0):
            cache.drop_part(key)
            dropped.append(key)
    return tuple(dropped)


def _is_unresumable(part: Part) -> bool:
    return not part.is_resumable_in_boot(boot_id())


def drop_dead_locks(cache: Cache) -> None:
    """Removes the locks of keys that have neither an entry nor a part.

    Needs no lock of the space: a key that comes back this moment has its lock held, or makes a new
    one.
    """
    locks = [file for file in cache.locks.glob("*.lock") if file != cache.space_lock]
    known = {one.name for above in (cache.entries, cache.parts) for one in above.iterdir()}
    for file in locks:
        if file.stem not in known:
            with contextlib.suppress(OSError):  # something else by that name
                lock.remove_if_free(file)


def _is_data_part(part: Part) -> bool:
    """Whether it is of no image, but of a job's data."""
    owner = part.find_record()
    return owner is not None and owner.image.kind == "data"


def _tree_bytes_or_zero(directory: Path) -> int:
    try:
        return tree_bytes(directory)
    except FileNotFoundError:
        return 0
