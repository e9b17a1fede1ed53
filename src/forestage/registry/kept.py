"""What a node imports for itself where there is no store: the file becomes an entry of the cache.

    CACHE.imports/UID/NAME.sqsh       where the user's worker imports to; the directory is theirs
    CACHE/imported/UID-NAME.json      which entry came of it; root's

The file is staged as any other, and read through meanwhile. Once its entry is there, the file goes:
the record says which entry stands for the name, for this user alone.

The user may put anything else there. The sweep bounds it (`bound`): nothing stays for more than a
day, all of it together takes no more than one user's share of the cache, but for one import that
goes on, and directories that no worker makes go at once. It acts as the user, so that it deletes
nothing which they could not.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from forestage.cache.image import Image
from forestage.cache.layout import Cache
from forestage.errors import Failed
from forestage.system import as_user, files, mounts, records
from forestage.system.as_user import User
from forestage.system.files import opened

MOST = 1000  # names looked at in one directory
LOOKED = 200_000  # … as its user, once in ten minutes
UNUSED = 86400.0  # seconds after which a file that became no entry goes
RECENT = 3600.0  # seconds since its last change in which an import stays, however large it is
RECORDS = 30 * 86400.0  # seconds for what tags meant, and for the digests of jobs
OURS = ("jobs", "tags")  # the directories that a worker makes (registry/store.py)
IMPORTS = (".sqsh", ".part")
SMALL = 64 * 1024  # bytes of what is noted of an import
NOBODY = 65534
NAME_BYTES = 4096  # bytes that a name counts at least: an inode is room as well
LOOK, ALL, AT_ONCE = 60.0, 300.0, 4  # seconds for one user's directory, for all of them
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Found(msgspec.Struct, frozen=True):
    """A name in a user's directory, or in one of OURS below it.

    `changed` is its ctime, which no user can set.
    """

    path: str
    size: int
    changed: float
    is_folder: bool


def directory(cache: Cache) -> Path:
    """Where users import to: beside the cache, on its disk, since nobody gets into the cache."""
    return cache.root.with_name(f"{cache.root.name}.imports")


def prepare(cache: Cache, user: User) -> Path:
    """Returns that directory, with one of the user's own in it. Raises Failed, OSError."""
    above = directory(cache)
    with contextlib.suppress(FileExistsError):
        above.mkdir(mode=0o711)
    facts = os.lstat(above)
    # The disk may be a scratch disk, on which users can make a directory by this name.
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise Failed("cache-not-ours", f"{above} is not a directory of root's", "remove it")
    own = above / str(user.uid)
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    # Also of a process that was killed here. Nobody else can make or replace it.
    os.chown(own, user.uid, user.gid, follow_symlinks=False)
    return above


def note(cache: Cache, user: User, name: str, image: Image) -> None:
    """Notes what a name stands for, if that is the file which its worker made. Raises OSError.

    A worker may name any file that its user can read; and what lies at the name may lead elsewhere.
    """
    imported = directory(cache) / str(user.uid) / f"{name}.sqsh"
    if image.path == os.fspath(imported) and image.access.uid == user.uid:
        record = _record(cache, user.uid, name)
        record.parent.mkdir(mode=0o700, exist_ok=True)
        records.write(record, msgspec.json.encode(image))


def find(cache: Cache, user: User, name: str) -> Image | None:
    """The image that this name of the user's stands for, if its entry is here and proven."""
    try:
        image = records.load(_record(cache, user.uid, name), Image)
    except (OSError, records.Damaged):
        return None
    return image if cache.find(image) else None


def tidy(cache: Cache) -> None:
    """Deletes files that became entries, and records of entries that went. Raises OSError."""
    for record in _some(cache.root / "imported"):
        uid, _, name = record.name.removesuffix(".json").partition("-")
        with contextlib.suppress(records.Damaged, FileNotFoundError):
            entry = cache.read(records.load(record, Image).key)
            if entry is not None:
                _delete(cache, uid, f"{name}.sqsh")
            elif not _is_there(cache, uid, f"{name}.sqsh"):
                record.unlink(missing_ok=True)


def bound(cache: Cache, most: int, now: float) -> list[str]:
    """Has each user's imports take `most` bytes at the most; for the sweep.

    Returns what stays that should not: their users cannot delete it either. Raises OSError.
    """
    owners = [user for user in map(_owner, _some(directory(cache))) if user is not None]
    works = [partial(_bounded, directory(cache) / str(one.uid), one, most, now) for one in owners]
    found = as_user.each(works, str, LOOK, ALL, AT_ONCE)
    problems = []
    for user, said in zip(owners, found, strict=True):
        own = directory(cache) / str(user.uid)
        if said or said is None:
            problems.append(f"{own}: {said or 'it could not be bounded in time'}")
        with contextlib.suppress(OSError), _uncovered(own) as handle:  # it is not empty, or gone
            if now - os.fstat(handle).st_ctime > UNUSED:
                own.rmdir()
    return problems


def _owner(own: Path) -> User | None:
    """Pure: whose directory that is, by the name that root gave it; None where it is nobody's."""
    if not (own.name.isascii() and own.name.isdigit()):
        return None
    return User("", int(own.name), NOBODY)


@contextlib.contextmanager
def _uncovered(own: Path) -> Iterator[int]:
    """A user's directory, O_PATH: what is in it is reached past what the user mounts over it.

    Raises OSError, EBUSY where something lies over it: of a FUSE of theirs root may ask nothing, as
    it would wait for the answer.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
    with opened(own.parent, flags) as above, opened(own.name, flags, dir_fd=above) as handle:
        if mounts.mount_id(handle) != mounts.mount_id(above):
            raise OSError(errno.EBUSY, "its user has mounted something over it", os.fspath(own))
        yield handle


def going(found: Sequence[Found], most: int, now: float) -> list[Found]:
    """Pure: what goes, whoever made it: folders, what is old, and of too much what changed first.

    The import that changed last stays for RECENT: it is being written, or a step starts from it.
    Of names that were not all looked at nobody knows the size: that is too much.
    """
    gone, taken = [], sum(one.size for one in found)
    imports = [one for one in found if not one.is_folder and one.path.endswith(IMPORTS)]
    last = max(imports, key=lambda one: one.changed, default=None)
    for one in sorted(found, key=lambda one: one.changed):
        limit = RECORDS if one.path.partition("/")[0] in OURS else UNUSED
        above = taken > most or len(found) >= LOOKED
        # With it what is noted of it: without its lease it would begin anew.
        noted = last and one.size <= SMALL and _name(one) == _name(last)
        stays = (one is last or noted) and now - one.changed < RECENT
        if one.is_folder or (above and not stays) or now - one.changed > limit:
            gone.append(one)
            taken -= one.size
    return gone


def _name(one: Found) -> str:
    return one.path.partition(".")[0]


def _bounded(own: Path, user: User, most: int, now: float) -> str:
    """Why not all that had to go went; "" where it did. In a child, as the user. Raises OSError."""
    _uncover(own)
    handle = os.open(own, _FOLDER)
    # They may have given it to an id of their own user namespaces (subuid(5)): it is theirs anew.
    if os.fstat(handle).st_uid != user.uid:
        os.fchown(handle, user.uid, user.gid)
    as_user.become(user)
    # They may have closed it even to themselves. Else its ctime stays: see `bound`.
    if stat.S_IMODE(os.fstat(handle).st_mode) != 0o700:
        os.fchmod(handle, 0o700)
    why = ""
    for one in going(_look(handle), most, now):
        try:
            _remove(handle, one)
        except FileNotFoundError:
            continue
        except OSError as error:
            # No name of the user's: nobody else reads those.
            why = f"its user can delete not all of it: {error.strerror}"
    for name in OURS:
        with contextlib.suppress(OSError):  # most are not empty
            os.rmdir(name, dir_fd=handle)
    return why


def _uncover(own: Path) -> None:
    """Takes off what its user has mounted over it and in it, for this process alone."""
    real, is_private = os.path.realpath(own.parent) + "/" + own.name, False
    while points := [one.point for one in mounts.current() if mounts.is_below(one.point, real)]:
        if not is_private:
            mounts.private_namespace()
            is_private = True
        # The uppermost: on the way to what lies in a FUSE that would be asked. It goes with this.
        mounts.umount(min(points, key=len))


def _look(own: int) -> list[Found]:
    """All that lies there, but for what lies in folders that no worker makes. Raises OSError.

    One of OURS that is another user's (an id of the user's own, see `_owner`) is such a folder.
    """
    found = _looked(own, "")
    for one in [one for one in found if one.is_folder and one.path in OURS]:
        # It may become a link, or another user's, at any time: no reason to look at nothing.
        with contextlib.suppress(OSError):
            os.chmod(one.path, 0o700, dir_fd=own)
            with opened(one.path, _FOLDER, dir_fd=own) as handle:
                found += _looked(handle, one.path)
            found.remove(one)
    return found


def _looked(handle: int, folder: str) -> list[Found]:
    found = []
    with os.scandir(handle) as entries:
        listed = list(islice(entries, LOOKED))
    for entry in listed:
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            facts = entry.stat(follow_symlinks=False)
            path, size = os.path.join(folder, entry.name), facts.st_blocks * 512
            is_folder = stat.S_ISDIR(facts.st_mode)
            found.append(Found(path, max(NAME_BYTES, size), facts.st_ctime, is_folder))
    return found


def _remove(own: int, one: Found) -> None:
    """Deletes a name; of a folder all that is in it, which is entered from above only."""
    files.remove(own, one.path, ".")


def _record(cache: Cache, uid: int, name: str) -> Path:
    return cache.root / "imported" / f"{uid}-{name}.json"


def _delete(cache: Cache, uid: str, name: str) -> None:
    """Deletes a name in a user's directory of imports, whatever the user has made of it by now.

    By descriptors from a directory of root's on: the user's own cannot be another, and no link is
    followed. What is no file is left to a person.
    """
    with contextlib.suppress(OSError), _uncovered(directory(cache) / uid) as own:
        os.unlink(name, dir_fd=own)


def _is_there(cache: Cache, uid: str, name: str) -> bool:
    """Whether a user's directory has this name, or nobody can say."""
    try:
        with _uncovered(directory(cache) / uid) as own:
            os.close(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=own))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    return True


def _some(folder: Path) -> list[Path]:
    """What lies in a directory: of one that a user has filled, so much that it holds nobody up."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        return [Path(one.path) for one in islice(found, MOST)]
    return []
