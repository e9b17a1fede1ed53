"""What a directory holds, as its user sees it: the identity of a tree, and what is copied of it.

All file access is the user's: each thread has their ids for files (setfsuid(2)), while the process
stays root's. Nothing is followed out of the directory; a name may be any bytes.
"""

import ctypes
import errno
import hashlib
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from forestage.cache import image
from forestage.errors import Declined
from forestage.system.as_user import User

THREADS = 16  # a look at a file costs a network file system a round trip, and hardly any time here
AT_ONCE = 64  # files of one turn of a thread

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_FACCESSAT2, _AT_EACCESS, _R_OK, _X_OK = 439, 0x200, 4, 1  # the same on every architecture

T = TypeVar("T")
Item = TypeVar("Item")


class File(msgspec.Struct, frozen=True, array_like=True):
    """One name below the directory; `path` is relative, b"" the directory itself.

    `link` is where a symbolic link leads; times in ns.
    """

    path: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    link: bytes = b""

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Manifest(msgspec.Struct, frozen=True):
    """A directory at its resolved `path`, and all below it, sorted by path."""

    path: str
    files: tuple[File, ...]

    @property
    def digest(self) -> str:
        """64 hex digits: whoever sees the same, sees the same bytes with the same rights."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(one.size for one in self.files if one.is_file)

    @property
    def newest_ns(self) -> int:
        """When anything of it changed last."""
        return max(max(one.mtime_ns, one.ctime_ns) for one in self.files)


def act_as(user: User) -> None:
    """Has this thread use the user's ids for files, for good; the groups are the process' own."""
    # glibc changes all ids but these for each thread of a process.
    _libc.setfsgid(user.gid)
    _libc.setfsuid(user.uid)
    if _libc.setfsuid(-1) & 0xFFFFFFFF != user.uid or _libc.setfsgid(-1) & 0xFFFFFFFF != user.gid:
        raise PermissionError(errno.EPERM, "cannot take on the user's ids")


def open_root(path: str, user: User) -> tuple[int, str]:
    """The directory, opened as the user, and its resolved path. Raises Declined."""
    (found,) = each_as(user, [path], _open_root)
    return found


def _open_root(path: str) -> tuple[int, str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError:
        raise Declined(
            "not-a-directory", f"{path} is no directory", "name a file without the slash"
        ) from None
    except OSError as error:
        raise image.declined_by(error, path) from None
    resolved = os.readlink(f"/proc/self/fd/{fd}")
    try:
        resolved.encode()
    except UnicodeEncodeError:
        raise Declined("bad-path", "the path resolves to a name that is not UTF-8") from None
    return fd, resolved


def take(root: int, path: str, user: User, max_files: int) -> Manifest:
    """Looks at all below the open directory. Raises Declined.

    The caller's process has the user's groups.
    """
    disk = os.fstat(root).st_dev
    found = [_file(b"", os.fstat(root))]
    lock = threading.Lock()

    def look(directory: bytes) -> list[bytes]:
        try:
            files = _list(root, directory, disk, user)
        except OSError as error:
            name = os.fsdecode(os.path.join(os.fsencode(path), directory))
            raise image.declined_by(error, name) from None
        with lock:
            found.extend(files)
            if len(found) > max_files:
                raise Declined(
                    "too-many-files",
                    f"{path} has more than {max_files} files",
                    "make one of it: `forestage pack`, or the admin raises `data: max_files:`",
                )
        return [one.path for one in files if one.is_dir]

    _spread([b""], user, look)
    return Manifest(path, tuple(sorted(found, key=lambda one: one.path)))


def acls(root: int, manifest: Manifest, user: User) -> dict[bytes, bytes]:
    """The raw access ACLs of the files that have one, by path. Raises Declined.

    They are no part of the manifest, as a look at a file does not show them: who changes an ACL
    changes ctime.
    """

    def of(some: Sequence[File]) -> list[tuple[bytes, bytes]]:
        found = []
        for one in some:
            name = f"/proc/self/fd/{root}/{os.fsdecode(one.path)}"
            try:
                acl = os.getxattr(name, image.ACL, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                    raise image.declined_by(error, manifest.path) from None
            else:
                found.append((one.path, acl))
        return found

    files = [one for one in manifest.files if not stat.S_ISLNK(one.mode)]
    some = [files[at : at + AT_ONCE] for at in range(0, len(files), AT_ONCE)]
    return dict(one for found in each_as(user, some, of) for one in found)


def _list(root: int, directory: bytes, disk: int, user: User) -> list[File]:
    """What is in one directory. Raises OSError, Declined."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory or b".", flags, dir_fd=root)
    try:
        names = [os.fsencode(name) for name in os.listdir(fd)]  # noqa: PTH208 - of a descriptor
        return [_look(fd, os.path.join(directory, name), name, disk, user) for name in names]
    finally:
        os.close(fd)


def _look(fd: int, path: bytes, name: bytes, disk: int, user: User) -> File:
    facts = os.stat(name, dir_fd=fd, follow_symlinks=False)
    kind = stat.S_IFMT(facts.st_mode)
    shown = os.fsdecode(path)
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise Declined("odd-file", f"{shown} is neither a file, a directory nor a link")
    if facts.st_dev != disk:
        raise Declined("odd-file", f"{shown} is another file system")
    if kind == stat.S_IFLNK:
        return _file(path, facts, os.readlink(name, dir_fd=fd))
    wanted = _R_OK if kind == stat.S_IFREG else _R_OK | _X_OK
    if not _grants(facts, wanted, user) and not _may(fd, name, wanted):
        raise Declined("no-permission", f"{shown} is not readable by this user")
    return _file(path, facts)


def _grants(facts: os.stat_result, wanted: int, user: User) -> bool:
    """Whether the owner's own bits say yes: no ACL takes that away."""
    return facts.st_uid == user.uid and (facts.st_mode >> 6) & wanted == wanted


def _may(fd: int, name: bytes, wanted: int) -> bool:
    """Asks the kernel, for this thread's ids. glibc's own would look at mode bits on EL 8."""
    done = _libc.syscall(_SYS_FACCESSAT2, fd, name, wanted, _AT_EACCESS)
    if done == 0 or ctypes.get_errno() != errno.ENOSYS:
        return bool(done == 0)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        os.close(os.open(name, flags, dir_fd=fd))
    except OSError:
        return False
    return True


def _file(path: bytes, facts: os.stat_result, link: bytes = b"") -> File:
    return File(
        path,
        facts.st_mode,
        facts.st_uid,
        facts.st_gid,
        facts.st_size if stat.S_ISREG(facts.st_mode) else 0,
        facts.st_mtime_ns,
        facts.st_ctime_ns,
        facts.st_ino,
        link,
    )


def each_as(user: User, items: Iterable[Item], work: Callable[[Item], T]) -> list[T]:
    """Does `work` on each of the items, in threads that have the user's ids; in their order."""
    results: dict[int, T] = {}

    def do(numbered: tuple[int, Item]) -> list[tuple[int, Item]]:
        results[numbered[0]] = work(numbered[1])
        return []

    _spread(list(enumerate(items)), user, do)
    return [results[number] for number in sorted(results)]


def _spread(first: list[T], user: User, work: Callable[[T], list[T]]) -> None:
    """Does `work` on items, and on those that it returns, in threads. Raises their first error."""
    todo = deque(first)
    turn = threading.Condition()
    busy = 0
    errors: list[Exception] = []

    def go() -> None:
        nonlocal busy
        try:
            act_as(user)
            while True:
                with turn:
                    while not todo and busy and not errors:
                        turn.wait()
                    if errors or not todo:
                        return
                    item = todo.popleft()
                    busy += 1
                more = work(item)
                with turn:
                    busy -= 1
                    todo.extend(more)
                    turn.notify_all()
        except (OSError, Declined) as error:
            with turn:
                errors.append(error)
                turn.notify_all()

    threads = [threading.Thread(target=go, name=f"walk-{n}") for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
