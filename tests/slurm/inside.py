"""What runs inside a test cluster: its first process, and the first process of each node.

    inside.py init STATE      builds the root tree, moves into it, then reaps orphans
    inside.py node NAME [-b]  gives the node its disks, starts slurmd, then reaps orphans

Both are process 1 of a PID namespace: when one is killed, the kernel kills all its descendants
and drops the mounts, and with them the loop devices. That is all there is to shutting down.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import net
from spec import (
    INSIDE_STATE,
    LAB_GID,
    LOGIN,
    REPO,
    SLURM_MUNGE,
    USERS,
    VENV,
    ClusterSpec,
    plugstack_conf,
    slurm_conf,
)

from isolate import open_parents

TMPFS = "mount -t tmpfs -o mode={mode} tmpfs {path}"


def main() -> None:
    role, argument, *flags = sys.argv[1:]
    if role == "init":
        build_root(Path(argument))
        print("ready", flush=True)
        reap_orphans()
        follow_owner()
    else:
        start_node(argument, flags)
        reap_orphans()
    while True:
        signal.pause()


def reap_orphans() -> None:
    # Ignored SIGCHLD makes the kernel reap. Children inherit it, so only once all are started.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # those that had ended before
            pass


def follow_owner() -> None:
    """Ends with the process that holds the other end of stdin, however that one ends.

    A byte instead of the end of file means: the cluster shall outlive its owner.
    """
    if not os.read(sys.stdin.fileno(), 1):
        sys.exit()


def run(command: str, **paths: object) -> None:
    subprocess.run([word.format(**paths) for word in command.split()], check=True)


def build_root(state: Path) -> None:
    spec = ClusterSpec.from_json((state / "spec.json").read_text())
    start_network(spec)
    socket.sethostname(LOGIN)

    # On a tmpfs, because the upper directory must not lie inside the lower tree's file system.
    layers, root = state / "layers", state / "root"
    run(TMPFS, mode="0755", path=layers)
    for layer in ("upper", "work"):
        (layers / layer).mkdir()
    run(
        "mount -t overlay -o lowerdir={lower},upperdir={layers}/upper,workdir={layers}/work"
        " overlay {root}",
        lower=spec.lower,
        layers=layers,
        root=root,
    )
    mount_system(root)
    for source, target in (
        (REPO, REPO),
        (state, INSIDE_STATE),
        (state / "shared", "/shared"),
        (state / "log", "/var/log/slurm"),
        (Path(spec.venv), VENV),
    ):
        if source.exists():
            bind(source, root / str(target).lstrip("/"))
    open_parents(REPO, root)

    os.chdir(root)
    (root / "old_host").mkdir()
    run("pivot_root . old_host")
    os.chdir("/")
    run("umount --lazy /old_host")
    Path("/old_host").rmdir()
    if spec.net:
        net.build(spec, spec.net)
    write_files(spec)


def start_network(spec: ClusterSpec) -> None:
    """Loopback only, but with other addresses than 127.0.0.1.

    Slurm looks names up with AI_ADDRCONFIG, for which 127.0.0.1 alone means: no network.
    """
    run("ip link set lo up")
    if spec.net:
        return  # the rest is made in the cluster's own tree
    for address in spec.addresses.values():
        run("ip address add {address}/32 dev lo", address=address)


def bind(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    run("mount --bind {source} {target}", source=source, target=target)


def mount_system(root: Path) -> None:
    run("mount -t proc proc {root}/proc", root=root)
    run("mount --rbind /sys {root}/sys", root=root)
    run("mount --rbind /dev {root}/dev", root=root)
    # Own instances: the host's terminals and shared memory are none of the cluster's business.
    run(
        "mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 pts {root}/dev/pts", root=root
    )
    run("mount --bind {root}/dev/pts/ptmx {root}/dev/ptmx", root=root)
    run(TMPFS, mode="1777", path=root / "dev/shm")
    run(TMPFS, mode="0755", path=root / "run")
    run(TMPFS, mode="1777", path=root / "tmp")
    allow_fuse(root)


def allow_fuse(root: Path) -> None:
    """Lets every user of the cluster open /dev/fuse; the host's own node keeps its mode."""
    fuse = root / "dev/fuse"
    if not fuse.exists():
        return
    own = root / "run/fuse"
    run("mknod -m 0666 {own} c 10 229", own=own)
    run("mount --bind {own} {fuse}", own=own, fuse=fuse)


def write_files(spec: ClusterSpec) -> None:
    hosts = {"localhost": "127.0.0.1", **spec.addresses}
    write("/etc/hosts", "".join(f"{address} {name}\n" for name, address in hosts.items()))
    write("/etc/hostname", f"{LOGIN}\n")
    write("/etc/slurm/slurm.conf", slurm_conf(spec))
    write("/etc/slurm/plugstack.conf", plugstack_conf(spec))
    add_users()
    for directory in ("/etc/forestage", "/var/spool/slurmctld", "/var/spool/slurmd", "/mnt/nvme"):
        Path(directory).mkdir(parents=True, exist_ok=True)
    Path("/etc/forestage").chmod(0o711)  # as the package has it where hooks run
    prepare_munge()
    if spec.net:
        bind(Path("/run/munge"), Path(SLURM_MUNGE))
    for path, text in spec.files.items():
        write(path, text, mode=0o755)


def write(path: str, text: str, mode: int = 0o644) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def add_users() -> None:
    with open("/etc/passwd", "a") as passwd, open("/etc/group", "a") as group:
        group.write(f"lab:x:{LAB_GID}:{','.join(user.name for user in USERS)}\n")
        for user in USERS:
            home = Path("/home", user.name)
            passwd.write(f"{user.name}:x:{user.uid}:{user.uid}::{home}:/bin/bash\n")
            group.write(f"{user.name}:x:{user.uid}:\n")
            for directory in (home, Path("/shared", user.name)):
                directory.mkdir(parents=True, mode=0o755)
                os.chown(directory, user.uid, user.uid)


def prepare_munge() -> None:
    key = Path("/etc/munge/munge.key")
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    Path("/run/munge").mkdir(mode=0o755)
    run("chown munge:munge {key} /run/munge", key=key)


def start_node(name: str, flags: list[str]) -> None:
    """Sees the cluster's mounts in a namespace of its own, and adds what is the node's alone."""
    spec = ClusterSpec.from_json((INSIDE_STATE / "spec.json").read_text())
    mine = INSIDE_STATE / "nodes" / name
    socket.sethostname(name)
    run("mount -t proc proc /proc")
    if spec.net:
        bind(net.disk(name), Path("/mnt/nvme"))
    else:
        run("mount -o loop {disk} /mnt/nvme", disk=mine / "nvme.img")
    # All of /run is lost at a reboot, but munged's socket is that of the one munged there is.
    run(TMPFS, mode="0755", path="/media")
    Path("/media/munge").mkdir()
    Path("/media/forestage").mkdir(mode=0o711)  # as packaging/tmpfiles.d makes it
    run("mount --bind /run/munge /media/munge")
    if spec.net:
        run("umount /media/munge")
    run("mount --no-mtab --move /media /run")  # mount's own notes are in the hidden /run
    if spec.net:
        net.join(name)
    run(TMPFS, mode="1777", path="/dev/shm")
    for directory in ("/var/spool/slurmd", *spec.node_dirs):
        own = mine / directory.strip("/").replace("/", "-")
        own.mkdir(exist_ok=True)
        bind(own, Path(directory))
    # As systemd has it: a mount made in a namespace that a job's process unshares with
    # propagation left as it is comes back to the node. Tests must see what that does.
    run("mount --make-rshared /")
    run(" ".join(["slurmd", "-N", name, *flags]))


if __name__ == "__main__":
    main()
