"""The sweep of a node whose clock is wrong, by a library that has it so, beside a shared store."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from imports import ALICE, BOB, NEW, OLD, Login

from forestage.system import mounts
from forestage.system.as_user import User

DAYS = 86400
HERE = Path(__file__).parent


@pytest.fixture
def wrong_clock(open_path: Path) -> Path:
    """To be preloaded: the wall clock is $AHEAD seconds ahead."""
    library = open_path / "ahead.so"
    argv = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, HERE / "ahead.c"]
    subprocess.run(argv, check=True)
    return library


@pytest.mark.ci
@pytest.mark.parametrize("ahead", [-40 * DAYS, -3600, 3600, 12000, 31 * DAYS, 40 * DAYS])
def test_sweep_on_a_node_with_a_wrong_clock_deletes_nothing_in_the_store(
    login: Login, wrong_clock: Path, ahead: int
) -> None:
    """Two users' images, and an import that another node makes just now."""
    for place in ("/run", "/var/lib", "/var/log"):
        mounts.mount("tmpfs", place, 0, "tmpfs", "mode=755")
    Path("/mnt/nvme").mkdir()
    login.configure(
        f"{{sources: [/srv], cache: /mnt/nvme/cache, registry: {{store: {login.site.store}}}}}"
    )
    for user, digest in ((ALICE, OLD), (BOB, NEW)):
        done = login.forestage("import", f"here#image@{digest}", user=user)
        assert done.returncode == 0, done.stderr
    for name in ("other.0123456789abcdef.part", "other.lease.1"):
        file = login.site.folder() / name
        file.touch()
        os.chown(file, ALICE.uid, ALICE.gid)
    before = {user: login.site.names(user) for user in (ALICE, BOB)}
    for _ in range(2):  # as if the node had started in between
        Path("/run/forestage/collected").unlink(missing_ok=True)
        swept = login.run(
            "/usr/lib/forestage/bin/forestage", "sweep",
            user=User("root", 0, 0), LD_PRELOAD=str(wrong_clock), AHEAD=str(ahead),
        )  # fmt: skip
        assert "Traceback" not in swept.stderr
        assert Path("/run/forestage/collected").exists(), swept
        assert {user: login.site.names(user) - {"collected-1"} for user in before} == before
