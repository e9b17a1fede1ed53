"""What a node imports for itself where there is no store: the file becomes an entry of the cache.

    CACHE.imports/UID/NAME.sqsh       where the user's worker imports to; the directory is theirs
    CACHE/imported/UID-NAME.json      which entry came of it; root's

The file is staged as any other, and read through meanwhile. Once its entry is there, the file goes:
the record says which entry stands for the name, for this user alone.
"""

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from forestage.cache.image import Image
from forestage.cache.layout import Cache
from forestage.errors import Failed
from forestage.system import records
from forestage.system.as_user import User

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
        os.chown(own, user.uid, user.gid)
    return above


def note(cache: Cache, user: User, name: str, image: Image) -> None:
    """Notes what a name stands for. Raises OSError."""
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
    for record in _files(cache.root / "imported"):
        with contextlib.suppress(records.Damaged):
            image = records.load(record, Image)
            if cache.read(image.key) is not None:
                _delete(Path(image.path))
            elif not os.path.lexists(image.path):
                record.unlink(missing_ok=True)
    for own in _files(directory(cache)):
        for file in _files(own):
            if now - os.lstat(file).st_mtime > UNUSED:
                _delete(file)


def _record(cache: Cache, uid: int, name: str) -> Path:
    return cache.root / "imported" / f"{uid}-{name}.json"


def _delete(file: Path) -> None:
    """Deletes a name in a user's own directory, whatever it is by now; no link is followed.

    The directory is not the user's to replace. What is no file is left to a person.
    """
    with contextlib.suppress(OSError):
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.unlink(file.name, dir_fd=folder)
        finally:
            os.close(folder)


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []
