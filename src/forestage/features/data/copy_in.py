"""Puts a tree or the files of an archive into the job's own directory. Runs as the job's user.

In a process of its own that has all three ids of the user, no way to others (no_new_privs), and the
new directory as its root: no link, `..` or absolute name of an archive leads out of it. What is
read may be hostile, and compressed sizes lie: the file system ends what is too large.

It is whole in the end, or raises: nothing is left out in silence.
"""

import bz2
import codecs
import contextlib
import gzip
import lzma
import os
import queue
import resource
import stat
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from forestage.errors import Declined
from forestage.system import as_user, forked_child, libc
from forestage.system.as_user import User
from forestage.system.files import open_descriptor
from forestage.units import make_printable

THREADS = 8  # files that are read at once: a shared file system answers slowly, but many
BLOCK = 1 << 20  # bytes
MEMORY = 4 << 30  # bytes of address space: a hostile archive must not take the job's memory
ZSTD = b"\x28\xb5\x2f\xfd"
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38

TimeCheck = Callable[[], None]
"""Raises Declined when there is no time left."""


def confine(root: int, user: User) -> None:
    """Leaves root's rights and the node's files for good; `root` is the user's own directory.

    Raises OSError.
    """
    groups = as_user.list_group_ids(user)  # which this process can look up no more afterwards
    os.fchdir(root)
    os.chroot(".")
    os.setgroups(groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    forked_child.call_prctl(_PR_SET_NO_NEW_PRIVS, 1)
    forked_child.call_prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.umask(0o077)


class CopyInError(Declined):
    """What was read cannot be put there as it is."""

    def __init__(self, what: str) -> None:
        super().__init__("not-put", what)


def choose_copy_mode(mode: int) -> int:
    """Pure: the mode of a copy, which its user may write and delete; set-id bits are not copied."""
    own = 0o700 if stat.S_ISDIR(mode) else 0o600
    return stat.S_IMODE(mode) & 0o777 | own


# A tree


def copy_tree(source: int, check_time: TimeCheck) -> int:
    """Copies what lies below the open directory `source` to /; returns the bytes of its files.

    Modes and times are kept, owners and hard links are not. Raises Declined, OSError.
    """
    directories: list[tuple[str, os.stat_result]] = []
    with _CopierThreads(source, check_time) as copiers:
        left = ["."]
        while left:
            check_time()
            path = left.pop()
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            with open_descriptor(path, flags, dir_fd=source) as fd:
                if path != ".":
                    Path("/", path).mkdir()
                directories.append((path, os.fstat(fd)))
                with os.scandir(fd) as entries:
                    for entry in entries:
                        name = f"{path}/{entry.name}".removeprefix("./")
                        if entry.is_symlink():
                            Path("/", name).symlink_to(os.readlink(entry.name, dir_fd=fd))
                        elif entry.is_dir(follow_symlinks=False):
                            left.append(name)
                        elif entry.is_file(follow_symlinks=False):
                            copiers.queue_file(name)
                        else:
                            raise CopyInError(
                                f"{make_printable(name)} is neither a file, directory nor link"
                            )
    for path, facts in reversed(directories):
        Path("/", path).chmod(choose_copy_mode(facts.st_mode))
        os.utime(f"/{path}", ns=(facts.st_mtime_ns, facts.st_mtime_ns))
    return copiers.bytes


class _CopierThreads:
    """Threads that copy files.

    The first error ends all; it is raised at the end, or in `queue_file`.
    """

    def __init__(self, source: int, check_time: TimeCheck) -> None:
        self.source = source
        self.check_time = check_time
        self.bytes = 0
        self.error: Declined | OSError | None = None
        self.names: queue.Queue[str | None] = queue.Queue(4 * THREADS)
        self.lock = threading.Lock()
        self.threads = [
            threading.Thread(target=self._copy_files, daemon=True) for _ in range(THREADS)
        ]

    def __enter__(self) -> "_CopierThreads":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if error is not None:
            self.error = self.error or CopyInError("")
        for _ in self.threads:
            self.names.put(None)
        for thread in self.threads:
            thread.join()
        if error is None and self.error:
            raise self.error

    def queue_file(self, name: str) -> None:
        if self.error:
            raise self.error
        self.names.put(name)

    def _copy_files(self) -> None:
        while (name := self.names.get()) is not None:
            if self.error:
                continue
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                with open_descriptor(name, flags, dir_fd=self.source) as fd:
                    size = copy_file(fd, name, self.check_time)
            except (Declined, OSError) as error:
                self.error = self.error or error
            except MemoryError:
                self.error = self.error or CopyInError("no memory is left for the copy")
            else:
                with self.lock:
                    self.bytes += size


def copy_file(source: int, target: str, check_time: TimeCheck) -> int:
    """Copies one open regular file; returns its bytes. Raises Declined, OSError."""
    facts = os.fstat(source)
    if not stat.S_ISREG(facts.st_mode):
        raise CopyInError(f"{make_printable(target)} was replaced while it was copied")
    blocks = iter(lambda: os.read(source, BLOCK), b"")
    size = _write_file(target, choose_copy_mode(facts.st_mode), blocks, check_time)
    os.utime(f"/{target}", ns=(facts.st_mtime_ns, facts.st_mtime_ns))
    return size


def _write_file(target: str, mode: int, blocks: Iterator[bytes], check_time: TimeCheck) -> int:
    size = 0
    with open_descriptor(f"/{target}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        for block in blocks:
            check_time()
            size += len(block)
            view = memoryview(block)
            while view:
                view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
    return size


# An archive


COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", ZSTD: "zstd"}


def find_compression(file: int) -> str:
    """How an archive is compressed, by its first bytes; "" for not at all. Raises OSError."""
    head = os.pread(file, 6, 0)
    return next((name for magic, name in COMPRESSION_MAGIC.items() if head.startswith(magic)), "")


def preload_modules() -> None:
    """Loads what Python would later: a confined process finds no module any more."""
    codecs.lookup("unicode_escape")
    libc.preload_libc()  # for prctl(2) in `confine`, once the node's files are out of reach


def unpack_archive(fd: int, packed: str, check_time: TimeCheck) -> int:
    """Unpacks the open tar archive to /; returns the bytes of its files.

    Links are made as they are, wherever they lead. It is read to its very end, where its checksum
    is. `zstd` has been taken off already. Raises Declined, OSError.
    """

    class Strict(tarfile.TarInfo):
        """Damage in the middle is no end: tarfile takes it for one."""

        @classmethod
        def fromtarfile(cls, tar: tarfile.TarFile) -> "Strict":
            try:
                return super().fromtarfile(tar)
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                raise
            except tarfile.HeaderError as error:
                raise CopyInError(f"the archive is damaged, or none: {error}") from None

    directories: dict[str, tarfile.TarInfo] = {}
    size = 0
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(open(fd, "rb", closefd=False))
            plain = stack.enter_context(_open_decompressed(raw, packed))
            tar = stack.enter_context(
                tarfile.open(fileobj=plain, mode="r|", bufsize=BLOCK, tarinfo=Strict)
            )
            while (member := tar.next()) is not None:
                check_time()
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
                size += _unpack_member(tar, member, directories, check_time)
            while plain.read(BLOCK):
                check_time()
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise CopyInError(f"the archive is damaged, or none: {error}") from None
    except (zlib.error, lzma.LZMAError) as error:
        raise CopyInError(f"the archive is damaged: {error}") from None
    except MemoryError:
        raise CopyInError("the archive has a header that does not fit into memory") from None
    for name in reversed(directories):
        Path("/", name).chmod(choose_copy_mode(stat.S_IFDIR | directories[name].mode & 0o777))
        _set_time(name, directories[name].mtime)
    return size


def _open_decompressed(file: BinaryIO, packed: str) -> Any:
    """A file to read what this one holds, unpacked."""
    if packed == "gzip":
        return gzip.GzipFile(fileobj=file)
    return {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile}.get(packed, contextlib.nullcontext)(file)


def _unpack_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    directories: dict[str, tarfile.TarInfo],
    check_time: TimeCheck,
) -> int:
    name = path_inside_root(member.name)
    if member.isdir():
        if name:
            Path("/", name).mkdir(parents=True, exist_ok=True)
            directories[name] = member
        return 0
    if not name:
        raise CopyInError("the archive holds a file without a name")
    path = Path("/", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # the last one of a name counts
    if member.issym():
        path.symlink_to(member.linkname)
        return 0
    if member.islnk():
        os.link(f"/{path_inside_root(member.linkname)}", path, follow_symlinks=False)
        return 0
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise CopyInError(
            f"the archive holds {make_printable(name)}, neither a file, directory nor link"
        )
    blocks = iter(lambda: content.read(BLOCK), b"")
    size = _write_file(name, choose_copy_mode(member.mode & 0o7777), blocks, check_time)
    _set_time(name, member.mtime)
    return size


def path_inside_root(name: str) -> str:
    """Pure: a member's path below the root; "" for the root itself.

    Raises CopyInError for one with `..`.
    It could not leave the directory, but no honest archive has such names.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise CopyInError(f"the archive holds {make_printable(name)}, which leads out of it")
    return "/".join(parts)


def _set_time(name: str, seconds: float) -> None:
    # A user's number: of any size, or none at all.
    with contextlib.suppress(OSError, ValueError, OverflowError):
        os.utime(f"/{name}", (seconds, seconds))
