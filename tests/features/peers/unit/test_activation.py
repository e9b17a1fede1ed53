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


def test_peers_enabled_auto_is_on_while_the_own_service_runs_and_seconds_after(
    places: NodePaths,
) -> None:
    assert Config().peers.enabled is None
    assert not activation.is_on(Config(), places, time.monotonic())
    with activation.hold_sign(places):
        assert activation.is_on(Config(), places, time.monotonic())
        # A service that gets no processor renews nothing, and still runs.
        assert activation.is_on(Config(), places, time.monotonic() + 10 * SIGN_LASTS)
    ended = time.monotonic()
    assert activation.is_on(Config(), places, ended)
    assert not activation.is_on(Config(), places, ended + SIGN_LASTS + 1)


def test_copy_imports_the_peers_feature_only_if_the_key_and_the_sign_allow(
    places: NodePaths,
) -> None:
    """By the table alone, which knows no more than the key and that there is a sign."""

    def names(enabled: bool | None) -> list[str]:
        found = features.list_switched_on("engine.helpers", config(enabled), str(places.run))
        return [one.name for one in found]

    assert (names(None), names(False), names(True)) == ([], [], ["peers"])
    with activation.hold_sign(places):
        assert (names(None), names(False)) == (["peers"], [])


@pytest.mark.parametrize("served", [True, False])
def test_peers_enabled_true_or_false_decides_without_a_sign(
    places: NodePaths, served: bool
) -> None:
    if served:
        with activation.hold_sign(places):
            pass
    assert activation.is_on(config(True), places, time.monotonic())
    assert not activation.is_on(config(False), places, time.monotonic())


def test_peers_auto_is_off_with_an_engine_without_digests(places: NodePaths) -> None:
    with activation.hold_sign(places):
        assert not activation.is_on(config(None, "rsync"), places, time.monotonic())
    assert not activation.may_serve(config(None, "rsync"))


@pytest.mark.parametrize("text", [b"", b"soon", b"nan", b"1e999", b"99999999999"])
def test_peer_sign_that_is_damaged_or_of_another_boot_is_ignored(
    places: NodePaths, text: bytes
) -> None:
    places.run.mkdir(parents=True)
    files.overwrite_file(places.peer_sign, text)
    assert not activation.is_service_running(places, time.monotonic())


def test_renewal_recreates_a_deleted_peer_sign(places: NodePaths) -> None:
    with activation.hold_sign(places) as renew:
        places.peer_sign.unlink()
        assert not activation.is_service_running(places, time.monotonic())
        renew()
        assert activation.is_service_running(places, time.monotonic())


def test_world_writable_run_directory_is_closed_before_the_peer_sign_is_created(
    places: NodePaths,
) -> None:
    places.run.mkdir(parents=True)
    places.run.chmod(0o777)
    with activation.hold_sign(places):
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (places.run, places.peer_sign)]
    assert modes == [0o711, 0o600]


def test_peer_sign_is_valid_at_the_very_time_of_its_writing(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 41046.90771125
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with activation.hold_sign(places):
        pass
    assert activation.is_service_running(places, now)


def test_second_peer_service_on_a_node_gets_a_lock_timeout(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "LOCK_TIMEOUT", 0.0)
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
def test_peers_are_not_worthwhile_for_few_nodes_or_chunks_unless_enabled_is_true(
    nodes: int, chunks: int, enabled: bool | None, reach: PeerReach, expected: bool
) -> None:
    about = Config(peers=PeersSection(enabled=enabled, reach=reach))
    assert activation.is_worthwhile(about, nodes, chunks) is expected
