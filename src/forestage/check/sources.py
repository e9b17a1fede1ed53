"""Findings about the sources: mounted, readable for a job's user, and striped on Lustre."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from forestage.check.finding import Finding
from forestage.check.uses import Used
from forestage.errors import Failed
from forestage.system import as_user, run
from forestage.system import tree as tree
from forestage.system.as_user import User
from forestage.system.tree import Files, Filesystem
from forestage.units import format_size

TIMEOUT = 5.0  # seconds; a file server that takes longer makes jobs wait as well
MOST = 5  # images whose striping is looked at
LARGE = 1 << 30  # bytes; a smaller image takes no time from any server
FEW = 4  # stripes; with so many a file's servers are no bottleneck for some nodes
# lustre's lfs-setstripe(1): one component to the end of the file (-E), on all OSTs (-c).
STRIPE = ("lfs", "setstripe", "-E", "-1", "-c", "-1", "-S", "1M")

State = Literal["readable", "missing", "denied", "hangs", "broken"]


class Source(msgspec.Struct, frozen=True):
    """A directory of `sources:`, as `user` finds it; `detail` is the system's word for trouble.

    `image` is one of this user's that lies below it; "" where there is none.
    """

    path: str
    state: State
    user: str
    under: Filesystem | None = None
    detail: str = ""
    image: str = ""


def gather(
    files: Files, sources: tuple[str, ...], user: User, images: tuple[str, ...] = ()
) -> tuple[Source, ...]:
    """Enters each source as the user, in a process of its own that may hang."""
    found = []
    for path in sources:
        state, detail = _entered(files, path, user)
        # Only now, when an automounter has had its chance.
        fits = state in ("readable", "denied")
        under = tree.under(files.filesystems(), files.real(path)) if fits else None
        below = tuple(f"{place.rstrip('/')}/" for place in (path, files.real(path)))
        image = next((one for one in images if one.startswith(below)), "")
        found.append(Source(path, state, user.name or str(user.uid), under, detail, image))
    return tuple(found)


def _entered(files: Files, path: str, user: User) -> tuple[State, str]:
    place = str(files.at(path))

    def work() -> as_user.Found[str]:
        if os.geteuid() == 0:
            as_user.become(user)
        os.stat(f"{place}/.")  # noqa: PTH116 - a Path drops the dot, which needs its own x bit
        return "", []

    try:
        as_user.call(work, str, TIMEOUT)
    except as_user.TooSlow:
        return "hangs", f"no answer within {TIMEOUT:.0f} s"
    except (FileNotFoundError, NotADirectoryError):
        return "missing", ""
    except PermissionError:
        return "denied", ""
    except (OSError, Failed) as error:
        word = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
        return "broken", f"{word} {error}".strip()
    return "readable", ""


def findings(sources: tuple[Source, ...], origin: str) -> Iterator[Finding]:
    """Pure. `origin` is the file that sets `sources:`."""
    if not sources:
        yield Finding(
            "no-sources",
            "critical",
            "no sources are configured",
            "No image is ever staged",
            f"{origin}: sources: [/path/of/the/shared/file/system]",
        )
    for one in sources:
        yield from _source(one, origin)


def _source(one: Source, origin: str) -> Iterator[Finding]:
    if one.state == "missing":
        yield Finding(
            "source-missing",
            "critical",
            f"the source {one.path} is not there",
            "No image below it is staged, and jobs that name one fail",
            f"mount it (/etc/fstab), or {origin}: sources without {one.path}",
        )
    elif one.state in ("hangs", "broken"):
        yield Finding(
            "source-hangs",
            "critical",
            f"the source {one.path} does not answer: {one.detail}",
            "Jobs that name an image below it wait for the file server",
            f"look at its server and network; `dmesg`; umount -l {one.path} and mount it again",
        )
    elif one.state == "denied" and one.image:  # a directory of another group's is no mistake
        yield Finding(
            "source-denied",
            "warning",
            f"{one.user} cannot enter the source {one.path}, where their image {one.image} lies",
            "What a job's user cannot open is not staged for them",
            f"`namei -l {one.path}` shows whose it is: change its mode, or the user's groups here",
        )
    elif one.under is not None and one.under.point == "/":
        yield Finding(
            "source-not-mounted",
            "warning",
            f"the source {one.path} lies on the root file system",
            "The shared file system may not be mounted; if images really lie there, copies of them"
            " save nothing",
            f"mount it (/etc/fstab), or {origin}: sources without {one.path}",
        )


class Striped(msgspec.Struct, frozen=True):
    """An image on Lustre, and over how many OSTs it is spread; -1 is all."""

    image: Used
    stripes: int


def gather_striping(
    files: Files, images: tuple[Used, ...], filesystems: tuple[Filesystem, ...]
) -> tuple[Striped, ...]:
    """Asks `lfs` about the large images that are used most; nothing where there is no lfs."""
    large = [used for used in images if used.size >= LARGE][:MOST]
    found = []
    for used in large:
        under = tree.under(filesystems, used.path)
        if under is not None and under.kind == "lustre":
            stripes = _stripes(str(files.at(used.path)))
            found += [] if stripes is None else [Striped(used, stripes)]
    return tuple(found)


def _stripes(path: str) -> int | None:
    try:
        ran = run.run(["lfs", "getstripe", "--stripe-count", path], timeout=TIMEOUT)
    except (Failed, OSError):  # not installed
        return None
    # A file of several components has a line for each; the last ones hold most of its bytes.
    words = ran.out.split() if ran.code == 0 else []
    numbers = [int(word) for word in words if word.lstrip("-").isdigit()]
    return numbers[-1] if numbers else None


def striping_findings(striped: tuple[Striped, ...]) -> Iterator[Finding]:
    """Pure."""
    for one in striped:
        path = Path(one.image.path)
        if not 0 <= one.stripes < FEW:
            continue
        osts = "1 OST" if one.stripes == 1 else f"{one.stripes} OSTs"
        yield Finding(
            "striping",
            "warning",
            f"{path} ({format_size(one.image.size)}) lies on {osts}",
            "All nodes of a cold start read it from there: 23 GiB took 64 nodes 200 s with Lustre's"
            " default, 74 s from 32 OSTs",
            f"{' '.join(STRIPE)} {path.parent} (for new files; then write {path.name}"
            " anew: cp it to another name there, and mv that over it)",
        )
