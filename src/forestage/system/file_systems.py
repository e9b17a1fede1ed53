"""The kind and identity of a file system, and what is believed of a kind.

A file system that this kernel does not lay out itself passes on what somebody else says, and that
may be untrue. Each kind here is believed for a reason that can be looked up.
"""

import errno
import fcntl
import os
import struct
from pathlib import Path

from forestage.system import libc
from forestage.system.files import open_descriptor

# linux/magic.h. What passes calls on has a number of its own (overlayfs, eCryptfs, NFS, FUSE, …).
EXT4, XFS, BTRFS, TMPFS = 0xEF53, 0x58465342, 0x9123683E, 0x01021994
NFS, CIFS, SMB2, SMB = 0x6969, 0xFF534D42, 0xFE534D42, 0x517B
_BESIDE = 4096  # bytes; what is missing of less, a file system may keep beside the inode
_LEAST = 65536  # bytes; what is free below that is too little for an event or a lease
_STATFS = 256  # bytes that hold a struct statfs on every architecture
_LONGEST_HANDLE = 128  # bytes, MAX_HANDLE_SZ
_HANDLE_HEAD = struct.Struct("Ii")  # struct file_handle: how many bytes it has, and of which kind
_HANDLELESS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EOVERFLOW)

# Whose SEEK_DATA and SEEK_HOLE are this kernel's own work, on blocks and on pages not yet written:
# - ext4: fs/ext4/file.c, ext4_llseek: iomap_seek_data on its extents. ext2 and ext3 have its
#   number; Linux' own ext2 driver knows no holes (generic_file_llseek): all is data there.
# - XFS: fs/xfs/xfs_file.c, xfs_file_llseek: the same, on its extents and delayed ones.
# - btrfs: fs/btrfs/file.c, find_desired_extent, with delayed extents.
# - tmpfs: mm/shmem.c, shmem_file_llseek, on its pages.
# Not ZFS, which has called fresh data a hole (openzfs issues 11900 and 15526). Not overlayfs, NFS,
# SMB, FUSE, Lustre, GPFS, CephFS: they pass the question on, or answer for a server.
_MAPPING_HOLES = frozenset((EXT4, XFS, BTRFS, TMPFS))

# Whose inode number is no other file's as long as the file has a name:
# - ext4, XFS, btrfs: the number of a place on their disk; tmpfs: counted (mm/shmem.c).
# - NFS: the server's fileid, unique within its file system (RFC 8881, attribute 20).
# Not FUSE, where it is the program's word, which may give two files one number, or another one
# after a remount; not what is made of several file systems.
_NUMBERING_FILES = frozenset((EXT4, XFS, BTRFS, TMPFS, NFS))

# xfsprogs, libxfs/xfs_fs.h: _IOR('X', 100, struct xfs_fsop_geom_v1), which has the UUID at byte 64.
# Every kernel has it; FS_IOC_GETFSUUID, which is for all file systems, came with Linux 6.9.
_XFS_GEOMETRY, _GEOMETRY, _UUID = 0x80705864, 112, slice(64, 80)


def find_exhausted_resource(facts: os.statvfs_result) -> str:
    """Return what root's small files find no more of: "space" or "inodes"; "" for neither. Pure."""
    if facts.f_blocks and facts.f_bfree * facts.f_frsize < _LEAST:
        return "space"
    return "inodes" if facts.f_files and not facts.f_ffree else ""  # btrfs has 0 of 0


def read_file_system_type(fd: int) -> int:
    """Return the number that Linux has for the file system of an open file. Raises OSError."""
    facts = libc.make_buffer(_STATFS)
    libc.call_libc("fstatfs", fd, facts)
    (kind,) = struct.unpack_from("l", facts)
    return int(kind) & 0xFFFFFFFF


def read_identity(path: Path | str, kind: str) -> str:
    """Return what tells the file system at `path` from others of this node; "" if nothing does.

    It is the same after a boot that names devices otherwise, and another one after mkfs. `kind` is
    the file system's type in mountinfo. No device is opened, and no udev is needed.

    - XFS: its UUID, as statfs(2) tells only the device's number (fs/xfs/xfs_super.c,
      xfs_fs_statfs).
    - all others: f_fsid. That is a sum of the UUID on ext4 (fs/ext4/super.c, ext4_statfs) and, with
      the subvolume, on btrfs (fs/btrfs/super.c, btrfs_statfs); the pool's and data set's own on ZFS
      (zfs_vfsops.c, zfs_statvfs); random for each mount of a tmpfs since Linux 5.16 (mm/shmem.c,
      shmem_fill_super), and 0 before. On f2fs and others it is the device's number: after a boot
      they may seem to be another file system.

    Raises OSError.
    """
    with open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        if kind == "xfs":
            answer = bytearray(_GEOMETRY)
            fcntl.ioctl(fd, _XFS_GEOMETRY, answer)
            return f"xfs {answer[_UUID].hex()}"
        number = os.statvfs(fd).f_fsid
    return f"{kind} {number:016x}" if number else ""


def is_hole_map_true(fd: int) -> bool:
    """Return whether a hole that the open file's file system names has no bytes but zeros."""
    try:
        return read_file_system_type(fd) in _MAPPING_HOLES
    except OSError:
        return False


def is_inode_number_true(fd: int) -> bool:
    """Return whether files of the open file's file system with one inode number are one file."""
    try:
        return read_file_system_type(fd) in _NUMBERING_FILES
    except OSError:
        return False


def read_file_handle(path: bytes, directory: int) -> bytes | None:
    """Return what the file system calls the file below an open directory, links not followed.

    A handle is no other file's, also once the inode is used again. None if this kind has none.
    Raises OSError.
    """
    handle = libc.make_buffer(
        _HANDLE_HEAD.size + _LONGEST_HANDLE, _HANDLE_HEAD.pack(_LONGEST_HANDLE, 0)
    )
    mount = libc.make_buffer(4)  # an int: the mount's number
    try:
        about = os.fsdecode(path)
        libc.call_libc("name_to_handle_at", directory, path, handle, mount, 0, about=about)
    except OSError as error:
        if error.errno in _HANDLELESS:
            return None
        raise
    size, _ = _HANDLE_HEAD.unpack_from(handle)
    return bytes(handle.raw[: _HANDLE_HEAD.size + size])


def is_probably_sparse(size: int, blocks: int) -> bool:
    """Return whether a file of `size` bytes seems to have fewer in its `blocks` of 512. Pure.

    Compression and late writing look the same: it tells where zeros are likely, and nothing more.
    """
    return size - blocks * 512 >= _BESIDE
