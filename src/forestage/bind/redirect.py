"""Redirects: read-only bind mounts of entries over the paths that users wrote, for the whole node.

Unmounting one is always right: the path then shows the shared file system, only slower. Mounting
one is right only over the very file that was staged, so that is checked last of all. The kernel's
mount table is the only record of them (docs/decisions/0002).

    mounted by     hooks/serve.py once the copy is here (`mount_redirect`), and the stager for jobs
                   that went on without it (`mount_for_waiting_jobs`)
    unmounted by   Epilog and sweep, those that no lease names (`claim_unneeded_binds`); whoever
                   opens a path whose redirect no longer fits (`unmount_stale_binds`);
                   commands/unredirect.py and commands/verify.py. bind/unmount.py does it for
                   all of them.

With `redirect: spank` the companion mounts for each task instead.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from forestage.bind import origins, unmount
from forestage.bind.unmount import ClaimedBind
from forestage.bind.unmount import RedirectBind as RedirectBind
from forestage.bind.unmount import list_binds as list_binds
from forestage.cache import source_image
from forestage.cache.layout import Cache
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.source_image import FileIdentity, SourceImage
from forestage.clock import Deadline
from forestage.config import switch
from forestage.errors import Declined, Failed
from forestage.paths import NodePaths
from forestage.system import as_user, folders, forked_child, lock, mounts
from forestage.system.as_user import User
from forestage.system.files import open_descriptor
from forestage.system.lock_ranges import NODE_MOUNTS
from forestage.system.mounts import MountInfo

MOUNT_TIMEOUT = 60.0  # seconds for a redirect that no hook waits for
OVER_TIMEOUT = 0.5  # seconds for mount(2) over a user's file, under the space lock

RedirectStep = Literal["keep", "mount", "unmount"]
RedirectResult = Literal["kept", "mounted"]


class _RedirectTarget(msgspec.Struct, frozen=True):
    """What lies at the path in the host's namespace, and whether the user can read the copy."""

    identity: FileIdentity
    readable: bool


def choose_redirect_step(bound: list[RedirectBind], path: str, key: str) -> RedirectStep:
    """Pure: what the path needs so that it shows the entry `key`, given all binds of ours."""
    at_path = [bind for bind in bound if bind.path == path]
    if not at_path:
        return "mount"
    return "keep" if at_path[-1].key == key else "unmount"


def list_unneeded_binds(bound: list[RedirectBind], needed: frozenset[str]) -> list[RedirectBind]:
    """Pure: the binds whose path no lease redirects."""
    return [bind for bind in bound if bind.path not in needed]


def list_stale_binds(
    bound: list[RedirectBind], paths: frozenset[str], key: str
) -> list[RedirectBind]:
    """Pure: the binds at one of the paths that show other bytes than the entry `key`."""
    # One without a key shows an entry that was evicted: nobody can say what it is.
    return [one for one in bound if one.path in paths and (not one.key or one.key != key)]


def unmount_stale_binds(
    cache: Cache, paths: frozenset[str], key: str, user: User, end: Deadline
) -> None:
    """Unmounts what shows something else than the entry `key` at one of the paths.

    Raises UnmountError, lock.LockTimeout, OSError.
    """
    while found := list_stale_binds(list_binds(cache), paths, key):
        with contextlib.ExitStack() as claims:
            with lock.held_if_writable(cache.space_lock, end.seconds_left()):
                going = unmount.claim_binds(
                    cache, list_stale_binds(list_binds(cache), paths, key), claims
                )
            unmount.unmount_binds(going, lambda bind: user)
        unmount.wait_until_unmounted(cache, found, end)


def mount_redirect(
    node: Node,
    lease: Lease,
    user: User,
    wanted: SourceImage,
    end: Deadline,
    wait_end: Deadline | None = None,
) -> RedirectResult:
    """Makes the image's path show the entry, and notes it in the lease of this user's job.

    Another process may be unmounting the right redirect: that is waited for until `wait_end`, where
    the job waits for its copies, and otherwise as long as an unmount takes that does not hang.
    Raises Declined where the path no longer leads to the staged file or the copy is not readable
    for the job's user; OSError, as_user.ChildTimeout.
    """

    def note() -> None:
        # Read again: another step of the job may have taken something meanwhile.
        # If it is gone, its Epilog has run: what it held besides may be evicted.
        held = node.leases.find_lease(lease.job) or msgspec.structs.replace(lease, uses=())
        if not held.belongs_to(lease.user.uid, lease.start):
            raise Declined("off", "the job has ended, and its number is another job's")
        node.leases.write_lease(held.with_use(EntryUse(wanted.key, wanted.path)))

    until_gone = wait_end or Deadline.after(min(unmount.TIMEOUT, end.seconds_left()), node.clock)
    return _mount_with_retries(node, user, wanted, end, until_gone, note)


def mount_for_waiting_jobs(node: Node, wanted: SourceImage) -> Iterator[tuple[int, str]]:
    """Makes the image's path show the entry for each job that began without it and wants that.

    Yields each such job and what came of it: mounted, kept, or why not. By the rules of
    `mount_redirect`, but for a lease that has gone: then its Epilog has run, and nobody needs a
    redirect.
    """
    from forestage.slurm import enroot  # an Epilog needs none of it

    use = EntryUse(wanted.key, wanted.path)
    entry = node.cache.find_entry(wanted)
    nobodys = enroot.JobVariables({}, all_known=False)
    own = [nobodys.expand(source) for source in entry.binds] if entry else []
    if any(enroot.is_bind_above(source, wanted.path) for source in own):
        return  # its own container would not start
    for job in node.leases.list_jobs():
        with contextlib.suppress(Failed):  # a damaged lease wants no redirect
            lease = node.leases.find_lease(job)
            if lease and use in lease.uses and lease.cache == str(node.cache.root):
                yield job, _mount_for_job(node, lease, wanted)


def _mount_for_job(node: Node, lease: Lease, wanted: SourceImage) -> str:
    def note() -> None:
        now = node.leases.find_lease(lease.job)
        is_there = now is not None and now.belongs_to(lease.user.uid, lease.start)
        if now is None or not is_there or EntryUse(wanted.key, wanted.path) not in now.uses:
            raise Declined("off", "the job has ended, or saves to this path")

    end = Deadline.after(MOUNT_TIMEOUT, node.clock)
    try:
        return _mount_with_retries(node, lease.user, wanted, end, end, note)
    except (Declined, OSError) as error:
        return str(error)


def _mount_with_retries(
    node: Node,
    user: User,
    wanted: SourceImage,
    end: Deadline,
    until_gone: Deadline,
    update_lease: Callable[[], None],
) -> RedirectResult:
    """Mounts as `user`; `update_lease`, under the space lock, sees to the lease or says why not.

    `until_gone` limits the wait for a redirect that shows the right bytes and is being unmounted.
    """
    cache = node.cache
    for _ in range(3):
        shown = _mount_once(node, user, wanted, end, update_lease)
        if shown:
            return shown
        # Without the lock, as this may hang. One with other bytes is waited for until the end.
        unmount_stale_binds(cache, frozenset({wanted.path}), wanted.key, user, end)
        try:
            going = [bind for bind in list_binds(cache) if bind.path == wanted.path]
            unmount.wait_until_unmounted(cache, going, until_gone)
        except lock.LockTimeout as busy:  # no fault of this node: the job reads the source
            raise Declined("busy", str(busy)) from None
    raise Failed("redirect", f"{wanted.path} keeps showing an older copy")


def _mount_once(
    node: Node, user: User, wanted: SourceImage, end: Deadline, update_lease: Callable[[], None]
) -> RedirectResult | None:
    """None where a bind has to go first, or goes just now."""
    cache, places = node.cache, node.places
    turn = functools.partial(
        lock.lock_byte, places.mounting, NODE_MOUNTS.first_byte(user.uid), is_blocking=False
    )
    # Opened before the lock: walking to the path may hang, and the lock is the whole node's.
    target, identity = _open_target(cache, wanted, user, end.seconds_left())
    try:
        with lock.held(cache.space_lock, end.seconds_left()):
            # Under the lock, in which all that mount and unmount decide: what was read before it
            # may lack a redirect, and a second one would be laid over that.
            table = mounts.list_mounts()
            known = origins.read_known_caches(cache).list_binds(table)
            bound = [bind for bind in known if bind.path == wanted.path]
            step = choose_redirect_step(bound, wanted.path, wanted.key)
            # One that an Epilog has claimed goes, though it shows the right entry.
            if step == "unmount" or any(unmount.is_being_unmounted(cache, bind) for bind in bound):
                return None
            # `unredirect` switches staging off, then takes this lock: no bind is made after that.
            if step == "mount" and (off := switch.find_off_file_reason(places, end.clock.wall())):
                raise Declined("disabled", off)
            if step == "mount" and identity != wanted.identity:
                raise Declined("changed", f"{wanted.path} was changed or replaced just now")
            # A job's word that it saves there is noted under this lock, too: one sees the other.
            if node.leases.is_saved_to(wanted.path):
                raise Declined("saved", f"a job on this node saves its container to {wanted.path}")
            # Lease first: an Epilog that runs next takes off what no lease mentions.
            update_lease()
            if step == "mount":
                origins.record_origin(cache, table)
                _bind_read_only(
                    cache.image_path(wanted.key), places.redirects / wanted.key, target, turn
                )
            return "mounted" if step == "mount" else "kept"
    finally:
        os.close(target)


def claim_unneeded_binds(
    cache: Cache,
    leases: LeaseDirectory,
    places: NodePaths,
    claims: contextlib.ExitStack,
    table: list[MountInfo],
    now: float | None = None,
) -> list[ClaimedBind]:
    """Claims every redirect that no lease needs, for `unmount.unmount_binds`. Under the space lock.

    `table` was read under it, too. `now`: see `unmount.claim_binds`.
    """
    if places.redirects.exists():
        for spot in places.redirects.iterdir():
            with contextlib.suppress(IsADirectoryError):  # not ours, and in nobody's way
                _clear_mount_point(spot)
    # Before the leases: a hook of another cache has another space lock, and notes its redirect in
    # the lease before it mounts.
    bound = list_binds(cache, table)
    return unmount.claim_binds(
        cache, list_unneeded_binds(bound, leases.list_redirected_paths()), claims, now
    )


def _open_target(
    cache: Cache, wanted: SourceImage, user: User, timeout: float
) -> tuple[int, FileIdentity]:
    try:
        copy = os.open(cache.image_path(wanted.key), os.O_PATH)
    except FileNotFoundError:
        # `verify` evicts what is bad, leased or not; the next look stages it anew.
        raise Declined("changed", f"the copy of {wanted.path} has just gone") from None

    def work() -> as_user.ChildResult[_RedirectTarget]:
        as_user.set_effective_user(user)
        fd = os.open(wanted.path, os.O_PATH | os.O_NOFOLLOW)
        identity = source_image.read_identity(fd, os.readlink(f"/proc/self/fd/{fd}"))
        try:
            os.open(f"/proc/self/fd/{copy}", os.O_RDONLY | os.O_NONBLOCK)
        except BlockingIOError:  # a lease of its owner's; the rights were checked before that
            pass
        except PermissionError:
            return _RedirectTarget(identity, readable=False), []
        return _RedirectTarget(identity, readable=True), [fd]

    try:
        target, fds = as_user.run_in_child(work, _RedirectTarget, timeout, keep=(copy,))
    except OSError as error:
        raise Declined("changed", f"{wanted.path} was moved just now: {error.strerror}") from None
    finally:
        os.close(copy)
    if not target.readable:
        # A server may grant what mode and ACL do not show (NFSv4): never bind a copy that this
        # user, who could read the source, cannot open.
        raise Declined("access", f"this user cannot read the copy of {wanted.path}")
    return fds[0], target.identity


def _bind_read_only(source: Path, spot: Path, target: int, lock_turn: Callable[[], int]) -> None:
    """Lays `source` over the open file `target`, read-only from the first moment on.

    A bind inherits the flags of the mount it is made from. So a first bind, on a spot that only
    root reaches, is remounted read-only, and the second is made from it: one call, no moment in
    which the job could open the cached file for writing.

    Raises OSError, also where somebody has cleared the spot meanwhile: after a change of `cache:`
    two hooks may hold each the lock of another cache. Declined where the target was replaced since
    it was opened, or cannot be mounted over in time.
    """
    folders.ensure_directory_with_mode(spot.parent)
    _clear_mount_point(spot)
    spot.touch(mode=0o600)
    mounts.mount(str(source), str(spot), mounts.MS_BIND)
    try:
        flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
        mounts.mount("none", str(spot), mounts.MS_REMOUNT | mounts.MS_BIND | flags)
        # Opened and compared: by its name it could be the bare file by now. The kernel makes no
        # bind from a mount that was unmounted.
        with open_descriptor(spot, os.O_PATH | os.O_NOFOLLOW) as made:
            if not os.path.samestat(os.fstat(made), os.lstat(source)):
                raise OSError(errno.ESTALE, "somebody took the bind off", str(spot))
            _bind_over_target(made, target, lock_turn)
    finally:
        _clear_mount_point(spot)


def _bind_over_target(made: int, target: int, lock_turn: Callable[[], int]) -> None:
    """Binds `made` over `target`, in a child: whoever can read that file may have mount(2) wait.

    No signal ends that wait, and the child would mount when it is over, whenever that is. But the
    kernel looks then whether `made` is still mounted, and the caller unmounts it at once: so what
    was not mounted in time never is (docs/decisions/0046). `lock_turn` takes the user's place among
    those that mount; a child that hangs keeps it. Raises Declined, OSError.
    """

    def work() -> as_user.ChildResult[bool]:
        forked_child.leave_job_cgroups()  # nobody is to wait for it
        try:
            place = lock_turn()
        except BlockingIOError:
            why = "an earlier mount for this user still hangs"
            raise Declined("mount-hangs", why) from None
        try:
            mounts.mount(f"/proc/self/fd/{made}", f"/proc/self/fd/{target}", mounts.MS_BIND)
        finally:
            os.close(place)  # on a busy node this process may end after the user's next one began
        return True, []

    try:
        # Once: a child that was killed may have mounted before.
        as_user.run_in_child(work, bool, OVER_TIMEOUT, keep=(made, target), tries=1)
    except FileNotFoundError:  # what the kernel says of a file that was deleted
        raise Declined("changed", "the image or its copy was replaced just now") from None
    except as_user.ChildTimeout:
        raise Declined("mount-hangs", "a process keeps the file from being mounted over") from None


def _clear_mount_point(spot: Path) -> None:
    """Clears where a redirect is made of what a hook left that was killed there: a file, and
    perhaps a bind on it. Under the space lock. Raises OSError."""
    while True:
        try:
            return spot.unlink(missing_ok=True)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        mounts.umount(str(spot))
