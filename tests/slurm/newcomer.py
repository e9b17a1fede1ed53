"""A fresh machine that has booted, and somebody who types what a page says, block by block."""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import TracebackType

from host import ClusterError
from mirror import mirror, proxy
from spec import REPO

HOST = "first"
ADDRESS = "10.99.0.1"
BOOT = 120  # seconds until systemd must have said that it has booted
# Layers in memory; what ends is this shell's process, and with it the machine.
SCRIPT = """\
set -e
mount -t tmpfs -o mode=0755 tmpfs {stage}
mkdir {stage}/upper {stage}/work {stage}/root
mount -t overlay -o lowerdir={tree},upperdir={stage}/upper,workdir={stage}/work overlay {stage}/root
printf '127.0.0.1 localhost\\n{address} {host}\\n' >{stage}/root/etc/hosts
printf '{host}\\n' >{stage}/root/etc/hostname
exec systemd-nspawn --quiet --directory={stage}/root --machine={name} --hostname={host} \
    --register=no --keep-unit --private-network --resolv-conf=replace-host --console=pipe \
    --timezone=off --notify-ready=yes --boot
"""


def blocks(page: Path) -> list[str]:
    """What the page tells to run: its fenced blocks."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def told(test: str) -> list[str]:
    """The blocks of docs/sites.md that this test runs, by its file's name, as the page says."""
    page = (REPO / "docs/sites.md").read_text()
    mark = rf"^<!-- run by slurm/{re.escape(test)} -->\n```sh\n(.*?)^```$"
    return re.findall(mark, page, re.MULTILINE | re.DOTALL)


class Machine:
    """A machine of its own with systemd as its first process. All of it ends with `with`."""

    def __init__(self, tree: Path, stage: Path) -> None:
        name = f"forestage-{secrets.token_hex(4)}-{tree.name}"
        script = SCRIPT.format(stage=stage, tree=tree, address=ADDRESS, host=HOST, name=name)
        self.console = stage.parent / f"{stage.name}.console"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(f"{stage}.notify")
            with self.console.open("w") as console:
                self._process = subprocess.Popen(
                    ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "NOTIFY_SOCKET": f"{stage}.notify"},
                )
            try:
                self._leader = self._booted(notified)
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise
        # slurmctld wants an address that is not the loopback's.
        network = ["nsenter", f"--target={self._leader}", "--net"]
        subprocess.run([*network, "ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Not nspawn, which would leave the machine running: with its first process all of it ends.
        process = os.pidfd_open(self._leader)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
        self._process.wait()

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self._leader}/root", inside.lstrip("/"))

    @property
    def enter(self) -> list[str]:
        """The command line that enters it, but for its network."""
        return ["nsenter", f"--target={self._leader}", "--mount", "--pid", "--uts", "--ipc"]

    def put(self, file: Path) -> None:
        """Into root's home, where the page is followed."""
        shutil.copy(file, self.path("/root"))

    def type(self, block: str) -> str:
        """Runs a block as root would; what it printed. Only apt meets the world's network."""
        done = self.begin(block)
        said, problems = done.communicate(timeout=240)
        if done.returncode:
            raise ClusterError(f"{block}\nexit {done.returncode}\n{said}{problems}")
        return said

    def begin(self, block: str) -> subprocess.Popen[str]:
        """The same, without waiting for its end."""
        enter = self.enter
        proxies = dict[str, str]()
        if "apt-get" in block:
            proxies = proxy(mirror())
        else:
            enter.append("--net")
        clean = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
        clean += ["LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"]
        clean += [f"{name}={value}" for name, value in proxies.items()]
        argv = [*enter, "env", "-i", "-C", "/root", *clean, "sh", "-eu", "-c", block]
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _booted(self, notified: socket.socket) -> int:
        """What nspawn says: who leads the machine, and then that it has booted."""
        leader, ended = 0, os.pidfd_open(self._process.pid)
        try:
            while select.select([notified, ended], [], [], BOOT)[0] == [notified]:
                for line in notified.recv(4096).decode().split("\n"):
                    name, _, value = line.partition("=")
                    if name == "X_NSPAWN_LEADER_PID":
                        leader = int(value)
                    if line == "READY=1" and leader:
                        return leader
        finally:
            os.close(ended)
        raise ClusterError(f"it did not boot\n{self.console.read_text()}")
