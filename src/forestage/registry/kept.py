"""What a node imports for itself where there is no store: the file becomes an entry of the cache.

    CACHE.imports/UID/NAME.sqsh       where the user's worker imports to; the directory is theirs
    CACHE/imported/UID-NAME.json      which entry came of it; root's

The file is staged as any other, and read through meanwhile. Once its entry is there, the file goes:
the record says which entry stands for the name, for this user alone.
"""

import contextlib
import os
import stat
from itertools import islice
from pathlib import Path

import msgspec

from forestage.cache.image import Image
from forestage.cache.layout import Cache
from forestage.errors import Failed
from forestage.system import records
from forestage.system.as_user import User

MOST = 1000  # names looked at in one directory
UNUSED = 86400.0  # seconds after which a file that became no entry goes


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


def tidy(cache: Cache, now: float) -> None:
    """Deletes files that became entries or that nobody wanted, and records of entries that went.

    Raises OSError.
    """
    for record in _some(cache.root / "imported"):
        uid, _, name = record.name.removesuffix(".json").partition("-")
        with contextlib.suppress(records.Damaged, FileNotFoundError):
            entry = cache.read(records.load(record, Image).key)
            if entry is not None:
                _delete(cache, uid, f"{name}.sqsh")
            elif not os.path.lexists(directory(cache) / uid / f"{name}.sqsh"):
                record.unlink(missing_ok=True)
    for own in _some(directory(cache)):
        for file in _some(own):
            with contextlib.suppress(FileNotFoundError):
                if now - os.lstat(file).st_mtime > UNUSED:
                    _delete(cache, own.name, file.name)


def _record(cache: Cache, uid: int, name: str) -> Path:
    return cache.root / "imported" / f"{uid}-{name}.json"


def _delete(cache: Cache, uid: str, name: str) -> None:
    """Deletes a name in a user's directory of imports, whatever the user has made of it by now.

    By descriptors from a directory of root's on: the user's own cannot be another, and no link is
    followed. What is no file is left to a person.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        above = os.open(directory(cache), flags)
        opened.callback(os.close, above)
        own = os.open(uid, flags, dir_fd=above)
        opened.callback(os.close, own)
        os.unlink(name, dir_fd=own)


def _some(folder: Path) -> list[Path]:
    """What lies in a directory: of one that a user has filled, so much that it holds nobody up."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        return [Path(one.path) for one in islice(found, MOST)]
    return []
