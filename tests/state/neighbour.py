"""A second node of the same jobs, whose peer service gives chunks away; good, bad, or gone."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from played import Ended, play

from forestage.cache.layout import Cache
from forestage.cache.lease import Leases
from forestage.clock import Clock
from forestage.paths import Places
from node import Node
from peering import SERVE, free_port

NODELIST = "n[1-2]"
JOB = 1000  # its own jobs have other numbers


class Neighbour:
    """n2; it sees the same shared file system at the same place as `node`, which is n1."""

    def __init__(self, node: Node, top: Path) -> None:
        self.node = Node(top)
        self.node.places = Places(top / "neighbour")
        self.node.nvme = self.node.places.root / "mnt/nvme"
        self.node.nvme.mkdir(parents=True)
        self.node.cache = Cache(self.node.nvme / "forestage")
        self.node.leases = Leases(self.node.places.leases)
        self.key_file = top / "peer.key"
        self.key_file.write_bytes(b"k" * 64)
        self.key_file.chmod(0o600)
        self.port = free_port()
        self.node.configure(redirect="none", user_messages="none", peers=self.peers())
        self.node.cache.prepare(require_mount=False)
        self._service: subprocess.Popen[bytes] | None = None

    def peers(self) -> dict[str, object]:
        """The configuration of both."""
        here = f"127.0.0.1:{self.port}"
        return {
            "enabled": True,
            "listen": "127.0.0.1",
            "addresses": {"n1": "127.0.0.1:9", "n2": here},  # nobody is at the first
            "key_file": str(self.key_file),
        }

    def serves(self) -> None:
        """Its service runs; it says so."""
        if self._service is not None:
            return
        argv = [sys.executable, "-Bc", SERVE, str(self.node.places.root), "", "n2"]
        self._service = subprocess.Popen(argv, stderr=subprocess.PIPE, cwd="/")
        said, out = b"", self._service.stderr
        assert out is not None
        while b"peer serves at" not in said:
            assert select.select([out], [], [], 60)[0], said.decode()
            more = os.read(out.fileno(), 65536)
            assert more, said.decode()
            said += more

    def dies(self) -> None:
        """From now on its port refuses."""
        if self._service is not None:
            self._service.kill()
            self._service.communicate()
            self._service = None

    def pids(self) -> set[int]:
        """Of its service, if that runs."""
        return {self._service.pid} if self._service is not None else set()

    def staging(self, path: Path, user_of: int) -> Callable[[], Ended]:
        """A job of its own comes and goes, and leaves its image there."""
        job = JOB + user_of
        environ = self.node.environ(job, path) | {"SLURMD_NODENAME": "n2"}

        def work() -> Ended:
            play("prolog", environ, self.node.places, Clock())
            return play("epilog", self.node.environ(job), self.node.places, Clock())

        return work

    def rots(self) -> int:
        """Its disk changes a byte in each image, and the digests do not; how many there are."""
        count = 0
        for image in self.node.cache.entries.glob("*/image"):
            with contextlib.suppress(FileNotFoundError), image.open("r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))
                count += 1
        return count

    def forgets(self) -> None:
        """All that it has."""
        for folder in (self.node.cache.entries, self.node.cache.parts):
            for path in folder.glob("*"):
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.node.places.run, ignore_errors=True)
