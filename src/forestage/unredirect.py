"""Take every redirect off this node, now: before the package goes, or when bytes are in doubt.

Jobs that have the local copy open keep it; whatever is opened next is the shared file system's own.
Leases stay, so that nothing a job holds is evicted.
"""

import contextlib
from pathlib import Path

import msgspec

from forestage.cache import redirect
from forestage.cache.layout import Cache
from forestage.cache.lease import Leases
from forestage.cache.redirect import Bind
from forestage.cli.world import World
from forestage.errors import ConfigError, Failed
from forestage.stage import source
from forestage.system import lock
from forestage.system.as_user import User

ROOT = User("root", 0, 0)


class Undone(msgspec.Struct, frozen=True):
    """The paths that show the shared file system again, and those that do not."""

    paths: tuple[str, ...]
    problems: tuple[str, ...] = ()


def unredirect(world: World) -> Undone:
    """As root. Works with a broken configuration, by what the leases say. Raises PermissionError.

    What a hook lays later stays laid, so switch staging off first (config.switch): a hook that has
    the space lock after us sees that.
    """
    undone: list[str] = []
    problems: list[str] = []
    for cache in _caches(world):
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock.held_if_writable(cache.space_lock, lock.SPACE_TIMEOUT))
            except lock.Busy as busy:  # taking a redirect off is right without it as well
                problems.append(str(busy))
            for bind in reversed(redirect.binds(cache)):
                try:
                    _take_off(cache, bind)
                except (OSError, Failed) as error:
                    problems.append(f"{bind.path}: {error}")
                else:
                    undone.append(bind.path)
    return Undone(tuple(undone), tuple(problems))


def _caches(world: World) -> list[Cache]:
    """The configured one, and each that a lease names: the configuration may have changed since."""
    found: dict[str, Cache] = {}
    with contextlib.suppress(ConfigError):
        cache = world.node().cache
        found[cache.real] = cache
    for root in Leases(world.places.leases).caches():
        cache = Cache(Path(root))
        found.setdefault(cache.real, cache)
    return list(found.values())


def _take_off(cache: Cache, bind: Bind) -> None:
    entry = cache.read(bind.key) if bind.key else None
    redirect.unmount([bind], source.owner(entry.access) if entry else ROOT)
