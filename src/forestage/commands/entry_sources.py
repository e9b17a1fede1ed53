"""The source of an entry, as a command sees it: whether it is still what was copied.

It is opened as the user who asks, or as the file's owner, beneath our own binds; see
sources/opening.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

from forestage.bind import origins
from forestage.cache import source_image
from forestage.cache.layout import Cache, Entry
from forestage.cache.source_image import AccessRights, SourceImage
from forestage.config import ANYWHERE
from forestage.errors import Declined
from forestage.slurm.hints import Request
from forestage.sources import opening
from forestage.sources.source import OpenImage
from forestage.system import as_user
from forestage.system.as_user import User
from forestage.units import format_size

SOURCE_TIMEOUT = 5.0  # seconds; a person waits, and a dead file system would never answer

SourceCondition = Literal["unchanged", "changed", "gone", "not-checked"]


class SourceState(msgspec.Struct, frozen=True):
    """Whether the source is what was copied; `detail` is what differs, or why there was no look."""

    state: SourceCondition
    detail: str = ""


def invoking_user() -> User:
    """Who runs this program."""
    uid = os.getuid()
    return User(as_user.find_user_name(uid), uid, os.getgid())


def read_owner_account(access: AccessRights) -> User:
    """Whom the file belongs to, with that user's own groups where the node knows them."""
    return as_user.user_from_uid(access.uid, access.gid)


def absolute_path(path: str) -> str:
    """The absolute path of what a user calls an image. Raises Declined for what is no path."""
    return source_image.resolve_requested_path(Request(path, "option"), str(Path.cwd()))


def resolve_path(path: str) -> str:
    """The path without symbolic links. Raises as_user.ChildTimeout."""
    found, _ = as_user.run_in_child(lambda: (os.path.realpath(path), []), str, SOURCE_TIMEOUT)
    return found


def read_source_image(cache: Cache, path: str, user: User) -> SourceImage:
    """The image that `path` leads to now. Raises Declined, as_user.ChildTimeout."""
    opened = open_image(cache, path, user)
    opened.close()
    return opened.image


def open_image(cache: Cache, path: str, user: User) -> OpenImage:
    """Opens the image at `path` for reading as this user, for a command; the caller closes it."""
    try:
        # What is in the cache may come from sources that are configured no more.
        known = origins.read_known_caches(cache)
        facts, fd = opening.open_descriptor_as_user(path, user, ANYWHERE, known, SOURCE_TIMEOUT)
    except OSError as error:
        raise source_image.declined_by_open_error(error, path, user) from None
    try:
        found = source_image.check_image(facts, None)
    except Declined:
        if fd is not None:
            os.close(fd)
        raise
    if fd is None:
        raise Declined("missing", f"{path} could not be opened")
    return OpenImage(found, user, fd)


def read_source_state(cache: Cache, entry: Entry, user: User) -> SourceState:
    """Whether the entry's source has these bytes and access rights still."""
    opened = open_if_unchanged(cache, entry, user)
    if isinstance(opened, SourceState):
        return opened
    opened.close()
    return SourceState("unchanged")


def open_if_unchanged(cache: Cache, entry: Entry, user: User) -> OpenImage | SourceState:
    """The entry's source, open, if it is still what was copied; else what became of it."""
    if entry.identity.tree:
        return SourceState("not-checked", "each step that is shown a directory looks at all of it")
    try:
        opened = open_image(cache, entry.identity.path, user)
    except as_user.ChildTimeout:
        return SourceState("not-checked", f"no answer within {SOURCE_TIMEOUT:.0f} s")
    except Declined as declined:
        states: dict[str, SourceCondition] = {
            "missing": "gone",
            "not-a-file": "changed",
            "empty": "changed",
        }
        return SourceState(states.get(declined.reason, "not-checked"), str(declined))
    found = compare_with_source(entry, opened.image)
    if found.state == "unchanged":
        return opened
    opened.close()
    return found


def compare_with_source(entry: Entry, now: SourceImage) -> SourceState:
    """Pure: the entry against the image that lies at its path now."""
    if now.identity == entry.identity and now.access == entry.access:
        return SourceState("unchanged")
    was = entry.identity
    differences = [
        (now.path != was.path, f"the path leads to {now.path}"),
        (now.identity.inode != was.inode, "it is another file"),
        (now.size != was.size, f"its size is {format_size(now.size)}"),
        (now.identity.mtime_ns != was.mtime_ns, "it was written to"),
        (now.access != entry.access, "its owner, mode or ACL is another"),
    ]
    # A new ctime alone: renamed, linked, or its rights changed and changed back.
    found = [text for differs, text in differences if differs] or ["its change time is another"]
    return SourceState("changed", ", ".join(found))
