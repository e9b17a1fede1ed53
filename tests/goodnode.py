"""A node's files as they are where all is well, below a folder: for tests of `forestage check`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from commands import NOW, Frozen
from forestage import events
from forestage.check import CheckReport, CheckTarget, format_report, run_checks
from forestage.events import EventRecord, RequestOutcome
from forestage.features.peers import activation
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient
from forestage.system.terminal import TextLine, escape_control_characters

REPO = Path(__file__).resolve().parents[1]
RELEASE = "22.05.8"

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

MOUNTS = (
    "21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw",
    "22 21 0:22 / /proc rw - proc proc rw",
    "23 21 0:23 / /dev/shm rw - tmpfs tmpfs rw",
    "24 21 0:44 / /home rw - nfs4 server:/home rw",
    "25 21 9:0 / /mnt/nvme rw,noatime - xfs /dev/md0 rw",
    "26 21 0:50 / /lustre rw - lustre 10.0.0.1@o2ib:/big rw,flock",
)

OF_ROOT = "Uid:\t0\t0\t0\t0\n"

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1E24 00000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 1
   1: 00000000:1E25 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2
"""
"""Somebody listens on 7717; 7716 is a connection."""


class GoodNode:
    """The tree, and what a test needs to spoil it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = NodePaths(root)
        self.conf = ""
        self.is_root = True
        self.login = False
        # By which nodes prove themselves to each other, on a machine with munge and without.
        self.write("/key", bytes(range(32)), 0o600)
        self.config("")
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
        self.write("/usr/sbin/slurmd", f"#!/bin/sh\necho slurm-wlm {RELEASE}\n", 0o755)
        self.plugin("/usr/lib/forestage/spank/forestage.so")
        self.companion_for("22.05.3")  # the last part may differ
        self.link("/etc/systemd/system/timers.target.wants/forestage.timer", "/x")
        self.link("/etc/systemd/system/multi-user.target.wants/forestage-peer.service", "/x")
        self.hold_sign()
        self.at("/run/systemd/system").mkdir(parents=True)

    def _pyxis(self) -> None:
        self.plugin("/usr/lib64/slurm/pyxis.so", "enroot", "use_squashfuse=")
        for name in ("squashfuse", "setpriv"):
            self.write(f"/usr/bin/{name}", "#!/bin/sh\n", 0o755)
        self.write("/dev/fuse", "", 0o666)

    def _kernel(self) -> None:
        self.write("/proc/self/mountinfo", "\n".join(MOUNTS) + "\n")
        for pid, name in (("1", "systemd"), ("77", "slurmd"), ("78", "sshd")):
            self.write(f"/proc/{pid}/comm", f"{name}\n")
            self.write(f"/proc/{pid}/status", f"Name:\t{name}\n{OF_ROOT}")
            self.link(f"/proc/{pid}/ns/mnt", "mnt:[9]" if name == "sshd" else "mnt:[1]")
        self.write("/proc/sys/user/max_mnt_namespaces", "100\n")
        self.write("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
        self.write("/run/forestage/hold/serve/memory.max", "max\n")
        self.write("/run/forestage/hold/copy/memory.max", "1073741824\n")
        self.write("/run/forestage/hold/cpu.max", "max 100000\n")
        self.write("/proc/net/tcp", TCP)

    # What a test does to it

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str | bytes, mode: int = 0o644) -> None:
        file = self.at(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        file.chmod(mode)

    def link(self, path: str, to: str) -> None:
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).symlink_to(to)

    def remove(self, path: str) -> None:
        self.at(path).unlink()

    def config(self, text: str) -> None:
        own = "" if "peers:" in text else f"peers: {{key_file: {self.at('/key')}}}\n"
        self.write("/etc/forestage/forestage.yaml", CONFIG + own + text)

    def change(self, path: str, old: str, new: str) -> None:
        """In a file that holds `old` once."""
        text = self.at(path).read_text()
        assert text.count(old) == 1, (path, old)
        self.at(path).write_text(text.replace(old, new))

    def slurm(self, old: str, new: str) -> None:
        self.change("/etc/slurm/slurm.conf", old, new)

    def hold_sign(self) -> None:
        """What the peer service holds as long as it lives."""
        self._sign = contextlib.ExitStack()
        self._sign.enter_context(activation.hold_sign(self.places))

    def drop_sign(self) -> None:
        """The service has ended, and that was long ago."""
        self._sign.close()
        self.places.peer_sign.unlink()

    def unmount(self, point: str) -> None:
        kept = [line for line in MOUNTS if line.split()[4] != point]
        self.write("/proc/self/mountinfo", "\n".join(kept) + "\n")

    def plugin(self, path: str, *names: str) -> None:
        """A plugin with these names in its table of strings."""
        self.write(path, b"\x7fELF" + b"".join(f"\0{name}\0".encode() for name in names))

    def companion_for(self, release: str) -> None:
        self.write("/usr/lib/forestage/spank/forestage.so.release", f"{release}\n")

    def use(self, image: str, size: int, times: int = 1, hook: events.EventHook = "prolog") -> None:
        """Jobs that asked for an image, an hour ago."""
        outcome = RequestOutcome("copied", image=image, size=size)
        event = EventRecord(NOW - 3600, hook, 7, outcome, "alice", 1000)
        events.append_events(self.places.events, [event] * times)

    # What `run_checks` says of it

    def check(self) -> CheckReport:
        slurm = SlurmClient(str(self.at("/usr/bin")), node="n1")
        return run_checks(
            CheckTarget(self.places, Frozen(), self.conf, self.is_root, self.login, slurm)
        )

    def ids(self) -> list[str]:
        return [one.id for one in self.check().findings]


def words(report: CheckReport) -> str:
    """What a person reads."""
    return "\n".join(
        escape_control_characters(piece.text)
        for piece in format_report(report)
        if isinstance(piece, TextLine)
    )
