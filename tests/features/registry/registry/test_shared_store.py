"""A store on a file system that hangs, squashes root, has quotas, or knows no hard links."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "faults"))

from far import Far
from imports import ALICE, BOB, IMAGE, NEW, OLD, ROOT, Login

from forestage.clock import Clock
from forestage.config import load_config
from forestage.features.registry import store_commands as registry
from forestage.features.registry.store import ImageStore
from forestage.features.registry.store_age import AGAIN
from forestage.features.registry.store_collection import CollectionResult
from forestage.paths import NodePaths
from forestage.system import as_user, mounts
from forestage.system.as_user import User

REFERENCE = "here#image:v1"
MONTH = 31 * 86400.0


class Running(Clock):
    """A node's clock: `up` seconds since its boot, and `ahead` of the time that is right."""

    def __init__(self, up: float = 1000.0, ahead: float = 0.0) -> None:
        self.up, self.ahead = up, ahead

    def monotonic(self) -> float:
        return self.up

    def wall(self) -> float:
        return super().wall() + self.ahead


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


def test_importer_over_quota_reports_the_quota_and_imports_for_the_step_alone(
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


class Sweeping:
    """A node that sweeps; each has its own places and clock."""

    def __init__(self, folder: Path, clock: Running | None = None) -> None:
        self.places = NodePaths(folder / os.urandom(4).hex())
        self.clock = clock or Running()

    def collect(self, store: Path | None = None) -> list[CollectionResult]:
        config = load_config(Path("/etc/forestage")).config
        if store:
            limits = msgspec.structs.replace(config.registry, store=str(store))
            config = msgspec.structs.replace(config, registry=limits)
        return registry.collect_some_users(config, self.places, self.clock)

    def collect_again(self, seconds: float = MONTH) -> list[CollectionResult]:
        """It has been up for so long since, and nobody used anything."""
        self.clock.up += seconds
        return self.collect()


@pytest.fixture
def sweeping(open_path: Path) -> Sweeping:
    return Sweeping(open_path)


def imported(login: Login, user: User = ALICE, digest: str = OLD) -> Path:
    return Path(login.forestage("import", f"here#image@{digest}", user=user).stdout.strip())


def test_sweep_deletes_unused_store_images_as_their_owners_on_a_root_squashed_file_system(
    login: Login, far: Far, sweeping: Sweeping
) -> None:
    paths = [imported(login, user) for user in (ALICE, BOB)]
    far.behaves(squash=1)
    with pytest.raises(PermissionError):
        paths[0].lstat()
    assert {len(one.images) for one in sweeping.collect()} == {0}
    done = sweeping.collect_again()
    assert {(one.user, len(one.images), one.problem) for one in done} == {
        (str(user.uid), 1, "") for user in (ALICE, BOB)
    }
    far.behaves()
    assert not any(path.exists() for path in paths)


def test_only_one_of_several_nodes_collects_the_store_within_hours(
    login: Login, far: Far, open_path: Path
) -> None:
    imported(login)
    nodes = [Sweeping(open_path, Running(up)) for up in (10.0, 1e6, 99.0, 5e5)]
    for node in nodes:
        node.collect()
    with ThreadPoolExecutor(4) as at_once:
        done = list(at_once.map(Sweeping.collect_again, nodes))
    assert sum(len(one.images) for (one,) in done) == 1
    assert len(list(login.site.folder().glob("collected-*"))) == 1
    with ThreadPoolExecutor(4) as at_once:
        list(at_once.map(lambda node: node.collect_again(registry.VISIT_INTERVAL), nodes))
    (stamp,) = login.site.folder().glob("collected-*")
    for node in nodes:
        node.collect_again(AGAIN - registry.VISIT_INTERVAL - 1)
    assert stamp.exists(), "nobody has seen six hours pass since"
    for node in nodes:
        node.collect_again(registry.VISIT_INTERVAL + 1)
    assert not stamp.exists()


@pytest.mark.ci
@pytest.mark.parametrize("ahead", [-MONTH, -3600.0, 3600.0, 12000.0, MONTH])
@pytest.mark.parametrize("who_sets_times", ["server", "node"])
def test_sweep_with_a_wrong_clock_deletes_no_image_lease_or_part_of_another_node(
    login: Login, far: Far, farfs: Path, open_path: Path, ahead: float, who_sets_times: str
) -> None:
    """Two images, and an import under way on another node; then what it left misleads nobody."""
    images = [imported(login, digest=digest) for digest in (OLD, NEW)]
    there = far.folder / str(ALICE.uid) / images[0].name
    lease, part = (there.with_suffix(kind) for kind in (".lease.1", f".{'0' * 16}.part"))
    for file in (lease, part):
        file.touch()
        os.chown(file, ALICE.uid, ALICE.gid)
    sides = Sides(open_path, open_path)
    other = Far(farfs, sides, open_path / "control-there", "there", shows=far.folder)
    if who_sets_times == "node":
        other.behaves(ahead=int(ahead))
    else:
        far.behaves(ago=int(ahead))  # all nodes see the server's times, which no node's clock sets
        other.behaves(ago=int(ahead))
    wrong = Sweeping(open_path, Running(50.0, ahead))
    right = Sweeping(open_path)
    try:
        for _ in range(3):
            for node, store in ((wrong, other.point), (right, far.point)):
                (done,) = node.collect(store)
                assert (done.images, done.files, done.problem) == ((), 0, "")
                node.clock.up += registry.VISIT_INTERVAL + 1
        assert all(file.exists() for file in (*images, lease, part))
        # What it uses there stays, though its clock is behind.
        as_alice = [lambda: _use(other.point, images[0].stem)]
        right.clock.up += MONTH / 2
        right.collect(far.point)
        assert as_user.run_each_in_child(as_alice, bool, 60.0, 60.0, 1) == [True]
        right.clock.up += MONTH / 2
        right.collect(far.point)
        assert [file.exists() for file in images] == [True, False]
    finally:
        other.end()


def _use(store: Path, name: str) -> bool:
    as_user.set_effective_user(ALICE)
    return ImageStore(store, Clock()).find_image(name) is not None


def test_store_images_age_by_the_file_servers_clock_if_the_server_sets_the_times(
    login: Login, far: Far, open_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the first collection already deletes, whatever the clock of its node says."""
    (kind,) = {one.kind for one in mounts.list_mounts() if one.point == str(far.point)}
    monkeypatch.setattr(mounts, "SERVER_SETS_TIMES", frozenset((kind,)))
    old, young = (imported(login, digest=digest) for digest in (OLD, NEW))
    there = far.folder / str(ALICE.uid)
    for file in (there / old.name, there / old.with_suffix(".json").name):
        written = file.stat().st_mtime - MONTH
        os.utime(file, (written, written))
    far.behaves(ago=40 * 86400)  # the server's clock is behind
    (done,) = Sweeping(open_path, Running(ahead=-MONTH)).collect()
    assert done.problem == ""
    assert [old.exists(), young.exists()] == [False, True]
    assert not list(young.parent.glob(".now.*"))


def test_store_directories_of_no_user_do_not_delay_the_collection_of_users_images(
    login: Login, sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make them."""
    login.configure(f"registry: {{store: {login.site.store}}}")
    old = imported(login)
    for name in (f"00{ALICE.uid}", *map(str, range(71000, 71050))):
        (login.site.store / name).mkdir()
        os.chown(login.site.store / name, BOB.uid, BOB.gid)
    monkeypatch.setattr(registry, "MAX_VISITED_USERS", 1)
    sweeping.collect()
    (done,) = sweeping.collect_again()
    assert (done.user, len(done.images)) == (str(ALICE.uid), 1)
    assert not old.exists()
    listed = login.forestage("ls", user=ROOT)
    assert "no images" in listed.stdout
    imported(login)
    assert login.forestage("ls", user=ROOT).stdout.count("here#image") == 1


def test_sweep_collects_a_store_without_free_inodes(
    login: Login, open_path: Path, sweeping: Sweeping
) -> None:
    store = open_path / "small"
    store.mkdir()
    mounts.mount("small", str(store), 0, "tmpfs", "nr_inodes=64,mode=1777")
    login.site.store = store
    login.configure(f"registry: {{store: {store}}}")
    old = imported(login)
    sweeping.collect()
    for number in range(64):
        with contextlib.suppress(OSError):  # no inode is left
            (store / f"{number}.of-others").touch()
    (done,) = sweeping.collect_again()
    assert (len(done.images), done.problem) == (1, "")
    assert not old.exists()


def test_node_reads_the_store_for_collection_once_an_hour_whatever_its_wall_clock(
    login: Login, far: Far, sweeping: Sweeping
) -> None:
    """An hour of its own, whatever its clock says meanwhile."""
    imported(login)
    assert len(sweeping.collect()) == 1
    before = far.calls()
    for ahead in (MONTH, -MONTH, 0.0):
        sweeping.clock.ahead = ahead
        assert sweeping.collect_again(registry.VISIT_INTERVAL / 4) == []
    assert far.calls() == before
    assert len(sweeping.collect_again(registry.VISIT_INTERVAL / 4 + 1)) == 1


def test_hanging_store_is_not_collected_again_for_an_hour(
    login: Login, far: Far, sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LIST_TIMEOUT", 0.2)
    far.hang()
    with pytest.raises(as_user.ChildTimeout):
        sweeping.collect()
    assert sweeping.collect_again(600) == []
    far.answer()


def test_hanging_user_directory_of_the_store_ends_its_collection_with_a_problem(
    login: Login, far: Far, sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the whole store does, once it was listed."""
    imported(login)
    monkeypatch.setattr(registry, "VISIT_TIMEOUT", 0.2)
    known = as_user.user_from_uid

    def then_hangs(uid: int, gid: int) -> User:
        far.hang()
        return known(uid, gid)

    monkeypatch.setattr(as_user, "user_from_uid", then_hangs)
    (one,) = sweeping.collect()
    assert "did not answer in time" in one.problem
    far.answer()


@pytest.mark.parametrize("links", [0, 1, 2])
def test_concurrent_nodes_agree_on_a_jobs_first_digest_without_hard_links(
    login: Login, far: Far, links: int
) -> None:
    """Many nodes at once, each a process of the user's."""
    far.behaves(links=links)
    digests = [f"sha256:{number:064x}" for number in range(1, 9)]

    def say(digest: str) -> str:
        def work() -> str:
            as_user.set_effective_user(ALICE)
            return ImageStore(far.point, Clock()).agree_on_job_digest("12", REFERENCE, digest)

        (said,) = as_user.run_each_in_child([work], str, 60.0, 60.0, 1)
        assert said is not None
        return said

    with ThreadPoolExecutor(8) as nodes:
        said = set(nodes.map(say, digests))
    assert len(said) == 1
    assert said <= set(digests)
    (record,) = (far.folder / f"{ALICE.uid}/jobs").iterdir()
    assert record.read_bytes()


@pytest.mark.parametrize("links", [1, 2])
def test_one_of_two_importers_imports_on_a_store_without_hard_links(
    login: Login, far: Far, links: int
) -> None:
    far.behaves(links=links)
    with ThreadPoolExecutor(2) as nodes:
        done = list(nodes.map(lambda _: login.importer("get", IMAGE), range(2)))
    assert [one.returncode for one in done] == [0, 0], done
    assert len({one.stdout for one in done}) == 1
    assert len(login.site.imports) == 1
