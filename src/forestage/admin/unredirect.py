"""Unmounts every redirect of this node: before the package goes, or when bytes are in doubt.

Processes that have the local copy open keep it; what is opened next is the shared file system's
own file. Leases stay, so that nothing a job holds is evicted.
"""

import contextlib
import functools
from pathlib import Path

import msgspec

from forestage.admin import sources
from forestage.bind import unmount
from forestage.bind.unmount import Bind
from forestage.cache.layout import Cache
from forestage.cache.node import Node
from forestage.errors import ForestageError
from forestage.system import lock
from forestage.system.as_user import User
from forestage.system.terminal import Line, Piece, count

ROOT = User("root", 0, 0)


class Unredirected(msgspec.Struct, frozen=True):
    """The paths that show the shared file system again, and those that do not."""

    paths: tuple[str, ...]
    problems: tuple[str, ...] = ()


def unredirect(node: Node) -> Unredirected:
    """Unmounts them all; as root. Raises PermissionError for other users.

    Redirects that a hook mounts later stay, so switch staging off first (switch.py): a hook that
    gets the space lock after us sees that. Where the configuration is broken, `node` may have the
    default one: the leases name the caches.
    """
    undone: list[str] = []
    problems: list[str] = []
    for cache in _caches(node):
        with contextlib.ExitStack() as claims:
            try:
                with lock.held_if_writable(cache.space_lock, lock.SPACE_TIMEOUT):
                    going = unmount.claim(cache, unmount.binds(cache), claims)
            except lock.Busy as busy:  # unmounting is right without it as well
                problems.append(str(busy))
                going = unmount.claim(cache, unmount.binds(cache), claims)
            try:
                unmount.unmount(going, functools.partial(owner_of, cache), unmount.SWEEP_TOTAL)
            except (ForestageError, OSError) as error:
                problems.append(str(error))
        left = {bind.mount.id: bind.path for bind in unmount.binds(cache)}
        undone += [one.bind.path for one in going if one.bind.mount.id not in left]
        elsewhere = left.keys() - {one.bind.mount.id for one in going}
        problems += [f"{left[one]}: another process unmounts it" for one in elsewhere]
    return Unredirected(tuple(undone), tuple(problems))


def _caches(node: Node) -> list[Cache]:
    """The configured one, and each that a lease names: the configuration may have changed since."""
    found = {node.cache.real: node.cache}
    for root in node.leases.caches():
        cache = Cache(Path(root), node.places.claims)
        found.setdefault(cache.real, cache)
    return list(found.values())


def owner_of(cache: Cache, bind: Bind) -> User:
    """The user who can reach a redirect's path where root is squashed: its entry's owner."""
    entry = cache.read(bind.key) if bind.key else None
    return sources.owner(entry.access) if entry else ROOT


def pieces(done: Unredirected) -> list[Piece]:
    """Pure: what `unredirect` prints."""
    lines = [f"{path}: redirect unmounted" for path in done.paths]
    lines += [f"Problem: {problem}" for problem in done.problems]
    lines.append(f"{count(len(done.paths), 'redirect')} unmounted.")
    return [Line(text) for text in lines]
