"""A registry that a test cluster's nodes reach on their loopback, and an enroot for them.

The registry and what stands in front of it are tests/features/registry/registry/registries.py, in a
process within
the cluster's network; it is told what to do by a line of JSON, and answers with one. Run as a
program, this file is that process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
IMPORTS = "/shared/imports"  # a line for each import
STORE = "/shared/store"
GATE = "/shared/gate"  # imports wait for it where a job has STANDIN_WAIT
OS_RELEASE = "etc/os-release"
PROGRAMS = ("sh", "cat", "sleep", "true")
MIB = 1 << 20


class Registry:
    """What a test does with it. `host` is what users name."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.host: str = self._ask("host")

    def push(self, name: str, content: str, mib: int = 0) -> str:
        """An image in which `cat /etc/os-release` says NAME="<content>"; returns its digest.

        `mib`: with the files of `padding` in it.
        """
        return str(self._ask("push", name, content, mib))

    def slow(self, rate: float) -> None:
        """Gives so many bytes of a layer a second, to each who asks."""
        self._ask("slow", rate)

    def says(self, method: str, status: int, times: int = -1, **headers: str) -> None:
        """Answers requests for manifests so, `times` times."""
        self._ask("says", method, status, times, headers)

    def behaves(self) -> None:
        """Forgets what `says` and `wants` said, and all requests so far."""
        self._ask("behaves")

    def wants(self, **passwords: str) -> None:
        """Answers nobody but these users."""
        self._ask("wants", passwords)

    def count(self, method: str, path: str = "/v2/.*/manifests/.*", answered: bool = True) -> int:
        """How many such requests came; `answered`: those that the registry did not refuse."""
        return int(self._ask("count", method, path, answered))

    def kill(self) -> None:
        """From now on nobody answers."""
        self._ask("kill")

    def _ask(self, *words: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the registry died at {words}"
        return json.loads(line)


def padding(mib: int) -> Mapping[str, bytes]:
    """Files of 1 MiB, by name, that cannot be compressed."""
    chance = random.Random(mib)
    return {f"padding/{number}": chance.randbytes(MIB) for number in range(mib)}


@contextlib.contextmanager
def serving(cluster: Any, folder: Path) -> Iterator[Registry]:
    """A registry that the cluster's nodes reach."""
    argv = ["nsenter", f"--net=/proc/{cluster.leader}/ns/net", sys.executable, __file__]
    process = subprocess.Popen(
        [*argv, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Registry(process)
    finally:
        process.communicate()  # it ends with its stdin


def with_importer(spec: Any, *arguments: str) -> Any:
    """The cluster with pyxis' importer=, and an enroot that stands in for the real one."""
    importer = f"importer={TESTS.parent}/src/importer/forestage-importer"
    line = " ".join((*spec.plugstack[0].split(), importer, *arguments))
    files = {
        **spec.files,
        "/usr/local/bin/enroot": (TESTS / "features/registry/registry/enroot").read_text(),
        "/etc/enroot/enroot.conf": "ENROOT_ALLOW_HTTP yes\nENROOT_TEMP_PATH /tmp\n",
    }
    return dataclasses.replace(spec, plugstack=(line,), files=files)


def imports(cluster: Any) -> list[str]:
    """What was imported so far, a line each."""
    log: Path = cluster.host_path(IMPORTS)
    return log.read_text().splitlines() if log.exists() else []


class _Server:
    """The other side."""

    def __init__(self, folder: Path) -> None:
        import registries

        self.module, self.folder = registries, folder
        self.registry = registries.start(folder / "registry")
        self.tokens: list[Any] = []

    def host(self) -> str:
        return str(self.registry.host)

    def push(self, name: str, content: str, mib: int) -> str:
        files = {OS_RELEASE: f'NAME="{content}"\n'.encode(), **padding(mib)}
        files |= _runnable(self.folder)
        return str(self.registry.push(name, files))

    def says(self, method: str, status: int, times: int, headers: dict[str, str]) -> None:
        answer = self.module.says(status, **headers)
        self.registry.front.on(method, "/v2/.*/manifests/.*", answer, times)

    def slow(self, rate: float) -> None:
        def slowed(seen: Any, behind: Any) -> Any:
            reply = behind()
            time.sleep(len(reply.body) / rate)
            return reply

        self.registry.front.on("GET", "/v2/.*/blobs/.*", slowed)

    def behaves(self) -> None:
        front = self.registry.front
        front._rules.clear()
        front._token_server = None
        front.log.clear()

    def wants(self, passwords: dict[str, str]) -> None:
        server = self.module.Front()
        self.tokens.append(server)
        self.registry.front.wants_token(server, passwords)

    def count(self, method: str, path: str, answered: bool) -> int:
        return int(self.registry.front.count(method, path))

    def kill(self) -> None:
        self.registry.stop()

    def close(self) -> None:
        for server in self.tokens:
            server.stop()
        with contextlib.suppress(OSError):
            self.registry.stop()


def _runnable(folder: Path) -> dict[str, bytes]:
    """Programs and libraries, so that a container can run `cat`."""
    import images

    tree = folder / "tree"
    if not tree.exists():
        images.make_tree(tree)
    found = {}
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(tree))] = path.read_bytes()
    return found


def main(argv: Sequence[str]) -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "features/registry/registry"), str(TESTS / "slurm")]
    server = _Server(Path(argv[0]))
    try:
        for line in sys.stdin:
            what, *facts = json.loads(line)
            print(json.dumps(getattr(server, what)(*facts)), flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    main(sys.argv[1:])
