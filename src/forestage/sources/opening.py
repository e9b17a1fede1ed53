"""Opens a source as the user it is for, in a child, and beneath our own binds.

Whatever asks the file server is asked with that user's ids: root may be squashed there, and a dead
file server must hang the child only. A server that has hung is asked by one process of the node.
"""

import contextlib
import errno
import functools
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from forestage import trace
from forestage.bind import origins, redirect
from forestage.bind.origins import KnownCaches
from forestage.cache import part, source_image
from forestage.cache.layout import Cache, open_copy
from forestage.cache.node import Node
from forestage.cache.source_image import AccessRights, PathFacts, SourceImage
from forestage.clock import Deadline
from forestage.config import ANYWHERE
from forestage.paths import NodePaths
from forestage.sources.source import OpenImage
from forestage.system import as_user, files, mounts, probe, writers
from forestage.system.as_user import User
from forestage.units import format_duration, is_utf8

OPEN_TRIES = 8  # one more for each redirect of ours that lies over the path
HOOK_TIMEOUT = 15.0  # seconds; no copy takes part in it, so a file server that needs longer hangs
SERVER = "source-"  # begins the name of a file that tells whether a server hangs


def open_as_user(
    path: str,
    user: User,
    sources: Iterable[str],
    caches: KnownCaches | None,
    timeout: float,
    read_copy_head: Callable[[SourceImage], bytes] | None = None,
    services: Mapping[str, str] | None = None,
    is_not_in_cache: Callable[[SourceImage], bool] | None = None,
) -> tuple[PathFacts, socket.socket]:
    """Opens `path` as the user, binds from `caches` out of sight; with None, what shows.

    Of users' FUSE mounts those count that are `services` (mounts.find_user_fuse), below `/` all.
    With `read_copy_head` all is wanted that `PathFacts` may say. It returns the first bytes of the
    image's copy on this node, or b"" where there is none: a hit reads nothing of the source, unless
    its copy is no squashfs, as it may be damaged. `is_not_in_cache`: of which images the first
    bytes are wanted, where nothing else is.
    The source waits in the line, if `PathFacts.image` is there; the caller closes the line, or
    takes it. Raises OSError as the user would get it; as_user.ChildTimeout.
    """

    def work() -> as_user.ChildResult[PathFacts]:
        is_private = is_covered = False
        for _ in range(OPEN_TRIES):
            trace.reach_point("looking")
            try:
                with as_user.with_effective_user(user):
                    found, fds = _open_and_inspect(path, tuple(sources), caches, services or {})
                # What this process has taken off for itself is on the node still.
                found = msgspec.structs.replace(found, is_bound=found.is_bound or is_covered)
                if read_copy_head is not None and found.image is not None:
                    head = read_copy_head(found.image)
                    head = head if source_image.is_squashfs(head) else _read_head(fds[0], user)
                    found = msgspec.structs.replace(
                        found,
                        head=head,
                        is_listable=_can_list_directory(found.path, user),
                        has_writer=writers.has_writer(fds[0], found.path),
                    )
                elif (
                    is_not_in_cache is not None
                    and found.image is not None
                    and is_not_in_cache(found.image)
                ):
                    found = msgspec.structs.replace(found, head=_read_head(fds[0], user))
                return found, fds
            except _CoveredByRedirect as covered:
                # Our own redirect. Off with it, in a mount namespace of this process' own; the
                # host's table stays. A descriptor from before is of the old namespace.
                is_covered = True
                if covered.handle is None:
                    continue
                if is_private:
                    mounts.umount(f"/proc/self/fd/{covered.handle}")
                else:
                    mounts.enter_private_namespace()
                    is_private = True
        raise OSError(errno.EBUSY, "redirects come and go", path)

    return as_user.run_in_child_with_socket(work, PathFacts, timeout)


def open_descriptor_as_user(
    path: str, user: User, sources: Iterable[str], caches: KnownCaches | None, timeout: float
) -> tuple[PathFacts, int | None]:
    """As `open_as_user`, with the source as a descriptor, if there is one; the caller closes it."""
    found, line = open_as_user(path, user, sources, caches, timeout)
    fds = as_user.receive_descriptors(line)
    return found, fds[0] if fds else None


def _open_and_inspect(
    path: str, sources: tuple[str, ...], caches: KnownCaches | None, services: Mapping[str, str]
) -> as_user.ChildResult[PathFacts]:
    # O_PATH first: opening a FIFO would block and opening a device may do something.
    handle = os.open(path, os.O_PATH)
    # Once the path is open, as a table from before may lack a bind that it led to: then its bytes
    # would pass for the source's. One reading tells all: the mount of an open file never changes.
    table = mounts.list_mounts() if caches else []
    binds = caches.list_binds(table) if caches else []
    number = mounts.read_mount_id(handle) if binds else None
    if any(bind.mount.id == number for bind in binds):
        raise _CoveredByRedirect(handle)
    seen = os.fstat(handle)
    mode = seen.st_mode
    resolved = os.readlink(f"/proc/self/fd/{handle}")
    if resolved == "/" and not stat.S_ISDIR(mode):
        # A redirect, unmounted since it was opened: so reads the path of a file without its mount.
        raise _CoveredByRedirect(None)
    if not is_utf8(resolved):
        return PathFacts("", sources, mode, is_bound=bool(binds)), []
    only_looks = sources == ANYWHERE
    sources = _resolve_sources(sources, resolved)
    if caches and mounts.is_on_user_mount(
        handle, resolved, None if only_looks else services, table
    ):
        return PathFacts("", sources, mode, is_bound=bool(binds)), []
    found = PathFacts(resolved, sources, mode, is_bound=bool(binds))
    if not (stat.S_ISREG(mode) and source_image.is_below_any(resolved, sources)):
        return found, []
    # Through the handle, so that it is the same file whatever the path has become.
    source = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NOCTTY)
    facts = files.read_fresh_stat(source, seen.st_dev)
    # Some file systems count no names: then the path itself shows whether it leads there.
    if facts.st_nlink == 0 and not _is_same_file(path, facts):
        return found, []
    access = AccessRights(
        facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode), source_image.read_acl(source)
    )
    found_image = SourceImage(source_image.identity_from_stat(facts, resolved), access)
    return msgspec.structs.replace(found, image=found_image), [source]


def _is_same_file(path: str, facts: os.stat_result | files.Statx) -> bool:
    """Whether the path leads to this very file now."""
    try:
        there = os.stat(path)  # noqa: PTH116
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (facts.st_dev, facts.st_ino)


class _CoveredByRedirect(Exception):
    """A redirect of ours covers the path; `handle` is open on it, None if unmounted since."""

    def __init__(self, handle: int | None) -> None:
        super().__init__()
        self.handle = handle


def _read_head(fd: int, user: User) -> bytes:
    """The first bytes of an open source, as the user; fewer than HEAD if it has no more.

    Called once its identity is known: what is written in between makes another identity.
    """
    data = b""
    with as_user.with_effective_user(user):
        while len(data) < source_image.HEAD:
            piece = os.pread(fd, source_image.HEAD - len(data), len(data))
            if not piece:
                break
            data += piece
    return data


def _can_list_directory(path: str, user: User) -> bool:
    """Whether the user can list the directory of a file."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        with as_user.with_effective_user(user):
            os.close(os.open(Path(path).parent, flags))
    except OSError:
        return False
    return True


def _resolve_sources(sources: tuple[str, ...], path: str) -> tuple[str, ...]:
    """The sources without links: one above the resolved `path` has none, others may hang."""
    named = tuple(source for source in sources if source_image.is_below_any(path, (source,)))
    return named or tuple(map(as_user.resolve_links, sources))


def resolve_save_path(path: str, user: User, timeout: float) -> tuple[str, bool]:
    """Where a path leads for this user, who may write there or not; it need not exist.

    Raises ChildTimeout, OSError.
    """

    def work() -> as_user.ChildResult[tuple[bytes, bool]]:
        as_user.set_effective_user(user)
        found = os.path.realpath(path)
        may = os.access(os.path.dirname(found), os.W_OK, effective_ids=True)  # noqa: PTH120
        with contextlib.suppress(OSError):
            # Of a file that is there a redirect shows owner and mode, and says EROFS to access(2).
            facts = os.stat(found)  # noqa: PTH116
            may = may or (facts.st_uid == user.uid and bool(facts.st_mode & 0o200))
        # As bytes: a name need not be text, and JSON takes no other.
        return (os.fsencode(found), may), []

    found, may = as_user.run_in_child(work, tuple[bytes, bool], timeout)[0]
    return os.fsdecode(found), may


@contextlib.contextmanager
def open_image_for_hook(user: User, path: str, node: Node, end: Deadline) -> Iterator[OpenImage]:
    """Opens the image at `path` as the job's user, under our own binds, for a hook.

    Binds of ours that show something else than what lies there are unmounted first: even a job that
    is declined next must not read outdated bytes. Raises Declined, Failed, OSError.
    """
    caches = origins.read_known_caches(node.cache)
    limit = min(HOOK_TIMEOUT, end.seconds_left())
    binds = node.config.redirect == "bind"
    head = functools.partial(_read_copy_head, node.cache) if binds else None
    sources, services = node.config.staged_from, node.config.user_mounts
    # Where a step's user can be told, and reads the same bytes next.
    of_steps = node.config.redirect == "spank"
    is_new = functools.partial(_is_not_in_cache, node.cache) if of_steps else None
    _check_server_answers(node.places, path)
    try:
        found, line = open_as_user(
            path,
            user,
            sources,
            caches,
            limit,
            head,
            services,
            is_new,
        )
    except as_user.ChildTimeout:
        start_server_probe(node.places, path)
        raise
    except OSError as error:
        # What this user may not see, no bind may show: an older copy may be more generous. But a
        # bind that refuses them as well stays: it is another user's, and it is right.
        if redirect.list_binds(node.cache) and (shown := _find_visible_path(user, path, node, end)):
            # So ends the name of an entry that was evicted while a redirect still shows it.
            names = frozenset((path, shown, shown.removesuffix(" (deleted)")))
            redirect.unmount_stale_binds(node.cache, names, "", user, end)
        raise source_image.declined_by_open_error(error, path, user) from None
    with contextlib.closing(line):
        # Looked for anew where the node has any: what was seen may be gone or going by now.
        if found.is_bound:
            key = found.image.key if found.image else ""
            redirect.unmount_stale_binds(node.cache, frozenset((path, found.path)), key, user, end)
        judged = source_image.check_image(found, node.config.max_image_size)
        part.check_chunk_count(judged, node.config.chunk_bytes_for(judged.size))
        if binds:
            source_image.check_node_redirect(found)
        source_image.check_not_truncated(found)
        yield OpenImage(judged, user, -1, line)


class _FileServer(msgspec.Struct, frozen=True):
    """Who answers for a path: the mount that it lies on, and where a probe of that is noted."""

    point: str
    file: Path

    def probe(self, at: Callable[[str], None]) -> None:
        at("server")
        os.statvfs(self.point)  # stat(2) may be answered by a cache


def start_server_probe(places: NodePaths, path: str) -> None:
    """Has one process ask the server of a path that hung: who comes next need not wait as well."""
    if server := _find_file_server(places, path):
        probe.start_probe(server.file, server.probe)


def find_server_hang(places: NodePaths, path: str) -> str:
    """What is known of a path's server that has hung before, and has not answered since, or ""."""
    if not any(places.probes.glob(f"{SERVER}*")):  # as on nearly all nodes
        return ""
    server = _find_file_server(places, path)
    hang = probe.find_known_hang(server.file) if server else None
    return f"{server.point} has hung for {format_duration(hang.seconds)}" if server and hang else ""


def _find_file_server(places: NodePaths, path: str) -> _FileServer | None:
    """The server of a path, as it is written; None for a user's own file system.

    That one may hang as its user likes, and is not asked by root.
    """
    plain = os.path.normpath(path)
    # A redirect of ours has the path itself as its mount point.
    under = mounts.find_mount_of_path(
        [mount for mount in mounts.list_mounts() if mount.point != plain], plain
    )
    if under is None or under.fuse_owner_uid:
        return None
    name = f"{SERVER}{under.device.replace(':', '-')}"
    return _FileServer(under.point, places.probes / name)


def _check_server_answers(places: NodePaths, path: str) -> None:
    """Raise ChildTimeout at once if the path's server has hung before and not answered since.

    One process of the node asks it (system/probe.py), and its end is the news.
    """
    if hang := find_server_hang(places, path):
        raise as_user.ChildTimeout(hang)


def _is_not_in_cache(cache: Cache, wanted: SourceImage) -> bool:
    """Whether nothing is here of an image: a hit reads nothing of its source."""
    with contextlib.suppress(OSError):
        return cache.find_entry(wanted) is None
    return False


def _read_copy_head(cache: Cache, wanted: SourceImage) -> bytes:
    """Returns the first bytes of the image's entry; b"" if there is none that can be read."""
    try:
        if cache.find_entry(wanted) is None:
            return b""
        with open_copy(cache.image_path(wanted.key)) as copy:
            return copy.read(source_image.SUPERBLOCK)
    except OSError:
        return b""


def _find_visible_path(user: User, path: str, node: Node, end: Deadline) -> str:
    """Returns what the user opens by this path as it is now, redirects and all; "" for nothing."""
    limit = min(HOOK_TIMEOUT, end.seconds_left())
    try:
        found, line = open_as_user(path, user, node.config.staged_from, None, limit)
    except OSError:
        return ""
    line.close()
    return found.path
