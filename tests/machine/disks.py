"""The disks of virtual machines, made once and kept beside the Debian trees (tests/slurm/suite.py).

A layer is a folder: vmlinuz, initrd, and a disk each for the root file system and the two NVMe. The
first has a Debian with Slurm, an NFS server and what guest/ and guest.sh add; its NVMe are empty. A
layer may lie upon another (`keep`). Each has its recipe in its name: another recipe is another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from spec import REPO
from suite import TREES, tree
from vm import DISKS, ROOT, VM

HERE = Path(__file__).parent
PACKAGES = (
    "ca-certificates,systemd,systemd-sysv,dbus,udev,kmod,linux-image-amd64,busybox-static,"
    "mdadm,xfsprogs,e2fsprogs,dmsetup,nfs-kernel-server,nfs-common,cachefilesd,iptables,iproute2,"
    "procps,psmisc,slurmctld,slurmd,slurm-client,munge,python3,squashfs-tools,squashfuse,fuse3,acl,"
    "attr,rsync,zstd"
)
SIZES = {"root": "6G", "nvme0": "1G", "nvme1": "1G"}
MODULES = ("virtio_pci", "virtio_blk", "ext4")
UNUSED = 4 * 86400  # seconds
Made = tuple[Path, "Path | None"]
PRIVATE = ("unshare", "--mount", "--propagation", "private")
# The tree stays as it is: what is added lies in a layer in memory.
MAKE = """\
set -eu
mount -t tmpfs -o mode=0755 tmpfs {stage}
mkdir {stage}/upper {stage}/work {stage}/root
mount -t overlay -o lowerdir={tree},upperdir={stage}/upper,workdir={stage}/work overlay {stage}/root
cp -r --no-preserve=ownership {here}/guest/. {stage}/root
chroot {stage}/root sh -s <{here}/guest.sh
cp {stage}/root/boot/vmlinuz-* {new}/vmlinuz
mkfs.ext4 -q -F -d {stage}/root {new}/root.raw {size}
"""
INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do /bin/busybox insmod $module; done
until test -b /dev/vda; do :; done
/bin/busybox mount -t ext4 /dev/vda /root
exec /bin/busybox switch_root /root /sbin/init
"""


def base(suite: str) -> Path:
    """The first layer, of that release of Debian."""
    with tree(f"machine-tree-{suite}", suite, PACKAGES) as below:
        texts = (PACKAGES, str(SIZES), *MODULES, MAKE, INIT)
        recipe = fingerprint([*HERE.glob("guest/**/*"), HERE / "guest.sh"], texts)
        with _kept(f"machine-{suite}", recipe) as (layer, new):
            if new:
                _make(below, new)
        return layer


def on_top(below: Path, name: str, recipe: str) -> contextlib.AbstractContextManager[Made]:
    """A layer upon another: (where it is, a folder to make it in or None if it is there)."""
    made_of = hashlib.sha256(f"{below.name} {recipe}".encode()).hexdigest()
    return _kept(f"{below.name.rpartition('-')[0]}-{name}", made_of)


def keep(vm: VM, new: Path) -> None:
    """Makes a layer of what a machine, which is off, has on its disks."""
    for name in ("vmlinuz", "initrd"):
        (new / name).hardlink_to(vm.layer / name)
    for name in DISKS:
        shutil.move(vm.disk(name), new / f"{name}.qcow2")


def fingerprint(files: Iterable[Path], texts: Iterable[str]) -> str:
    """Of these texts, of what is in these files, and of what they are called."""
    found = hashlib.sha256("\0".join(texts).encode())
    for file in sorted(set(files)):
        if file.is_file():
            found.update(
                f"{file.relative_to(REPO)}\n".encode() + hashlib.sha256(file.read_bytes()).digest()
            )
    return found.hexdigest()


@contextlib.contextmanager
def _kept(name: str, recipe: str) -> Iterator[Made]:
    """Where the layer is, and a folder that becomes it at the block's end if it has to be made.

    Layers lie upon each other, and other checkouts have theirs: none is ever changed. Those that
    nobody has used for some days are deleted.
    """
    layer = TREES / f"{name}-{recipe[:12]}"
    new = TREES / f"{layer.name}.new"
    with (TREES / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if layer.exists():
            os.utime(layer)
            yield layer, None
            return
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        yield layer, new
        new.rename(layer)
        for old in TREES.glob(f"machine-*-{'?' * 12}"):
            if old.stat().st_mtime < time.time() - UNUSED:
                shutil.rmtree(old)


def _make(below: Path, new: Path) -> None:
    with tempfile.TemporaryDirectory() as stage:
        script = MAKE.format(stage=stage, tree=below, here=HERE, new=new, size=SIZES[ROOT])
        _run(["nice", *PRIVATE, "sh", "-c", script])
    _make_initrd(below, new / "initrd")
    for name in DISKS:
        if name != ROOT:
            _run(["qemu-img", "create", "-q", "-f", "qcow2", f"{new}/{name}.qcow2", SIZES[name]])


def _make_initrd(below: Path, initrd: Path) -> None:
    """Debian's own takes a minute to be unpacked and run here; this one has what the disk needs."""
    (kernel,) = (one.name for one in below.glob("lib/modules/*"))
    asked = ["modprobe", "--show-depends", "--set-version", kernel, "--all", *MODULES]
    lines = _run(["chroot", str(below), *asked]).splitlines()
    # Each once, what is needed first.
    names = dict.fromkeys(line.split()[1] for line in lines if line.startswith("insmod"))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for directory in ("bin", "dev", "modules", "root"):
            (root / directory).mkdir()
        for number, name in enumerate(names):
            data = (below / name.lstrip("/")).read_bytes()
            packed = name.endswith(".xz")
            (root / f"modules/{number:02}.ko").write_bytes(
                lzma.decompress(data) if packed else data
            )
        shutil.copy(below / "bin/busybox", root / "bin/busybox")
        (root / "init").write_text(INIT)
        (root / "init").chmod(0o755)
        _run(["sh", "-c", f"cd {root} && find . | cpio --quiet -o -H newc >{initrd}"])


def _run(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout
