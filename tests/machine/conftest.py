"""The tests in this folder run in a virtual machine; `node` is what most of them are given."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "slurm")]

from compute import Compute  # noqa: E402
from install import installed  # noqa: E402
from vm import PROGRAM, VM  # noqa: E402

TOOLS = (PROGRAM, "qemu-img", "debootstrap", "cpio", "mkfs.ext4", "unshare", "setpriv")
SUITES = ("bookworm", "trixie")  # on the second those that are marked `releases`
LONGEST = 3 * 3600  # seconds: the machine is slow, and one of them runs at a time


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if FOLDER in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.machine)
        item.add_marker(pytest.mark.timeout(LONGEST))
    asked = "machine" in os.environ.get("FORESTAGE_TEST_ALSO", "").split()
    left = [item for item in mine if not (asked and is_wanted(item))]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def is_wanted(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    suite = item.callspec.params["booted"]
    return suite == SUITES[0] or item.get_closest_marker("releases") is not None


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips for an ordinary user; root has no excuse, ./test --machine installs all it needs."""
    if os.geteuid() != 0:
        pytest.skip("the disks of a virtual machine are made by root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in TOOLS if not shutil.which(name, path=path)]:
        pytest.fail(f"missing: {', '.join(missing)} (run tests/prepare machine)")


@pytest.fixture(scope="module", params=SUITES)
def booted(
    machine: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compute]:
    """A node with forestage, for the tests of a file."""
    with VM.of(installed(request.param), tmp_path_factory.mktemp("vm")) as vm:
        compute = Compute(vm)
        compute.boot()
        yield compute


@pytest.fixture
def node(booted: Compute) -> Iterator[Compute]:
    """It idles, its cache is empty. What a test leaves behind is a new boot's to clear away."""
    booted.ready()
    yield booted
    booted.clean()
