"""What a directory holds, as its user sees it: the identity of a tree, and what is copied of it.

All file access is the user's (features/data/user_threads), while the process stays root's. Nothing
is
followed out of the directory; a name may be any bytes.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import random
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

import msgspec

from forestage.cache import source_image
from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.features.data.user_threads import UserThreadPool, map_as_user
from forestage.system import file_systems, mounts
from forestage.system.as_user import User
from forestage.system.file_systems import is_probably_sparse
from forestage.system.files import Statx, open_descriptor, read_fresh_stat
from forestage.units import is_utf8, make_printable

LAYOUT_VERSION = (
    b"1"  # changes with what features/data/erofs.py makes of a manifest: peers give parts of it
)
NAMES_PER_TURN = 64  # names of one turn: some FUSE let only one thread into a directory at a time
_NAME_MAX, _PATH_MAX = 255, 4096  # limits.h
MAX_NAMES_TOLD = 10  # names that cannot be copied which are told, of all
NAMED_CHARACTERS = 160  # of each, with why not
SAMPLE = 64  # files that a node looks at which has another node's manifest
MOST_ACLS = 64 * 1024 * 1024  # bytes of all of them
MOST_ACL = 65536 - 64  # bytes of one: what an inode of EROFS has room for
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
NAME_BYTES = 256  # of a file's path and link, on average; root's memory holds all of them

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_FACCESSAT2, _AT_EACCESS, _R_OK, _X_OK = 439, 0x200, 4, 1  # the same on every architecture


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
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


class DirectoryManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A directory at its resolved `path`, and all below it, sorted by path.

    `sparse` are the numbers of the files that have no blocks on their disk for some of their bytes.
    `links` are further names of one inode: the number of the name, and that of its first name.
    """

    path: str
    files: tuple[ManifestEntry, ...]
    sparse: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()

    @property
    def digest(self) -> str:
        """64 hex digits: whoever sees the same, sees the same bytes with the same rights.

        Blocks do not count: a disk gives and takes them when it likes.
        """
        counted = msgspec.structs.replace(self, sparse=())
        return hashlib.sha256(LAYOUT_VERSION + msgspec.msgpack.encode(counted)).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Of all its files; those of an inode once, whatever names it has."""
        again = sum(self.files[number].size for number, _ in self.links)
        return sum(file.size for file in self.files if file.is_file) - again

    @property
    def names_by_inode(self) -> dict[int, list[int]]:
        """The numbers of all names of an inode, by that of the first, where it has several."""
        found: dict[int, list[int]] = {}
        for number, first in self.links:
            found.setdefault(first, [first]).append(number)
        return found

    @property
    def newest_ns(self) -> int:
        """When anything of it changed last."""
        return max(max(file.mtime_ns, file.ctime_ns) for file in self.files)


def open_root(path: str, user: User) -> tuple[int, str]:
    """The directory, opened as the user, and its resolved path. Raises Declined."""
    (found,) = map_as_user(user, [path], functools.partial(_open_root_as_user, user))
    return found


def _open_root_as_user(user: User, path: str) -> tuple[int, str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except NotADirectoryError:
        raise Declined(
            "not-a-directory", f"{path} is not a directory", "write a file without the slash"
        ) from None
    except OSError as error:
        raise source_image.declined_by_open_error(error, path, user) from None
    resolved = os.readlink(f"/proc/self/fd/{fd}")
    if not is_utf8(resolved):
        raise Declined("bad-path", "the path resolves to a name that is not UTF-8")
    # A link of /proc leads where the user may not go by name, or into a namespace of their own: the
    # directory may be the same, and what is mounted in it another.
    try:
        is_there = os.path.samestat(os.fstat(fd), os.stat(resolved))  # noqa: PTH116
        is_there = is_there and not mounts.is_on_user_mount(fd, resolved)
    except OSError as error:
        raise source_image.declined_by_open_error(error, resolved, user) from None
    if not is_there:
        raise Declined("bad-path", f"{path} does not lead to {resolved} as this node sees it")
    return fd, resolved


def scan_directory(
    root: int, path: str, user: User, max_files: int, end: Deadline | None = None
) -> DirectoryManifest:
    """Looks at all below the open directory, until `end` at most. Raises Declined.

    The caller's process has the user's groups. Each directory is asked for before it is listed, and
    its names after that: else NFS says of all of them what it knew a while ago.
    """
    disk = os.fstat(root).st_dev
    try:
        found = [_stat_root(root, disk, user)]
    except OSError as error:
        raise source_image.declined_by_open_error(error, make_printable(path), user) from None
    bound = _ScanLimits(path, max_files, user)

    def look(todo: _ScanTask) -> list[_ScanTask]:
        if end is not None and not end.seconds_left():  # a source that hangs never comes here
            raise make_too_slow_error(path, f"more than {bound.files} files")
        try:
            files, more = _run_scan_task(root, todo, disk, user, bound)
        except OSError as error:
            raise _make_error_below(error, path, todo.directory, user) from None
        found.extend(files)
        return [*more, *(_ScanTask(file.path) for file in files if file.is_dir)]

    UserThreadPool(user).process_with_more([_ScanTask(b"")], look)
    bound.check_none_refused()
    found.sort(key=lambda file: file.path)
    sparse = tuple(number for number, file in enumerate(found) if file.path in bound.sparse)
    return DirectoryManifest(
        path, tuple(found), sparse, _find_links(root, found, bound.linked, user)
    )


def _find_links(
    root: int, files: Sequence[ManifestEntry], linked: Set[bytes], user: User
) -> tuple[tuple[int, int], ...]:
    """Return which names are one inode, as `DirectoryManifest.links` has it; `linked` have several.

    The copy has the bytes of the first name for all of them, so a mistake would be wrong bytes.
    Two names are one file only if

    - the file system is one whose inode numbers are believed (system/file_systems). All files of a
      tree lie on one, or it is declined;
    - both have further names by st_nlink, and the same inode number, size, mode, owner, mtime and
      ctime: these are an inode's own, so whichever name they are taken from, they are right;
    - their handles are equal. A new file that gets a number which has just become free has another
      generation in its handle; on NFS the server's own handles are compared.

    Names for which any of this is not so keep bytes of their own, which costs space and is never
    wrong. Only the structure is noted, as st_dev is a number of this node. A name that is linked to
    another file later changes that file's ctime, and so the tree's digest.
    """
    if not linked or not file_systems.is_inode_number_true(root):
        return ()
    same: dict[ManifestEntry, list[int]] = {}
    for number, file in enumerate(files):
        if file.path in linked:
            same.setdefault(msgspec.structs.replace(file, path=b""), []).append(number)
    several = [number for numbers in same.values() if len(numbers) > 1 for number in numbers]

    def read(numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        found = []
        for number in numbers:
            with contextlib.suppress(OSError):  # it is gone: a further look finds a change
                if handle := file_systems.read_file_handle(files[number].path, root):
                    found.append((number, handle))
        return found

    # In one thread: the kernel has just seen these names, and asks no server for a handle.
    (pairs,) = map_as_user(user, [several], read)
    known = dict(pairs)
    first: dict[tuple[ManifestEntry, bytes], int] = {}
    links = []
    for facts, numbers in same.items():
        for number in numbers:
            if number in known and first.setdefault((facts, known[number]), number) != number:
                links.append((number, first[facts, known[number]]))
    return tuple(sorted(links))


def check_manifest(found: DirectoryManifest, acls: Mapping[bytes, bytes], max_files: int) -> None:
    """Pure: raises Declined for what no look finds.

    Of another node's manifest root makes what the kernel parses: nothing in it is believed.
    """
    kinds: dict[bytes, int] = {}
    before = b""
    for file in found.files:
        above, _, name = file.path.rpartition(b"/")
        kind = stat.S_IFMT(file.mode)
        placed = file.path > before and kinds.get(above) == stat.S_IFDIR if kinds else not file.path
        named = not kinds or (len(name) <= _NAME_MAX and name not in (b"", b".", b".."))
        linked = 0 < len(file.link) < _PATH_MAX if kind == stat.S_IFLNK else not file.link
        fits = (
            0 <= file.mode < 1 << 16
            and 0 <= file.uid < 1 << 32
            and 0 <= file.gid < 1 << 32
            and 0 <= file.size < (1 << 63 if file.is_file else 1)
            and 0 <= file.inode < 1 << 64
            and abs(file.mtime_ns) < 1 << 63
            and abs(file.ctime_ns) < 1 << 63
        )
        known = kind in (stat.S_IFREG, stat.S_IFLNK) or kind == stat.S_IFDIR
        if not (placed and named and linked and fits and known) or b"\0" in file.path + file.link:
            raise Declined("bad-look", f"another node's manifest has {file.path!r} in it")
        kinds[file.path] = kind
        before = file.path
    names = sum(len(file.path) + len(file.link) for file in found.files)
    if not 0 < len(found.files) <= max_files or names > max_files * NAME_BYTES:
        raise Declined("bad-look", "another node's manifest has too many files")
    if not _are_valid_links(found, acls):
        raise Declined("bad-look", "another node's manifest has names of one file that are not")
    numbers = found.sparse
    if sorted(set(numbers)) != list(numbers) or not all(
        _is_file_number(found, at) for at in numbers
    ):
        raise Declined("bad-look", "another node's manifest has holes in what is no file")
    for path, acl in acls.items():
        if kinds.get(path, stat.S_IFLNK) == stat.S_IFLNK or not _is_acl(acl):
            raise Declined("bad-look", f"another node's manifest has an ACL of {path!r}")


def _are_valid_links(found: DirectoryManifest, acls: Mapping[bytes, bytes]) -> bool:
    """Return whether each further name comes after its first one and is as that is. Pure."""
    files, numbers = found.files, [number for number, _ in found.links]
    further = set(numbers)
    return sorted(further) == numbers and all(
        0 <= first < number < len(files)
        and first not in further
        and files[number].is_file
        and msgspec.structs.replace(files[number], path=files[first].path) == files[first]
        and acls.get(files[number].path) == acls.get(files[first].path)
        for number, first in found.links
    )


def _is_file_number(found: DirectoryManifest, number: int) -> bool:
    return 0 <= number < len(found.files) and found.files[number].is_file


def _is_acl(acl: bytes) -> bool:
    """Whether it has an ACL's form (linux/posix_acl_xattr.h): version 2, and whole entries."""
    return 4 < len(acl) <= MOST_ACL and len(acl) % 8 == 4 and acl[:4] == b"\2\0\0\0"


def sample_files(found: DirectoryManifest) -> list[ManifestEntry]:
    """Some files that nobody could have foreseen, and the directory itself."""
    rest = found.files[1:]
    drawn = random.SystemRandom().sample(rest, min(len(rest), SAMPLE))
    return [found.files[0], *drawn]


def _stat_root(root: int, disk: int, user: User) -> ManifestEntry:
    """The directory itself, asked for as the user: its names count as of now. Raises OSError."""
    (found,) = map_as_user(user, [root], lambda fd: _make_entry(b"", read_fresh_stat(fd, disk)))
    return found


def are_files_unchanged(root: int, files: Sequence[ManifestEntry], user: User) -> bool:
    """Whether these are what they were, and this user may read them. Raises Declined, OSError."""
    disk = os.fstat(root).st_dev
    bound = _ScanLimits("", len(files), user)

    def is_same(file: ManifestEntry) -> bool:
        return _inspect_name(root, file.path, file.path, disk, user, bound) == file

    top = _stat_root(root, disk, user)
    if any(file != top for file in files if not file.path):
        return False
    return all(map_as_user(user, [file for file in files if file.path], is_same))


class _ScanTask(NamedTuple):
    """A directory to list, or `names` in it to look at."""

    directory: bytes
    names: tuple[bytes, ...] = ()


class _ScanLimits:
    """Counts files, and the bytes of their names and links, as they are listed.

    Notes the paths of those with fewer blocks than bytes, of those that have other names, and of
    those that cannot be copied.
    """

    def __init__(self, path: str, max_files: int, user: User) -> None:
        self.path, self.user = path, user
        self.files, self.max_files = 1, max_files
        self.room = max_files * NAME_BYTES
        self.sparse: set[bytes] = set()
        self.linked: set[bytes] = set()
        self.refused: list[tuple[bytes, Declined]] = []  # the first ones, by path
        self.refusals = 0
        self.lock = threading.Lock()

    def add_refused(self, path: bytes, error: Declined) -> None:
        """Note a name for which the tree cannot be copied."""
        with self.lock:
            self.refusals += 1
            self.refused = sorted([*self.refused, (path, error)], key=lambda one: one[0])[
                :MAX_NAMES_TOLD
            ]

    def check_none_refused(self) -> None:
        """Raise Declined for all names that cannot be copied: their user wants to mend them all."""
        if not self.refused:
            return
        reason, top = self.refused[0][1].reason, make_printable(self.path)
        named = [_shorten_start(error.what) for _, error in self.refused]
        who = f" (looked at as {self.user})" if reason == "no-permission" else ""
        if self.refusals == 1:
            hint = "move it away, or name a directory without it"
            raise Declined(reason, f"{top}: {named[0]}{who}", hint)
        more = self.refusals - len(named)
        listed = "; ".join([*named, *([f"and {more} more"] if more else [])])
        what = f"{top} holds {self.refusals} names that cannot be copied: {listed}{who}"
        raise Declined(reason, what, "move them away, or name a directory without them")

    def add_and_check(self, files: int, size: int) -> None:
        """Raises Declined for what would take too much of root's memory."""
        with self.lock:
            self.files += files
            self.room -= size
        if self.files > self.max_files:
            raise _make_too_many_error(self.path, f"has more than {self.max_files} files")
        if self.room < 0:
            raise _make_too_many_error(
                self.path, f"has names of more than {NAME_BYTES} bytes for each file"
            )


def _shorten_start(text: str) -> str:
    """Return the end of a sentence that begins with a path of any length. Pure."""
    short = text if len(text) <= NAMED_CHARACTERS else f"…{text[-NAMED_CHARACTERS:]}"
    return make_printable(short)


def make_too_slow_error(path: str, what: str) -> Declined:
    """Pure: there are more files than can be looked at in the time that there is."""
    hint = (
        "make one file of it: `forestage pack`, copy it once for the job: `stage=DIR/@job`, or have"
        " fewer files in it"
    )
    detail = f"{path} holds {what}, which takes longer to look at than a step has"
    return Declined("too-many-files", detail, hint)


def _make_too_many_error(path: str, what: str) -> Declined:
    hint = "make one of it: `forestage pack`, or the admin raises `data: max_files:`"
    return Declined("too-many-files", f"{path} {what}", hint)


def read_acls(root: int, manifest: DirectoryManifest, user: User) -> dict[bytes, bytes]:
    """The raw access ACLs of the files that have one, by path. Raises Declined.

    They are no part of the manifest, as a look at a file does not show them: who changes an ACL
    changes ctime.
    """
    lock = threading.Lock()
    all_bytes = 0

    def of(file: ManifestEntry) -> bytes | None:
        nonlocal all_bytes
        name = f"/proc/self/fd/{root}/{os.fsdecode(file.path)}"
        try:
            acl = os.getxattr(name, source_image.ACL, follow_symlinks=False)
        except OSError as error:
            # Not for all at once: of a union of file systems some may have ACLs.
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise _make_error_below(error, manifest.path, file.path, user) from None
            return None
        with lock:
            all_bytes += len(acl)
        if all_bytes > MOST_ACLS:
            raise Declined("acl", f"{manifest.path} has more than {MOST_ACLS} bytes of ACLs")
        return acl

    files = [file for file in manifest.files if not stat.S_ISLNK(file.mode)]
    found = zip(files, map_as_user(user, files, of), strict=True)
    return {file.path: acl for file, acl in found if acl is not None}


def _run_scan_task(
    root: int, todo: _ScanTask, disk: int, user: User, bound: _ScanLimits
) -> tuple[list[ManifestEntry], list[_ScanTask]]:
    """What is in one directory, or what is still to be looked at where there is much of it.

    One after the other, the files of one large directory would take as many round trips. Raises
    OSError, Declined.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    directory = todo.directory
    with open_descriptor(directory or b".", flags, dir_fd=root) as fd:
        some = [todo.names] if todo.names else list(_list_names(fd, len(directory) + 1, bound))
        if len(some) > 1:
            return [], [_ScanTask(directory, names) for names in some]
        names = some[0] if some else ()
        files = []
        for name in names:
            try:
                files.append(
                    _inspect_name(fd, os.path.join(directory, name), name, disk, user, bound)
                )
            except Declined as error:
                bound.add_refused(os.path.join(directory, name), error)
            except OSError as error:
                below = os.path.join(directory, name)
                raise _make_error_below(error, bound.path, below, user) from None
    bound.add_and_check(0, sum(len(file.link) for file in files))
    return files, []


def _make_error_below(error: OSError, path: str, name: bytes, user: User) -> Declined:
    """Return what an error of a name below the directory `path` means. Pure.

    A name was listed a moment ago, so one that is not there was removed since.
    """
    shown = make_printable(os.fsdecode(name))
    if name and error.errno in _GONE:
        what = (
            f"{make_printable(path)} changed while it was looked at: {shown} is not there any more"
        )
        return Declined("changed", what)
    return source_image.declined_by_open_error(
        error, os.path.join(make_printable(path), shown), user
    )


def _list_names(fd: int, above: int, bound: _ScanLimits) -> Iterator[tuple[bytes, ...]]:
    """The names in a directory, some at a time; `above` bytes go before each of them."""
    with os.scandir(fd) as listed:
        names = (os.fsencode(entry.name) for entry in listed)
        while some := tuple(islice(names, NAMES_PER_TURN)):
            bound.add_and_check(len(some), sum(above + len(name) for name in some))
            yield some


def _inspect_name(
    fd: int, path: bytes, name: bytes, disk: int, user: User, bound: _ScanLimits
) -> ManifestEntry:
    facts = read_fresh_stat(fd, disk, name)
    kind = stat.S_IFMT(facts.st_mode)
    shown = os.fsdecode(path)
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise Declined("odd-file", f"{shown} is neither a file, a directory nor a link")
    if facts.st_dev != disk:
        raise Declined("odd-file", f"{shown} is another file system")
    if kind == stat.S_IFLNK:
        return _make_entry(path, facts, os.readlink(name, dir_fd=fd))
    wanted = _R_OK if kind == stat.S_IFREG else _R_OK | _X_OK
    if not _owner_may(facts, wanted, user) and not _kernel_allows(fd, name, wanted):
        raise Declined("no-permission", f"{shown} is not readable by this user")
    if kind == stat.S_IFREG and is_probably_sparse(facts.st_size, facts.st_blocks):
        bound.sparse.add(path)
    if kind == stat.S_IFREG and facts.st_nlink > 1:
        bound.linked.add(path)
    return _make_entry(path, facts)


def _owner_may(facts: os.stat_result | Statx, wanted: int, user: User) -> bool:
    """Whether the owner's own bits say yes: no ACL takes that away."""
    return facts.st_uid == user.uid and (facts.st_mode >> 6) & wanted == wanted


def _kernel_allows(fd: int, name: bytes, wanted: int) -> bool:
    """Asks the kernel, for this thread's ids. glibc's own looked at mode bits before 2.33."""
    done = _libc.syscall(_SYS_FACCESSAT2, fd, name, wanted, _AT_EACCESS)
    if done == 0 or ctypes.get_errno() != errno.ENOSYS:
        return bool(done == 0)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        os.close(os.open(name, flags, dir_fd=fd))
    except OSError:
        return False
    return True


def _make_entry(path: bytes, facts: os.stat_result | Statx, link: bytes = b"") -> ManifestEntry:
    return ManifestEntry(
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
