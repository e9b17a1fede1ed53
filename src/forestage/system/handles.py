"""File handles, by which a file is found after its last name has gone: open_by_handle_at(2).

The kernel finds it as long as anything holds it, whatever that is: a descriptor, one of O_PATH, a
mapping, a mount in any namespace, a loop device, a message between processes. Only for who may
pass all permissions (CAP_DAC_READ_SEARCH); ext4, xfs, btrfs and tmpfs have handles.
"""

import errno
import os
import struct
import time
from pathlib import Path

import msgspec

from forestage.system import libc

_LONGEST = 128  # bytes, MAX_HANDLE_SZ
_HEAD = struct.Struct("Ii")  # struct file_handle: how many bytes it has, and of which kind
_AT_FDCWD = -100
_GONE = (errno.ESTALE, errno.ENOENT)
_TRIES, _PAUSE = 200, 0.005  # a second, where there is no memory either
_NONE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EOVERFLOW)


class Handle(msgspec.Struct, frozen=True):
    """What the file system calls a file: it is no other's, also once its inode is used again."""

    kind: int
    data: bytes

    @property
    def name(self) -> str:
        """A word for it."""
        return f"{self.kind}-{self.data.hex()}"


def of(path: Path | bytes, directory: int = _AT_FDCWD) -> Handle | None:
    """The handle of what lies there, links not followed; None where its file system has none.

    A relative path is one below an open `directory`. Raises OSError.
    """
    raw = libc.room(_HEAD.size + _LONGEST, _HEAD.pack(_LONGEST, 0))
    mount = libc.room(4)  # an int: the mount's number
    name = os.fsencode(path)
    try:
        about = os.fsdecode(name)
        libc.call("name_to_handle_at", directory, name, raw, mount, 0, about=about)
    except OSError as error:
        if error.errno in _NONE:
            return None
        raise
    size, kind = _HEAD.unpack_from(raw)
    return Handle(kind, raw.raw[_HEAD.size : _HEAD.size + size])


def facts(top: int, handle: Handle) -> os.stat_result | None:
    """What stat(2) says of a file of the file system on which the open directory `top` lies.

    None: nothing holds it any more. Raises OSError; PermissionError for who may not ask.
    """
    raw = _HEAD.pack(len(handle.data), handle.kind) + handle.data
    try:
        fd = _opened(top, raw)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _opened(top: int, raw: bytes) -> int:
    """A descriptor of the file that has this handle. Raises OSError.

    Of ENOMEM it asks again. ext4 says so, too, while a new file is made with the inode number of
    one that has gone: iget_locked() of Linux finds an inode that is I_CREATING, and gives none.
    """
    left = _TRIES
    while True:
        try:
            return libc.call("open_by_handle_at", top, raw, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            left -= 1
            if error.errno != errno.ENOMEM or not left:
                raise
        time.sleep(_PAUSE)
