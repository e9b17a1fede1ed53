"""The tests in this folder run the hooks for real: as root, on a node made of two tmpfs."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from node import Node  # it lies beside this file, not in the package

from forestage import mounts

MS_PRIVATE = 1 << 18
TOP = Path("/mnt")  # there on every Linux; covered in the test's own namespace only

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips for an ordinary user; root has no excuse, ./test installs all that is needed."""
    if os.geteuid() != 0:
        pytest.skip("mounts and other users' rights need root")
    if missing := [name for name in ("rsync", "setfacl", "mount") if not shutil.which(name)]:
        pytest.fail(f"missing: {', '.join(missing)} (run tests/prepare)")


@pytest.fixture
def private_mounts(machine: None) -> Iterator[None]:
    """A mount namespace for one test, which goes with all its mounts when the test leaves it."""
    folder = Path.cwd()
    home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    assert _libc.unshare(mounts.CLONE_NEWNS) == 0
    try:
        mounts.mount("none", "/", mounts.MS_REC | MS_PRIVATE)
        yield
    finally:
        result = _libc.setns(home, mounts.CLONE_NEWNS)
        os.close(home)
        if result != 0:
            pytest.exit("cannot leave a test's mount namespace")
        os.chdir(folder)  # setns(2) goes to the root


@pytest.fixture
def node(private_mounts: None) -> Node:
    """A node with an empty cache on its NVMe and an empty shared file system."""
    return Node.boot(TOP)
