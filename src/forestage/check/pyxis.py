"""Findings about pyxis and enroot: mounting or unpacking an image, and where to."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.admin.site import Plugin
from forestage.check.finding import Finding
from forestage.system import tree as tree
from forestage.system.tree import Files, Filesystem

ENROOT = "/etc/enroot/enroot.conf"
_SETTING = re.compile(r"(?m)^\s*(ENROOT_\w+)[ \t=]+(\S.*?)\s*$")
_YES = ("1", "true", "yes", "y")  # pyxis' config.c


class Pyxis(msgspec.Struct, frozen=True):
    """`plugin` of the stack; `mounts_images`: it knows use_squashfuse.

    `data_path` is where enroot unpacks, and `data` on what; None where nobody knows, "" where its
    configuration does not say, which means below users' homes. `fuse` is the mode of /dev/fuse,
    `cache` the file system below our cache.
    """

    plugin: Plugin
    runs_enroot: bool = True
    mounts_images: bool = True
    data_path: str | None = None
    data: Filesystem | None = None
    cache: Filesystem | None = None
    fuse: int | None = None
    squashfuse: str = ""
    user_namespaces: int | None = None
    unprivileged: int | None = None


def gather(files: Files, plugin: Plugin, cache: str) -> Pyxis:
    """Reads enroot's configuration. It is shell, of which only plain values are understood."""
    mounted = files.filesystems()
    path = _data_path(files)
    code = files.data(plugin.path) or b""
    return Pyxis(
        plugin=plugin,
        runs_enroot=b"enroot" in code,
        mounts_images=b"use_squashfuse=" in code,
        data_path=path,
        data=tree.under(mounted, files.real(path)) if path else None,
        cache=tree.under(mounted, files.real(cache)),
        fuse=files.mode("/dev/fuse"),
        squashfuse=files.program("squashfuse") or files.program("squashfuse_ll"),
        user_namespaces=files.number("/proc/sys/user/max_user_namespaces"),
        unprivileged=files.number("/proc/sys/kernel/unprivileged_userns_clone"),
    )


def _data_path(files: Files) -> str | None:
    """What is above every user's own ENROOT_DATA_PATH; as in Pyxis."""
    if files.mode(ENROOT) is None:
        return None
    found: dict[str, str] = {}
    parts = [f"{ENROOT}.d/{name}" for name in files.names(f"{ENROOT}.d")]
    for path in (ENROOT, *(part for part in parts if part.endswith(".conf"))):
        found |= dict(_SETTING.findall(files.text(path) or ""))
    value = found.get("ENROOT_DATA_PATH", "").strip("\"'")
    if not value:
        return ""
    plain = value.partition("$")[0]
    if not plain.startswith("/"):
        return None
    return plain if plain == value else str(Path(plain).parent)


def findings(facts: Pyxis) -> Iterator[Finding]:
    """Pure. Of a plugin that does not run enroot nothing is known."""
    if not facts.plugin.exists or not facts.runs_enroot:
        return
    line = facts.plugin.line
    mounts = line.argument("use_squashfuse").lower() in _YES
    if not facts.mounts_images:
        yield Finding(
            "pyxis-old",
            "warning",
            f"{facts.plugin.path} cannot mount images (use_squashfuse, since pyxis 0.22)",
            "Each step unpacks its whole image first: minutes for 20 GiB, also from a local copy",
            f"install pyxis 0.22 or later, then {line.where}: use_squashfuse=1",
        )
    elif not mounts:
        yield Finding(
            "pyxis-unpacks",
            "warning",
            f"{line.where} does not set use_squashfuse=1",
            "Each step unpacks its whole image first: minutes for 20 GiB where mounting the local"
            " copy takes a second",
            f"{line.where}: required {line.path} {' '.join((*_others(facts), 'use_squashfuse=1'))}",
        )
    if mounts:
        yield from _fuse(facts)
    else:
        yield from _unpacks(facts)
    yield from _namespaces(facts)


def _others(facts: Pyxis) -> tuple[str, ...]:
    return tuple(a for a in facts.plugin.line.arguments if not a.startswith("use_squashfuse="))


def _fuse(facts: Pyxis) -> Iterator[Finding]:
    if facts.fuse is None or facts.fuse & 0o666 != 0o666:
        has = "is not there" if facts.fuse is None else f"has mode {facts.fuse & 0o777:04o}"
        yield Finding(
            "fuse-device",
            "critical",
            f"/dev/fuse {has}, and pyxis has use_squashfuse=1",
            "No user but root can mount an image: container jobs fail",
            '/etc/udev/rules.d/99-fuse.rules: KERNEL=="fuse", MODE="0666" (now: chmod 0666'
            " /dev/fuse)"
            if facts.fuse is not None
            else "/etc/modules-load.d/fuse.conf: fuse (now: modprobe fuse)",
        )
    if not facts.squashfuse:
        yield Finding(
            "squashfuse-missing",
            "critical",
            "squashfuse is not installed, and pyxis has use_squashfuse=1",
            "Container jobs fail",
            "install the package squashfuse",
        )


def _unpacks(facts: Pyxis) -> Iterator[Finding]:
    """Where the bytes go that each step unpacks."""
    path, data, cache = facts.data_path, facts.data, facts.cache
    if path is None or cache is None or (path and data is None):
        return
    folder = f"{cache.point.rstrip('/')}/enroot/user-$(id -u)"
    change = f'{ENROOT}: ENROOT_DATA_PATH "{folder}"'
    if data is None:
        why = "Homes often lie on a network file system, where the local copy saves nothing"
        what = f"{ENROOT} does not set ENROOT_DATA_PATH: enroot unpacks below users' homes"
        yield Finding("enroot-data", "warning", what, why, change)
    elif data.network:
        why = f"Each step unpacks its image into {data.kind}: the local copy saves nothing"
        what = f"enroot unpacks to {path}, on a network file system"
        yield Finding("enroot-data", "warning", what, why, change)
    elif data.memory:
        why = "Each step's whole unpacked image takes memory from the jobs of the node"
        what = f"enroot unpacks to {path}, which is memory"
        yield Finding("enroot-data", "warning", what, why, change)
    elif data.device != cache.device:
        why = f"Unpacking goes at the pace of {data.source}, not of the cache's disk"
        what = f"enroot unpacks to {path}, on another disk than the cache"
        yield Finding("enroot-data", "warning", what, why, change)


def _namespaces(facts: Pyxis) -> Iterator[Finding]:
    if facts.user_namespaces == 0:
        name = "user.max_user_namespaces=65536"
    elif facts.unprivileged == 0:
        name = "kernel.unprivileged_userns_clone=1"
    else:
        return
    yield Finding(
        "user-namespaces",
        "critical",
        "the kernel is set to let no user make a user namespace",
        "enroot needs one for each container: container jobs fail",
        f"/etc/sysctl.d/99-forestage.conf: {name}",
    )
