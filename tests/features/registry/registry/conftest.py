"""What these tests share: who asks, and whom."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import registries  # it and `asking` lie beside this file, not in a package
from asking import ALICE, Asker
from imports import Login, Site
from registries import Front, Registry


@pytest.fixture
def open_path(machine: None) -> Iterator[Path]:
    """A folder that users can reach; another pytest that begins closes the one above tmp_path."""
    # A test may have mounted something below, in a mount namespace that ends with it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def login(private_mounts: None, open_path: Path) -> Login:
    """A user at a shell of a node."""
    return Login(Site(open_path), open_path)


@pytest.fixture
def alice(open_path: Path) -> Asker:
    """Her node's enroot speaks http, unless a test has it otherwise."""
    asker = Asker(open_path / "alice", ALICE)
    asker.conf.write_text("ENROOT_ALLOW_HTTP yes\n")
    return asker


@pytest.fixture
def started(open_path: Path) -> Iterator[Callable[..., Registry]]:
    """registries.start, and the end of what it started."""
    made: list[Registry] = []

    def starting(**how: bool) -> Registry:
        made.append(registries.start(open_path / f"registry{len(made)}", **how))
        return made[-1]

    yield starting
    for registry in made:
        registry.stop()


@pytest.fixture
def fronts() -> Iterator[Callable[..., Front]]:
    """Servers with nothing behind them, or proxies; their kind is the first argument."""
    made: list[Front] = []

    def making(kind: type[Front] = Front, **how: object) -> Front:
        made.append(kind(**how))  # type: ignore[arg-type]
        return made[-1]

    yield making
    for front in made:
        front.stop()


@pytest.fixture
def registry(started: Callable[..., Registry]) -> Registry:
    """A registry without TLS."""
    return started()
