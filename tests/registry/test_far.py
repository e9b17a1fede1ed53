"""A store on a file system that hangs, squashes root, has quotas, or knows no hard links."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from far import Far
from imports import ALICE, BOB, IMAGE, OLD, ROOT, Login

from forestage.admin import registry
from forestage.clock import Clock
from forestage.config import load_settings
from forestage.paths import Places
from forestage.registry import collect
from forestage.registry.collect import Done
from forestage.registry.store import Store
from forestage.system import as_user, mounts
from forestage.system.as_user import User

NOW = 1_800_000_000.0
REFERENCE = "here#image:v1"


@dataclass(frozen=True)
class Sides:
    server: Path
    shared: Path


@pytest.fixture
def far(login: Login, farfs: Path, open_path: Path) -> Iterator[Far]:
    """The store is on it."""
    sides = Sides(open_path / "server", open_path / "shared")
    for folder in (sides.server, sides.shared):
        folder.mkdir()
    far = Far(farfs, sides, open_path / "control")
    far.folder.chmod(0o1777)
    login.site.store = far.point
    login.configure(f"registry: {{store: {far.point}}}")
    yield far
    far.end()


def test_user_above_their_quota_is_told_and_starts_from_an_import_of_the_step(
    login: Login, far: Far
) -> None:
    far.behaves(quota=1)
    done = login.importer("get", IMAGE, STANDIN_FILL="4")
    assert done.returncode == 0, done.stderr
    assert "Disk quota exceeded" in done.stderr
    assert "imported for this step alone" in done.stderr
    path = Path(done.stdout.strip())
    assert path.is_relative_to(login.runtime)
    assert login.site.names() <= {"failed"}, "no part, no lease"


def collected(login: Login, open_path: Path, now: float = NOW) -> list[Done]:
    """By the sweep of a node; each has its own places."""
    config = load_settings(Path("/etc/forestage")).config
    return registry.clean_some(config, Places(open_path / os.urandom(4).hex()), now)


def imported(login: Login, user: User = ALICE, digest: str = OLD) -> Path:
    """An image that nobody has used for long."""
    path = Path(login.forestage("import", f"here#image@{digest}", user=user).stdout.strip())
    for file in (path, path.with_suffix(".json")):
        os.utime(file, (1, 1))
    return path


def test_sweep_collects_as_each_owner_where_root_is_nobody(
    login: Login, far: Far, open_path: Path
) -> None:
    paths = [imported(login, user) for user in (ALICE, BOB)]
    far.behaves(squash=1)
    with pytest.raises(PermissionError):
        paths[0].lstat()
    done = collected(login, open_path)
    assert {(one.user, len(one.images), one.problem) for one in done} == {
        (str(user.uid), 1, "") for user in (ALICE, BOB)
    }
    far.behaves()
    assert not any(path.exists() for path in paths)


def test_of_all_nodes_one_collects_and_none_again_for_hours(
    login: Login, far: Far, open_path: Path
) -> None:
    imported(login)
    with ThreadPoolExecutor(4) as nodes:
        done = list(nodes.map(lambda _: collected(login, open_path), range(4)))
    assert sum(len(one.images) for (one,) in done) == 1
    later = imported(login)
    collected(login, open_path, NOW + registry.EVERY)
    assert later.exists()
    collected(login, open_path, NOW + collect.AGAIN)
    assert not later.exists()
    assert len(list(later.parent.glob("collected-*"))) == 1


def test_names_that_are_nobodys_take_no_turn_from_users(
    login: Login, open_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make them."""
    login.configure(f"registry: {{store: {login.site.store}}}")
    old = imported(login)
    for name in (f"00{ALICE.uid}", *map(str, range(71000, 71050))):
        (login.site.store / name).mkdir()
        os.chown(login.site.store / name, BOB.uid, BOB.gid)
    monkeypatch.setattr(registry, "VISITED", 1)
    (done,) = collected(login, open_path)
    assert (done.user, len(done.images)) == (str(ALICE.uid), 1)
    assert not old.exists()
    listed = login.forestage("ls", user=ROOT)
    assert "no images" in listed.stdout
    imported(login)
    assert login.forestage("ls", user=ROOT).stdout.count("here#image") == 1


def test_store_that_has_no_room_for_a_name_is_collected_in(login: Login, open_path: Path) -> None:
    store = open_path / "small"
    store.mkdir()
    mounts.mount("small", str(store), 0, "tmpfs", "nr_inodes=64,mode=1777")
    login.site.store = store
    login.configure(f"registry: {{store: {store}}}")
    old = imported(login)
    for number in range(64):
        with contextlib.suppress(OSError):  # no inode is left
            (store / f"{number}.of-others").touch()
    (done,) = collected(login, open_path)
    assert (len(done.images), done.problem) == (1, "")
    assert not old.exists()


def test_node_looks_at_the_store_once_in_an_hour(login: Login, far: Far, open_path: Path) -> None:
    imported(login)
    places = Places(open_path / "node")
    config = load_settings(Path("/etc/forestage")).config
    assert len(registry.clean_some(config, places, NOW)) == 1
    before = far.calls()
    assert registry.clean_some(config, places, NOW + registry.EVERY - 1) == []
    assert far.calls() == before
    assert len(registry.clean_some(config, places, NOW + registry.EVERY + 1)) == 1


def test_store_that_hangs_is_left_alone_for_an_hour(
    login: Login, far: Far, open_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LISTED", 0.2)
    places = Places(open_path / "node")
    config = load_settings(Path("/etc/forestage")).config
    far.hang()
    with pytest.raises(as_user.TooSlow):
        registry.clean_some(config, places, NOW)
    assert registry.clean_some(config, places, NOW + 600) == []
    far.answer()


def test_directory_that_hangs_does_not_keep_the_others_waiting(
    login: Login, far: Far, open_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the whole store does, once it was listed."""
    imported(login)
    monkeypatch.setattr(registry, "VISIT", 0.2)
    known = as_user.account

    def then_hangs(uid: int, gid: int) -> User:
        far.hang()
        return known(uid, gid)

    monkeypatch.setattr(as_user, "account", then_hangs)
    (one,) = collected(login, open_path)
    assert "did not answer in time" in one.problem
    far.answer()


@pytest.mark.parametrize("links", [0, 1, 2])
def test_first_word_on_a_jobs_digest_counts_without_hard_links(
    login: Login, far: Far, links: int
) -> None:
    """Many nodes at once, each a process of the user's."""
    far.behaves(links=links)
    digests = [f"sha256:{number:064x}" for number in range(1, 9)]

    def say(digest: str) -> str:
        def work() -> str:
            as_user.become(ALICE)
            return Store(far.point, Clock()).set_job_digest("12", REFERENCE, digest)

        (said,) = as_user.each([work], str, 60.0, 60.0, 1)
        assert said is not None
        return said

    with ThreadPoolExecutor(8) as nodes:
        said = set(nodes.map(say, digests))
    assert len(said) == 1
    assert said <= set(digests)
    (record,) = (far.folder / f"{ALICE.uid}/jobs").iterdir()
    assert record.read_bytes()


@pytest.mark.parametrize("links", [1, 2])
def test_one_node_imports_where_there_are_no_hard_links(login: Login, far: Far, links: int) -> None:
    far.behaves(links=links)
    with ThreadPoolExecutor(2) as nodes:
        done = list(nodes.map(lambda _: login.importer("get", IMAGE), range(2)))
    assert [one.returncode for one in done] == [0, 0], done
    assert len({one.stdout for one in done}) == 1
    assert len(login.site.imports) == 1
