"""A node on which docs/install.md was followed, "On a cluster", as a layer of disks.

Two NVMe as a RAID 0 with XFS, Slurm with cgroups, the shared file system over NFS, and the packages
made of this checkout: forestage and the companion. Made anew where any of that has changed.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from disks import fingerprint, keep, on_top
from spec import REPO
from vm import VM

# What the packages are made of. Byte code and the tools that make them are not.
SOURCES = ("src", "prolog", "epilog", "etc", "packaging")
NO_SOURCES = (".venv", "__pycache__", ".mypy_cache", ".ruff_cache", "build")
CACHE = "/mnt/nvme/forestage"
CONFIG = f"sources: [/lustre]\ncache: {CACHE}\n"

RAID = """\
mdadm --create /dev/md/nvme --run --quiet --level=0 --chunk=512 --raid-devices=2 \
    --data-offset=1M --name=nvme --homehost=any /dev/nvme0n1 /dev/nvme1n1
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
systemctl enable --now forestage-sweep.timer forestage-ask.socket
"""


def installed(below: Path) -> Path:
    """The layer upon `below`. Takes some ten minutes if it has to be made."""
    with on_top(below, "installed", recipe()) as (layer, new):
        if new:
            with tempfile.TemporaryDirectory(dir=new.parent) as folder:
                _install(below, Path(folder), new)
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


def packages(folder: Path) -> list[Path]:
    """forestage and the companion, made for this computer's Debian and Slurm."""
    for command in (["packaging/prepare"], ["packaging/build", "--out", str(folder)]):
        done = subprocess.run(["nice", *command], cwd=REPO, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return sorted(folder.glob("*.deb"))


def _install(below: Path, folder: Path, new: Path) -> None:
    made = packages(folder / "packages")
    with VM.of(below, folder / "vm") as vm:
        vm.boot()
        vm.until("test -b /dev/nvme0n1 -a -b /dev/nvme1n1")
        vm.run(RAID)
        for package in made:
            vm.put(f"/root/{package.name}", package.read_bytes())
        vm.run("apt-get install -y /root/forestage_*.deb /root/forestage-spank_*.deb")
        vm.put("/etc/forestage/forestage.yaml", CONFIG.encode())
        vm.run(FOLLOW)
        vm.run("scontrol reconfigure; systemctl restart slurmd")
        vm.power_off()
        keep(vm, new)
