"""The Epilog: the lease, its redirects and unwanted copies go, in the time that Slurm allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forestage.bind import redirect, unmount
from forestage.bind.unmount import ClaimedBind, RedirectBind
from forestage.cache import disk_probe
from forestage.cache.layout import Cache, Entry
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.config import Config
from forestage.events import ReleaseOutcome
from forestage.hooks import epilog
from forestage.slurm.job import Job
from forestage.slurm.timeouts import UNKNOWN, HookTimeLimits
from forestage.system import lock
from forestage.system.as_user import User
from forestage.system.mounts import MountInfo
from forestage.units import SizeOrShare
from made_up import around_all, calls_of

Patch = pytest.MonkeyPatch


@pytest.fixture
def config(staging_node: Node) -> Config:
    """Makes the epilog's own node the one of the tests, whose cache is empty at rest."""
    return msgspec.structs.replace(
        staging_node.config, cache="/cache", low_watermark=SizeOrShare(share=0.0)
    )


def outcome_of(
    node: Node, job: Job, config: Config | None, limits: HookTimeLimits = UNKNOWN
) -> ReleaseOutcome:
    outcomes: list[ReleaseOutcome] = []
    epilog.run_epilog(config, node.places, node.clock, job, limits, outcomes.append)
    (outcome,) = outcomes
    return outcome


def ended(node: Node, job: Job, config: Config | None) -> tuple[str, str]:
    outcome = outcome_of(node, job, config)
    return outcome.result, outcome.reason


def holding(node: Node, job: Job, key: str, cache: Path | None = None) -> None:
    lease = Lease(
        job.id, job.user, 0.0, str(cache or node.cache.root), (EntryUse(key, "/lustre/a"),)
    )
    node.leases.write_lease(lease)


Publish = Callable[[SourceImage], Entry]
Make = Callable[..., SourceImage]


def test_epilog_updates_the_last_use_of_the_jobs_entries(
    staging_node: Node, asking: Job, config: Config, publish: Publish, make_image: Make
) -> None:
    key = publish(make_image()).key
    staging_node.cache.record_use(key, 5.0)
    holding(staging_node, asking, key)
    before = staging_node.clock.wall()
    ended(staging_node, asking, None)
    (stored,) = staging_node.cache.list_entries()
    assert stored.used == pytest.approx(before, abs=3600)


def test_epilog_unmounts_redirects_as_the_jobs_user_after_dropping_the_lease(
    staging_node: Node, asking: Job, config: Config, monkeypatch: Patch
) -> None:
    holding(staging_node, asking, "0a")
    bind = RedirectBind(MountInfo(-1, 0, "0:0", "/", "/lustre/a"), "0a")
    ended: list[Lease | None] = []
    users: list[User] = []

    def claim_unneeded(cache: Cache, leases: LeaseDirectory, *_: object) -> list[ClaimedBind]:
        ended.append(leases.find_lease(asking.id))
        return [ClaimedBind(bind, cache)] * 3

    monkeypatch.setattr(redirect, "claim_unneeded_binds", claim_unneeded)
    monkeypatch.setattr(unmount, "unmount_binds", lambda going, whose: users.append(whose(bind)))
    outcome = outcome_of(staging_node, asking, config)
    assert (outcome.unmounted, users) == (3, [asking.user])
    assert ended == [None]  # its lease has gone before: what no other one names goes


def test_epilog_deletes_the_sockets_of_steps_before_the_lease(
    staging_node: Node, asking: Job, config: Config, monkeypatch: Patch
) -> None:
    """By that a step that takes a lease later knows to give it back
    (features/registry/step_image.py)."""
    images, release, seen = staging_node.places.images, epilog._drop_lease_and_unmount, []
    images.mkdir(parents=True)
    (images / f"{asking.id}.asked").touch()
    (images / f"{asking.id}.0.sock").touch()
    holding(staging_node, asking, "0a")
    monkeypatch.setattr(
        epilog,
        "_drop_lease_and_unmount",
        lambda *of: seen.append([*images.iterdir()]) or release(*of),
    )
    assert ended(staging_node, asking, config) == ("released", "")
    assert seen == [[]]


def test_epilog_drops_the_lease_of_a_job_with_staging_switched_off(
    staging_node: Node, asking: Job, config: Config
) -> None:
    node = staging_node
    node.leases.add_notes_and_keep_lease(
        Lease(asking.id, asking.user, 0.0, str(node.cache.root)), off=True
    )
    assert ended(node, asking, config) == ("released", "")
    assert node.leases.list_leases() == []


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (None, lock.SPACE_TIMEOUT),
        (1000.0, 2 * lock.SPACE_TIMEOUT),
        (6.0, 6.0),
        pytest.param(0.0, 0.0),
    ],
)
def test_epilog_waits_for_its_locks_no_longer_than_its_slurm_timeout(
    staging_node: Node,
    asking: Job,
    config: Config,
    monkeypatch: Patch,
    limit: float | None,
    most: float,
) -> None:
    """Slurm kills an Epilog at its timeout and drains the node."""
    real = lock.held
    waits: list[float] = []

    def noting(path: Path, timeout: float) -> object:
        if path == staging_node.cache.space_lock:
            waits.append(timeout)
        return real(path, timeout)

    monkeypatch.setattr(lock, "held", noting)
    # One that has no time to answer may count as hanging, and then one lock is not taken.
    monkeypatch.setattr(disk_probe, "probe_disk", lambda *_: None)
    holding(staging_node, asking, "0a")
    outcome_of(staging_node, asking, config, HookTimeLimits(None, 15.0, limit))
    assert len(waits) == 2
    assert sum(waits) <= most


def test_epilog_event_contains_no_paths_of_other_users(
    staging_node: Node, asking: Job, config: Config, monkeypatch: Patch
) -> None:
    stuck = ["/lustre/a (hangs)", "/lustre/bob/secret (hangs)", "/lustre/ab (Permission denied)"]

    def stay(*_: object) -> int:
        raise unmount.UnmountError(stuck, 1)

    monkeypatch.setattr(unmount, "unmount_binds", stay)
    holding(staging_node, asking, "0a")
    outcome = outcome_of(staging_node, asking, config)
    assert outcome.detail == "still redirected: /lustre/a (hangs), 2 of other jobs"
    outcome = outcome_of(staging_node, asking, config)
    assert "/lustre" not in outcome.detail


EPILOG = ("epilog.before_lease_drop", "epilog.after_lease_drop")


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_exception_in_a_feature_stops_neither_other_features_nor_the_epilog(
    staging_node: Node,
    asking: Job,
    config: Config,
    publish: Publish,
    make_image: Make,
    monkeypatch: Patch,
    error: type[Exception],
) -> None:
    raising, quiet, called = calls_of(EPILOG, error)
    around_all(monkeypatch, raising, quiet)
    holding(staging_node, asking, publish(make_image()).key)
    outcomes: list[ReleaseOutcome] = []
    about = config, staging_node.places, staging_node.clock, asking, UNKNOWN
    if error is OSError:  # as any work of an Epilog may
        epilog.run_epilog(*about, outcomes.append)
        assert outcomes.pop().result == "failed"
    else:
        with pytest.raises(error, match=EPILOG[-1]):  # the boundary has the last one
            epilog.run_epilog(*about, outcomes.append)
    assert [one.result for one in outcomes] == ["released"], "it is told what the core has done"
    assert len(outcomes[0].evicted) == 1
    assert called == [EPILOG[0], f"{EPILOG[0]}, too", EPILOG[1], f"{EPILOG[1]}, too"]
    assert staging_node.leases.list_leases() == []
    assert staging_node.cache.list_entries() == [], "evicted"
