"""Whether this node asks others: by the configuration, and by the sign of its own service."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from forestage import features
from forestage.config import Config
from forestage.config.keys import EngineName, PeerReach, PeersSection
from forestage.features.peers import activation
from forestage.features.peers.activation import SIGN_LASTS
from forestage.paths import NodePaths
from forestage.system import files, lock


def config(enabled: bool | None, engine: EngineName = "chunks") -> Config:
    return Config(peers=PeersSection(enabled=enabled), engine=engine)


@pytest.fixture
def places(tmp_path: Path) -> NodePaths:
    return NodePaths(tmp_path)


def test_auto_is_the_default_and_is_on_while_the_own_service_runs(places: NodePaths) -> None:
    assert Config().peers.enabled is None
    assert not activation.is_on(Config(), places, time.monotonic())
    with activation.hold_sign(places):
        assert activation.is_on(Config(), places, time.monotonic())
        # A service that gets no processor renews nothing, and still runs.
        assert activation.is_on(Config(), places, time.monotonic() + 10 * SIGN_LASTS)
    ended = time.monotonic()
    assert activation.is_on(Config(), places, ended)
    assert not activation.is_on(Config(), places, ended + SIGN_LASTS + 1)


def test_copy_imports_peers_only_where_they_may_be_on(places: NodePaths) -> None:
    """By the table alone, which knows no more than the key and that there is a sign."""

    def names(enabled: bool | None) -> list[str]:
        found = features.switched_on("engine.helpers", config(enabled), str(places.run))
        return [one.name for one in found]

    assert (names(None), names(False), names(True)) == ([], [], ["peers"])
    with activation.hold_sign(places):
        assert (names(None), names(False)) == (["peers"], [])


@pytest.mark.parametrize("served", [True, False])
def test_word_of_the_admin_needs_no_sign(places: NodePaths, served: bool) -> None:
    if served:
        with activation.hold_sign(places):
            pass
    assert activation.is_on(config(True), places, time.monotonic())
    assert not activation.is_on(config(False), places, time.monotonic())


def test_engine_without_digests_asks_nobody_by_default(places: NodePaths) -> None:
    with activation.hold_sign(places):
        assert not activation.is_on(config(None, "rsync"), places, time.monotonic())
    assert not activation.may_serve(config(None, "rsync"))


@pytest.mark.parametrize("text", [b"", b"soon", b"nan", b"1e999", b"99999999999"])
def test_sign_that_is_spoilt_or_of_another_boot_counts_for_nothing(
    places: NodePaths, text: bytes
) -> None:
    places.run.mkdir(parents=True)
    files.overwrite_file(places.peer_sign, text)
    assert not activation.is_served(places, time.monotonic())


def test_sign_whose_file_was_deleted_beneath_the_service_comes_back(places: NodePaths) -> None:
    with activation.hold_sign(places) as renew:
        places.peer_sign.unlink()
        assert not activation.is_served(places, time.monotonic())
        renew()
        assert activation.is_served(places, time.monotonic())


def test_folder_that_users_could_write_is_closed_before_the_sign_is_held(places: NodePaths) -> None:
    places.run.mkdir(parents=True)
    places.run.chmod(0o777)
    with activation.hold_sign(places):
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (places.run, places.peer_sign)]
    assert modes == [0o711, 0o600]


def test_sign_counts_in_the_moment_in_which_it_is_written(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 41046.90771125
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with activation.hold_sign(places):
        pass
    assert activation.is_served(places, now)


def test_second_service_of_a_node_is_refused(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "START", 0.0)
    with (
        activation.hold_sign(places),
        pytest.raises(lock.LockTimeout),
        activation.hold_sign(places),
    ):
        pass


@pytest.mark.parametrize(
    ("nodes", "chunks", "enabled", "reach", "expected"),
    [
        (2, 10_000, None, "job", False),
        (3, 15, None, "job", False),
        (3, 16, None, "job", True),
        (64, 1, None, "job", True),
        (1, 1, None, "cluster", True),
        (2, 1, True, "job", True),
    ],
)
def test_few_nodes_or_chunks_are_shared_only_if_the_admin_says_so(
    nodes: int, chunks: int, enabled: bool | None, reach: PeerReach, expected: bool
) -> None:
    about = Config(peers=PeersSection(enabled=enabled, reach=reach))
    assert activation.is_worthwhile(about, nodes, chunks) is expected
