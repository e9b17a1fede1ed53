"""What is on the NVMe after a power cut, seen from outside the machine: `cut.py FOLDER`, as root.

FOLDER has copies of both disks. They are put together as the RAID 0 that they are, XFS recovers its
log, and forestage looks at its cache as after a boot: another boot id, an empty /run. Prints JSON:

    {entries: {key: [path, sha256]}, parts, jobs, left: [name], swept: {key: result}, problems}

To be run in a mount namespace of its own (`look`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHUNK, OFFSET = 512 * 1024, 1 << 20  # of the RAID 0, see install.py
TOP = Path("/mnt")  # there on every Linux; covered in this program's namespace only


@dataclass(frozen=True)
class Left:
    """What a cut has left. `swept` is what a sweep found of each entry, `left` what it did not
    clear away."""

    entries: dict[str, tuple[str, str]] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    swept: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def look(folder: Path) -> Left:
    """What is in the copies of the disks there; they are deleted. Raises CalledProcessError."""
    argv = ["unshare", "--mount", "--propagation", "private", sys.executable, __file__, str(folder)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
    return Left(**json.loads(done.stdout))


def main(folder: Path) -> None:
    disk = folder / "raid"
    join([raw(folder, name) for name in ("nvme0", "nvme1")], disk)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", TOP], check=True)
    nvme = TOP / "mnt/nvme"
    nvme.mkdir(parents=True)
    subprocess.run(["mount", "-o", "loop", disk, nvme], check=True)
    print(json.dumps(looked_at(nvme)))
    subprocess.run(["umount", nvme], check=True)
    disk.unlink()


def raw(folder: Path, name: str) -> Path:
    file, target = folder / f"{name}.qcow2", folder / f"{name}.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", file, target], check=True)
    file.unlink()
    return target


def join(members: list[Path], to: Path) -> None:
    """The RAID 0 of these, of which the holes stay holes. The members are deleted."""
    with to.open("wb") as raid:
        for number, member in enumerate(members):
            size = member.stat().st_size
            with member.open("rb") as file:
                for at in range(OFFSET, size - CHUNK + 1, CHUNK):
                    if data := os.pread(file.fileno(), CHUNK, at).rstrip(b"\0"):
                        stripe = (at - OFFSET) // CHUNK * len(members) + number
                        os.pwrite(raid.fileno(), data, stripe * CHUNK)
            raid.truncate((size - OFFSET) // CHUNK * CHUNK * len(members))
            member.unlink()


def looked_at(nvme: Path) -> dict[str, Any]:
    sys.path[:0] = [str(HERE.parent)]
    from boot import Boot
    from forestage.cache.node import Node
    from forestage.clock import Clock
    from forestage.commands import inventory, sweep, verify
    from forestage.config import Config
    from forestage.paths import NodePaths
    from forestage.slurm.slurm_client import SlurmClient

    places = NodePaths(TOP)
    for folder in (places.run, places.events.parent):
        folder.mkdir(parents=True)
    config = Config(cache="/mnt/nvme/forestage", sources=("/lustre",))
    node = Node.from_config(config, places, Clock())
    cache = node.cache
    if not cache.entries.exists():
        return {"problems": ["no cache"]}
    entries = {}
    for one in cache.list_entries():
        path = one.entry.identity.path if one.entry else ""
        with cache.image_path(one.key).open("rb") as file:
            entries[one.key] = (path, hashlib.file_digest(file, "sha256").hexdigest())
    parts, jobs = names(cache.parts), names(cache.jobs)
    with Boot.told_by(TOP / "boot_id"):
        done = sweep.run_sweep(node, SlurmClient("", ""), False, lambda text: None)
        swept = {one.key: one.result for one in done.verified}
        manner = verify.VerifyOptions(source_skip_reason="the source is in the machine")
        again = verify.verify_entries(
            node, inventory.read_inventory(node).items, False, lambda text: None, manner
        )
    bad = [f"{one.key}: {one.result} {one.detail}" for one in again.verdicts if one.result != "ok"]
    left = [*names(cache.parts), *names(cache.jobs), *names(cache.evicted)]
    return {
        "entries": entries,
        "parts": parts,
        "jobs": jobs,
        "swept": swept,
        "left": left,
        "problems": [*done.problems, *bad],
    }


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir()) if folder.exists() else []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
