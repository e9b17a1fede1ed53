"""A program in a mount namespace of its own, as rootless containers have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forestage.bind import namespaces
from node import BOB, Node, until

USERS = ("--user", "--map-root-user")


class Private:
    """A program of Bob's in a mount namespace of its own, or of root's, as `options` say."""

    def __init__(self, *options: str, first: str = ":") -> None:
        who = {"user": BOB.uid, "group": BOB.gid, "extra_groups": []} if options else {}
        first = f"{first}; exec sleep inf"
        argv = ["unshare", *options, "--mount", "--propagation", "private", "sh", "-c", first]
        self.program = subprocess.Popen(argv, **who)  # type: ignore[call-overload]
        comm = Path(f"/proc/{self.program.pid}/comm")
        until(lambda: comm.read_text() == "sleep\n" or self.program.poll(), "the namespace")
        if self.program.returncode:
            pytest.skip("no user namespaces here")

    def reads(self, path: Path) -> bytes:
        return Path(f"/proc/{self.program.pid}/root{path}").read_bytes()

    def found(self, node: Node) -> list[namespaces.ForeignBind]:
        """The redirects that it sees.

        By the namespace: a child of a hook's that went there may not have ended yet, and then it is
        named in the program's place.
        """
        mine = Path(f"/proc/{self.program.pid}/ns/mnt").stat().st_ino
        return [
            one for one in namespaces.scan_namespaces(node.cache).binds if one.namespace == mine
        ]

    def binds(self, node: Node) -> int:
        """How many redirects it sees."""
        return len(self.found(node))

    def end(self) -> None:
        self.program.kill()
        self.program.wait()
