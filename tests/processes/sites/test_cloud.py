"""packaging/cloud/prepare-node: what it installs and writes, and which disks it never touches.

Disks are loop devices. Only what the kernel says of a disk's model is a stand-in, as loop devices
have none: a folder that is /sys/block but for that. Package managers are stand-ins that take notes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
SCRIPT = REPO / "packaging/cloud/prepare-node"
MODEL = "Amazon EC2 NVMe Instance Storage"
MIB = 1 << 20
SIZE = 64 * MIB  # the least of which blkid believes that ZFS is on it
LEAST = 320 * MIB  # that mkfs.xfs takes
SLURMD = "#!/bin/sh\necho slurm-wlm 24.11.5\n"


class CloudNode:
    """A node that boots: the script with its paths below a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = folder / "tools"
        self.blocks = folder / "block"
        self.conf = folder / "etc/conf.d/40-boot.yaml"
        self.raid = folder / "nvme"
        for path in (self.tools, self.blocks, folder / "packages"):
            path.mkdir()
        self.tool("dpkg-query", "#!/bin/sh\necho install ok installed\n")
        self.tool("forestage", "#!/bin/sh\nexit 0\n")
        self.tool("slurmd", SLURMD)
        text = SCRIPT.read_text()
        for old, new in (
            ("/etc/forestage/conf.d/40-boot.yaml", str(self.conf)),
            ("/usr/lib/forestage/bin/forestage", str(self.tools / "forestage")),
            ("/usr/lib/forestage/spank", str(folder / "spank")),
            ("/sys/block", str(self.blocks)),
            ("/opt/slurm/", str(folder / "opt/slurm/")),
            ("/proc/[0-9]*/comm", f"{folder}/proc/[0-9]*/comm"),
            ("units=/etc/systemd/system", f"units={folder}/units"),
            ("/run/systemd/system", str(folder / "systemd")),
            ('MOUNTS="/mnt/nvme ', f'MOUNTS="{folder}/mnt '),
        ):
            assert old in text, old
            text = text.replace(old, new)
        (folder / "script").write_text(text)

    def tool(self, name: str, text: str, folder: Path | None = None) -> None:
        path = (folder or self.tools) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def boot(self, *words: str, code: int = 0) -> str:
        """What it says."""
        done = subprocess.run(
            ["sh", self.folder / "script", *words],
            env={"PATH": f"{self.tools}:{os.environ['PATH']}:/usr/sbin:/sbin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done
        assert done.stdout == ""
        return done.stderr

    @contextlib.contextmanager
    def disk(
        self, content: Path, model: str = MODEL, options: tuple[str, ...] = ()
    ) -> Iterator[str]:
        """A disk with this content, of that model."""
        attach = ["losetup", "--find", "--show", *options, content]
        name = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
        try:
            self.add(Path("/sys/block", name.removeprefix("/dev/")), model)
            yield name
        finally:
            subprocess.run(["losetup", "--detach", name], check=True)

    def add(self, real: Path, model: str) -> None:
        shown = self.blocks / real.name
        shutil.rmtree(shown, ignore_errors=True)
        (shown / "device").mkdir(parents=True)
        (shown / "device/model").write_text(f"{model:<40}\n")
        for one in real.iterdir():
            if one.name != "device":
                (shown / one.name).symlink_to(one)


@pytest.fixture
def node(private_mounts: None, tmp_path: Path) -> CloudNode:
    return CloudNode(tmp_path)


@pytest.fixture
def blank(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        path = tmp_path / name
        path.touch()
        os.truncate(path, SIZE)
        return path

    return make


def put(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset if offset >= 0 else SIZE + offset)
        file.write(data)


def with_tool(*argv: str) -> Callable[[Path], None]:
    return lambda path: (
        subprocess.run([*argv, path], check=True, stdout=subprocess.DEVNULL) and None
    )


def with_bytes(offset: int, data: bytes) -> Callable[[Path], None]:
    return lambda path: put(path, offset, data)


def lvm(path: Path) -> None:
    """As pvcreate writes it (lib/format_text/layout.h): a label in the second sector."""
    header = struct.pack("<I8s", 32, b"LVM2 001") + b"a" * 32 + struct.pack("<Q", SIZE)
    body = header.ljust(512 - 20, b"\0")
    crc = zlib.crc32(body, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
    put(path, 512, b"LABELONE" + struct.pack("<QI", 1, crc) + body)


def spoilt(make: Callable[[Path], None], offset: int) -> Callable[[Path], None]:
    """The same with a checksum that is wrong."""

    def write(path: Path) -> None:
        make(path)
        put(path, offset, b"none")

    return write


def md(path: Path) -> None:
    """The superblock of version 1.2, 4 KiB from the start (linux/raid/md_p.h)."""
    block = bytearray(256 + 2 * 2)
    struct.pack_into("<III", block, 0, 0xA92B4EFC, 1, 0)
    block[16:32] = b"u" * 16
    block[32:36] = b"host"
    struct.pack_into("<QIIQII", block, 64, 1, 0, 0, 0, 1024, 2)
    struct.pack_into("<QQQ", block, 128, 2048, SIZE // 512 - 2048, 8)
    struct.pack_into("<I", block, 220, 1)  # max_dev
    total = sum(struct.unpack(f"<{len(block) // 4}I", block[: len(block) // 4 * 4]))
    struct.pack_into("<I", block, 216, (total + (total >> 32)) & 0xFFFFFFFF)
    put(path, 4096, bytes(block))


def zfs(path: Path) -> None:
    """Two labels at the start and two at the end, each with uberblocks in its second half."""
    for label in (0, 256 << 10, -(512 << 10), -(256 << 10)):
        for one in range(8):
            put(path, label + (128 << 10) + (one << 10), struct.pack("<QQQ", 0x00BAB10C, 5000, one))


def luks(version: int) -> Callable[[Path], None]:
    header = b"LUKS\xba\xbe" + struct.pack(">H", version) + struct.pack(">Q", 16384)
    return with_bytes(0, header.ljust(16384, b"\0"))


def dos(path: Path) -> None:
    """With one partition, of which the kernel knows nothing."""
    put(path, 446, struct.pack("<BBBBBBBBII", 0, 0, 2, 0, 0x83, 0, 2, 0, 2048, 4096))
    put(path, 510, b"\x55\xaa")


USED = {
    "ext4": (with_tool("mkfs.ext4", "-q", "-F"), "signature: ext4"),
    "swap": (with_tool("mkswap"), "signature: swap"),
    "LVM": (lvm, "signature: LVM2_member"),
    "LVM, spoilt": (spoilt(lvm, 512 + 16), "signature: LVM2_member"),  # blkid would find nothing
    "md": (md, "signature: linux_raid_member"),
    "LUKS 1": (luks(1), "signature: crypto_LUKS"),
    "LUKS 2": (luks(2), "signature: crypto_LUKS"),
    "ZFS": (zfs, "signature: zfs_member"),
    "btrfs": (with_bytes(65536 + 64, b"_BHRfS_M"), "signature: btrfs"),
    "a partition table": (dos, "signature: dos"),
    "a byte at the start": (with_bytes(MIB - 1, b"x"), "its first MiB is not zero"),
    "a byte at the end": (with_bytes(-MIB, b"x"), "its last MiB is not zero"),
    "the last byte": (with_bytes(-1, b"x"), "its last MiB is not zero"),
}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_raid(node: CloudNode) -> None:
    """Nothing was mounted, and no tool that writes has run."""
    assert str(node.raid) not in Path("/proc/self/mountinfo").read_text()
    assert not (node.folder / "ran").exists()


@pytest.fixture
def watched(node: CloudNode) -> CloudNode:
    """The same, with tools that write noted and not run."""
    for name in ("mkfs.xfs", "mdadm"):
        node.tool(name, f'#!/bin/sh\necho "{name} $*" >>{node.folder}/ran\nexit 1\n')
    return node


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", USED)
def test_used_disk_and_an_empty_disk_beside_a_used_disk_are_not_formatted(
    watched: CloudNode, blank: Callable[[str], Path], kind: str
) -> None:
    make, reason = USED[kind]
    used, empty = blank("used"), blank("empty")
    make(used)
    before = digest(used), digest(empty)
    with watched.disk(used) as first, watched.disk(empty) as second:
        said = watched.boot("--sources", "/lustre", "--raid", str(watched.raid))
        assert f"{first} is not touched: it has a {reason}" in said or (
            f"{first} is not touched: {reason}" in said
        ), said
        assert f"{second} is not touched" not in said
    assert (digest(used), digest(empty)) == before
    no_raid(watched)


@pytest.mark.parametrize(("left", "where"), [(0, "first"), (SIZE - MIB, "last")])
def test_unreadable_disk_is_not_formatted(
    watched: CloudNode, blank: Callable[[str], Path], left: int, where: str
) -> None:
    """wipefs finds nothing on it, and ends with 0."""
    file = blank("bad")
    with watched.disk(file) as disk:
        os.truncate(file, left)  # what was behind that is an I/O error now
        said = watched.boot("--sources", "/lustre", "--raid", str(watched.raid))
        assert f"{disk} is not touched: its {where} MiB is not zero" in said
    no_raid(watched)


def test_disk_with_partitions_or_a_holder_is_not_formatted(
    watched: CloudNode, blank: Callable[[str], Path]
) -> None:
    with watched.disk(blank("whole")) as disk:
        name = disk.removeprefix("/dev/")
        (watched.blocks / name / f"{name}p1").mkdir()
        words = ("--sources", "/lustre", "--raid", str(watched.raid), disk)
        assert f"{disk} is not touched: it has partitions" in watched.boot(*words)
        (watched.blocks / name / f"{name}p1").rmdir()
        (watched.blocks / name / "holders").unlink()
        (watched.blocks / name / "holders/dm-3").mkdir(parents=True)
        assert f"{disk} is not touched: dm-3 holds it" in watched.boot(*words)
    no_raid(watched)


def test_mounted_or_read_only_disk_is_not_formatted(
    watched: CloudNode, blank: Callable[[str], Path], tmp_path: Path
) -> None:
    """The signature would tell, too: here the file system's has been wiped under the mount."""
    used = blank("used")
    subprocess.run(["mkfs.ext4", "-q", "-F", used], check=True)
    (tmp_path / "at").mkdir()
    words = ("--sources", "/lustre", "--raid", str(watched.raid))
    with watched.disk(used) as disk:
        subprocess.run(["mount", disk, tmp_path / "at"], check=True)
        said = watched.boot(*words)
        subprocess.run(["umount", tmp_path / "at"], check=True)
        assert f"{disk} is not touched: it is mounted" in said
    with watched.disk(blank("ro"), options=("--read-only",)) as disk:
        assert f"{disk} is not touched: it is read-only" in watched.boot(*words, disk)
    no_raid(watched)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "model", ["nvme_card-pd", "Amazon Elastic Block Store", "SAMSUNG MZWLR7T6", "", "nvme_card100"]
)
def test_disk_that_is_no_instance_store_by_its_model_is_not_formatted_even_if_named(
    watched: CloudNode, blank: Callable[[str], Path], model: str
) -> None:
    words = ("--sources", "/lustre", "--raid", str(watched.raid))
    with watched.disk(blank("kept"), model=model) as disk:
        assert "no disk here is an instance store" in watched.boot(*words)
        assert f"{disk} is not touched: its model is no" in watched.boot(*words, disk)
    no_raid(watched)


def test_path_that_is_no_whole_disk_is_not_formatted(watched: CloudNode, tmp_path: Path) -> None:
    link = f"/dev/../{tmp_path}/file"
    (tmp_path / "file").touch()
    words = ("--sources", "/lustre", "--raid", str(watched.raid))
    for name in ("/dev/nonexistent", "/dev/null", link):
        assert f"{name} is not touched: it is no whole disk" in watched.boot(*words, name)
    no_raid(watched)


def test_raid_of_empty_disks_is_created_only_with_the_raid_option(
    watched: CloudNode, blank: Callable[[str], Path]
) -> None:
    with watched.disk(blank("a")) as first, watched.disk(blank("b"), model="nvme_card0") as second:
        watched.boot("--sources", "/lustre")
        no_raid(watched)
        dry = watched.boot("--sources", "/lustre", "--raid", str(watched.raid), "--dry-run")
        assert "would run: mdadm --create" in dry
        no_raid(watched)
        watched.boot("--sources", "/lustre", "--raid", str(watched.raid))
        (ran,) = (watched.folder / "ran").read_text().splitlines()
        assert ran.startswith("mdadm --create /dev/md/forestage --level=0")
        assert set(ran.split()[-2:]) == {first, second}
        assert not {"--run", "--force", "-R", "-f"} & set(ran.split())


def test_single_empty_disk_is_formatted_for_the_cache_and_mounted_again_at_the_next_boot(
    node: CloudNode, blank: Callable[[str], Path]
) -> None:
    """With the real mkfs.xfs."""
    file = blank("one")
    os.truncate(file, LEAST)
    words = ("--sources", "/lustre", "--raid", str(node.raid))
    with node.disk(file) as disk:
        node.boot(*words)
        shown = subprocess.run(["findmnt", "-no", "SOURCE,FSTYPE", node.raid], capture_output=True)
        assert shown.stdout.decode().split() == [disk, "xfs"]
        (node.raid / "entry").write_text("kept")
        assert f"cache: {node.raid}/forestage\n" in node.conf.read_text()
        node.boot(*words)  # it is there
        subprocess.run(["umount", node.raid], check=True)
        node.boot(*words)  # a boot later
        assert (node.raid / "entry").read_text() == "kept"
        subprocess.run(["umount", node.raid], check=True)


def test_directory_with_files_is_not_mounted_over(
    watched: CloudNode, blank: Callable[[str], Path]
) -> None:
    watched.raid.mkdir()
    (watched.raid / "scratch").touch()
    with watched.disk(blank("a")):
        said = watched.boot("--sources", "/lustre", "--raid", str(watched.raid))
    assert f"{watched.raid} is not empty" in said
    no_raid(watched)


def test_prepare_node_without_a_package_exits_0_with_a_message(node: CloudNode) -> None:
    node.tool("dpkg-query", "#!/bin/sh\nexit 1\n")
    assert "forestage is not installed" in node.boot("--sources", "/lustre")
    packages = str(node.folder / "packages")
    said = node.boot("--sources", "/lustre", "--packages", packages)
    assert f"no forestage[_-]VERSION.deb in {packages}" in said
    assert "nothing is staged on this node" in said
    assert not node.conf.exists()


@pytest.mark.parametrize(("words", "code"), [((), 2), (("--sorces", "/x"), 2)])
def test_prepare_node_with_wrong_arguments_exits_2(
    node: CloudNode, words: tuple[str, ...], code: int
) -> None:
    assert "--sources" in node.boot(*words, code=code)


def test_prepare_node_installs_the_companion_package_of_this_slurm_and_distribution(
    node: CloudNode,
) -> None:
    """slurmd itself says its release: here one in /opt, in no PATH."""
    (node.tools / "slurmd").unlink()
    node.tool("slurmd", SLURMD.replace("24.11.5", "25.05.2"), node.folder / "opt/slurm/sbin")
    node.tool("dpkg-query", f"#!/bin/sh\n[ -e {node.folder}/$4 ] && echo install ok installed\n")
    node.tool(
        "apt-get",
        f"#!/bin/sh\nfor last; do :; done\necho $last >>{node.folder}/ran\n"
        f"touch {node.folder}/forestage; mkdir -p {node.folder}/spank\n"
        f"case $last in *spank*) touch {node.folder}/spank/plugstack-25.05.conf ;; esac\n",
    )
    packages = node.folder / "packages"
    for name in (
        "forestage_0.1.0-1_amd64.deb",
        "forestage_0.10.0-1_amd64.deb",
        "forestage_0.9.0-1_amd64.deb",
        "forestage-spank_0.10.0+slurm24.11.5-1~deb12_amd64.deb",
        "forestage-spank_0.10.0+slurm25.05.2-1~deb12_amd64.deb",
        "forestage-spank_0.10.0+slurm25.05.2-1~deb13_amd64.deb",
        "forestage-spank-0.10.0+slurm25.05.2-1.el9.x86_64.rpm",
    ):
        (packages / name).touch()
    node.tool("squeue", "#!/bin/sh\n", node.folder / "opt/slurm/bin")
    node.tool("systemctl", f"#!/bin/sh\necho $* >>{node.folder}/units.ran\n")
    (node.folder / "systemd").mkdir()
    said = node.boot("--sources", "/lustre,/home", "--packages", str(packages))
    unit = (node.folder / "units/forestage.service.d/slurm.conf").read_text()
    assert f"PATH={node.folder}/opt/slurm/bin:/usr/bin" in unit, "else the sweep asks nobody"
    enabled = re.findall("enable --now --no-block (.*)", (node.folder / "units.ran").read_text())
    assert enabled == ["forestage.timer", "forestage-peer.service"]
    assert [Path(one).name for one in (node.folder / "ran").read_text().split()] == [
        "forestage_0.10.0-1_amd64.deb",
        "forestage-spank_0.10.0+slurm25.05.2-1~deb12_amd64.deb",
    ]
    assert "redirect" not in node.conf.read_text() + said
    assert "sources: [/lustre, /home]\n" in node.conf.read_text()
    node.boot("--sources", "/lustre", "--packages", str(packages))
    assert len((node.folder / "ran").read_text().split()) == 2, "they are there"


def test_program_of_a_users_process_named_slurmd_is_not_run(node: CloudNode) -> None:
    """By its real uid: a program with a set-id bit has an effective one of root's."""
    (node.tools / "slurmd").unlink()
    mine = node.folder / "proc/71"
    node.tool("slurmd", f"#!/bin/sh\ntouch {node.folder}/ran\n{SLURMD}", node.folder / "home")
    mine.mkdir(parents=True)
    (mine / "comm").write_text("slurmd\n")
    (mine / "exe").symlink_to(node.folder / "home/slurmd")
    for uid, is_run in ((4242, False), (0, True)):
        (mine / "status").write_text(f"Name:\tslurmd\nUid:\t{uid}\t0\t0\t0\n")
        node.boot("--sources", "/lustre", "--packages", str(node.folder / "packages"))
        assert (node.folder / "ran").exists() is is_run


def test_prepare_node_without_a_companion_package_configures_redirect_bind(node: CloudNode) -> None:
    said = node.boot("--sources", "/lustre", "--packages", str(node.folder / "packages"))
    assert "no companion for Slurm 24.11 on deb12" in said
    assert "so redirect: bind" in said
    assert "redirect: bind\n" in node.conf.read_text()


def test_prepare_node_configures_the_cache_only_on_a_mounted_local_disk(
    node: CloudNode, blank: Callable[[str], Path]
) -> None:
    """/mnt/nvme on the root disk is no disk of the node's own; nor is a tmpfs, or NFS."""
    place = node.folder / "mnt"
    place.mkdir()
    assert "no disk of this node's own is mounted" in node.boot("--sources", "/lustre")
    assert "cache:" not in node.conf.read_text()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    node.boot("--sources", "/lustre")
    assert "cache:" not in node.conf.read_text()
    subprocess.run(["umount", place], check=True)
    file = blank("disk")
    subprocess.run(["mkfs.ext4", "-q", "-F", file], check=True)
    with node.disk(file) as disk:
        subprocess.run(["mount", disk, place], check=True)
        node.boot("--sources", "/lustre")
        assert f"cache: {place}/forestage\n" in node.conf.read_text()
        node.boot("--sources", "/lustre", "--cache", "/elsewhere/forestage")
        assert "cache: /elsewhere/forestage\n" in node.conf.read_text()
        subprocess.run(["umount", place], check=True)
