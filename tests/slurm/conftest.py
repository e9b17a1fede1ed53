"""The tests in this folder run on a real Slurm cluster; `cluster` is the one they share."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

# These lie beside this file, not in a package.
from cluster import Cluster  # noqa: E402
from host import exit_on_sigterm  # noqa: E402

DAEMONS = ("slurmctld", "slurmd", "munged", "srun")
TOOLS = ("mksquashfs", "squashfuse", "gcc", "make", "ip", "unshare", "mkfs.ext4")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips for an ordinary user; root has no excuse, ./test installs all that is needed."""
    if os.geteuid() != 0:
        pytest.skip("a Slurm cluster in namespaces of its own needs root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [program for program in DAEMONS + TOOLS if not shutil.which(program, path=path)]:
        pytest.fail(f"missing: {', '.join(missing)} (run tests/prepare)")
    exit_on_sigterm()


@pytest.fixture(scope="session")
def cluster(machine: None) -> Iterator[Cluster]:
    """Four nodes with the repository's own Prolog and Epilog."""
    with Cluster.up() as cluster:
        yield cluster
