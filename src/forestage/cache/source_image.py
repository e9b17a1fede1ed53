"""A `SourceImage`: the bytes that a path means, who may read them, and whether they may be staged.

The path is opened in sources/opening, as the user; what is found there are `PathFacts`, of which
`check_image` makes an image, or says why it is none.
"""

import errno
import os
import stat
from collections.abc import Iterable
from typing import Literal

import msgspec

from forestage.errors import Declined
from forestage.slurm.hints import ABSOLUTE, Request
from forestage.system.as_user import User
from forestage.system.files import Statx
from forestage.system.sha256 import sha256
from forestage.units import format_size, is_utf8

ACL = "system.posix_acl_access"

SUPERBLOCK = 32  # bytes of a squashfs superblock that tell what it is
HEAD = 48  # bytes of it that tell as well how long the image is
_MAGIC, _VERSION = b"hsqs", (4, 0)  # linux/fs/squashfs/squashfs_fs.h, struct squashfs_super_block

PATH_MAX = 4096  # linux/limits.h; the kernel refuses longer ones anyway, but late and unclearly


class FileIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which bytes are meant. `path` is resolved; times are in ns, of the file server's clock.

    Of a directory `tree` is the digest of all that it holds, and `size` that of the image which is
    made of it (features/data/erofs.py).
    """

    path: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    tree: str = ""

    @property
    def key(self) -> str:
        """The cache's name for these bytes: 32 hex digits."""
        if self.tree:
            return self.tree[:32]
        parts = (self.path, self.inode, self.size, self.mtime_ns, self.ctime_ns)
        return sha256("\0".join(map(str, parts)).encode())[:32]


class AccessRights(msgspec.Struct, frozen=True):
    """Who may read the file: mirrored on the cached copy. `acl` is the raw xattr, or empty."""

    uid: int
    gid: int
    mode: int
    acl: bytes = b""


ImageKind = Literal["image", "data"]
"""Data is what a job's comment shows as more than an image: a directory, a mounted file."""


class SourceImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A regular file below a configured source that the user may read.

    `kind` is what it is copied as: it decides whose room the copy takes, and nothing else.
    """

    identity: FileIdentity
    access: AccessRights
    kind: ImageKind = "image"

    @property
    def key(self) -> str:
        return self.identity.key

    @property
    def path(self) -> str:
        return self.identity.path

    @property
    def size(self) -> int:
        """Bytes."""
        return self.identity.size


class PathFacts(msgspec.Struct, frozen=True):
    """What was found at a path; `check_image` decides what it means. `path` is "" if it is not
    text, or in a mount that a user made.

    `head` is what the file begins with, HEAD bytes of it or fewer; b"" where its copy is here and
    nobody needs it. The rest was asked for where the whole node would see a redirect: whether the
    user can list its directory; whether somebody writes to it. `is_bound`: the node had redirects
    of ours, over whatever path, when this one was opened beneath them.
    """

    path: str
    sources: tuple[str, ...]
    mode: int
    image: SourceImage | None = None
    head: bytes = b""
    is_listable: bool = False
    has_writer: bool = False
    is_bound: bool = False


def resolve_requested_path(request: Request, work_dir: str) -> str:
    """The absolute path a request names. Pure. Raises Declined for what is no path.

    A value that begins with `.` or `/` is a path for pyxis, relative to the working directory;
    everything else names an image in a registry (pyxis `pyxis_slurmstepd.c`).
    """
    if not request.path.startswith(("/", ".")):
        if request.is_data:  # which no registry has
            what = f"{request.path} is no path"
            raise Declined("bad-path", what, f"write ./{request.path}, or {ABSOLUTE}")
        raise Declined("registry", f"{request.path} is an image of a registry")
    path = os.path.join(work_dir, request.path)
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise Declined("bad-path", "the path holds control characters")
    if not path.startswith("/"):
        raise Declined(
            "bad-path", f"{request.path} is relative and Slurm names no working directory"
        )
    if not is_utf8(path):
        raise Declined("bad-path", "the path is not UTF-8")
    if len(path.encode()) >= PATH_MAX:
        raise Declined("bad-path", f"the path is longer than {PATH_MAX} bytes")
    return path


def check_image(found: PathFacts, max_size: int | None) -> SourceImage:
    """Pure: the image, or Declined with the reason that the user and the admin will read."""
    if not found.path:
        what = "the path resolves to a name that is not UTF-8, or in a mount that a user made"
        raise Declined("bad-path", what, "the admin can name that of a service in `user_mounts:`")
    if not stat.S_ISREG(found.mode):
        raise Declined(
            "not-a-file", f"{found.path} is {_file_type_name(found.mode)}, not a regular file"
        )
    if not found.sources:
        raise Declined("outside-sources", "no sources are configured", "set `sources:`")
    if not is_below_any(found.path, found.sources):
        raise Declined(
            "outside-sources",
            f"{found.path} is not below {', '.join(found.sources)}",
            "the admin can add its directory to `sources:`",
        )
    if found.image is None:
        raise Declined("missing", f"{found.path} was removed while it was looked at")
    if found.image.size == 0:
        raise Declined("empty", f"{found.path} is empty")
    if max_size is not None and found.image.size > max_size:
        raise Declined(
            "too-large",
            f"{found.path} has {format_size(found.image.size)}, more than"
            f" max_image_size {format_size(max_size)}",
        )
    return found.image


def is_squashfs(head: bytes) -> bool:
    """Pure: whether a file that begins so is a squashfs image that Linux can mount."""
    version = (int.from_bytes(head[at : at + 2], "little") for at in (28, 30))
    return len(head) >= SUPERBLOCK and head[:4] == _MAGIC and tuple(version) == _VERSION


def parse_squashfs_size(head: bytes) -> int:
    """Pure: the bytes that an image which begins so has at least; 0 where that is not known."""
    return int.from_bytes(head[40:HEAD], "little") if len(head) >= HEAD and is_squashfs(head) else 0


def check_not_truncated(found: PathFacts) -> None:
    """Pure: raises Declined for an image that ends before its superblock says so.

    The container could not start from it, and the user would look for the fault here.
    """
    used = parse_squashfs_size(found.head)
    if found.image is not None and used > found.image.size:
        raise Declined(
            "truncated",
            f"{found.path} is truncated: it has {format_size(found.image.size)} of the"
            f" {format_size(used)} that its superblock says",
            "copy it again, or wait until it is written",
        )


def check_node_redirect(found: PathFacts) -> None:
    """Pure: raises Declined for what may not be redirected for the whole node.

    Everybody on the node would find the file read-only, immovable and nosuid: an image that is
    complete can bear that, but not somebody else's log or program, which any user who can read it
    may name. `found` must have been opened with `read_copy_head`.
    """
    check_squashfs(found)
    spank = "`redirect: spank` stages such files as well"
    if found.image and found.image.access.mode & (stat.S_ISUID | stat.S_ISGID):
        raise Declined("set-id", f"{found.path} is set-user-ID or set-group-ID", spank)
    if not found.is_listable:
        what = f"this user cannot list the directory of {found.path}"
        raise Declined("unlisted", what, spank)
    if found.has_writer:
        raise Declined("written", f"{found.path} is open for writing on this node", spank)


def check_squashfs(found: PathFacts) -> None:
    """Pure: raises Declined for what is no image: somebody's log or data, for all we know."""
    if not is_squashfs(found.head):
        raise Declined(
            "not-squashfs",
            f"{found.path} is no squashfs image (version 4.0)",
            "`redirect: spank` stages other files as well",
        )


def declined_by_open_error(error: OSError, path: str, user: User) -> Declined:
    """Pure: what an error of the user's own look means. pyxis will tell the user the same."""
    refused = ("no-permission", f"is not readable as {user}")
    known = {
        errno.ENOENT: ("missing", "does not exist"),
        errno.ENOTDIR: ("missing", "does not exist"),
        errno.EACCES: refused,
        errno.EPERM: refused,
        errno.ELOOP: ("bad-path", "has too many symbolic links"),
        errno.ENAMETOOLONG: ("bad-path", "has a name, or a path, that is too long"),
    }
    reason, text = known.get(error.errno or 0, ("source-error", f"cannot be read: {error}"))
    return Declined(reason, f"{path} {text}")


def is_below_any(path: str, directories: Iterable[str]) -> bool:
    """Pure: whether a resolved path lies inside one of the resolved directories."""
    return any(path.startswith(directory.rstrip("/") + "/") for directory in directories)


def read_identity(fd: int, path: str) -> FileIdentity:
    """The identity of an open file that is known to lie at the resolved `path`."""
    return identity_from_stat(os.fstat(fd), path)


def identity_from_stat(facts: os.stat_result | Statx, path: str) -> FileIdentity:
    """Pure: the identity of a file of which stat(2) says this."""
    return FileIdentity(path, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def read_acl(fd: int) -> bytes:
    """The raw POSIX ACL of an open file, or nothing where there is none or none can be."""
    try:
        return os.getxattr(fd, ACL)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return b""
        raise


def _file_type_name(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "no file")
