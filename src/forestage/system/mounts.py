"""Mount system calls, and which binds of ours the kernel shows. Root only.

The kernel's own list (`/proc/self/mountinfo`, proc(5)) is the one truth about redirects: nothing
here keeps a ledger that a crash could make wrong.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from forestage.system import libc
from forestage.system.files import open_descriptor

MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS = 0x00020000
_SYS_OPEN_TREE, _OPEN_TREE_CLONE, _AT_FDCWD = 428, 1, -100  # on every architecture
_SYS_MOVE_MOUNT, _FROM_FD, _TO_FD = 429, 4, 0x40
_READ_ONLY = frozenset(("ro", "emergency_ro"))
_REMOTE = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs"),
        *("nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
        "wekafsio",
    )
)

# Where the server's clock sets the time of what is made, written or touched "now", whichever node
# does it: NFS (RFC 1813 and 8881, SET_TO_SERVER_TIME, which Linux sends for utimensat(2) with
# UTIME_NOW). On Lustre (llite sends op_mod_time), CephFS (r_stamp), CIFS and GlusterFS (the utime
# translator) the client's clock does; of all others nothing is known for certain.
SERVER_SETS_TIMES = frozenset(("nfs", "nfs4"))


class MountInfo(msgspec.Struct, frozen=True, gc=False):
    """One line of mountinfo, octal escapes undone. `root` is the path inside its file system.

    `rest` is what follows the mount point, as it is: "rw,nosuid shared:1 - fuse.x source rw,a=b".
    """

    id: int
    parent: int
    device: str
    root: str
    point: str
    rest: str = ""

    @property
    def kind(self) -> str:
        """The type of its file system."""
        return self.rest.partition(" - ")[2].split(" ")[0]

    @property
    def source(self) -> str:
        return self.rest.partition(" - ")[2].partition(" ")[2].split(" ")[0]

    @property
    def options(self) -> list[str]:
        """Those of the mount, then those of its file system."""
        fields = self.rest.split(" ")
        # Neither name nor source of a mount holds a space as it is: the last field is the kernel's.
        return [*fields[0].split(","), *fields[-1].split(",")]

    @property
    def is_read_only(self) -> bool:
        """Also where only its file system is, as with errors=remount-ro once a disk has failed."""
        return not _READ_ONLY.isdisjoint(self.options)

    @property
    def is_remote(self) -> bool:
        """Whether a file server answers for its file system, or a program, or nodes share it."""
        # Whatever a user space file system is, it is no disk of this node. fuseblk is one: ntfs-3g.
        return self.kind in _REMOTE or self.kind.partition(".")[0] == "fuse"

    @property
    def has_server_times(self) -> bool:
        """Whether its server's clock sets the time of what is made or touched "now".

        With NFS 4.2 a server may let a client answer for a file's times (RFC 9754).
        """
        return self.kind in SERVER_SETS_TIMES and "vers=4.2" not in self.options

    @property
    def fuse_owner_uid(self) -> int:
        """The uid of the user who mounted a FUSE file system; 0: root did, or it is none."""
        for option in self.options if self.kind.startswith("fuse") else ():
            name, _, value = option.partition("=")
            if name == "user_id" and value.isdigit():
                return int(value)
        return 0


def mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    """mount(2); without a `kind` of file system a bind, remount or propagation. Raises OSError."""
    words = [os.fsencode(text) if text else None for text in (source, target, kind, options)]
    libc.call_libc("mount", *words[:3], flags, words[3], about=target)


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """umount2(2). Raises OSError."""
    libc.call_libc("umount2", os.fsencode(target), flags, about=target)


def enter_private_namespace() -> None:
    """Leaves the host's mount table: what this process mounts or takes off, only it sees."""
    libc.call_libc("unshare", CLONE_NEWNS, about="mount namespace")
    # Private, not slave: what another hook mounts meanwhile must not come in here either.
    mount("none", "/", MS_REC | MS_PRIVATE)


def enter_empty_namespace() -> None:
    """Goes to a mount namespace of this process' own, with the root file system and an empty /run.

    A copy of all the host's mounts would keep each of them busy for as long as this process lives.
    What was opened before leads to where it did. Raises OSError.
    """
    enter_private_namespace()
    listed = {mount.id: mount for mount in list_mounts()}
    for found in listed.values():
        above = listed.get(found.parent)  # not listed: the root of a slurmd in a chroot
        # What lies below goes with it; so no path leads over a file server that may hang.
        if found.point != "/" and (above is None or above.point == "/"):
            with contextlib.suppress(OSError):  # EINVAL: nothing is mounted there any more
                while True:
                    umount(found.point)
    mount("forestage", "/run", MS_NOSUID | MS_NODEV, "tmpfs", "mode=700,size=64k")


def open_hidden_mount(source: str, kind: str, point: str) -> int:
    """Returns a descriptor of the root of a file system that is mounted at no path.

    It is unmounted when the last descriptor in it is closed. Meanwhile, for an instant, it covers
    the directory `point` in a mount namespace of this process' own. Raises OSError; EINVAL in a
    process with threads.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        enter_private_namespace()
        try:
            mount(source, point, MS_NOSUID | MS_NODEV, kind)
            return os.open(point, flags)
        finally:
            enter_namespace(namespace, root)
    finally:
        os.close(namespace)
        os.close(root)


def enter_namespace(namespace: int, root: int) -> None:
    """Goes back to the mount namespace and the root directory that these descriptors are of.

    Raises OSError; EINVAL in a process with threads.
    """
    libc.call_libc("setns", namespace, CLONE_NEWNS, about="mount namespace")
    # Its own root first: that of a slurmd in a chroot is another.
    os.fchdir(root)
    os.chroot(".")
    os.chdir("/")


def clone_mount(path: str) -> int:
    """Returns a descriptor of a detached copy of the mount at `path`: move_mount(2) attaches it.

    Raises OSError.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return libc.call_libc(
        "syscall", _SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags, about=path
    )


def attach_mount(tree: int, target: int) -> None:
    """Mounts what `clone_mount` returned on an open file or directory: move_mount(2).

    Raises OSError.
    """
    what = (tree, b"", target, b"", _FROM_FD | _TO_FD)
    libc.call_libc("syscall", _SYS_MOVE_MOUNT, *what, about=f"descriptor {target}")


def parse_mountinfo(mountinfo: str) -> list[MountInfo]:
    """Parses mountinfo; `os.fsdecode`d text in, mounts in the kernel's order (oldest first) out."""
    mounts = []
    # Not splitlines(): a mount point may hold a form feed, and the kernel escapes only \n.
    for line in filter(None, mountinfo.split("\n")):
        number, parent, device, root, point, rest = line.split(" ", 5)
        mounts.append(
            MountInfo(
                int(number),
                int(parent),
                device,
                _unescape_octal(root),
                _unescape_octal(point),
                rest,
            )
        )
    return mounts


def list_mounts() -> list[MountInfo]:
    """The mounts of this process' namespace.

    The kernel makes the list for each reading, in some microseconds a mount; a node may have
    thousands. So a table is passed on where a change since its reading cannot matter.
    """
    return parse_mountinfo(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))


def find_mount_of_path(mounts: list[MountInfo], path: str) -> MountInfo | None:
    """The mount that `path` lies on: the longest mount point above it, the newest of equals."""
    above = [m for m in mounts if is_below(path, m.point)]
    # sorted() keeps the kernel's order among equals, where the last one covers the others.
    return sorted(above, key=lambda m: len(m.point))[-1] if above else None


def find_disk_mount(path: str) -> MountInfo | None:
    """Return the mount that a resolved path lies on; None if no mount is known above it.

    The caller has walked the path: an automount that has its disk mounted it then. One that has
    none (autofs) is no disk, and the path is judged by what the automount covers.
    """
    listed = list_mounts()
    found = find_mount_of_path(listed, path)
    if found is not None and found.kind == "autofs":
        return find_mount_of_path([mount for mount in listed if mount.kind != "autofs"], path)
    return found


class BindOrigin(msgspec.Struct, frozen=True):
    """A directory as mountinfo names what is bound from below it: device, path inside it with /."""

    device: str
    root: str


def find_bind_origin(mounts: list[MountInfo], directory: str) -> BindOrigin | None:
    """Pure: where `directory` lies; None where no mount is known above it."""
    base = find_mount_of_path(mounts, directory)
    if base is None:
        return None
    inside = directory[len(base.point.rstrip("/")) :]
    return BindOrigin(base.device, base.root.rstrip("/") + inside + "/")


def format_mountinfo_marker(origin: BindOrigin) -> bytes:
    """Pure: what mountinfo has in each line of a bind from below it, and in no other line.

    No name that a user chooses holds a space there: the kernel writes \\040.
    """
    root = origin.root
    for sign in "\\ \t\n":  # what show_mountinfo() escapes, first what escapes
        root = root.replace(sign, f"\\{ord(sign):03o}")
    return os.fsencode(f" {origin.device} {root}")


def list_binds_of_origin(
    mounts: list[MountInfo], origin: BindOrigin
) -> list[tuple[MountInfo, str]]:
    """Pure: binds of files below `origin`, wherever mounted, each with its path inside it.

    They are known by device and by path inside the file system, so no other program's mounts and no
    file that a user made can look like ours. A deleted file's path ends in `//deleted`.
    """
    return [
        (m, m.root[len(origin.root) :])
        for m in mounts
        if m.device == origin.device and m.root.startswith(origin.root)
    ]


def list_binds_of_directory(mounts: list[MountInfo], directory: str) -> list[tuple[MountInfo, str]]:
    """Pure: as `list_binds_of_origin`, of a directory in the same mount table."""
    found = find_bind_origin(mounts, directory)
    return list_binds_of_origin(mounts, found) if found else []


def find_hidden_path(here: list[MountInfo], there: list[MountInfo], hides: MountInfo) -> str:
    """Pure: the path `here` of what a mount hides in another namespace, `there`; "" for none."""
    under = next((mount for mount in there if mount.id == hides.parent), None)
    if under is None or not is_below(hides.point, under.point):
        return ""
    inside = under.root.rstrip("/") + hides.point[len(under.point.rstrip("/")) :]
    holding = [m for m in here if m.device == under.device and is_below(inside, m.root)]
    # The very mount first: another of that file system may have other flags, or be root's alone.
    holding.sort(key=lambda m: (m.root, m.point) != (under.root, under.point))
    if not holding:
        return ""
    return holding[0].point.rstrip("/") + inside[len(holding[0].root.rstrip("/")) :]


def find_covering_fuse(mounts: list[MountInfo], hidden: MountInfo) -> MountInfo | None:
    """Pure: a user's FUSE that was mounted over a directory above `hidden`; the outermost of them.

    The walk to `hidden` leads into it, though `hidden` does not lie on it.
    """
    by_id = {mount.id: mount for mount in mounts}
    found: MountInfo | None = None
    at: MountInfo | None = hidden
    # On the way: each mount's own point must be met, and nothing over it.
    over = [m for m in mounts if m.parent == hidden.id and m.point == hidden.point]
    while at is not None:
        parent = by_id.get(at.parent)
        over += [m for m in mounts if m.parent == at.parent and m.id != at.id]
        over = [m for m in over if m.fuse_owner_uid and is_below(at.point, m.point)]
        found = min(over, key=lambda m: len(m.point), default=found)
        over, at = [], parent if parent is not at else None
    return found


def is_below(path: str, point: str) -> bool:
    """Pure: whether a path is `point` or lies below it."""
    return path == point or path.startswith(point.rstrip("/") + "/")


def find_mount_of_descriptor(fd: int) -> MountInfo | None:
    """The mount that an open descriptor lies on; None where that is not seen. Raises OSError."""
    number = read_mount_id(fd)
    return next((mount for mount in list_mounts() if mount.id == number), None)


def unmount_if_same(bind: MountInfo, fd: int, proc: str = "/proc") -> bool:
    """Takes off the mount that the descriptor `fd` lies on, if that is `bind`. Raises OSError.

    Job owners may rename and link around their files, so the path was opened first, and must have
    led to the mount that was meant. `proc`: where the node's procfs is reached.
    """
    if read_mount_id(fd, proc) != bind.id:
        return False
    umount(f"{proc}/self/fd/{fd}")
    return True


def find_cluster_wide_name(fd: int) -> str:
    """The file system of an open file, and where in it its mount begins, as every node names it.

    "" for a disk of this node: that another node's has the same name says nothing. Raises OSError.
    """
    if os.major(os.fstat(fd).st_dev):
        return ""
    found = find_mount_of_descriptor(fd)
    return f"{found.kind} {found.source} {found.root}" if found else ""


def read_mount_id(fd: int, proc: str = "/proc") -> int:
    """The id, as in mountinfo, of the mount that an open descriptor lies on."""
    for line in Path(f"{proc}/self/fdinfo/{fd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "mnt_id":
            return int(value)
    raise OSError(f"no mnt_id for descriptor {fd}")


def is_on_user_mount(
    fd: int,
    path: str,
    services: Mapping[str, str] | None = None,
    table: list[MountInfo] | None = None,
) -> bool:
    """Whether an open file, of this resolved path, lies on a mount that a user has made.

    Such a mount gives other users' names to what its user likes, and a file system of theirs says
    what inode, times and owner it likes. A link of /proc leads into a mount namespace of theirs; in
    this one it is a FUSE, see `find_user_fuse`. Without `services` that counts for none: who only
    looks has to find what is served to its own user alone. `table` is what `list_mounts` said after
    the file was opened: an earlier one may lack the mount that the file lies on. Raises OSError.
    """
    listed, number = list_mounts() if table is None else table, read_mount_id(fd)
    if any(mount.id == number for mount in listed):
        return services is not None and find_user_fuse(listed, number, services) is not None
    # mountinfo lacks the mount of a chroot's root. Else no file server is asked for a walk.
    with open_descriptor(path, os.O_PATH | os.O_NOFOLLOW) as found:
        return read_mount_id(found) != number


def find_user_fuse(
    mounts: list[MountInfo], number: int, services: Mapping[str, str]
) -> MountInfo | None:
    """Pure: the FUSE of a user that the mount of this id is, or lies on, however far above.

    Not one of the `services`: mount points, each with the type and the uid of what is mounted there
    for all, such as "fuse.juicefs 994".
    """
    by_id = {mount.id: mount for mount in mounts}
    at = by_id.get(number)
    while at is not None:
        if at.fuse_owner_uid and services.get(at.point) != f"{at.kind} {at.fuse_owner_uid}":
            return at
        parent = by_id.get(at.parent)
        at = parent if parent is not at else None
    return None


def _unescape_octal(text: str) -> str:
    """Undoes mountinfo's octal escapes (space, tab, newline, backslash)."""
    if "\\" not in text:
        return text
    parts = text.split("\\")
    return parts[0] + "".join(chr(int(part[:3], 8)) + part[3:] for part in parts[1:])
