"""What users have of imports from when a node had no store: when it goes, and what is asked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far import Far

from forestage.admin import old_imports
from forestage.cache.lease import Lease
from forestage.cache.node import Node as Here
from forestage.clock import Clock
from forestage.config import Config
from forestage.errors import Failed
from forestage.registry import imports_now
from forestage.registry.imports_now import UnderWay
from forestage.system import as_user, mounts
from forestage.system.as_user import User
from node import ALICE, BOB, Node

IN_TIME = 60.0  # seconds for a child that would hang for ever


def here(node: Node) -> Here:
    return Here.of(Config(cache="/mnt/nvme/forestage"), node.places, Clock())


def made(node: Node, user: User) -> Path:
    """A user's directory with an import in it, as a node without a store had it."""
    node.cache.prepare(require_mount=False)
    above = node.nvme / "forestage.imports"
    above.mkdir(mode=0o711, exist_ok=True)
    own = above / str(user.uid)
    (own / "jobs").mkdir(parents=True)
    (own / "jobs/7-a.json").write_text("{}")
    (own / "image.sqsh").write_bytes(b"x" * 5000)
    for path in (own, *own.rglob("*")):
        os.chown(path, user.uid, user.gid)
    own.chmod(0o700)
    return own


@pytest.fixture
def own(node: Node) -> Path:
    return made(node, ALICE)


def test_what_nobody_uses_goes_whatever_it_has_become(node: Node, own: Path) -> None:
    victim = node.put("bob/victim", user=BOB)
    deep = own / "a/b/c"
    deep.mkdir(parents=True)
    (deep / "link").symlink_to(victim)
    (own / "folder").symlink_to(victim.parent)
    os.mkfifo(deep / "fifo")
    for path in (deep, deep.parent, deep.parents[1]):
        os.chown(path, ALICE.uid, ALICE.gid)
        path.chmod(0)
    own.chmod(0)
    (node.cache.root / "imported").mkdir()
    (node.cache.root / "imported" / f"{ALICE.uid}-image.json").write_text("{}")
    assert old_imports.remove(here(node)) == []
    assert not own.parent.exists()
    assert not (node.cache.root / "imported").exists()
    assert victim.exists()


@contextlib.contextmanager
def leased(node: Node, own: Path) -> Iterator[None]:
    node.leases.write(Lease(1, ALICE, 0.0, str(node.cache.root)))
    yield
    node.leases.drop(1)


@contextlib.contextmanager
def importing(node: Node, own: Path) -> Iterator[None]:
    node.places.images.mkdir(parents=True)
    own_name = Path("/proc/self/comm")
    was = own_name.read_text()
    own_name.write_text(imports_now.PROCESS_NAME)
    # As ALICE's uid is called here.
    imports_now.note(node.places, UnderWay(1, 0, "nobody", "ubuntu", 0.0, os.getpid()))
    yield
    own_name.write_text(was)


@contextlib.contextmanager
def at_work(own: Path, script: str) -> Iterator[None]:
    argv = [sys.executable, "-c", f"{script}; print(flush=True); input()"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=own, text=True
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield
        process.communicate("\n")


USES: dict[str, Callable[[Node, Path], contextlib.AbstractContextManager[None]]] = {
    "lease": leased,
    "import": importing,
    "open": lambda node, own: at_work(own, "import os; f = open('image.sqsh'); os.chdir('/')"),
    "deleted": lambda node, own: at_work(
        own, "import os; f = open('new', 'w'); os.unlink('new'); os.chdir('/')"
    ),
    "directory": lambda node, own: at_work(own, "pass"),
}


@pytest.mark.parametrize("how", USES)
def test_what_a_step_may_still_use_stays_and_keeps_no_other(
    node: Node, own: Path, how: str
) -> None:
    bobs = made(node, BOB)
    with USES[how](node, own):
        assert old_imports.remove(here(node)) == []
        assert (own / "image.sqsh").exists()
        assert not bobs.exists()
    assert old_imports.remove(here(node)) == []
    assert not own.parent.exists()


def test_damaged_lease_keeps_all(node: Node, own: Path) -> None:
    """Nobody knows whose it is."""
    node.leases.directory.mkdir(parents=True)
    node.leases.file(1).write_text("half")
    with pytest.raises(Failed, match="lease"):
        old_imports.remove(here(node))
    assert (own / "image.sqsh").exists()


def test_it_goes_as_its_user_and_what_they_cannot_delete_is_told(node: Node, own: Path) -> None:
    (own / "bobs").mkdir()
    (own / "bobs/file").touch()
    os.chown(own / "bobs", BOB.uid, BOB.gid)
    (problem,) = old_imports.remove(here(node))
    assert str(own) in problem
    assert "its user can delete not all of it" in problem
    assert (own / "bobs/file").exists()
    assert not (own / "image.sqsh").exists()


def test_directory_that_was_given_to_an_id_of_the_users_namespace_goes(
    node: Node, own: Path
) -> None:
    """Who has subuids gives files to them, without any right."""
    os.chown(own, 161001, 161001)
    assert old_imports.remove(here(node)) == []
    assert not own.exists()


@pytest.mark.parametrize("what", ["alices", "open", "link"])
def test_directory_that_others_may_change_is_left_alone(node: Node, own: Path, what: str) -> None:
    """On a scratch disk anybody can make one by this name, and what root entered there."""
    if what == "alices":
        os.chown(own.parent, ALICE.uid, ALICE.gid)
    elif what == "open":
        own.parent.chmod(0o777)
    else:
        own.parent.rename(node.nvme / "away")
        own.parent.symlink_to(node.nvme / "away")
    assert old_imports.remove(here(node)) == []
    assert (own / "image.sqsh").exists()


@pytest.fixture(params=[".", "jobs", "image.sqsh"])
def covered(request: pytest.FixtureRequest, node: Node, own: Path, far: Far) -> Path:
    """What Alice has covered with a FUSE of hers that hangs: all of it, or something in it."""
    point = far.point if (own / request.param).is_dir() else far.put("file", b"")
    mounts.mount(str(point), str(own / request.param), mounts.MS_BIND)
    far.hang()
    return own / request.param


def test_users_file_system_over_it_is_asked_nothing_and_keeps_nobodys(
    node: Node, own: Path, covered: Path
) -> None:
    bobs = made(node, BOB)
    work = here(node)
    found = as_user.each([lambda: old_imports.remove(work)], list[str], IN_TIME, IN_TIME, 1)
    assert found == [[]]
    assert not bobs.exists()
    with contextlib.suppress(OSError):  # a mount goes with what it lies on
        mounts.umount(str(covered))
    assert not own.exists() or list(own.iterdir()) == []
