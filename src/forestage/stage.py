"""How did it get here? One copy for each key, whoever asks; others wait for it and join."""

import errno
import os
from typing import Literal

import msgspec

from forestage import copy, evict, image, lock, redirect, run
from forestage.cache import Cache, Entry
from forestage.clock import Deadline
from forestage.config import Config
from forestage.errors import Declined, Failed
from forestage.image import Image, Look
from forestage.job import User
from forestage.lease import Leases

Result = Literal["hit", "joined", "copied"]

# A file server's clock may tick in seconds: a change within the same tick leaves the identity as it
# is. So a copy starts only when the source's last change is a full tick old.
COARSE_TICK_NS = 2_000_000_000
FINE_TICK_NS = 20_000_000


class Changed(Exception):
    """The source is no longer the file that was asked for; its copy was thrown away."""


class Staged(msgspec.Struct, frozen=True):
    """An entry that is here, and how it came: bytes copied now by this hook."""

    entry: Entry
    result: Result
    bytes: int = 0


def stage(
    cache: Cache, leases: Leases, config: Config, looked: Look, user: User, deadline: Deadline
) -> Staged:
    """Finds the image in the cache, waits for a copy under way, or copies it.

    Raises Changed, Declined (no-room, deadline, busy), Failed, OSError of the cache's file system.
    """
    entry = cache.find(looked.image)
    if entry is not None:
        return Staged(entry, "hit")
    key = looked.image.key
    try:
        with lock.held(cache.key_lock(key), deadline.left()):
            entry = cache.find(looked.image)
            if entry is not None:
                return Staged(entry, "joined")
            entry = _bring(cache, leases, config, looked, user, deadline)
            return Staged(entry, "copied", looked.image.size)
    except lock.Busy:
        raise Declined(
            "deadline", f"another copy of {looked.image.path} did not end before the deadline"
        ) from None
    except run.TimedOut:
        raise Declined(
            "deadline", f"the copy of {looked.image.path} did not end before the deadline"
        ) from None


def _bring(
    cache: Cache, leases: Leases, config: Config, looked: Look, user: User, deadline: Deadline
) -> Entry:
    """Room, copy, check, publish. The caller holds the key's lock."""
    wanted = looked.image
    engine = copy.ENGINES[config.engine]
    deadline.clock.sleep(_settling(wanted, deadline.clock.wall()))
    try:
        _reserve(cache, leases, config, wanted)
        engine.copy(looked.source, cache.part(wanted.key), deadline.left())
        _check_unchanged(cache, config, looked, user, deadline)
        _mirror(cache, wanted)
        entry = Entry(
            key=wanted.key,
            identity=wanted.identity,
            access=wanted.access,
            created=deadline.clock.wall(),
            engine=engine.name,
        )
        cache.publish(entry)
        return entry
    finally:
        # After publish there is nothing left under this name.
        cache.drop_part(wanted.key)


def _settling(wanted: Image, now: float) -> float:
    """Seconds to wait until a further change of the source must show in its times. Pure."""
    times = (wanted.identity.mtime_ns, wanted.identity.ctime_ns)
    tick = FINE_TICK_NS if any(time % 1_000_000_000 for time in times) else COARSE_TICK_NS
    age = int(now * 1_000_000_000) - max(times)
    # A time in the future is another machine's clock; waiting for it could take for ever.
    return (tick - age) / 1_000_000_000 if 0 <= age < tick else 0.0


def _reserve(cache: Cache, leases: Leases, config: Config, wanted: Image) -> None:
    """Makes room and takes it at once, so that no copy fails half-way for want of space."""
    for attempt in (1, 2):
        evict.make_room(cache, leases, config, wanted.path, wanted.size)
        cache.drop_part(wanted.key)
        cache.part_dir(wanted.key).mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(cache.part(wanted.key), flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, wanted.size)
            return
        except OSError as error:
            # Another copy, or somebody else on this disk, was faster; look once more.
            if error.errno != errno.ENOSPC or attempt == 2:
                raise
        finally:
            os.close(fd)


def _check_unchanged(
    cache: Cache, config: Config, looked: Look, user: User, deadline: Deadline
) -> None:
    """Raises Changed unless both the open file and what the path now leads to are as before."""
    wanted = looked.image
    if image.identify(looked.source, wanted.path) != wanted.identity:
        raise Changed
    try:
        hidden = [bind.mount for bind in redirect.binds(cache)]
        seen, fd = image.look(wanted.path, user, config.sources, hidden, deadline.left())
    except OSError:
        raise Changed from None
    if fd is not None:
        os.close(fd)
    if seen.image != wanted:
        raise Changed


def _mirror(cache: Cache, wanted: Image) -> None:
    """Gives the copy the source's owner, group, mode, ACL and time: only who could read it may."""
    fd = os.open(cache.part(wanted.key), os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != wanted.size:
            raise Failed("copy", f"the copy of {wanted.path} has another size than its source")
        os.fchown(fd, wanted.access.uid, wanted.access.gid)
        if wanted.access.acl:
            try:
                os.setxattr(fd, image.ACL, wanted.access.acl)
            except OSError as error:
                # Without its ACL the mode's group bits would mean something else.
                raise Failed("acl", f"the cache's file system takes no ACL: {error}") from None
        # Last: chown clears set-id bits.
        os.fchmod(fd, wanted.access.mode)
        os.utime(fd, ns=(wanted.identity.mtime_ns, wanted.identity.mtime_ns))
    finally:
        os.close(fd)
