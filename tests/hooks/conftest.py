"""Nothing here is about how long the product waits for what hangs, unless a test says so."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forestage.bind import namespaces, redirect, unmount
from forestage.sources import opening, source
from forestage.system import lock, mounts, probe
from node import Node
from private import Private

DEV = Path("/dev")

LIMITS = (
    (opening, "HOOK_TIMEOUT"),
    (source, "STAGER_TIMEOUT"),
    (redirect, "OVER_TIMEOUT"),
    (unmount, "TIMEOUT"),
    (namespaces, "LOOK"),
    (probe, "LIMIT"),
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds or minutes is no dead server."""
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, 600.0)


@pytest.fixture
def spank(node: Node) -> Node:
    """A node whose steps the companion redirects."""
    node.configure(redirect="spank")
    return node


@pytest.fixture
def loaded(spank: Node) -> Node:
    """A node on which steps have the companion, which would say what the Prolog cannot."""
    spank.places.loaded.parent.mkdir(parents=True, exist_ok=True)
    spank.places.loaded.touch()
    return spank


@pytest.fixture
def short_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a lock, but for all else: a short deadline may be over before it."""
    held = lock.held
    monkeypatch.setattr(lock, "held", lambda path, timeout: held(path, min(0.05, timeout)))


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str, Callable[[], object]], None]:
    """Has something happen just before each call of a module's function."""

    def arrange(module: object, name: str, happens: Callable[[], object]) -> None:
        real = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            happens()
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    return arrange


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str, Callable[[], object]], None]:
    """Has something happen just after each call of a module's function."""

    def arrange(module: object, name: str, happens: Callable[[], object]) -> None:
        real = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            happens()
            return found

        monkeypatch.setattr(module, name, called)

    return arrange


@pytest.fixture
def dev_log(private_mounts: None, tmp_path: Path) -> Iterator[socket.socket]:
    """The socket behind /dev/log, in a /dev of the test's own."""
    host = tmp_path / "dev"
    host.mkdir()
    mounts.mount("/dev", str(host), mounts.MS_BIND | mounts.MS_REC)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", DEV], check=True)
    for device in host.iterdir():
        (DEV / device.name).symlink_to(device)
    (DEV / "log").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(DEV / "log"))
        yield listener


@pytest.fixture
def unread(dev_log: socket.socket) -> None:
    """Nobody reads, and the queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
        filler.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                filler.sendto(b"x", str(DEV / "log"))


@pytest.fixture
def private() -> Iterator[Callable[..., Private]]:
    made: list[Private] = []

    def making(*options: str, first: str = ":") -> Private:
        made.append(Private(*options, first=first))
        return made[-1]

    yield making
    for one in made:
        one.end()
