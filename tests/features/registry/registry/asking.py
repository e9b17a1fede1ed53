"""A user with a home and an enroot, who asks registries in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

ALICE, BOB = 64001, 64002  # as real as it gets: ids that nobody has
VERSION = "4.1.2"

CHILD = """
import json, sys
from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.features.registry import environment, reference, resolve
from forestage.system import run

class Skipping(Clock):
    slept = []
    def monotonic(self):
        return super().monotonic() + sum(self.slept)
    def sleep(self, seconds):
        self.slept.append(seconds)

order = json.load(sys.stdin)
run.PATH = order["path"]
found = {}
try:
    clock = Skipping()
    environ = environment.parse_environment(order["environ"].encode(errors="surrogateescape"))
    stop = Deadline.after(600.0, clock)
    settings = environment.read_enroot_settings(environ, stop, order["conf"])
    asked = reference.parse_reference(order["text"])
    until = Deadline.after(order["patience"], clock)
    if "meant" in order:
        found["layers"] = resolve.sum_layer_bytes(asked, settings, order["meant"], until)
    else:
        found["digest"] = resolve.resolve_digest(asked, settings, until)
except Declined as error:
    found |= {"reason": error.reason, "detail": str(error)}
    found["transient"] = getattr(error, "is_transient", False)
print(json.dumps(found | {"slept": Skipping.slept}))
"""


class Result(msgspec.Struct, frozen=True):
    """What came of it, and for how long it would have slept."""

    digest: str = ""
    layers: int = 0
    reason: str = ""
    detail: str = ""
    transient: bool = False
    slept: tuple[float, ...] = ()


class Asker:
    """A user who resolves references in a process of their own, as the worker does."""

    def __init__(self, folder: Path, uid: int) -> None:
        folder.mkdir()
        self.folder, self.uid = folder, uid
        self.home = folder / "home"
        self.conf = folder / "etc/enroot.conf"
        self.bin = folder / "bin"
        for made in (self.home / ".config/enroot", self.conf.parent, self.bin):
            made.mkdir(parents=True)
        self.program("enroot", f"echo {VERSION}")
        self.credentials = self.home / ".config/enroot/.credentials"
        self.variables = {"HOME": str(self.home), "USER": "alice"}
        self.pid = 0

    def program(self, name: str, script: str) -> None:
        """A program in the node's PATH."""
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def has(self, *lines: str) -> None:
        """Writes .credentials, a line each."""
        self.credentials.write_text("".join(f"{line}\n" for line in lines))

    def owns_home(self) -> None:
        for folder, _, files in os.walk(self.home):
            for path in (folder, *(f"{folder}/{file}" for file in files)):
                os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def ask(self, text: str, patience: float = 600.0, meant: str | None = None) -> Result:
        """Resolves a reference, or looks for what `meant` is in bytes; `patience` is in seconds."""
        self.owns_home()
        order = {
            "text": text,
            "patience": patience,
            "path": f"{self.bin}:/usr/sbin:/usr/bin:/sbin:/bin",
            "environ": "".join(f"{name}={value}\0" for name, value in self.variables.items()),
            "conf": str(self.conf),
            **({} if meant is None else {"meant": meant}),
        }
        ids = (f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--no-new-privs")
        argv = ["setpriv", *ids, "--pdeathsig", "KILL", "--", sys.executable, "-I", "-c", CHILD]
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(argv, stdin=pipe, stdout=pipe, env={}, cwd="/") as process,
            contextlib.ExitStack() as end,
        ):
            end.callback(process.kill)  # else a test whose time is over would wait for `patience`
            self.pid = process.pid
            out, _ = process.communicate(json.dumps(order).encode())
        assert process.returncode == 0
        return msgspec.json.decode(out, type=Result)
