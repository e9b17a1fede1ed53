"""Takes our binds off their paths: outside the space lock, since walking to a path may hang.

Which ones go is decided under the space lock, and each is claimed there. What others do meanwhile:

    who                        sees a claimed bind             and so
    a hook that mounts         `is_being_unmounted`            waits, then mounts anew
    a hook that unmounts       its own claim fails             leaves it to who has it
    a job that just reads      the copy, then the source       right bytes, both times
    who claims it is killed    the claim is gone with it       the bind counts as before

A claim is a lock file named by the mount's id, `/run/forestage/claims/<id>.unmount`: not on the
cache's disk, as what is outdated has to go while that hangs, too. A mount is taken off by
its id, and while a bind is claimed no hook mounts over its path. So no other mount is hit, though
the kernel uses ids again. If somebody else unmounts it first (umount(8), or the kernel, because the
file was replaced), the worst that can happen is that another path shows its source.

A path that hung keeps the file, with the path in it: hooks leave it to the sweep for a while.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from forestage.bind import origins
from forestage.bind.origins import RedirectBind as RedirectBind
from forestage.cache.layout import Cache
from forestage.clock import Deadline
from forestage.errors import Failed
from forestage.system import as_user, files, folders, forked_child, lock, mounts
from forestage.system.as_user import User

TIMEOUT = 2.0  # seconds for one path, and for all of a hook's
SWEEP_TOTAL = 120.0  # seconds for all of a sweep's; nobody waits for it
AT_ONCE = 32  # children
MOST = 256  # binds that one hook or sweep claims: each is an open file until all are off
SUFFIX = ".unmount"
LEFT_TO_SWEEP = 1800.0  # seconds in which hooks do not try a path again that hung
COVERS = 8  # mounts that users may have over one redirect
CHASES = 20  # tries to reach a redirect whose path is being renamed
MOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # what such a path says meanwhile


class ClaimedBind(msgspec.Struct, frozen=True):
    """A bind that is claimed until `release`: nobody else takes it off, nor counts on it."""

    bind: RedirectBind
    cache: Cache
    release: Callable[[], None] = lambda: None


class UnmountError(Failed):
    """Redirects whose paths could not be reached: `removed` others have gone.

    The sweep tries again.
    """

    def __init__(self, stuck: list[str], off: int) -> None:
        super().__init__("redirect", f"still redirected: {', '.join(stuck)}")
        self.stuck = stuck
        self.removed = off


def list_binds(cache: Cache, table: list[mounts.MountInfo] | None = None) -> list[RedirectBind]:
    """Return every bind of ours on the node, oldest first, those of earlier caches too.

    `table` is the node's mount table, where the caller has just read it.
    """
    table = mounts.list_mounts() if table is None else table
    return origins.read_known_caches(cache).list_binds(table)


def claim_binds(
    cache: Cache,
    wanted: Iterable[RedirectBind],
    claims: contextlib.ExitStack,
    now: float | None = None,
) -> list[ClaimedBind]:
    """Claims binds that are to go; returns those that are left to `unmount_binds`.

    `unmount_binds` releases each that is done. What it does not get to is released when `claims` is
    closed. Under the space lock. Left out is what another process takes off, what is gone, and,
    with `now` (seconds since the epoch), what hung a while ago; and what is beyond MOST, for the
    next time. Raises OSError.
    """
    mine = []
    for bind in islice(wanted, MOST):
        folders.ensure_directory(cache.claims, folders.PRIVATE)
        with contextlib.suppress(lock.LockTimeout):
            if now is None or not has_hung_recently(cache, bind, now):
                claim = claims.enter_context(contextlib.ExitStack())
                claim.enter_context(_hold_claim(cache, bind))
                mine.append(ClaimedBind(bind, cache, claim.close))
    # Looked at again: who had the claim before may have taken it off in between.
    there = {mount.id for mount in mounts.list_mounts()} if mine else set()
    return [one for one in mine if one.bind.mount.id in there]


@contextlib.contextmanager
def _hold_claim(cache: Cache, bind: RedirectBind) -> Iterator[None]:
    file = _claim_path(cache, bind)
    # Without /run there are no leases either, and nobody mounts.
    with lock.held_if_writable(file, 0):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if file.stat().st_size == 0:  # else it says that the path hung
                    file.unlink()


def _claim_path(cache: Cache, bind: RedirectBind) -> Path:
    return cache.claims / f"{bind.mount.id}{SUFFIX}"


def has_hung_recently(cache: Cache, bind: RedirectBind, now: float) -> bool:
    """Whether its path hung in the last LEFT_TO_SWEEP seconds; mount ids are the whole node's."""
    file = _claim_path(cache, bind)
    try:
        return (
            files.read_file(file) == os.fsencode(bind.path)
            and abs(now - file.stat().st_mtime) < LEFT_TO_SWEEP
        )
    except OSError:
        return False


def _record_hang(one: ClaimedBind, hung: bool) -> None:
    """Notes that a path hung, or that it does no more."""
    file = _claim_path(one.cache, one.bind)
    with contextlib.suppress(OSError):  # it only spares others the wait
        if hung or file.exists():
            files.overwrite_file(file, os.fsencode(one.bind.path) if hung else b"")


def delete_old_claims(cache: Cache) -> None:
    """Deletes what is noted of mounts that have gone. Under the space lock. Raises OSError."""
    here = {cache.claims / f"{mount.id}{SUFFIX}" for mount in mounts.list_mounts()}
    for file in cache.claims.glob(f"*{SUFFIX}"):
        if file not in here and lock.is_free(file):
            file.unlink(missing_ok=True)


def is_being_unmounted(cache: Cache, bind: RedirectBind) -> bool:
    """Whether another process takes this bind off now. Under the space lock. Raises OSError."""
    return not lock.is_free(_claim_path(cache, bind))


def wait_until_unmounted(cache: Cache, binds: Iterable[RedirectBind], end: Deadline) -> None:
    """Waits until nobody takes these off any more. Not under a lock. Raises lock.LockTimeout."""
    for bind in binds:
        while is_being_unmounted(cache, bind):
            if end.seconds_left() <= 0:
                raise lock.LockTimeout(f"another process is unmounting the redirect of {bind.path}")
            end.clock.sleep(lock.POLL)


def unmount_binds(
    claimed: list[ClaimedBind], owner_of: Callable[[RedirectBind], User], total: float = 0.0
) -> None:
    """Takes the binds off, each path in a child of its own, within TIMEOUT or `total` seconds.

    Not under a lock. `owner_of` is the user who can reach a bind's path where root is squashed.
    Raises UnmountError at last: what hangs keeps no other from going, nor anybody waiting for one
    whose turn is over.
    """
    paths: dict[str, list[ClaimedBind]] = {}
    for one in claimed[::-1]:  # the newest lies on top
        paths.setdefault(one.bind.path, []).append(one)
    table = mounts.list_mounts() if len(paths) > 1 else []
    # A user's FUSE may hang whenever they like: what lies below it comes last.
    users = [mount.point for mount in table if mount.fuse_owner_uid]
    ordered = sorted(
        paths.values(), key=lambda at: any(mounts.is_below(at[0].bind.path, one) for one in users)
    )
    works = [
        functools.partial(_unmount_in_order, [one.bind.mount for one in at], owner_of(at[0].bind))
        for at in ordered
    ]
    stuck: list[str] = []
    as_user.run_each_in_child(
        *(works, list[int], TIMEOUT, max(TIMEOUT, total), AT_ONCE),
        lambda number, answer: stuck.extend(_record_outcome(ordered[number], answer)),
    )
    if stuck:
        raise UnmountError(stuck, len(claimed) - len(stuck))


def _record_outcome(at: list[ClaimedBind], numbers: list[int] | None) -> Iterator[str]:
    """Notes how it went at one path, and releases what was claimed there; yields what stays."""
    there = {mount.id for mount in mounts.list_mounts()} if numbers is None else set()
    for n, one in enumerate(at):
        hung = numbers is None and one.bind.mount.id in there
        _record_hang(one, hung)
        one.release()
        if hung:
            yield f"{one.bind.path} (hangs)"
        elif numbers and numbers[n]:
            yield f"{one.bind.path} ({os.strerror(numbers[n])})"


def _unmount_in_order(binds: list[mounts.MountInfo], user: User) -> list[int]:
    """In a child: an errno for each, 0 for those that are gone."""
    # One that hangs for ever cannot be killed: in a job's cgroup it would drain the node.
    forked_child.leave_job_cgroups()
    numbers = []
    for bind in binds:
        try:
            with _without_user_mounts(bind, user):
                _unmount_despite_renames(bind, user)
            numbers.append(0)
        except OSError as error:
            numbers.append(error.errno or errno.EIO)
    return numbers


@contextlib.contextmanager
def _without_user_mounts(bind: mounts.MountInfo, user: User) -> Iterator[None]:
    """Lifts what users have mounted over a directory above a bind, so that it can be reached.

    A FUSE of theirs, with a server that is dead or stopped, would keep it for ever. It is put back:
    a job of its user may be at work in it.
    """
    with contextlib.ExitStack() as back:
        for _ in range(COVERS):
            cover = mounts.find_covering_fuse(mounts.list_mounts(), bind)
            if cover is None:
                break
            _lift_user_mount(cover, user, back)
        yield


def _lift_user_mount(cover: mounts.MountInfo, user: User, back: contextlib.ExitStack) -> None:
    # Opening the root of a mount asks its server nothing.
    top = as_user.open_path_as_root_or_user(cover.point, user)
    # Another one may lie on it: that goes first.
    found = mounts.find_mount_of_descriptor(top)
    if found is None or not found.fuse_owner_uid or found.point != cover.point:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    tree = mounts.clone_mount(f"/proc/self/fd/{top}")
    mounts.umount(f"/proc/self/fd/{top}")
    back.callback(_put_user_mount_back, tree, found, user)


def _put_user_mount_back(tree: int, was: mounts.MountInfo, user: User) -> None:
    with contextlib.suppress(OSError):
        spot = as_user.open_path_as_root_or_user(was.point, user)
        # No link may lead root elsewhere: to a directory of that user's own, as fusermount3(1)
        # wants it, on the mount where it was.
        its_own = os.fstat(spot).st_uid == was.fuse_owner_uid
        if its_own and mounts.read_mount_id(spot) == was.parent:
            mounts.attach_mount(tree, spot)


def _unmount_despite_renames(bind: mounts.MountInfo, user: User) -> None:
    """Takes off one bind. A user may rename the folders above it all the time: it goes along."""
    point, failed = bind.point, OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    for _ in range(CHASES):
        try:
            if mounts.unmount_if_same(bind, as_user.open_path_as_root_or_user(point, user)):
                return
        except OSError as error:  # of a path that may lead nowhere by now
            failed = error
        found = [mount.point for mount in mounts.list_mounts() if mount.id == bind.id]
        if not found:  # gone already
            return
        if found[-1] == point and failed.errno not in (errno.EBUSY, *MOVED):
            break
        point = found[-1]
    raise failed
