from __future__ import annotations

import errno
import struct

import pytest

from forestage.system import fuse
from forestage.system.fuse import FuseAttributes, FuseOpcode, FuseRequest

ACL = bytes(28)
NAME = b"system.posix_acl_access"
PLAIN = FuseAttributes(7, 1025, 3_000_000_004, 5_000_000_006, 0o100640, 11, 22)
WITH_ACL = FuseAttributes(7, 1025, 3, 5, 0o100640, 11, 22, ACL)
POSIX_ACL, NO_OPEN = 1 << 20, 1 << 17
OPEN, FLUSH, WRITE, SETATTR, IOCTL, LSEEK = 14, 25, 16, 4, 39, 46


def initial(offered: int = 2**32 - 1, minor: int = 41) -> FuseRequest:
    return FuseRequest(FuseOpcode.INIT, 2, struct.pack("<IIII", 7, minor, 131072, offered))


def xattr(op: int, size: int, name: bytes = b"") -> FuseRequest:
    return FuseRequest(op, 2, struct.pack("<II", size, 0) + name)


@pytest.mark.parametrize(
    ("request_", "file", "wanted"),
    [
        (FuseRequest(FuseOpcode.FORGET, 2, b""), PLAIN, None),
        (FuseRequest(FuseOpcode.BATCH_FORGET, 2, b""), PLAIN, None),
        (FuseRequest(FuseOpcode.RELEASE, 2, b""), PLAIN, (0, b"")),
        (FuseRequest(FuseOpcode.DESTROY, 2, b""), PLAIN, (0, b"")),
        # Refused once, the kernel never asks again: no opener and no closer waits for a server.
        (FuseRequest(OPEN, 2, b""), PLAIN, (errno.ENOSYS, b"")),
        (FuseRequest(FLUSH, 2, b""), PLAIN, (errno.ENOSYS, b"")),
        (FuseRequest(WRITE, 2, b""), PLAIN, (errno.ENOSYS, b"")),
        (FuseRequest(SETATTR, 2, b""), PLAIN, (errno.ENOSYS, b"")),
        (FuseRequest(IOCTL, 2, b""), PLAIN, (errno.ENOSYS, b"")),
        (FuseRequest(LSEEK, 2, b""), PLAIN, (errno.ENOSYS, b"")),
        (FuseRequest(999, 2, b""), PLAIN, (errno.ENOSYS, b"")),
        (xattr(FuseOpcode.LISTXATTR, 0), PLAIN, (errno.ENOSYS, b"")),
        (xattr(FuseOpcode.LISTXATTR, 0), WITH_ACL, (0, struct.pack("<II", 24, 0))),
        (xattr(FuseOpcode.LISTXATTR, 24), WITH_ACL, (0, NAME + b"\0")),
        (xattr(FuseOpcode.LISTXATTR, 23), WITH_ACL, (errno.ERANGE, b"")),
        (xattr(FuseOpcode.GETXATTR, 0, NAME + b"\0"), WITH_ACL, (0, struct.pack("<II", 28, 0))),
        (xattr(FuseOpcode.GETXATTR, 4096, NAME + b"\0"), WITH_ACL, (0, ACL)),
        (xattr(FuseOpcode.GETXATTR, 27, NAME + b"\0"), WITH_ACL, (errno.ERANGE, b"")),
        (xattr(FuseOpcode.GETXATTR, 4096, b"user.x\0"), WITH_ACL, (errno.ENODATA, b"")),
        (xattr(FuseOpcode.GETXATTR, 4096, NAME + b"\0"), PLAIN, (errno.ENOSYS, b"")),
    ],
)
def test_each_fuse_request_has_the_expected_reply(
    request_: FuseRequest, file: FuseAttributes, wanted: tuple[int, bytes] | None
) -> None:
    assert fuse.compute_reply(request_, file) == wanted


def test_fuse_attributes_are_the_files_and_valid_for_years() -> None:
    error, data = fuse.compute_reply(FuseRequest(FuseOpcode.GETATTR, 2, b""), PLAIN) or (1, b"")
    valid, _, _, *attributes = struct.unpack("<QIIQQQQQQIIIIIIIIII", data)
    assert (error, len(data)) == (0, 104)  # struct fuse_attr_out
    assert valid > 365 * 86400
    assert attributes == [7, 1025, 3, 3, 3, 5, 4, 4, 6, 0o100640, 1, 11, 22, 0, 4096, 0]


def test_fuse_attributes_contain_a_time_before_1970() -> None:
    early = FuseAttributes(7, 1, -1, -1_000_000_000, 0o100640, 1, 2)
    _, data = fuse.compute_reply(FuseRequest(FuseOpcode.GETATTR, 2, b""), early) or (1, b"")
    fields = struct.unpack("<QIIQQQqqqIIIIIIIIII", data)
    assert (fields[7], fields[10], fields[8], fields[11]) == (-1, 999_999_999, -1, 0)


@pytest.mark.parametrize(("file", "acl"), [(PLAIN, 0), (WITH_ACL, POSIX_ACL)])
def test_fuse_init_requests_the_needed_flags_among_those_offered(
    file: FuseAttributes, acl: int
) -> None:
    error, data = fuse.compute_reply(initial(), file) or (1, b"")
    major, minor, _, flags, most, _, _, _, pages, *_ = struct.unpack("<IIIIHHIIHHI28x", data)
    assert (error, len(data), major, minor, pages) == (0, 64, 7, 31, fuse.MAX_READ // 4096)
    assert most >= 4096
    assert (flags & POSIX_ACL, flags & NO_OPEN) == (acl, NO_OPEN)
    _, data = fuse.compute_reply(initial(offered=1, minor=26), file) or (1, b"")
    assert struct.unpack_from("<IIII", data)[1::2] == (26, 1)


def test_kernel_without_fuse_acl_support_is_recognised() -> None:
    assert fuse.has_acl_support(initial())
    assert not fuse.has_acl_support(initial(2**32 - 1 - POSIX_ACL))


def test_fuse_request_is_parsed_and_an_empty_buffer_gives_none() -> None:
    body = struct.pack("<QQI", 1, 2**33, 4096) + bytes(20)
    head = struct.pack("<IIQQIIIHH", 40 + len(body), FuseOpcode.READ, 12, 1, 0, 0, 77, 0, 0)
    found = fuse.parse_request(memoryview(head + body + b"rest"))
    assert found == FuseRequest(FuseOpcode.READ, 12, body, 77)
    assert fuse.parse_read_range(found) == (2**33, 4096)
    assert fuse.parse_request(memoryview(bytes(8192))) is None


def test_fuse_interrupt_contains_the_interrupted_requests_id() -> None:
    assert (
        fuse.parse_interrupted_id(FuseRequest(FuseOpcode.INTERRUPT, 13, struct.pack("<Q", 12)))
        == 12
    )
