"""A fresh Debian 12 and somebody who types what a page says, block by block."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from host import ClusterError
from mirror import mirror, proxy

HOST = "first"
ADDRESS = "10.99.0.1"
# A machine runs systemd; a tree does not. What the page restarts is started here, once.
SYSTEMCTL = """\
#!/bin/sh
test "$1" = restart || exit 1
shift
for daemon; do
    case $daemon in
        munge)
            install -d -o munge -g munge -m 755 /run/munge
            setpriv --reuid=munge --regid=munge --clear-groups munged ;;
        slurmctld) setpriv --reuid=slurm --regid=slurm --init-groups slurmctld ;;
        slurmd) install -d /var/lib/slurm/slurmd; slurmd ;;
    esac || exit 1
done
"""
# The packages' own services must not start as the tree's packages are unpacked.
NO_SERVICES = "#!/bin/sh\nexit 101\n"
# Layers in memory; the tree's own network begins when the page is done with apt.
BOOT = """\
set -e
hostname {host}
mount -t tmpfs -o mode=0755 tmpfs {stage}
mkdir {stage}/upper {stage}/work {stage}/root
mount -t overlay -o lowerdir={tree},upperdir={stage}/upper,workdir={stage}/work overlay {stage}/root
cd {stage}/root
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=0755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
unshare --net sh -c 'ip link set lo up; ip address add {address}/32 dev lo; exec sleep infinity' &
echo $! >{stage}/network
until nsenter --net=/proc/$!/ns/net ip -o address show dev lo | grep -q {address}; do
    sleep 0.1
done
echo ready
exec sleep infinity
"""


def blocks(page: Path) -> list[str]:
    """What the page tells to run: its fenced blocks."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


class Machine:
    """A fresh machine in namespaces of its own. All of it ends with `with`."""

    def __init__(self, tree: Path, stage: Path) -> None:
        self._stage = stage
        script = BOOT.format(host=HOST, stage=stage, tree=tree, address=ADDRESS)
        unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--uts", "--ipc"]
        unshare += ["--mount-proc"]
        self._process = subprocess.Popen(
            [*unshare, "--fork", "--kill-child", "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise ClusterError("the machine did not start")
        self._init = self._child(self._process.pid)
        self.write("/usr/local/bin/systemctl", SYSTEMCTL)
        self.write("/usr/sbin/policy-rc.d", NO_SERVICES)
        self.write("/etc/hosts", f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
        self.write("/etc/hostname", f"{HOST}\n")

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self._init}/root{self._stage}/root", inside.lstrip("/"))

    def write(self, path: str, text: str) -> None:
        self.path(path).parent.mkdir(parents=True, exist_ok=True)
        self.path(path).write_text(text)
        self.path(path).chmod(0o755)

    def put(self, file: Path) -> None:
        """Into root's home, where the page is followed."""
        shutil.copy(file, self.path("/root"))

    def type(self, block: str) -> str:
        """Runs a block as root would; what it printed. Only apt meets the world's network."""
        enter = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--uts", "--ipc"]
        sleeper = Path(f"/proc/{self._init}/root{self._stage}/network").read_text().strip()
        own, proxies = ["nsenter", f"--net=/proc/{sleeper}/ns/net"], dict[str, str]()
        if "apt-get" in block:
            own, proxies = [], proxy(mirror())
        chroot = ["chroot", f"{self._stage}/root", "env", "-i", "-C", "/root"]
        clean = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
        clean += ["LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"]
        clean += [f"{name}={value}" for name, value in proxies.items()]
        argv = [*enter, *own, *chroot, *clean, "sh", "-eu"]
        done = subprocess.run(argv, input=block, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise ClusterError(f"{block}\nexit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    @staticmethod
    def _child(parent: int) -> int:
        """unshare(1) forks: the machine's first process is its child."""
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(child)
