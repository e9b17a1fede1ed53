"""What this node's event log says: images by how often they were asked for, users, hooks."""

import contextlib
import pwd
from collections.abc import Iterable

import msgspec

from forestage import events
from forestage.events import Event, Handled
from forestage.paths import Places
from forestage.system.as_user import User


class Used(msgspec.Struct, frozen=True):
    """An image: how often jobs asked for it, and its bytes."""

    path: str
    times: int
    size: int


class Uses(msgspec.Struct, frozen=True):
    """`images`, most used first; the last job's `user` and uid; when each hook ran last; the
    images that this user has asked for."""

    images: tuple[Used, ...] = ()
    user: tuple[str, int] | None = None
    hooks: dict[str, float] = {}
    users_own: tuple[str, ...] = ()


def gather(places: Places) -> Uses:
    """Reads the log; one that cannot be read counts as empty."""
    with contextlib.suppress(OSError):
        return tally(events.read(places.events))
    return Uses()


def tally(log: Iterable[Event]) -> Uses:
    """Pure: events in any order."""
    times: dict[str, int] = {}
    sizes: dict[str, int] = {}
    hooks: dict[str, float] = {}
    by_user: dict[int, dict[str, None]] = {}
    last: Event | None = None
    for event in log:
        hooks[event.hook] = max(event.time, hooks.get(event.hook, 0.0))
        outcome = event.outcome
        if not (isinstance(outcome, Handled) and outcome.image):
            continue
        image = outcome.image
        times[image] = times.get(image, 0) + 1
        sizes[image] = outcome.size or sizes.get(image, 0)
        by_user.setdefault(event.uid, {})[image] = None
        if event.uid > 0 and (last is None or event.time >= last.time):
            last = event
    images = [Used(path, number, sizes[path]) for path, number in times.items()]
    images.sort(key=lambda used: (-used.times, used.path))
    if last is None:
        return Uses(tuple(images), None, hooks)
    return Uses(tuple(images), (last.user, last.uid), hooks, tuple(by_user[last.uid]))


def somebody(uses: Uses) -> User:
    """A user for whom the shared file system must be readable: the last job's, else `nobody`."""
    name, uid = uses.user or ("nobody", 65534)
    try:
        return User(name, uid, pwd.getpwuid(uid).pw_gid)
    except KeyError:
        return User("", uid, uid)
