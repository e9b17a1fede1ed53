"""`stage=FILE.sqsh@/mount/point`: a squashfs file, mounted in the job's steps before pyxis works.

Where it may show is decided here, what mounts it is in features/data/squashfs_server.py. The mount
is seen by the
step's tasks only. But set-user-ID programs that they start see it too, and believe what lies in a
directory of root's: so users mount over what they may write to anyway (the rule of fusermount), or
below the admin's `data.mount_roots`, and never over or below the system's directories.
"""

import os
import socket
import stat
from collections.abc import Sequence

import msgspec

from forestage.bind import origins
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage, declined_by_open_error
from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.events import WHOLE_RESULTS, RequestOutcome
from forestage.features.data import squashfs_server
from forestage.features.data.data_view import StepView, ViewContext
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import LineFields
from forestage.sources import opening
from forestage.system import as_user
from forestage.system.mounts import is_below
from forestage.units import is_utf8, make_printable

SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr", "/var/cache", "/var/lib", "/var/log", "/var/run", "/var/spool"),
)
"""Whatever the admin has in `mount_roots`."""

INSPECT_TIMEOUT = 5.0  # seconds for a look at the mount point


class JobMountPoint(msgspec.Struct, frozen=True):
    """A mount point, without links on its way. `inode` is 0 where it is to be made.

    That is done in a tmpfs over `root`, in each task's own namespace.
    """

    path: str
    inode: int
    root: str = ""

    def format_lines(self, server: str) -> list[LineFields]:
        """Pure: what the companion does to show there what a server holds."""
        if self.inode:
            return [("served", server, self.path, str(self.inode))]
        inside = self.path[len(self.root) + 1 :]
        return [("folder", inside, self.root, "root"), ("served", server, self.path, "root")]


class _MountPointFacts(msgspec.Struct, frozen=True):
    """What the user finds at a mount point: as bytes, since names need not be text."""

    path: bytes
    needed: tuple[bytes, ...]
    roots: tuple[bytes, ...]
    inode: int = 0
    theirs: bool = False
    room: bool = False
    """Whether the root above a missing one is empty, and root's own."""


def start_in_prolog(call: ViewContext, request: Request) -> RequestOutcome:
    """Has the file copied, for the Prolog, unless it will not be mounted: the step looks closer."""
    check_mount_allowed(request.at, ())
    return call.stage(request, call.end).outcome


def show_in_step(call: ViewContext, request: Request) -> StepView:
    """Has the file served for this step; returns what the companion is to mount.

    Raises Declined, Failed, OSError.
    """
    node, job, end = call.node, call.job, call.scan_deadline()
    place = _resolve_mount_point(node, job, request.at, end)
    try:
        call.check_not_bound(place.path)
    except Declined as why:  # of an image nobody needs to hear it, as its path shows the same bytes
        raise Declined("no-mount", f"{place.path}: {why}") from None
    staged = call.stage(request, end)
    found = staged.image
    is_here = found is not None and staged.outcome.result in WHOLE_RESULTS
    with squashfs_server.SquashfsSource() as content:
        if found is not None and staged.keeper_socket is not None:
            content.keeper_socket = staged.keeper_socket
        elif found is not None and is_here:
            content.entry_path = node.cache.image_path(found.key)
        else:
            found, content.descriptor_socket = _open_as_user(node, job, request.path, end)
        name = squashfs_server.start_server(
            node.places.served_sockets, job, found.identity.inode, content
        )
    outcome = msgspec.structs.replace(
        staged.outcome,
        request=make_printable(f"{request.path}@{request.at}"),
        redirect="none" if content.descriptor_socket else "spank",
    )
    return place.format_lines(str(name)), outcome


def _open_as_user(
    node: Node, job: Job, path: str, end: Deadline
) -> tuple[SourceImage, socket.socket]:
    """The user's own file, opened as them beneath our redirects."""
    known = origins.read_known_caches(node.cache)
    try:
        facts, line = opening.open_as_user(
            path, job.user, ("/",), known, min(opening.HOOK_TIMEOUT, end.seconds_left())
        )
    except OSError as error:
        raise declined_by_open_error(error, path, job.user) from None
    if facts.image is None:
        line.close()
        raise Declined("not-a-file", f"{make_printable(path)} is not a regular file")
    return facts.image, line


def _resolve_mount_point(node: Node, job: Job, at: str, end: Deadline) -> JobMountPoint:
    """Where the mount point `at` leads, looked at as the job's user. Raises Declined, OSError."""
    roots = node.config.data.mount_roots
    known = [name for name in (job.work_dir, job.home) if name.startswith("/")]

    def look() -> as_user.ChildResult[_MountPointFacts]:
        as_user.set_effective_user(job.user)
        resolved = os.path.realpath(at)
        above = tuple(map(os.path.realpath, roots))
        seen = _MountPointFacts(
            os.fsencode(resolved),
            tuple(os.fsencode(os.path.realpath(name)) for name in known),
            tuple(map(os.fsencode, above)),
        )
        try:
            fd = os.open(resolved, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return msgspec.structs.replace(
                seen, room=_can_hold_mount_points(_find_mount_root(resolved, above))
            ), []
        facts = os.fstat(fd)
        theirs = os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)
        # As fusermount has it: of a directory that all may write to, theirs is what they made.
        theirs = theirs and (facts.st_uid == job.user.uid or not facts.st_mode & stat.S_ISVTX)
        os.close(fd)
        return msgspec.structs.replace(seen, inode=facts.st_ino, theirs=theirs), []

    check_mount_allowed(os.path.normpath(at), ())
    try:
        seen = as_user.run_in_child(
            look, _MountPointFacts, min(INSPECT_TIMEOUT, end.seconds_left())
        )[0]
    except OSError as error:
        raise Declined(
            "no-mount", f"{make_printable(at)}: {os.strerror(error.errno or 0)}"
        ) from None
    path, above = os.fsdecode(seen.path), tuple(map(os.fsdecode, seen.roots))
    check_mount_allowed(path, (*map(os.fsdecode, seen.needed), node.cache.real_root))
    root = _find_mount_root(path, above)
    if seen.inode:
        if not (seen.theirs or root):
            raise Declined(
                "no-mount",
                f"{path}: this user cannot write to the directory",
                "a directory of their own can be mounted over, and what is below `mount_roots:`",
            )
        return JobMountPoint(path, seen.inode)
    if not root:
        raise Declined("no-mount", f"{path} does not exist", "the admin can set `mount_roots:`")
    if not seen.room:
        raise Declined(
            "no-mount", f"{path} does not exist, and {root} is no empty directory of root's"
        )
    return JobMountPoint(path, 0, root)


def check_mount_allowed(path: str, needed: Sequence[str]) -> None:
    """Pure: raises Declined where no job may mount at the resolved `path`.

    `needed` are resolved directories that a step must go on seeing.
    """
    if not path.startswith("/") or any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise Declined("no-mount", f"{make_printable(path)} is no absolute path")
    if not is_utf8(path):
        raise Declined("no-mount", f"{make_printable(path)} is not UTF-8")
    for directory in SYSTEM:
        if is_below(path, directory) or is_below(directory, path):
            raise Declined("no-mount", f"{path}: nothing may be mounted over {directory}")
    for directory in needed:
        if is_below(directory, path):
            raise Declined("no-mount", f"{path} would hide {make_printable(directory)}")


def _find_mount_root(path: str, roots: Sequence[str]) -> str:
    """Pure: the directory of `mount_roots` that a path lies below; "" for none."""
    return next((root for root in roots if root != path and is_below(path, root)), "")


def _can_hold_mount_points(root: str) -> bool:
    """Whether a tmpfs may lie over this directory, with mount points in it: it would hide all."""
    if not root:
        return False
    facts = os.stat(root)  # noqa: PTH116
    return facts.st_uid == 0 and not facts.st_mode & 0o022 and not os.listdir(root)  # noqa: PTH208
