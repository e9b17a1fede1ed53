"""What the fstab inside an image binds, for the entry of its copy.

enroot mounts by it into the container (runtime.sh). Root parses no squashfs: unsquashfs does, in a
process that has the job's user's rights and limits, is theirs neither to trace nor to outlive
(run.start_filter), and writes into memory that is gone with it. Any unsquashfs will do; `-cat` came
with 4.5, and Enterprise Linux 9 has an earlier one.
"""

import contextlib
import os
import resource
import stat

from forestage.cache.source_image import SUPERBLOCK, is_squashfs
from forestage.errors import Declined
from forestage.slurm import enroot
from forestage.system import as_user, mounts, run
from forestage.system.as_user import User
from forestage.system.files import open_descriptor

TIMEOUT = 10.0  # seconds; the whole tree's inodes are read before a file is found
MOST_BYTES = 64 * 1024  # of an fstab
MOST = 64  # binds that an entry's record holds
MEMORY = 4 << 30  # bytes of address space; of what it reserves it uses little
PLACE = "/tmp"  # noqa: S108 - in a mount namespace of its own, below a file system of its own
PROGRAM = (
    *("unsquashfs", "-no-progress", "-no-xattrs", "-processors", "1", "-data-queue", "16"),
    *("-frag-queue", "16", "-dest", f"{PLACE}/image", "/proc/self/fd/0", "etc/fstab"),
)


def read_fstab_binds(copy: int, user: User) -> tuple[str, ...]:
    """Returns the directories that an image's fstab binds without what is mounted below them.

    `copy` is the open file, which the user may read. Variables are as they are written, and
    enroot.UNKNOWN stands for what cannot be told. Nothing where nobody can say it: then the image
    counts as one without (docs/faq.md).
    """
    if not is_squashfs(os.pread(copy, SUPERBLOCK, 0)):
        return ()
    found: tuple[str, ...] = ()
    with contextlib.suppress(Declined, OSError):
        found = as_user.run_in_child(
            lambda: (_unpack_and_read(copy, user), []), tuple[str, ...], TIMEOUT, keep=(copy,)
        )[0]
    return found if len(found) <= MOST else (enroot.UNKNOWN,)


def _unpack_and_read(copy: int, user: User) -> tuple[str, ...]:
    """In a child: has the one file unpacked, and reads it as the user."""
    mounts.enter_private_namespace()
    flags = mounts.MS_NOSUID | mounts.MS_NODEV
    mounts.mount("forestage", PLACE, flags, "tmpfs", f"size=1m,mode=700,uid={user.uid}")
    for limit, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, int(TIMEOUT)),
        (resource.RLIMIT_FSIZE, MOST_BYTES),
    ):
        resource.setrlimit(limit, (most, most))
    program = run.start_filter(user, PROGRAM, copy)
    while os.read(program.out, 1 << 16):
        pass
    program.wait()
    as_user.set_effective_user(user)
    try:
        with open_descriptor(
            f"{PLACE}/image/etc/fstab", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        ) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return ()
            text = os.read(fd, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError:  # a link, which may lead anywhere
        return (enroot.UNKNOWN,)
    sources = (source for _, source in enroot.list_plain_binds(text.decode(errors="replace")))
    return tuple(sources)
