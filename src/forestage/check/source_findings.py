"""Findings about the sources: mounted, answering, no tmpfs, and striped on Lustre.

File systems that are mounted below a source are asked as well, and what did not answer a job.
"""

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from forestage.check.event_log_facts import EventLogFacts, ImageUse
from forestage.check.finding import CheckFinding
from forestage.config import KEYS, Config
from forestage.errors import Declined, Failed
from forestage.system import as_user, mounts, run
from forestage.system.files import open_descriptor
from forestage.system.mounts import MountInfo
from forestage.system.striping import StripeLayout, format_setstripe_command
from forestage.system.terminal import format_count, format_local_time
from forestage.system.tree import RootedTree
from forestage.units import format_size

# With pages of their own: a store to one that was read first is noted nowhere (decision 47).
MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs"))
SOURCE_TIMEOUT = 5.0  # seconds; a file server that takes longer makes jobs wait as well
MAX_STRIPING_IMAGES = 5  # images whose striping is looked at
RECENT_HANG_SECONDS = 86400.0  # seconds since a job got no answer
MAX_CHILDREN = 16  # children that ask
LARGE_IMAGE_BYTES = 1 << 30  # bytes; a smaller image takes no time from any server
MIN_STRIPES = 4  # stripes; with so many a file's servers are no bottleneck for some nodes


def list_findings(
    files: RootedTree, config: Config, log_facts: EventLogFacts, origin: str, now: float
) -> Iterator[CheckFinding]:
    """Takes seconds where a source does not answer. `origin` is the file that sets `sources:`."""
    sources = config.sources
    if not sources:
        yield CheckFinding(
            "no-sources",
            "critical",
            "no sources are configured",
            "No image is ever staged",
            f"{origin}: sources: [/path/of/the/shared/file/system]",
        )
    found = [finding for path in sources if (finding := _find_source_problem(files, path, origin))]
    if all(finding.id != "source-hangs" for finding in found):
        found += _list_hang_findings(files, config, log_facts, now)
    yield from found
    if all(finding.id != "source-hangs" for finding in found):  # what follows would hang with them
        yield from _list_user_mount_findings(files, config, origin)
        yield from _list_striping_findings(files, log_facts.images)


def _find_source_problem(files: RootedTree, path: str, origin: str) -> CheckFinding | None:
    try:
        real = _resolve_in_child(files, path)
    except (FileNotFoundError, NotADirectoryError):
        return CheckFinding(
            "source-missing",
            "critical",
            f"the source {path} is not there",
            "No image below it is staged, and jobs that name one fail",
            f"mount it (/etc/fstab), or {origin}: sources without {path}",
        )
    except PermissionError:
        # As where the file server squashes root: jobs read as their users.
        real = files.resolve_paths((path,))[path]
    except (OSError, Declined) as error:
        word = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
        return CheckFinding(
            "source-hangs",
            "critical",
            f"the source {path} does not answer: {word} {error}".replace(":  ", ": "),
            "Jobs that name an image below it wait for the file server",
            f"look at its server and network; `dmesg`; umount -l {path} and mount it again",
        )
    # Only now, when an automounter has had its chance.
    under = files.find_mount(real)
    if under is not None and under.kind in MEMORY_FILE_SYSTEMS:
        return CheckFinding(
            "source-in-memory",
            "warning",
            f"the source {path} lies on {under.kind}",
            "A program that changes a file there through a mapping (mmap) changes none of its"
            " times: jobs may be shown the copy of what it was",
            f"{origin}: sources without {path}; or have its files replaced (mv), never changed",
        )
    if under is None or under.point != "/":
        return None
    return CheckFinding(
        "source-not-mounted",
        "warning",
        f"the source {path} lies on the root file system",
        "The shared file system may not be mounted; if images really lie there, copies of them"
        " save nothing",
        f"mount it (/etc/fstab), or {origin}: sources without {path}",
    )


def _list_hang_findings(
    files: RootedTree, config: Config, log_facts: EventLogFacts, now: float
) -> Iterator[CheckFinding]:
    """What hangs though the sources answer: mounted below one of them, or reached by a link."""
    tops = [f"{real.rstrip('/')}/" for real in files.resolve_paths(config.sources).values()]
    listed = files.list_mounts()
    below = {
        mount.device: mount.point
        for mount in listed
        if mount.is_remote and not mount.fuse_owner_uid and mount.point.startswith(tuple(tops))
    }
    asked = {
        path: f"{path} did not answer a job at {format_local_time(when)}, and"
        for path, when in reversed(log_facts.hung_paths.items())
        if now - when < RECENT_HANG_SECONDS and not _is_on_user_fuse(listed, path, config)
    }
    asked |= {point: f"{point}, which is mounted below a source," for point in below.values()}
    asked = dict(islice(asked.items(), MAX_CHILDREN))
    works = [functools.partial(_read_from_path, str(files.host_path(path))) for path in asked]
    answers = as_user.run_each_in_child(works, str, SOURCE_TIMEOUT, SOURCE_TIMEOUT, MAX_CHILDREN)
    for what, answer in zip(asked.values(), answers, strict=True):
        if answer is None:
            yield CheckFinding(
                "source-hangs",
                "critical",
                f"{what} does not answer",
                "Jobs that name an image there wait for the file server",
                "look at its server and network; `dmesg`",
            )


def _is_on_user_fuse(listed: list[MountInfo], path: str, config: Config) -> bool:
    """Pure: whether a path lies on a user's own FUSE, which hangs as its user likes."""
    under = mounts.find_mount_of_path(listed, path)
    return under is not None and bool(mounts.find_user_fuse(listed, under.id, config.user_mounts))


def _read_from_path(path: str) -> str:
    """In a child, which may hang: any answer is one. No device is opened, only a file is read."""
    with contextlib.suppress(OSError), open_descriptor(path, os.O_PATH) as found:
        if stat.S_ISREG(os.fstat(found).st_mode):
            with open_descriptor(f"/proc/self/fd/{found}", os.O_RDONLY) as file:
                os.read(file, 1)
    return ""


def _list_user_mount_findings(
    files: RootedTree, config: Config, origin: str
) -> Iterator[CheckFinding]:
    """Sources on a FUSE of a user: of a service of the site, or of anybody."""
    listed = files.list_mounts()
    found: dict[MountInfo, str] = {}
    for path, real in files.resolve_paths(config.sources).items():
        under = mounts.find_mount_of_path(listed, real)
        users = under and mounts.find_user_fuse(listed, under.id, config.user_mounts)
        if users:
            found.setdefault(users, path)
    for mount, path in found.items():
        named = {**config.user_mounts, mount.point: f"{mount.kind} {mount.fuse_owner_uid}"}
        line = f"{origin}: user_mounts: {KEYS['user_mounts'].format_value(named)}"
        yield CheckFinding(
            "source-of-user",
            "critical",
            f"the source {path} lies on a file system that the user {mount.fuse_owner_uid} has"
            f" mounted ({mount.kind} at {mount.point})",
            "Nothing below it is staged: its user could show other users any bytes",
            f"if it is a service of the site, {line}",
        )


def _resolve_in_child(files: RootedTree, path: str) -> str:
    """Returns where it leads, found in a process of its own, which may hang.

    Raises what the system says, or Declined.
    """

    def work() -> as_user.ChildResult[str]:
        os.stat(f"{files.host_path(path)}/.")  # noqa: PTH116 - a Path drops the dot, which needs its own x bit
        return files.resolve_path(path), []

    return as_user.run_in_child(work, str, SOURCE_TIMEOUT)[0]


def _list_striping_findings(
    files: RootedTree, images: tuple[ImageUse, ...]
) -> Iterator[CheckFinding]:
    """Asks `lfs` about the large images that are used most; nothing where there is no lfs."""
    for used in [used for used in images if used.size >= LARGE_IMAGE_BYTES][:MAX_STRIPING_IMAGES]:
        under = files.find_mount(used.path)
        if under is None or under.kind != "lustre":
            continue
        stripes = _find_stripe_count(str(files.host_path(used.path)))
        if stripes is None or not 0 <= stripes < MIN_STRIPES:  # -1 is all OSTs
            continue
        path = Path(used.path)
        yield CheckFinding(
            "striping",
            "warning",
            f"{path} ({format_size(used.size)}) lies on {format_count(stripes, 'OST')}",
            "All nodes of a cold start read it from there: 23 GiB took 64 nodes 200 s with Lustre's"
            " default, 74 s from 32 OSTs",
            f"{' '.join(format_setstripe_command(StripeLayout(), path.parent))}"
            f" (for new files; then write {path.name} anew: cp it to another name there, and mv"
            " that over it)",
        )


def _find_stripe_count(path: str) -> int | None:
    try:
        ran = run.run_program(["lfs", "getstripe", "--stripe-count", path], timeout=SOURCE_TIMEOUT)
    except (Failed, OSError):  # not installed
        return None
    # A file of several components has a line for each; the last ones hold most of its bytes.
    words = ran.out.split() if ran.code == 0 else []
    numbers = [int(word) for word in words if word.lstrip("-").isdigit()]
    return numbers[-1] if numbers else None
