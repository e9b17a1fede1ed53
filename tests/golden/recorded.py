"""Hooks as new processes, whose imports are recorded: what a hook costs, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import peering
from forestage import config, log
from forestage.cache import disk_errors, entry_sum
from forestage.features.data import squashfs_mount, squashfs_server
from forestage.features.peers import auth, connection, peer_copy, protocol
from forestage.hooks import hook_worker, leases, step, user_messages
from forestage.sources import opening, source
from forestage.stage import pipeline
from forestage.system import daemon, probe, writers
from node import HANGS, Node

# Also in all that it forks; what it executes, as a registry's worker, is not recorded.
HOOK = """
import json, os, sys
name, root, record, after = sys.argv[1:]
after = json.loads(after)

class Recorder:
    def find_spec(self, module, path=None, target=None):
        found = (finder.find_spec(module, path, target) for finder in sys.meta_path[1:])
        spec = next((one for one in found if one), None)
        if spec and (module.startswith("forestage.") or "site-packages" in (spec.origin or "")):
            try:
                file = os.open(record, os.O_WRONLY | os.O_APPEND)
                os.write(file, module.encode() + b"\\n")
                os.close(file)
            except OSError:  # below a file system of its own
                pass
        if spec and module in after:
            load = spec.loader.exec_module
            def exec_module(loaded):
                load(loaded)
                exec(after[module], vars(loaded))
            spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Recorder())
sys.argv = [name]
from forestage.hooks import boundary
os._exit(boundary._run_to_exit_status(name, root))
"""

# Whether or not somebody listens at /dev/log.
LOG = """
_deliver = write_log_line
def write_log_line(line, by_slurm):
    _deliver(line, False)
"""

# A machine may stand still for seconds, as tests/hooks has it. A hook does not look whether its
# child hangs, nor tell its user why it waits.
LIMITS = {
    auth: ("MUNGE_TIMEOUT",),
    connection: ("CONNECT_TIMEOUT", "SILENCE_TIMEOUT"),
    disk_errors: ("LOCK_TIMEOUT", "LOOK_TIME"),
    entry_sum: ("PATIENCE",),
    daemon: ("START",),
    leases: ("SHORT_LOCK_TIMEOUT",),
    squashfs_mount: ("INSPECT_TIMEOUT",),
    opening: ("HOOK_TIMEOUT",),
    pipeline: ("PROGRESS_EVERY",),
    probe: ("LIMIT",),
    protocol: ("HANDSHAKE_TIMEOUT",),
    squashfs_server: ("BEGIN", "SERVE_TIMEOUT"),
    source: ("STAGER_TIMEOUT",),
    step: ("NAME_TIMEOUT",),
    user_messages: ("FIRST_MESSAGE_AFTER",),
    hook_worker: ("PROBE_INTERVAL",),
    writers: ("LOOK",),
}


def run_after_loading() -> dict[str, str]:
    """Code by the module in which it is to run: patient limits, and where lines and nodes go."""
    for module, names in LIMITS.items():
        assert all(hasattr(module, name) for name in names), module
    code = {
        module.__name__: "".join(f"{name} = 600.0\n" for name in names)
        for module, names in LIMITS.items()
    }
    code[peer_copy.__name__] = WAITS
    return code | {log.__name__: LOG, config.__name__: peering.FINDS.format(places=peering._places)}


# A copy reads nothing before the other node could answer.
WAITS = """
_make_policy = make_policy
def make_policy(threads, nodes):
    found = _make_policy(threads, nodes)
    return SchedulePolicy(found.max_own_reads, found.max_fetches, max_probe_reads=0, probe=600.0)
"""


class Ran(NamedTuple):
    """A hook's files; to be read once all that it has begun has ended."""

    err: Path
    out: Path
    record: Path

    @property
    def said(self) -> list[str]:
        """Its log in lines, and what the companion is told. Several processes write the log."""
        log = self.err.read_text().splitlines()
        return [*sorted(log, key=lambda line: line.split()[1]), *self.out.read_text().splitlines()]

    @property
    def modules(self) -> list[str]:
        """Those of forestage, and others' packages."""
        names = {
            name if name.startswith("forestage.") else name.partition(".")[0]
            for name in self.record.read_text().splitlines()
        }
        return sorted(names)


def run(
    node: Node,
    name: str,
    environ: Mapping[str, str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> Ran:
    """Runs a hook as Slurm does; `variables` are those of a step. `folder` is open to all."""
    number = len(list(folder.iterdir()))
    record, out, err = (folder / f"{number}.{kind}" for kind in ("imports", "out", "err"))
    record.touch()
    record.chmod(0o666)
    after = json.dumps(run_after_loading())
    keep: tuple[int, ...] = ()
    environ = dict(environ)
    if variables is not None:
        memory = os.memfd_create("environment")
        os.write(memory, "".join(f"{key}={value}\0" for key, value in variables.items()).encode())
        environ["FORESTAGE_ENVIRONMENT"] = str(memory)
        keep = (memory,)
    # Files: who lives on has them open.
    with out.open("wb") as stdout, err.open("wb") as stderr:
        ran = subprocess.run(
            [sys.executable, "-BIc", HOOK, name, node.places.root, record, after],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd="/",
            check=False,
            start_new_session=True,
            pass_fds=keep,
            timeout=HANGS,
        )
    for fd in keep:
        os.close(fd)
    assert ran.returncode == 0, err.read_text()
    return Ran(err, out, record)
