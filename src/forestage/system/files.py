"""Files as open(2) and lstat(2) have them: by descriptor, and without a surprise where none is.

No descriptor that Python opens is inherited by a program (PEP 446), so no call here says O_CLOEXEC.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from forestage.system import libc

_SYMLINK_NOFOLLOW, _EMPTY_PATH, _FORCE_SYNC = 0x100, 0x1000, 0x2000  # linux/fcntl.h, AT_…
_BASIC = 0x7FF  # linux/stat.h, STATX_BASIC_STATS
# Of these the type, mode, owner, group, times of writing and change, inode and size: what says
# which file it is, and whose. A file system may fill in what it does not know, but must not say
# that it knows it (statx(2), stx_mask).
_TELLING = 0x3DB
_LINKED = 0x4  # STATX_NLINK
# struct statx: mask, nlink, uid, gid, mode, inode, size, blocks, ctime, mtime, device.
_STATX = struct.Struct("=I12xIIIH2xQQQ40xqI4xqI4x8xII")
_STATX_BYTES = 256

ACL = "system.posix_acl_access"  # linux/posix_acl_xattr.h
MOST = 1000  # names of a directory that are held in memory at once
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def open_descriptor(
    path: Path | str | bytes, flags: int, mode: int = 0o777, dir_fd: int | None = None
) -> Iterator[int]:
    """A descriptor, as open(2) gives it, closed at the end. Raises OSError."""
    fd = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Give an OSError of a call by descriptor, such as write(2), the file's name: it has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_file(path: Path) -> bytes:
    """All bytes of a file of ours. No link is followed, no FIFO waited for. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with (
        add_path_to_errors(path),
        open_descriptor(path, flags) as fd,
        open(fd, "rb", closefd=False) as file,
    ):
        return file.read() or b""  # None: of a FIFO that somebody holds open for writing


def overwrite_file(path: Path, data: bytes) -> None:
    """Writes a file of ours in its place, for what half of it, or nothing, may be left of.

    No link is followed, no FIFO waited for. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    with (
        add_path_to_errors(path),
        open_descriptor(path, flags, 0o600) as fd,
        open(fd, "wb", closefd=False) as file,
    ):
        file.write(data)


def encode_acl(uid: int, owner: int, user: int) -> bytes:
    """Return an ACL with these bits for the owner and for one user, and none for others. Pure."""
    everybodys = 0xFFFFFFFF
    # Tags of linux/posix_acl.h: the owner, a user, the group, the mask of both, all others.
    entries = [(1, owner, everybodys), (2, user, uid), (4, 0, everybodys)]
    entries += [(16, user, everybodys), (32, 0, everybodys)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one) for one in entries)


def lstat_or_none(path: Path) -> os.stat_result | None:
    """What lstat(2) says; None where nothing is there. Raises OSError for any other reason."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


class Statx(NamedTuple):
    """What statx(2) says of a file, by the names that stat(2) has for it."""

    st_mode: int
    st_nlink: int
    st_uid: int
    st_gid: int
    st_ino: int
    st_size: int
    st_blocks: int
    st_ctime_ns: int
    st_mtime_ns: int
    st_dev: int


def statx_from_server(directory: int, name: bytes = b"") -> Statx:
    """What its file server says now of a name in an open directory; without one, of the open file.

    stat(2) says what this node knew of it up to a minute ago, or longer, as the mount allows. No
    link is followed. A name counts as it was when its directory was asked for last. Raises OSError,
    also where the file server does not know what says which file it is.
    """
    facts = libc.make_buffer(_STATX_BYTES)
    flags = _FORCE_SYNC | _SYMLINK_NOFOLLOW | (0 if name else _EMPTY_PATH)
    libc.call_libc("statx", directory, name, flags, _BASIC, facts, about=os.fsdecode(name) or None)
    mask, nlink, uid, gid, mode, inode, size, blocks, *times, major, minor = _STATX.unpack_from(
        facts
    )
    if mask & _TELLING != _TELLING:
        what = f"the file server does not say which file it is (statx mask {mask:#x})"
        raise OSError(errno.EOPNOTSUPP, what, os.fsdecode(name) or None)
    if not mask & _LINKED:
        nlink = 1
    changed, written = (times[at] * 1_000_000_000 + times[at + 1] for at in (0, 2))
    disk = os.makedev(major, minor)
    return Statx(mode, nlink, uid, gid, inode, size, blocks, changed, written, disk)


def read_fresh_stat(fd: int, disk: int, name: bytes = b"") -> os.stat_result | Statx:
    """What is known of an open file, or of a name in an open directory. Raises OSError.

    `disk` is the st_dev of that descriptor. Of a disk of this node the kernel knows all; else the
    file server is asked. open(2) need not ask it: NFS does not while the server has promised this
    client to tell of others' changes, and its second mount on this node is no other client.
    """
    if not os.major(disk):
        return statx_from_server(fd, name)
    return os.stat(name, dir_fd=fd, follow_symlinks=False) if name else os.fstat(fd)


def remove_tree(
    directory: int, name: str, aside: str, before_each: Callable[[], None] = lambda: None
) -> None:
    """Deletes what has this name in an open directory, however deep it is; links are not followed.

    Each directory in it is moved up first, to a name that begins with `aside`: so no path grows
    long, and no stack. Raises OSError, and what `before_each` raises, which is called for each of
    them.
    """
    left = [name]
    while left:
        before_each()
        at = left.pop()
        if _unlink_unless_directory(at, directory):
            continue
        os.chmod(at, 0o700, dir_fd=directory)  # it may be forbidden to its owner so far
        with open_descriptor(at, _FOLDER, dir_fd=directory) as fd:
            while names := _list_some_names(fd):
                for below in names:
                    if not _unlink_unless_directory(below, fd):
                        os.chmod(below, 0o700, dir_fd=fd)  # it is to be writable for that
                        left.append(f"{aside}{os.urandom(8).hex()}")
                        os.rename(below, left[-1], src_dir_fd=fd, dst_dir_fd=directory)
        os.rmdir(at, dir_fd=directory)


def _unlink_unless_directory(name: str, directory: int) -> bool:
    """Deletes a name, or finds it gone; False for a directory."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        return False
    return True


def _list_some_names(directory: int) -> list[str]:
    with os.scandir(directory) as found:
        return [entry.name for entry in islice(found, MOST)]
