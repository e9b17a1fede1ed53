"""What users have of imports from when a node without a store imported for itself; for the sweep.

    CACHE.imports/UID/    the user's own directory, to which their steps imported
    CACHE/imported/       root's records of which entry came of it

No step makes them any more. A step of that release may be at work, or read what lies there: so a
user's stays while they have a lease here, a step of theirs imports, or something in it is open.
It goes as the user, so that nothing is deleted which they could not delete. The entries that came
of it are evicted as any others.
"""

import contextlib
import os
import pwd
import shutil
import stat
from functools import partial
from itertools import islice
from pathlib import Path

from forestage.cache.node import Node
from forestage.registry import imports_now
from forestage.system import as_user, files, mounts, writers
from forestage.system.as_user import User
from forestage.units import is_number

MOST = 1000  # users' directories looked at by one sweep
LOOK, ALL, AT_ONCE = 60.0, 300.0, 4  # seconds for one user's directory, for all of them
NOBODY = 65534
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(node: Node) -> list[str]:
    """Removes what nobody uses. Returns what stays that should not. Raises Failed, OSError."""
    cache = node.cache
    shutil.rmtree(cache.root / "imported", ignore_errors=True)
    above = Path(f"{cache.real}.imports")
    facts = files.facts(above)
    # The disk may be a scratch disk, on which users can make a directory by this name.
    if facts is None or not stat.S_ISDIR(facts.st_mode):
        return []
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        return []
    with os.scandir(above) as found:
        names = [one.name for one in islice(found, MOST)]
    busy = _busy(node, above)
    gone = [name for name in names if is_number(name) and int(name) not in busy]
    works = [partial(_emptied, above / name, User("", int(name), NOBODY)) for name in gone]
    problems = []
    for name, said in zip(gone, as_user.each(works, str, LOOK, ALL, AT_ONCE), strict=True):
        if said or said is None:
            problems.append(f"{above / name}: {said or 'it was not emptied in time'}")
        with contextlib.suppress(OSError):  # it is not empty, or its user mounted something over it
            (above / name).rmdir()
    with contextlib.suppress(OSError):
        above.rmdir()
    return problems


def _busy(node: Node, above: Path) -> set[int]:
    """The uids of users whose directory a step may use. Raises Failed, OSError."""
    busy = {lease.user.uid for lease in node.leases.all()}
    for one in imports_now.gather(node.places):
        with contextlib.suppress(KeyError):  # the account went meanwhile
            busy.add(pwd.getpwnam(one.user).pw_uid)
    inside = (path[len(f"{above}/") :] for path in writers.open_below(str(above)))
    names = {path.partition("/")[0].removesuffix(" (deleted)") for path in inside}
    return busy | {int(name) for name in names if is_number(name)}


def _emptied(own: Path, user: User) -> str:
    """Why not all of it went; "" where it did. In a child, as the user. Raises OSError."""
    _uncover(own)
    handle = os.open(own, _FOLDER)
    # They may have given it to an id of their own user namespaces (subuid(5)): it is theirs anew.
    if os.fstat(handle).st_uid != user.uid:
        os.fchown(handle, user.uid, user.gid)
    as_user.become(user)
    os.fchmod(handle, 0o700)  # they may have closed it even to themselves
    why = ""
    for name in os.listdir(handle):  # noqa: PTH208 - of a descriptor
        try:
            files.remove(handle, name, ".")
        except FileNotFoundError:
            continue
        except OSError as error:
            # No name of the user's: nobody else reads those.
            why = f"its user can delete not all of it: {error.strerror}"
    return why


def _uncover(own: Path) -> None:
    """Takes off what its user has mounted over it and in it, for this process alone."""
    is_private = False
    while points := [one.point for one in mounts.current() if mounts.is_below(one.point, str(own))]:
        if not is_private:
            mounts.private_namespace()
            is_private = True
        # The uppermost: on the way to what lies in a FUSE that would be asked. It goes with this.
        mounts.umount(min(points, key=len))
