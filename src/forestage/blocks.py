"""Which disks are below a file system? As /sys tells it (md(4), sysfs-block in the kernel)."""

import re
from collections.abc import Iterator

import msgspec

from forestage.system.tree import Files

_NVME = re.compile(r"nvme\d+n\d+")


class Raid(msgspec.Struct, frozen=True):
    """An md array: `level` in md's words, its disks, and how many of them are missing."""

    name: str
    level: str
    disks: int
    missing: int


class Disks(msgspec.Struct, frozen=True):
    """The whole disks below a file system, its array if any, and what `spins`.

    `spare` are NVMe disks of the node, of the same size at least, that look as if nobody uses them.
    """

    names: tuple[str, ...]
    raid: Raid | None = None
    spins: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()


def look(files: Files, device: str) -> Disks | None:
    """`device` is major:minor; None where the kernel knows no disk by that number."""
    top = files.real(f"/sys/dev/block/{device}")
    if files.mode(top) is None:
        return None
    folders = list(_below(files, top, 8))
    names = tuple(
        folder.rpartition("/")[2] for folder in folders if not files.names(_slaves(folder))
    )
    arrays = (raid for folder in folders if (raid := _raid(files, folder)))
    # Virtual disks call themselves rotational for want of a better word.
    spins = tuple(n for n in names if n.startswith("sd") and _number(files, n, "queue/rotational"))
    return Disks(names, next(arrays, None), spins, tuple(_spare(files, names)))


def _slaves(folder: str) -> str:
    return f"{folder}/slaves"


def _below(files: Files, folder: str, depth: int) -> Iterator[str]:
    """The device and all that it is made of, partitions as their disks."""
    if files.mode(f"{folder}/partition") is not None:
        folder = folder.rpartition("/")[0]
    yield folder
    for name in files.names(_slaves(folder)) if depth else ():
        yield from _below(files, files.real(f"{_slaves(folder)}/{name}"), depth - 1)


def _raid(files: Files, folder: str) -> Raid | None:
    level = (files.text(f"{folder}/md/level") or "").strip()
    if not level:
        return None
    disks, missing = files.number(f"{folder}/md/raid_disks"), files.number(f"{folder}/md/degraded")
    return Raid(folder.rpartition("/")[2], level, disks or 0, missing or 0)


def _number(files: Files, disk: str, name: str) -> int:
    return files.number(f"/sys/block/{disk}/{name}") or 0


def _spare(files: Files, used: tuple[str, ...]) -> Iterator[str]:
    """NVMe disks without partitions, holders and mounts, no smaller than those that are used."""
    sizes = [_number(files, name, "size") for name in used]
    if not all(map(_NVME.fullmatch, used)) or not sizes or not min(sizes):
        return
    busy = {one.source for one in files.filesystems()}
    swaps = files.text("/proc/swaps") or ""
    for name in files.names("/sys/block"):
        folder = f"/sys/block/{name}"
        parts = any(files.mode(f"{folder}/{part}/partition") for part in files.names(folder))
        taken = parts or files.names(f"{folder}/holders") or f"/dev/{name}" in busy
        if not _NVME.fullmatch(name) or name in used or taken or f"/dev/{name} " in swaps:
            continue
        if _number(files, name, "size") >= min(sizes):
            yield name
