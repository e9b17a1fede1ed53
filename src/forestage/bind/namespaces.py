"""Our binds in the mount namespaces of other processes, and how they are taken off there.

Who makes a private mount namespace (rootless podman, unshare(1)) while a redirect lies keeps a
copy of it, and its bytes, as long as that namespace lives; unmounting on the node does not reach
it.

    namespace of root's           umount2(2) in it, as on the node
    namespace of a user's         the bind is locked there (EINVAL, also for root), so the source's
                                  own file is laid over it: cloned here, moved there

A bind whose entry a job holds stays: the companion makes such in each task. The lease is there
before the bind, so leases that are read after the namespaces tell of every one that was found.
What a process finds in its own namespace is its user's to arrange, /proc too: nothing is opened by
a path there but what hides the source, and that counts only if it is the very mount.
"""

import contextlib
import errno
import functools
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from forestage.bind import origins, unmount
from forestage.bind.origins import RedirectBind
from forestage.cache.layout import Cache
from forestage.cache.lease import LeaseDirectory
from forestage.system import as_user, folders, forked_child, mounts
from forestage.system.mounts import MountInfo
from forestage.system.sha256 import sha256

HOST = Path("/proc")
HUNG = ".hung"  # of a file beside the claims

# A user may make hundreds of namespaces with 100,000 mounts each (fs.mount-max).
LOOK = 1.0  # seconds in which a hook looks through all of them
MOST = 1 << 20  # bytes of one's mounts that it reads, some 10,000 mounts
SWEEP_MOST = 64 << 20


class ForeignBind(msgspec.Struct, frozen=True):
    """A bind of ours in the mount namespace (an inode) of a process.

    `source` is the path on the node of what it hides, "" where the node does not have that.
    """

    pid: int
    namespace: int
    bind: RedirectBind
    source: str = ""


class NamespaceScan(msgspec.Struct, frozen=True):
    """What was found, and how many namespaces were not looked through to the end."""

    binds: tuple[ForeignBind, ...] = ()
    unread_namespaces: int = 0


class CleanupResult(msgspec.Struct, frozen=True):
    """How many were taken off or covered, and sentences about those that stay."""

    removed: int = 0
    problems: tuple[str, ...] = ()


def scan_namespaces(
    cache: Cache,
    is_thorough: bool = False,
    first_uid: int | None = None,
    proc: Path = HOST,
    here: list[MountInfo] | None = None,
) -> NamespaceScan:
    """Our binds in other namespaces than this process', of any cache, that nothing covers.

    Within LOOK seconds, or, if `is_thorough`, as long as a sweep may take.
    Namespaces of the user `first_uid`, a uid, are looked at before the others. `here` is this
    process' own table.
    """
    end = time.monotonic() + (unmount.SWEEP_TOTAL if is_thorough else LOOK)
    most = SWEEP_MOST if is_thorough else MOST
    here = mounts.list_mounts() if here is None else here
    known = origins.list_origins(cache, here)
    found: list[ForeignBind] = []
    marks = [mounts.format_mountinfo_marker(one.origin) for one in known]
    namespaces, all_known = _list_namespaces(proc, first_uid, end)
    unread = int(not all_known)
    for pid, namespace in namespaces:
        if time.monotonic() >= end:
            unread += 1
            continue
        with contextlib.suppress(OSError):  # it has just ended
            raw, whole = _read_mountinfo(proc / str(pid) / "mountinfo", most)
            unread += not whole
            # Nearly all have none of ours: not even parsed.
            if not any(mark in raw for mark in marks):
                continue
            table = mounts.parse_mountinfo(os.fsdecode(raw))
            over = {(mount.parent, mount.point) for mount in table}
            for bind in origins.list_binds(table, known):
                if (bind.mount.id, bind.path) not in over:
                    source = mounts.find_hidden_path(here, table, bind.mount)
                    found.append(ForeignBind(pid, namespace, bind, source))
    return NamespaceScan(tuple(found), unread)


def _read_mountinfo(file: Path, most: int) -> tuple[bytes, bool]:
    """Whole lines of some of it, and whether that is all. Raises OSError.

    The kernel makes it as it is read.
    """
    with file.open("rb") as opened:
        raw = opened.read(most + 1)
    whole = len(raw) <= most
    return (raw if whole else raw[: raw.rfind(b"\n") + 1]), whole


def _list_namespaces(
    proc: Path, first: int | None, end: float
) -> tuple[list[tuple[int, int]], bool]:
    """A process of each mount namespace but ours, with that; and whether the time was enough."""
    ours = os.readlink(f"{proc}/self/ns/mnt")
    known: dict[str, tuple[bool, int]] = {}
    in_time = True
    for directory in os.scandir(proc):  # of thousands, perhaps: no Path for each
        if directory.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                name = os.readlink(f"{directory.path}/ns/mnt")  # mnt:[4026531841]
                other = first is not None and directory.stat().st_uid != first
                if name != ours:
                    # The lowest pid: a child of another hook that works in there for a moment
                    # would be gone once somebody asks it for the namespace.
                    one = other, int(directory.name)
                    known[name] = min(one, known.get(name, one))
        in_time = time.monotonic() < end
        if not in_time:
            break
    by_user = sorted(known.items(), key=lambda one: one[1][0])
    return [(pid, int(name[5:-1])) for name, (_, pid) in by_user], in_time


def list_unneeded_binds(found: Iterable[ForeignBind], keys: frozenset[str]) -> list[ForeignBind]:
    """Pure: those whose entry is gone, or held by no job."""
    return [one for one in found if one.bind.key not in keys]


def unmount_in_namespaces(
    cache: Cache,
    leases: LeaseDirectory,
    now: float | None = None,
    total: float = 0.0,
    first_uid: int | None = None,
    here: list[MountInfo] | None = None,
) -> CleanupResult:
    """Takes off, or covers, what no lease holds in other namespaces. Not under a lock.

    Within unmount.TIMEOUT or `total` seconds: what is not reached is for the sweep. With `now`
    (seconds since the epoch), a hook's, what hung a while ago is left to it too: by its path, as
    each new namespace has mounts with new ids. `first_uid` is the uid of the job's user, `here` the
    node's mount table: what was unmounted since it was read does not matter. Raises OSError; Failed
    for a damaged lease, which may hold any entry.
    """
    looked = scan_namespaces(cache, now is None, first_uid, here=here)
    found = looked.binds
    gone = list_unneeded_binds(found, leases.leased_keys()) if found else []
    if now is not None:
        gone = [one for one in gone if not _has_hung_recently(_hang_note_path(cache, one), now)]
    hung, left = _unmount_by_namespace(gone, total)
    for file in {_hang_note_path(cache, one) for one in hung}:
        with contextlib.suppress(OSError):  # it only spares others the wait
            folders.ensure_directory(file.parent, folders.PRIVATE)
            file.touch()
    if now is None:  # all were tried
        for file in set(cache.claims.glob(f"*{HUNG}")) - {
            _hang_note_path(cache, one) for one in hung
        }:
            file.unlink(missing_ok=True)
    if looked.unread_namespaces:
        told = f"mount namespaces that were not looked through: {looked.unread_namespaces}"
        left = msgspec.structs.replace(left, problems=(*left.problems, told))
    return left


def _hang_note_path(cache: Cache, one: ForeignBind) -> Path:
    """The file that says, by its time, when this path hung in some namespace."""
    path = os.fsencode(one.source or one.bind.path)
    return cache.claims / f"{sha256(path)[:32]}{HUNG}"


def _has_hung_recently(note: Path, now: float) -> bool:
    try:
        return abs(now - note.stat().st_mtime) < unmount.LEFT_TO_SWEEP
    except OSError:
        return False


def _unmount_by_namespace(
    gone: list[ForeignBind], total: float
) -> tuple[list[ForeignBind], CleanupResult]:
    """Also returns those whose namespace did not answer."""
    by_namespace: dict[int, list[ForeignBind]] = {}
    for one in gone[::-1]:  # the newest lies on top
        by_namespace.setdefault(one.namespace, []).append(one)
    works = [functools.partial(_unmount_in_one_namespace, ones) for ones in by_namespace.values()]
    timeout = max(unmount.TIMEOUT, total)
    answers = as_user.run_each_in_child(works, list[int], unmount.TIMEOUT, timeout, unmount.AT_ONCE)
    off, problems, hung = 0, [], []
    for ones, numbers in zip(by_namespace.values(), answers, strict=True):
        hung += ones if numbers is None else []
        for one, number in zip(ones, numbers or [errno.ETIMEDOUT] * len(ones), strict=True):
            what = f"{one.bind.path} in the mount namespace of process {one.pid}"
            off += not number
            problems += [f"still redirected: {what} ({os.strerror(number)})"] if number else []
    return hung, CleanupResult(off, tuple(problems))


def _unmount_in_one_namespace(ones: list[ForeignBind]) -> list[int]:
    """In a child: an errno for each, 0 for those that are off or covered."""
    forked_child.leave_job_cgroups()
    numbers = []
    # By descriptor, as all paths of that namespace are its user's.
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    sources = [_clone_hidden_source(one) for one in ones]
    try:
        namespace = os.open(f"/proc/{ones[0].pid}/ns/mnt", os.O_RDONLY)
        root = os.open(f"/proc/{ones[0].pid}/root", os.O_PATH | os.O_DIRECTORY)
        if os.fstat(namespace).st_ino != ones[0].namespace:
            raise ProcessLookupError
    except (FileNotFoundError, ProcessLookupError):  # it has ended, and its namespace perhaps
        return [0] * len(ones)
    mounts.enter_namespace(namespace, root)
    os.fchdir(proc)
    for one, source in zip(ones, sources, strict=True):
        try:
            _unmount_or_cover(one.bind.mount, source)
            numbers.append(0)
        except OSError as error:
            numbers.append(error.errno or errno.EIO)
    return numbers


def _clone_hidden_source(one: ForeignBind) -> int | None:
    """A clone of the file that the bind hides, as the node has it now; None where it has none.

    Only of the file that was staged: its user may exchange folders on the way for another's.
    """
    entry = Cache(Path(one.bind.cache)).find_entry_by_key(one.bind.key) if one.bind.key else None
    if not one.source or entry is None:
        return None
    try:
        file = os.open(one.source, os.O_PATH | os.O_NOFOLLOW)
        # A link on the way could lead root where that user may not go; and another redirect may
        # lie there now.
        facts = os.fstat(file)
        same = (facts.st_ino, facts.st_uid) == (entry.identity.inode, entry.access.uid)
        if not same or os.readlink(f"/proc/self/fd/{file}") != one.source:
            return None
        under = mounts.find_mount_of_descriptor(file)
        if under is None or under.point == one.source:
            return None
        return mounts.clone_mount(f"/proc/self/fd/{file}")
    except OSError:
        return None


def _unmount_or_cover(bind: MountInfo, source: int | None) -> None:
    spot = os.open(bind.point, os.O_PATH | os.O_NOFOLLOW)
    try:
        if not mounts.unmount_if_same(bind, spot, "."):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    except OSError as error:
        if error.errno != errno.EINVAL or source is None:
            raise
        mounts.attach_mount(source, spot)
