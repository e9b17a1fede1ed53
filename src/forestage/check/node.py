"""Findings about the node itself: programs, the kernel, slurmd's mounts, timers, peers."""

import os
from collections.abc import Iterator

import msgspec

from forestage.check.finding import Finding
from forestage.config import Config, switch
from forestage.errors import ForestageError
from forestage.paths import Places
from forestage.peers import auth
from forestage.system.tree import Files

TIMER = "forestage-sweep.timer"
_LISTEN = "0A"  # /proc/net/tcp, TCP_LISTEN


class Peers(msgspec.Struct, frozen=True):
    """Where `peers.enabled`: why the node cannot prove who it is, and whether somebody serves."""

    port: int
    unproven: str = ""
    served: bool = True


class Machine(msgspec.Struct, frozen=True):
    """The node apart from Slurm and disks. `off` says what switched staging off.

    `elsewhere`: slurmd has mounts of its own; None where no slurmd runs, or nobody may look.
    `timer`: whether the sweep's is enabled; None without systemd.
    """

    off: str = ""
    missing: tuple[str, ...] = ()
    mount_namespaces: int | None = None
    elsewhere: bool | None = None
    timer: bool | None = None
    peers: Peers | None = None


def gather(files: Files, places: Places, config: Config) -> Machine:
    """Looks at /proc, /sys and programs; proves itself to itself where peers are on."""
    needed = ["setpriv", *(["rsync"] if config.engine == "rsync" else [])]
    return Machine(
        off=switch.by_file(places) or ("" if config.enabled else "enabled: false"),
        missing=tuple(name for name in needed if not files.program(name)),
        mount_namespaces=files.number("/proc/sys/user/max_mnt_namespaces"),
        elsewhere=_elsewhere(files),
        timer=_timer(files),
        peers=_peers(files, places, config) if config.peers.enabled else None,
    )


def _elsewhere(files: Files) -> bool | None:
    ours = _namespace(files, "1")
    for pid in files.names("/proc"):
        if pid.isdigit() and (files.text(f"/proc/{pid}/comm") or "").strip() == "slurmd":
            theirs = _namespace(files, pid)
            return None if ours is None or theirs is None else theirs != ours
    return None


def _namespace(files: Files, pid: str) -> str | None:
    try:
        return os.readlink(files.at(f"/proc/{pid}/ns/mnt"))
    except OSError:
        return None


def _timer(files: Files) -> bool | None:
    if files.mode("/run/systemd/system") is None:
        return None
    wants = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
    return any(TIMER in files.names(f"{folder}/timers.target.wants") for folder in wants)


def _peers(files: Files, places: Places, config: Config) -> Peers:
    port, unproven = config.peers.port, ""
    try:
        auth.check(auth.prover(config.peers.key_file, places.munge))
    except (ForestageError, OSError) as error:
        unproven = str(error)
    tables = [files.text(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    known = [table for table in tables if table is not None]
    served = not known or any(_listens(table, port) for table in known)
    return Peers(port, unproven, served)


def _listens(table: str, port: int) -> bool:
    """Pure: whether /proc/net/tcp shows that somebody listens on a port, at any address."""
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 3 and words[3] == _LISTEN and words[1].endswith(f":{port:04X}"):
            return True
    return False


def findings(machine: Machine) -> Iterator[Finding]:
    """Pure."""
    if machine.off:
        yield Finding(
            "switched-off",
            "warning",
            f"staging is switched off: {machine.off}",
            "Every job reads its image from the shared file system",
            "rm /run/forestage/disabled, or `enabled: true`, when the reason for it is gone",
        )
    for name in machine.missing:
        package = "util-linux" if name == "setpriv" else name
        yield Finding(
            "program-missing",
            "critical",
            f"{name} is not installed",
            "Programs that forestage runs cannot be started: copies fail" if name == "setpriv"
            else "engine: rsync fails every copy",
            f"install the package {package}",
        )  # fmt: skip
    if machine.mount_namespaces == 0:
        yield Finding(
            "mount-namespaces",
            "critical",
            "the kernel is set to let nobody make a mount namespace",
            "A step's redirect needs one, and so does a look at a source below a redirect",
            "/etc/sysctl.d/99-forestage.conf: user.max_mnt_namespaces=65536",
        )
    yield from _services(machine)


def _services(machine: Machine) -> Iterator[Finding]:
    if machine.elsewhere:
        yield Finding(
            "slurmd-mounts",
            "warning",
            "slurmd has mounts of its own, apart from the node's",
            "`forestage status` and the sweep do not see the bind mounts that its Prologs make, and"
            " cannot unmount them after a crash",
            "systemctl edit slurmd: no PrivateTmp=, ProtectSystem=, ProtectHome= and the like",
        )
    if machine.timer is False:
        yield Finding(
            "sweep-timer",
            "warning",
            f"{TIMER} is not enabled",
            "What crashes leave stays: leases of jobs whose Epilog never ran keep their entries"
            " from being evicted",
            f"systemctl enable --now {TIMER}",
        )
    peers = machine.peers
    if peers is not None and peers.unproven:
        yield Finding(
            "peer-proof",
            "warning",
            f"peers are on, and this node cannot prove who it is: {peers.unproven}",
            "It gets no chunk from other nodes and sends none: each cold start reads the shared"
            " file system once per node",
            "systemctl enable --now munge, or peers.key_file",
        )
    if peers is not None and not peers.served:
        yield Finding(
            "peer-service",
            "warning",
            f"peers are on, and nobody listens on port {peers.port}",
            "Other nodes wait for this one's chunks in vain, then read the shared file system",
            "systemctl enable --now forestage-peer",
        )
