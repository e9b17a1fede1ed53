"""Findings about the cache's place: its file system, who may write there, its room, its disk."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.cache import evict
from forestage.cache.layout import Cache
from forestage.check.finding import Finding
from forestage.check.uses import Used
from forestage.config import Config
from forestage.errors import Failed
from forestage.system import run
from forestage.system import tree as tree
from forestage.system.tree import Files, Filesystem
from forestage.units import format_size

TIMEOUT = 5.0  # seconds for lsblk
LSBLK = ("--json", "--output", "NAME,MAJ:MIN,ROTA")


class Space(msgspec.Struct, frozen=True):
    """Bytes: of the disk, what is free, and what entries may take if all others are evicted."""

    total: int
    free: int
    room: int


class Place(msgspec.Struct, frozen=True):
    """Where the cache lies. `real` is its path without links; `hidden_by` a directory above it that
    jobs cannot see; `not_ours` why the root must not be used; `rotating` disks are below it."""

    cache: str
    real: str
    under: Filesystem | None
    hidden_by: str = ""
    not_ours: str = ""
    space: Space | None = None
    rotating: tuple[str, ...] = ()
    largest: Used | None = None


def gather(
    files: Files, cache: Cache, config: Config, hidden: tuple[str, ...], images: tuple[Used, ...]
) -> Place:
    """Looks and changes nothing. A network file system is not asked: it may hang."""
    real = files.real(config.cache)
    under = tree.under(files.filesystems(), real)
    place = Place(
        cache=config.cache,
        real=real,
        under=under,
        hidden_by=next((d for d in hidden if f"{real}/".startswith(f"{d.rstrip('/')}/")), ""),
        largest=max(images, key=lambda used: used.size, default=None),
    )
    if under is None or under.network:
        return place
    return msgspec.structs.replace(
        place,
        not_ours=_not_ours(cache),
        space=_space(cache, config),
        rotating=_rotating(files, under.device),
    )


def _not_ours(cache: Cache) -> str:
    """Why the root is no safe place, as Cache.prepare judges it; one to be made is none yet."""
    try:
        facts = os.lstat(cache.root)
    except OSError:
        return ""
    if not stat.S_ISDIR(facts.st_mode):
        return "is not a directory"
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o077:
        return f"belongs to uid {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):04o}"
    return ""


def _space(cache: Cache, config: Config) -> Space | None:
    above = cache.root
    while not os.path.exists(above) and above != above.parent:
        above = above.parent
    try:
        disk = os.statvfs(above)
    except OSError:
        return None
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    used = 0
    with contextlib.suppress(OSError, Failed):
        used = evict.measure(cache, cache.stored(), config).used
    room = min(config.max_size.of(total), used + free - config.min_free.of(total))
    return Space(total, free, max(0, room))


class _Device(msgspec.Struct, rename={"number": "maj:min"}):
    """As lsblk(8) shows one. What it is a part of, as an array or a volume, is its child."""

    name: str
    number: str = ""
    rota: bool = False
    children: tuple["_Device", ...] = ()


class _Devices(msgspec.Struct):
    blockdevices: tuple[_Device, ...] = ()


def _rotating(files: Files, device: str) -> tuple[str, ...]:
    """The rotating disks below a device (major:minor); none where lsblk cannot tell."""
    program = files.program("lsblk")
    if not program:
        return ()
    try:
        ran = run.run([str(files.at(program)), *LSBLK], timeout=TIMEOUT)
        # Releases before 2.33 write "1" and "0" for true and false.
        found = msgspec.convert(msgspec.json.decode(ran.out), _Devices, strict=False)
    except (Failed, OSError, msgspec.DecodeError):
        return ()
    # Virtual disks, such as vda, call themselves rotational for want of a better word.
    disks = (one for one in found.blockdevices if one.rota and one.name.startswith("sd"))
    return tuple(one.name for one in disks if _is_below(one, device))


def _is_below(one: _Device, device: str) -> bool:
    return one.number == device or any(_is_below(child, device) for child in one.children)


def findings(place: Place, config: Config, origin: str) -> Iterator[Finding]:
    """Pure. `origin` is the file that sets `cache:`."""
    under = place.under
    line = f"{origin}: cache: /mnt/nvme/forestage"
    if under is None:
        return
    if under.point == "/" and config.require_mount:
        yield Finding(
            "cache-not-mounted",
            "critical",
            f"{place.cache} lies on the root file system: its disk is not mounted",
            "Nothing is staged until it is",
            f"/etc/fstab: the cache's disk, at {Path(place.cache).parent} (or, if it is meant"
            f" to be there, {origin}: require_mount: false)",
        )
        return
    if place.hidden_by:
        yield Finding(
            "cache-hidden",
            "critical",
            f"{place.cache} lies below {place.hidden_by}, which jobs do not see as the node does",
            "Images are copied, and jobs cannot be given the copies",
            line,
        )
    yield from _kind(place, under, line)
    if place.not_ours:
        yield Finding(
            "cache-not-ours",
            "critical",
            f"{place.cache} {place.not_ours}, and must be root's with mode 0700",
            "Nothing is staged: others could change what jobs read",
            f"chown root: {place.cache}; chmod 0700 {place.cache} (if nobody else uses it)",
        )
    yield from _room(place, origin)
    if place.rotating:
        yield Finding(
            "disk-spins",
            "warning",
            f"{place.cache} lies on a rotating disk ({', '.join(place.rotating)})",
            "It reads 0.2 GB/s where an NVMe reads 3 and more: two minutes for 23 GiB",
            f"{origin}: cache: on an NVMe or SSD",
        )


def _kind(place: Place, under: Filesystem, line: str) -> Iterator[Finding]:
    if under.network:
        yield Finding(
            "cache-on-network",
            "critical",
            f"{place.cache} lies on {under.kind} ({under.source}), which is no disk of this node",
            "Each copy goes through the network twice, and jobs still read from a server",
            line,
        )
    elif under.memory:
        yield Finding(
            "cache-in-memory",
            "warning",
            f"{place.cache} lies in memory ({under.kind})",
            "Each entry takes its size from the memory of the jobs; a restart empties the cache",
            line,
        )
    if under.read_only:
        yield Finding(
            "cache-read-only",
            "critical",
            f"{under.point} is mounted read-only",
            "Nothing is staged; ext4 goes read-only when its disk fails: see `dmesg`",
            f"mount -o remount,rw {under.point} (after fsck, if it failed)",
        )


def _room(place: Place, origin: str) -> Iterator[Finding]:
    space, largest = place.space, place.largest
    if space is None:
        return
    has = f"{format_size(space.free)} of {format_size(space.total)} are free"
    if space.room == 0:
        yield Finding(
            "cache-full",
            "critical",
            f"the disk of {place.cache} has no room for any entry ({has}, the rest is not the"
            " cache's)",
            "Nothing is staged; every start reads the shared file system",
            f"make room on the disk, or {origin}: max_size and min_free",
        )
    elif largest is not None and space.room < 2 * largest.size:
        yield Finding(
            "cache-small",
            "warning",
            f"entries may take {format_size(space.room)}, less than two images such as"
            f" {largest.path} ({format_size(largest.size)})",
            "Two jobs with images of that size at a time: one of them reads the shared file system",
            f"make room on the disk, or {origin}: cache: on a larger one",
        )
