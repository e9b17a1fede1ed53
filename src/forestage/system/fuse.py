"""The kernel's FUSE protocol, as far as one read-only regular file needs it (linux/fuse.h, 7.31).

A file system whose root is that file: nothing is ever looked up. Requests are read from a
descriptor of /dev/fuse, one each, and answered by writing to it. What is answered with ENOSYS once,
the kernel does not ask again.
"""

import errno
import os
import struct
from enum import IntEnum

import msgspec

from forestage.system import mounts

DEVICE = "/dev/fuse"
TYPE = "fuse.forestage"  # in mountinfo
REQUEST_BYTES = 8192  # FUSE_MIN_READ_BUFFER: a shorter buffer gets no request at all
MAX_READ = 1024 * 1024  # bytes of one READ
MAX_BACKGROUND = 8192  # read-aheads under way; at 16, twenty hung ones stopped every other reader
FOR_EVER = 10 * 365 * 86400  # seconds that attributes stay valid: asking a hung server would hang

_VERSION = (7, 31)
_REQUEST = struct.Struct("<IIQQIIIHH")  # len opcode unique nodeid uid gid pid extlen padding
_REPLY = struct.Struct("<IiQ")  # len error unique
_READ = struct.Struct("<QQI")  # fh offset size
_INIT_IN = struct.Struct("<IIII")  # major minor max_readahead flags
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<QIIQQQQQQIIIIIIIIII")  # valid, then struct fuse_attr
_XATTR = struct.Struct("<II")  # size padding
_STATFS = struct.Struct("<QQQQQIIII24x")
_INVALIDATE = struct.Struct("<Qqq")  # inode offset length

_ASYNC_READ, _NO_OPEN, _POSIX_ACL, _MAX_PAGES = 1 << 0, 1 << 17, 1 << 20, 1 << 22


class FuseOpcode(IntEnum):
    """The requests that are not refused."""

    FORGET = 2
    GETATTR = 3
    READ = 15
    STATFS = 17
    RELEASE = 18
    GETXATTR = 22
    LISTXATTR = 23
    INIT = 26
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


class FuseRequest(msgspec.Struct, frozen=True):
    """One request; `body` is what follows its header, `pid` the thread that asks, if known."""

    op: int
    unique: int
    body: bytes
    pid: int = 0


class FuseAttributes(msgspec.Struct, frozen=True):
    """What fstat(2) shows of the file, and its ACL (the raw xattr, or empty)."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int
    acl: bytes = b""


def mount_fuse(fd: int, point: str, mode: int) -> None:
    """Mounts the file system that `fd` serves on a file. Raises OSError.

    The kernel checks modes and ACL, for any user.
    """
    flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
    owner = "user_id=0,group_id=0"  # of the mount; the file's are in its attributes
    access = f"rootmode={mode:o},{owner},allow_other,default_permissions"
    mounts.mount("forestage", point, flags, TYPE, f"fd={fd},{access},max_read={MAX_READ}")


def parse_request(data: memoryview) -> FuseRequest | None:
    """Pure: the request in a buffer that the kernel filled; None where it is empty."""
    length, op, unique, _, _, _, pid, *_ = _REQUEST.unpack_from(data)
    if length < _REQUEST.size:
        return None
    return FuseRequest(op, unique, bytes(data[_REQUEST.size : length]), pid)


def parse_read_range(request: FuseRequest) -> tuple[int, int]:
    """Pure: the offset and the size that a READ asks for, in bytes."""
    _, offset, size = _READ.unpack_from(request.body)
    return offset, size


def parse_interrupted_id(request: FuseRequest) -> int:
    """Pure: the `unique` of the request that an INTERRUPT is about."""
    return int.from_bytes(request.body[:8], "little")


def send_reply(fd: int, unique: int, *data: bytes | memoryview, error: int = 0) -> None:
    """Answers a request; one that is not waited for any more is ENOENT, and no fault.

    Raises OSError.
    """
    head = _REPLY.pack(_REPLY.size + sum(map(len, data)), -error, unique)
    try:
        os.writev(fd, [head, *data])
    except OSError as failed:
        if failed.errno != errno.ENOENT:
            raise


def invalidate_cache(fd: int) -> None:
    """Has the kernel forget all that it has cached of the file. Raises OSError."""
    body = _INVALIDATE.pack(1, 0, 0)
    try:
        os.writev(fd, [_REPLY.pack(_REPLY.size + len(body), 2, 0), body])
    except OSError as failed:
        if failed.errno != errno.ENOENT:  # nobody has the file open
            raise


def compute_reply(request: FuseRequest, file: FuseAttributes) -> tuple[int, bytes] | None:
    """Pure: the error and the bytes that answer any request but READ; None: it wants no answer.

    OPEN and FLUSH are refused with ENOSYS: the kernel opens and closes by itself then, and neither
    waits for a server that hangs.
    """
    op = request.op
    if op == FuseOpcode.INIT:
        return 0, _encode_init_reply(request, file)
    if op == FuseOpcode.GETATTR:
        return 0, _encode_attributes(file)
    if op in (FuseOpcode.GETXATTR, FuseOpcode.LISTXATTR) and file.acl:
        return _encode_xattr_reply(request, file.acl)
    if op == FuseOpcode.STATFS:
        return 0, _STATFS.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0)
    if op in (FuseOpcode.RELEASE, FuseOpcode.DESTROY):
        return 0, b""
    if op in (FuseOpcode.FORGET, FuseOpcode.BATCH_FORGET, FuseOpcode.INTERRUPT):
        return None
    return errno.ENOSYS, b""


def _encode_init_reply(request: FuseRequest, file: FuseAttributes) -> bytes:
    _, minor, readahead, offered = _INIT_IN.unpack_from(request.body)
    wanted = _ASYNC_READ | _NO_OPEN | _MAX_PAGES | (_POSIX_ACL if file.acl else 0)
    return _INIT_OUT.pack(
        _VERSION[0],
        min(minor, _VERSION[1]),
        readahead,
        offered & wanted,
        MAX_BACKGROUND,
        MAX_BACKGROUND * 3 // 4,
        4096,  # of a write, which never comes
        1,  # times are exact to so many ns
        MAX_READ // 4096,
        0,
        0,
    )


def has_acl_support(request: FuseRequest) -> bool:
    """Pure: whether the kernel that sent this INIT can keep to an ACL."""
    return bool(_INIT_IN.unpack_from(request.body)[3] & _POSIX_ACL)


def _encode_attributes(file: FuseAttributes) -> bytes:
    mtime, mtime_ns = divmod(file.mtime_ns, 10**9)
    ctime, ctime_ns = divmod(file.ctime_ns, 10**9)
    return _ATTRIBUTES.pack(
        *(FOR_EVER, 0, 0),
        *(file.inode, file.size, -(-file.size // 512)),
        *(mtime % 2**64, mtime % 2**64, ctime % 2**64, mtime_ns, mtime_ns, ctime_ns),
        *(file.mode, 1, file.uid, file.gid, 0, 4096, 0),
    )


def _encode_xattr_reply(request: FuseRequest, acl: bytes) -> tuple[int, bytes]:
    size = _XATTR.unpack_from(request.body)[0]
    name = b"system.posix_acl_access"
    if request.op == FuseOpcode.LISTXATTR:
        value = name + b"\0"
    elif request.body[_XATTR.size :].rstrip(b"\0") == name:
        value = acl
    else:
        return errno.ENODATA, b""
    if not size:
        return 0, _XATTR.pack(len(value), 0)
    return (0, value) if len(value) <= size else (errno.ERANGE, b"")
