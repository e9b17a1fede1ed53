"""A node on which docs/install.md was followed, "On a cluster", as a layer of disks.

Two NVMe as a RAID 0 with XFS, Slurm with cgroups, the shared file system over NFS, and the packages
made of this checkout: forestage and the companion. Made anew where any of that has changed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from disks import base, fingerprint, keep, on_top
from spec import REPO
from suite import PACKAGES as WITH_SLURM
from suite import tree
from vm import VM

# What the packages are made of. Byte code and the tools that make them are not.
SOURCES = ("src", "prolog", "epilog", "etc", "packaging")
NO_SOURCES = (".venv", "__pycache__", ".mypy_cache", ".ruff_cache", "build")
CACHE = "/mnt/nvme/forestage"
NOTHING: Mapping[str, str] = {}
CONFIG = f"sources: [/lustre]\ncache: {CACHE}\n"

RAID = """\
mdadm --create /dev/md/nvme --run --quiet --level=0 --chunk=512 --raid-devices=2 \
    --data-offset=1M --name=nvme --homehost=any /dev/nvme0n1 /dev/nvme1n1
until test -b /dev/md/nvme; do sleep 0.5; done
mdadm --detail --scan >>/etc/mdadm/mdadm.conf
mkfs.xfs -q -L nvme /dev/md/nvme
echo 'LABEL=nvme /mnt/nvme xfs prjquota,nofail,x-systemd.device-timeout=900 0 0' >>/etc/fstab
systemctl daemon-reload
mount /mnt/nvme
"""
# What it prints for each of Slurm's files is indented, below a heading that names the file.
FOLLOW = """\
forestage enable --yes >/root/enable 2>&1 || true
sed -n '/slurm.conf,/,/^[^ ]/s/^  //p' /root/enable >>/etc/slurm/slurm.conf
sed -n '/plugstack.conf,/,/^[^ ]/s/^  //p' /root/enable >>/etc/slurm/plugstack.conf
systemctl enable --now forestage.timer
"""


def installed(suite: str) -> Path:
    """The layer of that release of Debian. Takes some ten minutes if it has to be made."""
    below = base(suite)
    with on_top(below, "installed", recipe()) as (layer, new):
        if new:
            with tempfile.TemporaryDirectory(dir=new.parent) as folder:
                _install(below, packages(Path(folder) / "packages", suite), Path(folder), new)
        return layer


def recipe() -> str:
    """Of all that a node with forestage depends on."""
    found = [
        file
        for folder in SOURCES
        for file in (REPO / folder).rglob("*")
        if not set(NO_SOURCES) & set(file.relative_to(REPO).parts)
    ]
    return fingerprint([*found, REPO / "pyproject.toml"], (CONFIG, RAID, FOLLOW))


def packages(folder: Path, suite: str) -> list[Path]:
    """forestage and the companion, made for that release's Slurm."""
    made(["packaging/prepare"])
    made(["packaging/build", "--out", str(folder)])
    for companion in folder.glob("forestage-spank*"):
        companion.unlink()  # for the Slurm of this computer
    with tree(suite, suite, WITH_SLURM) as there:
        headers = folder / "include"
        headers.mkdir()
        (headers / "slurm").symlink_to(there / "usr/include/slurm")
        facts = {"SLURM_INCLUDE": str(headers), "OS_RELEASE": str(there / "etc/os-release")}
        made(["packaging/companion", "--out", str(folder), "--kind", "deb"], facts)
    return sorted(folder.glob("*.deb"))


def made(command: list[str], facts: Mapping[str, str] = NOTHING) -> None:
    env = os.environ | facts
    done = subprocess.run(["nice", *command], cwd=REPO, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def _install(below: Path, packages: list[Path], folder: Path, new: Path) -> None:
    with VM.of(below, folder / "vm") as vm:
        vm.boot()
        vm.until("test -b /dev/nvme0n1 -a -b /dev/nvme1n1")
        vm.run(RAID)
        for package in packages:
            vm.put(f"/root/{package.name}", package.read_bytes())
        vm.run("apt-get install -y /root/forestage_*.deb /root/forestage-spank_*.deb")
        vm.put("/etc/forestage/forestage.yaml", CONFIG.encode())
        vm.run(FOLLOW)
        vm.run("scontrol reconfigure; systemctl restart slurmd")
        vm.power_off()
        keep(vm, new)
