"""Squashfs images to test with: a tiny tree that can run, and padding up to the wanted size."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster import Cluster
from spec import ALICE, User

MIB = 1 << 20
PROGRAMS = ("sh", "cat", "ls", "id", "sleep", "sha256sum", "stat", "touch", "env", "true")
DIRECTORIES = ("proc", "sys", "dev", "tmp", "home", "shared", "etc", "bin", "mnt", "forestage/job")
# Nothing compressed: it is bytes that we want, and soon. Fixed times: the same arguments give
# the same bytes.
MKSQUASHFS = (
    "mksquashfs {tree} {image} -noappend -quiet -no-progress -no-xattrs -all-root"
    " -noI -noD -noF -noX -no-duplicates -b {block} -mkfs-time 0 -all-time 0"
)


def make_image(
    cluster: Cluster,
    path: str,
    *,
    mib: int = 1,
    name: str = "testos",
    seed: int = 0,
    owner: User = ALICE,
    mode: int = 0o644,
) -> Path:
    """Makes an image with `mib` MiB of padding at a path below /shared; its path on the host.

    In it, `cat /etc/os-release` says NAME="<name>". An image at that path is replaced by rename,
    as users do it.
    """
    target = cluster.host_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cluster.state) as directory:
        tree, image = Path(directory, "tree"), Path(directory, "image")
        make_tree(tree)
        (tree / "etc/os-release").write_text(f'NAME="{name}"\nID={name}\n')
        write_padding(tree / "padding", mib, seed)
        pack(tree, image)
        os.chown(image, owner.uid, owner.uid)
        image.chmod(mode)
        image.replace(target)
    return target


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(MIB):
            digest.update(chunk)
    return digest.hexdigest()


def pack(tree: Path, image: Path, block: str = "1M") -> None:
    command = MKSQUASHFS.format(tree=tree, image=image, block=block).split()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def make_tree(tree: Path, programs: Sequence[str] = PROGRAMS) -> None:
    for directory in DIRECTORIES:
        (tree / directory).mkdir(parents=True)
    for source, place in _programs(tuple(programs)).items():
        target = tree / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


@functools.cache
def _programs(programs: tuple[str, ...]) -> dict[str, str]:
    """What makes the tree one that can run: host's files, each with its place in the tree."""
    found = {}
    for program in programs:
        source = shutil.which(program, path="/usr/bin:/bin")
        if source is None:
            raise FileNotFoundError(program)
        found[source] = f"bin/{program}"
    listing = subprocess.run(["ldd", *found], check=True, capture_output=True, text=True).stdout
    return found | {path: path.lstrip("/") for path in re.findall(r"(/\S+) \(0x", listing)}


def write_padding(file: Path, mib: int, seed: int) -> None:
    # Each MiB starts 64 bytes further in one random text: no two are equal, none compresses,
    # and it is made ten times as fast as that many random bytes.
    text = memoryview(random.Random(seed).randbytes(MIB + 64 * mib))
    with file.open("wb") as padding:
        for index in range(mib):
            padding.write(text[64 * index : 64 * index + MIB])
