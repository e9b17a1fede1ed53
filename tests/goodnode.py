"""A node's files as they are where all is well, below a folder: for tests of `forestage check`."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from commands import NOW, Frozen
from forestage import events
from forestage.check import Checked, Request, check, pieces
from forestage.events import Event, Outcome
from forestage.paths import Places
from forestage.system.as_user import User
from forestage.system.terminal import Line, harmless

REPO = Path(__file__).resolve().parents[1]
RELEASE = 0x160508  # 22.05.8

CONFIG = "sources: [/lustre]\ncache: /mnt/nvme/forestage\nmin_free: 0\n"

SLURM_CONF = """\
ClusterName=good
PrologFlags=Alloc,DeferBatch
Prolog=/etc/slurm/prolog.d/*
Epilog=/usr/libexec/forestage/epilog
PluginDir=/usr/lib64/slurm
"""

PLUGSTACK = """\
# kept in parts
include plugstack.conf.d/*.conf
"""

COMPANION = "optional /usr/lib/forestage/spank/forestage.so timeout=500\n"
PYXIS = "required pyxis.so runtime_path=/run/pyxis use_squashfuse=1\n"

ENROOT = "# a comment\nENROOT_DATA_PATH           /mnt/nvme/enroot/user-$(id -u)\n"

MOUNTS = (
    "21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw",
    "22 21 0:22 / /proc rw - proc proc rw",
    "23 21 0:23 / /dev/shm rw - tmpfs tmpfs rw",
    "24 21 0:44 / /home rw - nfs4 server:/home rw",
    "25 21 9:0 / /mnt/nvme rw,noatime - xfs /dev/md0 rw",
    "26 21 0:50 / /lustre rw - lustre 10.0.0.1@o2ib:/big rw,flock",
    "27 21 252:0 / /scratch rw - ext4 /dev/vdb rw",
)

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1E24 00000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 1
   1: 00000000:1E25 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2
"""
"""Somebody listens on 7717; 7716 is a connection."""


def shared_object(words: Mapping[str, int], after: bytes = b"") -> bytes:
    """A 64-bit ELF file that defines these variables of 32 bits, and wants `printf`."""
    names, symbols, values = b"\0", struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0), b""
    for name, value in (*words.items(), ("printf", None)):
        place = (3, 0x1000 + len(values)) if value is not None else (0, 0)
        symbols += struct.pack("<IBBHQQ", len(names), 0x11, 0, *place, 4)
        names += name.encode() + b"\0"
        values += b"" if value is None else struct.pack("<I", value)
    start = 64
    sections = [(0, 0, 0, 0, 0, 0)]
    body = b""
    for kind, address, content, link, each in (
        (11, 0, symbols, 2, 24),
        (3, 0, names, 0, 0),
        (1, 0x1000, values, 0, 0),
    ):
        sections.append((kind, address, start + len(body), len(content), link, each))
        body += content
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, start + len(body), 0, 64, 0, 0, 64, 4, 0)
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, address, offset, size, link, 0, 1, each)
        for kind, address, offset, size, link, each in sections
    )
    return head + body + table + after


class GoodNode:
    """The tree, and what a test needs to spoil it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = Places(root)
        self.conf = ""
        self.is_root = True
        self._folders: set[str] = set()
        self.write("/etc/forestage/forestage.yaml", CONFIG)
        self.at("/mnt/nvme/forestage").mkdir(parents=True, mode=0o700)
        self.at("/lustre").mkdir()
        self._slurm()
        self._pyxis()
        self._kernel()

    def _slurm(self) -> None:
        self.write("/etc/slurm/slurm.conf", SLURM_CONF)
        self.write("/etc/slurm/plugstack.conf", PLUGSTACK)
        self.write("/etc/slurm/plugstack.conf.d/10-forestage.conf", COMPANION)
        self.write("/etc/slurm/plugstack.conf.d/20-pyxis.conf", PYXIS)
        for name in ("prolog", "epilog"):
            hook = (REPO / name / "forestage").read_text()
            self.write(f"/usr/libexec/forestage/{name}", hook, 0o755)
        self.link("/etc/slurm/prolog.d/50-forestage", "../../../usr/libexec/forestage/prolog")
        self.write("/etc/slurm/prolog.d/90-site", "#!/bin/sh\nexit 0\n", 0o755)
        self.write("/usr/lib/forestage/bin/python3", "#!/bin/sh\nexit 0\n", 0o755)
        self.write("/usr/lib/forestage/bin/forestage", "#!/bin/sh\n", 0o755)
        self.plugin("/usr/lib64/slurm/auth_munge.so", RELEASE)
        self.plugin("/usr/lib/forestage/spank/forestage.so", RELEASE - 1)  # only the last part
        self.link("/etc/systemd/system/timers.target.wants/forestage-sweep.timer", "/x")
        self.at("/run/systemd/system").mkdir(parents=True)

    def _pyxis(self) -> None:
        self.plugin("/usr/lib64/slurm/pyxis.so", RELEASE, b"enroot\0use_squashfuse=\0")
        self.write("/etc/enroot/enroot.conf", ENROOT)
        for name in ("squashfuse", "setpriv"):
            self.write(f"/usr/bin/{name}", "#!/bin/sh\n", 0o755)
        self.write("/dev/fuse", "", 0o666)

    def _kernel(self) -> None:
        self.write("/proc/self/mountinfo", "\n".join(MOUNTS) + "\n")
        for pid, name in (("1", "systemd"), ("77", "slurmd"), ("78", "sshd")):
            self.write(f"/proc/{pid}/comm", f"{name}\n")
            self.link(f"/proc/{pid}/ns/mnt", "mnt:[9]" if name == "sshd" else "mnt:[1]")
        self.write("/proc/sys/user/max_user_namespaces", "100\n")
        self.write("/proc/sys/user/max_mnt_namespaces", "100\n")
        self.write(
            "/proc/swaps", "Filename Type Size Used Priority\n/dev/nvme3n1 partition 1 0 -2\n"
        )
        self.write("/proc/net/tcp", TCP)
        for name in ("nvme0n1", "nvme1n1"):
            self.disk(name)
            self.link(f"/sys/block/md0/slaves/{name}", f"../../{name}")
        # In use, or too small: none of these is spare.
        self.disk("nvme2n1", size=10)
        self.disk("nvme3n1")
        self.disk("nvme4n1")
        self.write("/sys/block/nvme4n1/nvme4n1p1/partition", "1\n")
        self.disk("vda")
        self.write("/sys/block/md0/md/level", "raid0\n")
        self.write("/sys/block/md0/md/raid_disks", "2\n")
        self.link("/sys/dev/block/9:0", "../../block/md0")
        self.link("/sys/dev/block/254:0", "../../block/vda")

    # What a test does to it

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self._write(path, text.encode(), mode)

    def link(self, path: str, to: str) -> None:
        os.symlink(to, self._ready(path))

    def _write(self, path: str, data: bytes, mode: int) -> None:
        fd = os.open(self._ready(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, data)
        os.fchmod(fd, mode)
        os.close(fd)

    def _ready(self, path: str) -> str:
        """Where a path is, its folder made; in as few calls as it takes, as every test does it."""
        place = f"{self.root}{path}"
        folder = os.path.dirname(place)
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return place

    def remove(self, path: str) -> None:
        self.at(path).unlink()

    def config(self, text: str) -> None:
        self.write("/etc/forestage/forestage.yaml", CONFIG + text)

    def change(self, path: str, old: str, new: str) -> None:
        """In a file that holds `old` once."""
        text = self.at(path).read_text()
        assert text.count(old) == 1, (path, old)
        self.at(path).write_text(text.replace(old, new))

    def slurm(self, old: str, new: str) -> None:
        self.change("/etc/slurm/slurm.conf", old, new)

    def mount(self, point: str, rest: str) -> None:
        """Puts a file system there: `device - kind source`, in place of what is mounted there."""
        device, _, tail = rest.partition(" - ")
        kept = [line for line in MOUNTS if line.split()[4] != point]
        line = f"99 21 {device} / {point} rw - {tail} rw"
        self.write("/proc/self/mountinfo", "\n".join([*kept, line]) + "\n")

    def unmount(self, point: str) -> None:
        kept = [line for line in MOUNTS if line.split()[4] != point]
        self.write("/proc/self/mountinfo", "\n".join(kept) + "\n")

    def plugin(
        self, path: str, release: int, after: bytes = b"", also: tuple[str, ...] = ()
    ) -> None:
        defined = {"plugin_version": release, **dict.fromkeys(also, 0)}
        self._write(path, shared_object(defined, after), 0o644)

    def disk(self, name: str, size: int = 1000) -> None:
        self.write(f"/sys/block/{name}/size", f"{size}\n")
        self.write(f"/sys/block/{name}/queue/rotational", "1\n" if name == "vda" else "0\n")

    def use(self, image: str, size: int, times: int = 1, hook: events.Hook = "prolog") -> None:
        """Jobs that asked for an image, an hour ago."""
        outcome = Outcome("copied", image=image, size=size)
        event = Event(NOW - 3600, hook, 7, outcome, "alice", 1000)
        events.append(self.places.events, [event] * times)

    # What `check` says of it

    def check(self) -> Checked:
        me = User("", os.getuid(), os.getgid())
        asked = Request(self.places, Frozen(), self.conf, me, self.is_root)
        return check(asked)

    def ids(self) -> list[str]:
        return [one.id for one in self.check().findings]


def words(checked: Checked) -> str:
    """What a person reads."""
    return "\n".join(harmless(piece.text) for piece in pieces(checked) if isinstance(piece, Line))
