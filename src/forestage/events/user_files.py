"""Each user's own events, in a file of root's that this user alone may read.

    /run/forestage/users/UID/events.jsonl    the lines of events.jsonl that are theirs to know

`forestage explain` without root reads it, so no service has to answer users. They can write to none
of it and list no directory of it. Hooks append without a lock: a reader can hold one.

It is memory for a reason. read(2) takes no lock of a tmpfs' file (mm/shmem.c,
shmem_file_read_iter), past the page cache neither. On XFS a reader whose memory a FUSE of theirs
has to fill holds the lock that every append waits for (fs/xfs/xfs_file.c, xfs_file_buffered_read),
on ext4 with O_DIRECT. So where /run is no tmpfs, or has no ACLs, there is no such file, and
`explain` is for root.

A file that is full gives its front back as a hole, and one that goes is emptied: a user who holds
it open, or mapped, keeps no memory by that.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from forestage.system import folders, libc
from forestage.system.files import ACL, encode_acl, open_descriptor
from forestage.units import is_number

USER_FILE_NAME = "events.jsonl"
MAX_USER_FILE_BYTES = 256 * 1024  # of memory: some 500 events
KEPT_USER_FILE_BYTES = 128 * 1024  # of these, once the front is given back
MAX_USERS = 256  # of a node: 64 MiB in all; who comes then takes the place of the longest silent
IDLE_DAYS = 14  # without an event; the number may be another person's by then
_PAGE = 4096
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_APPEND = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # no FIFO is waited for


def user_file_path(users: Path, uid: int) -> Path:
    """Return where a user's events are. Pure."""
    return users / str(uid) / USER_FILE_NAME


def append_user_lines(users: Path, uid: int, lines: Sequence[bytes], is_own: bool = True) -> None:
    """Append lines to a user's file, which is made for the first ones. As root.

    What fails is left out: no job is worse off for what its user may read. Root, and who is
    unknown (-1), has none. Only events of the user's own jobs (`is_own`) have a full file
    give its front back: a user who has it mapped a million times holds up the process that does.
    """
    if uid <= 0:
        return
    with contextlib.suppress(OSError):
        file = user_file_path(users, uid)
        if not file.exists():
            _make_file(users, uid)
        with open_descriptor(file, _APPEND) as fd:
            write_lines(fd, lines)
            if is_own:
                _punch_front(fd)


def write_lines(fd: int, lines: Sequence[bytes]) -> None:
    """Append lines, one write each, whatever the last line was cut short by. Raises OSError."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        lines = [b"\n" + lines[0], *lines[1:]]  # a crash cut the one before short
    for line in lines:
        if os.write(fd, line) < len(line):  # the disk is full amid the line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def list_users(users: Path) -> list[int]:
    """Return who has a file, or had one half made. Raises OSError."""
    try:
        return sorted(int(name) for name in os.listdir(users) if is_number(name))  # noqa: PTH208
    except FileNotFoundError:
        return []


def list_users_of_key(users: Path, key: str) -> Iterator[int]:
    """Yield the users with an event of this key: their jobs had it.

    A key that was evicted for a job is another job's, and one in a path is the user's word. Quotes
    in a text are escaped, so the field cannot be written by a user.
    """
    field = f'"key":"{key}"'.encode()
    for uid in list_users(users):
        with (
            contextlib.suppress(OSError),
            open_descriptor(
                user_file_path(users, uid), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            ) as fd,
        ):
            start = max(0, os.fstat(fd).st_size - 2 * MAX_USER_FILE_BYTES)
            if field in os.pread(fd, 2 * MAX_USER_FILE_BYTES, start):
                yield uid


def restore_rights(users: Path) -> None:
    """Give folders and files the rights that they were made with. Raises OSError.

    Somebody's hand may have changed them, for all of /run.
    """
    for uid in list_users(users):
        folders.ensure_directory_with_mode(users, folders.PASSABLE)
        with contextlib.suppress(OSError):  # another thing by that name, or it went meanwhile
            _set_rights(users / str(uid), uid, owner=7, user=1)
            _set_rights(user_file_path(users, uid), uid, owner=6, user=4)


def remove_idle_users(users: Path, now: float) -> None:
    """Remove the files of users without an event for IDLE_DAYS. Raises OSError."""
    for uid in list_users(users):
        if _last_event_time(users, uid) < now - IDLE_DAYS * 86400:
            _remove_user(users, uid)


def _make_file(users: Path, uid: int) -> None:
    """Make a user's file; it gets its name once nobody else can read it. Raises OSError."""
    folders.ensure_directory_with_mode(users, folders.PASSABLE)
    with open_descriptor(users, os.O_TMPFILE | os.O_RDWR, 0o600) as fd:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # an error (EINVAL) on all that is no tmpfs
        os.setxattr(fd, ACL, encode_acl(uid, owner=6, user=4))
        _remove_longest_idle(users, uid)
        folder = users / str(uid)
        folders.ensure_directory(folder, folders.PRIVATE)
        _set_rights(folder, uid, owner=7, user=1)
        with (
            open_descriptor(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as here,
            contextlib.suppress(FileExistsError),  # another hook was faster
        ):
            os.link(f"/proc/self/fd/{fd}", USER_FILE_NAME, dst_dir_fd=here)


def _punch_front(fd: int) -> None:
    """Give the front of a full file back. Raises OSError.

    It is no new file, and not the end that is cut off: lines that another hook writes meanwhile
    stay, and a reader who has it open sees them.
    """
    facts = os.fstat(fd)
    if facts.st_blocks * 512 > MAX_USER_FILE_BYTES:
        length = (facts.st_size - KEPT_USER_FILE_BYTES) // _PAGE * _PAGE
        libc.call_libc(
            "fallocate", fd, _KEEP_SIZE | _PUNCH_HOLE, libc.make_int64(0), libc.make_int64(length)
        )


def _set_rights(path: Path, uid: int, owner: int, user: int) -> None:
    os.setxattr(path, ACL, encode_acl(uid, owner, user), follow_symlinks=False)


def _remove_longest_idle(users: Path, new_uid: int) -> None:
    """Remove as many of the longest silent users as are too many beside this one."""
    others = [one for one in list_users(users) if one != new_uid]
    others.sort(key=lambda one: _last_event_time(users, one))
    for one in others[: max(0, len(others) - MAX_USERS + 1)]:
        _remove_user(users, one)


def _last_event_time(users: Path, uid: int) -> float:
    """Return when a user's file was written last; 0 if there is none."""
    try:
        return user_file_path(users, uid).stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _remove_user(users: Path, uid: int) -> None:
    """Remove a user's file and folder, and empty the file: somebody may have it open.

    What an admin put there stays, and keeps no other user's from being removed.
    """
    file = user_file_path(users, uid)
    with contextlib.suppress(OSError), open_descriptor(file, _APPEND) as fd:
        file.unlink()
        os.ftruncate(fd, 0)
    with contextlib.suppress(OSError):
        file.parent.rmdir()
