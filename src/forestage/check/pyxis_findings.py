"""Findings about pyxis: whether it mounts an image or unpacks it, and what mounting needs."""

from collections.abc import Iterator

from forestage.check.finding import CheckFinding
from forestage.check.slurm_site import StackPlugin
from forestage.system.tree import RootedTree

_TRUE_WORDS = ("1", "true", "yes", "y")  # pyxis' config.c


def list_findings(files: RootedTree, plugin: StackPlugin) -> Iterator[CheckFinding]:
    """Of a plugin that does not run enroot nothing is known."""
    code = files.read_bytes_or_none(plugin.path) or b""
    if b"enroot" not in code:
        return
    line = plugin.line
    mounts = line.find_argument("use_squashfuse").lower() in _TRUE_WORDS
    if b"use_squashfuse=" not in code:
        yield CheckFinding(
            "pyxis-old",
            "warning",
            f"{plugin.path} cannot mount images (use_squashfuse, since pyxis 0.22)",
            "Each step unpacks its whole image first: minutes for 20 GiB, also from a local copy,"
            " which saves nothing where enroot unpacks to a network file system",
            f"install pyxis 0.22 or later, then {line.where}: use_squashfuse=1 (until then:"
            " ENROOT_DATA_PATH in enroot.conf on the cache's disk)",
        )
    elif not mounts:
        others = [one for one in line.arguments if not one.startswith("use_squashfuse=")]
        yield CheckFinding(
            "pyxis-unpacks",
            "warning",
            f"{line.where} does not set use_squashfuse=1",
            "Each step unpacks its whole image first: minutes for 20 GiB where mounting the local"
            " copy takes a second",
            f"{line.where}: required {line.path} {' '.join((*others, 'use_squashfuse=1'))}",
        )
    else:
        yield from _list_fuse_findings(files)


def _list_fuse_findings(files: RootedTree) -> Iterator[CheckFinding]:
    mode = files.find_mode("/dev/fuse")
    if mode is None or mode & 0o666 != 0o666:
        has = "is not there" if mode is None else f"has mode {mode & 0o777:04o}"
        rule = '/etc/udev/rules.d/99-fuse.rules: KERNEL=="fuse", MODE="0666"'
        yield CheckFinding(
            "fuse-device",
            "critical",
            f"/dev/fuse {has}, and pyxis has use_squashfuse=1",
            "No user but root can mount an image: container jobs fail",
            "/etc/modules-load.d/fuse.conf: fuse (now: modprobe fuse)"
            if mode is None
            else f"{rule} (now: chmod 0666 /dev/fuse)",
        )
    if not (files.find_program("squashfuse") or files.find_program("squashfuse_ll")):
        yield CheckFinding(
            "squashfuse-missing",
            "critical",
            "squashfuse is not installed, and pyxis has use_squashfuse=1",
            "Container jobs fail",
            "install the package squashfuse",
        )
