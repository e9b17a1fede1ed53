"""The network of a cluster made with `net`: a switch, a link for each node, a file server.

    login --- switch --- n1, n2, ...      each in a network namespace of its own, its link shaped
                  \\----- store            GlusterFS, the shared file system of all; shaped as well

Links are pairs of veth, shaped both ways by tbf: what leaves a node at its own end, what goes to
it at the switch's. The login's is not shaped. All of it lies inside the cluster's namespaces.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from spec import LOGIN, STORE, ClusterSpec, Net

SWITCH = "switch"
PREFIX = 16  # bits of the network's addresses
NAMESPACES = Path("/run/netns")
RAM = Path("/ram")  # the nodes' disks and the file server's: this is to measure networks
BRICK = RAM / "brick"
PORT = 24007
BURST = 128 << 10  # bytes; more than one segment of 64 KiB as the kernel hands them over
QUEUE_MS = 50

BRICK_VOLUME = """\
volume posix
    type storage/posix
    option directory {brick}
end-volume
volume rights
    type features/access-control
    subvolumes posix
end-volume
volume locks
    type features/locks
    subvolumes rights
end-volume
volume brick
    type performance/io-threads
    option thread-count 8
    subvolumes locks
end-volume
volume server
    type protocol/server
    option transport-type tcp
    option transport.socket.bind-address {address}
    option transport.socket.listen-port {port}
    option auth.addr.brick.allow *
    option root-squash {squash}
    subvolumes brick
end-volume
"""

# Without caches and without reading ahead: whatever the kernel asks for goes over the network.
CLIENT_VOLUME = """\
volume store
    type protocol/client
    option transport-type tcp
    option remote-host {address}
    option remote-port {port}
    option remote-subvolume brick
    option ping-timeout 10
end-volume
"""

# The file system is there and can be looked at, but every read of a file's bytes fails. GlusterFS
# cannot be told to say EIO.
NO_READS = """\
volume failing
    type debug/error-gen
    option failure 100
    option error-no EACCES
    option enable read
    subvolumes store
end-volume
"""


def build(spec: ClusterSpec, net: Net) -> None:
    """Switch, links and file server; /shared of the login. By the cluster's first process."""
    for node in spec.node_names:
        _do("mount", "-t", "tmpfs", "-o", f"size={spec.nvme_mib}m", "tmpfs", _made(disk(node)))
    _do("mount", "-t", "tmpfs", "tmpfs", _made(BRICK))
    _do("ip", "link", "add", SWITCH, "type", "bridge")
    _do("ip", "address", "add", f"{spec.addresses[LOGIN]}/{PREFIX}", "dev", SWITCH)
    _do("ip", "link", "set", SWITCH, "up")
    for name in (STORE, *spec.node_names):
        mbit = net.store_mbit if name == STORE else net.node_mbit
        _connect(name, spec.addresses[name], mbit)
    _volumes(spec.addresses[STORE], "on" if net.squash else "off")
    options = ["-f", "/etc/glusterfs/brick.vol", "-l", "/var/log/slurm/brick.log"]
    _do(*_within(STORE), "glusterfsd", *options, "-p", "/run/brick.pid")
    if net.squash:
        # Whoever fills the file system does so where root is root.
        _do("mount", "--bind", BRICK, "/shared")
    else:
        mount()


def mount(volume: str = "client", remembers: int = 1) -> None:
    """/shared through a client of its own, for whoever's namespaces these are.

    It `remembers` names and attributes for so many seconds.
    """
    log = Path("/var/log/slurm", f"shared-{_host()}.log")
    options = ["--log-level=WARNING", "-l", str(log), "-p", "/run/shared.pid"]
    options += [f"--{what}-timeout={remembers}" for what in ("entry", "attribute")]
    _do("glusterfs", "-f", f"/etc/glusterfs/{volume}.vol", *options, "/shared")


def join(name: str) -> None:
    """Gives a node its own way to /shared, and its own munged. By the node's first process."""
    _do("umount", "--lazy", "/shared")  # the login's
    mount()
    # Its own, with the cluster's key, so that it can be stopped without stopping Slurm.
    _do("chown", "munge:munge", _made(Path("/run/munge")))
    user = ["setpriv", "--reuid=munge", "--regid=munge", "--init-groups"]
    files = [f"--pid-file=/run/munge/{name}.pid", f"--log-file=/var/log/munge/{name}.log"]
    _do(*user, "munged", *files, f"--seed-file=/var/lib/munge/{name}.seed")


def shape(device: str, mbit: float) -> list[str]:
    """The command line that gives a device this rate, or another one than it has."""
    burst = ["burst", str(BURST), "latency", f"{QUEUE_MS}ms"]
    return [*f"tc qdisc replace dev {device} root tbf rate {mbit}mbit".split(), *burst]


def port(node: str) -> str:
    """The switch's end of a node's link."""
    return f"to-{node}"


def _connect(name: str, address: str, mbit: float) -> None:
    _do("ip", "netns", "add", name)
    near = ["ip", "link", "add", port(name), "type", "veth"]
    _do(*near, "peer", "name", "eth0", "netns", name)
    _do("ip", "link", "set", port(name), "master", SWITCH, "up")
    within = _within(name)
    _do(*within, "ip", "address", "add", f"{address}/{PREFIX}", "dev", "eth0")
    for device in ("lo", "eth0"):
        _do(*within, "ip", "link", "set", device, "up")
    _do(*shape(port(name), mbit))
    _do(*within, *shape("eth0", mbit))


def _within(name: str) -> list[str]:
    return ["nsenter", f"--net={NAMESPACES / name}", "--"]


def _volumes(address: str, squash: str) -> None:
    where = {"address": address, "port": PORT, "brick": BRICK, "squash": squash}
    etc = _made(Path("/etc/glusterfs"))
    (etc / "brick.vol").write_text(BRICK_VOLUME.format(**where))
    (etc / "client.vol").write_text(CLIENT_VOLUME.format(**where))
    (etc / "failing.vol").write_text(CLIENT_VOLUME.format(**where) + NO_READS)


def disk(node: str) -> Path:
    return RAM / node


def _host() -> str:
    return Path("/proc/sys/kernel/hostname").read_text().strip()


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    return directory


def _do(*argv: str | Path) -> None:
    words: Sequence[str] = [str(word) for word in argv]
    subprocess.run(words, check=True)
