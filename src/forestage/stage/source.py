"""Is the source still what was copied? Looked at as the user who asks, under our own binds."""

import os
import pwd
from pathlib import Path
from typing import Literal

import msgspec

from forestage.cache import image
from forestage.cache.image import Access, Image, Look
from forestage.cache.layout import Cache, Entry
from forestage.errors import Declined
from forestage.slurm.job import Asked
from forestage.system import as_user
from forestage.system.as_user import User
from forestage.units import format_size

TIMEOUT = 5.0  # seconds; a person waits, and a dead file system would never answer

State = Literal["unchanged", "changed", "gone", "not-checked"]


class Source(msgspec.Struct, frozen=True):
    """What the look found; `detail` is what differs, or why there was no look."""

    state: State
    detail: str = ""


def invoking_user() -> User:
    """Who runs this program."""
    uid = os.getuid()
    try:
        return User(pwd.getpwuid(uid).pw_name, uid, os.getgid())
    except KeyError:
        return User("", uid, os.getgid())


def owner(access: Access) -> User:
    """Whom the file belongs to, with that user's own groups where the node knows them."""
    try:
        known = pwd.getpwuid(access.uid)
    except KeyError:
        return User("", access.uid, access.gid)
    return User(known.pw_name, access.uid, known.pw_gid)


def wanted(path: str) -> str:
    """The absolute path of what a user calls an image. Raises Declined for what is no path."""
    return image.wanted_path(Asked(path, "option"), str(Path.cwd()))


def resolved(path: str) -> str:
    """The path without symbolic links. Raises as_user.TooSlow."""
    found, _ = as_user.call(lambda: (os.path.realpath(path), []), str, TIMEOUT)
    return found


def look(cache: Cache, path: str, user: User) -> Image:
    """The image that `path` leads to now. Raises Declined, as_user.TooSlow."""
    looked = opened(cache, path, user)
    looked.close()
    return looked.image


def opened(cache: Cache, path: str, user: User) -> Look:
    """The same, and the source open for reading as this user; the caller closes it."""
    try:
        # Below `/`: what is in the cache may come from sources that are configured no more.
        seen, fd = image.look(path, user, ("/",), [cache.real], TIMEOUT)
    except OSError as error:
        raise image.declined_by(error, path) from None
    try:
        found = image.judge(seen, None)
    except Declined:
        if fd is not None:
            os.close(fd)
        raise
    if fd is None:
        raise Declined("missing", f"{path} could not be opened")
    return Look(found, user, fd)


def of(cache: Cache, entry: Entry, user: User) -> Source:
    """Whether the entry's source has these bytes and access rights still."""
    looked = unchanged(cache, entry, user)
    if isinstance(looked, Source):
        return looked
    looked.close()
    return Source("unchanged")


def unchanged(cache: Cache, entry: Entry, user: User) -> Look | Source:
    """The entry's source, open, if it is still what was copied; else what became of it."""
    try:
        looked = opened(cache, entry.identity.path, user)
    except as_user.TooSlow:
        return Source("not-checked", f"no answer within {TIMEOUT:.0f} s")
    except Declined as declined:
        return without_look(declined)
    found = compared(entry, looked.image)
    if found.state == "unchanged":
        return looked
    looked.close()
    return found


def without_look(declined: Declined) -> Source:
    """Pure: what is known where the look did not find an image."""
    states: dict[str, State] = {"missing": "gone", "not-a-file": "changed", "empty": "changed"}
    return Source(states.get(declined.reason, "not-checked"), str(declined))


def compared(entry: Entry, now: Image) -> Source:
    """Pure: the entry against the image that lies at its path now."""
    if now.identity == entry.identity and now.access == entry.access:
        return Source("unchanged")
    was = entry.identity
    differences = [
        (now.path != was.path, f"the path leads to {now.path}"),
        (now.identity.inode != was.inode, "it is another file"),
        (now.size != was.size, f"its size is {format_size(now.size)}"),
        (now.identity.mtime_ns != was.mtime_ns, "it was written to"),
        (now.access != entry.access, "its owner, mode or ACL is another"),
    ]
    # A new ctime alone: renamed, linked, or its rights changed and changed back.
    told = [text for differs, text in differences if differs] or ["its change time is another"]
    return Source("changed", ", ".join(told))
