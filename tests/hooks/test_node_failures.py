"""What is broken on the node costs the job nothing but the speed: exit 0 and a visible reason."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from forestage.cache import evict
from forestage.clock import Clock, Deadline
from forestage.commands import explain
from forestage.errors import NotFoundError
from forestage.features.metrics import export as metrics
from forestage.sources import opening
from forestage.system import lock, mounts
from forestage.system.as_user import User
from node import ALICE, BOB, Node, content, fill_with_tmpfs, make_read_only, unmount


def _owned_by_a_user(node: Node) -> None:
    node.cache.root.mkdir(mode=0o700)
    os.chown(node.cache.root, BOB.uid, BOB.gid)


def _writable_by_a_group(node: Node) -> None:
    node.cache.root.mkdir()
    node.cache.root.chmod(0o770)


def _readable_by_all(node: Node) -> None:
    node.cache.root.mkdir()
    node.cache.root.chmod(0o755)


def _a_file(node: Node) -> None:
    node.cache.root.touch(mode=0o600)


def _a_dangling_link(node: Node) -> None:
    node.cache.root.symlink_to("nowhere")


def _newer_format(node: Node) -> None:
    node.cache.root.mkdir(mode=0o700)
    (node.cache.root / "format").write_text("2\n")


def _read_only(node: Node) -> None:
    make_read_only(node.nvme)


def _no_etc(node: Node) -> None:
    node.write_config("deadline: soon\nsources: 7\n")


def _not_yaml(node: Node) -> None:
    node.write_config("{" * 1000)


def _config_of_a_user(node: Node) -> None:
    os.chown(node.places.etc / "forestage.yaml", BOB.uid, BOB.gid)


def _run_is_full(node: Node) -> None:
    fill_with_tmpfs(node.places.run)


def _run_is_a_file(node: Node) -> None:
    node.places.run.parent.mkdir(exist_ok=True)
    node.places.run.touch()


TROUBLE = [
    (_owned_by_a_user, "cache-not-ours"),
    (_writable_by_a_group, "cache-not-ours"),
    (_readable_by_all, "cache-not-ours"),
    (_a_file, "cache-not-ours"),
    (_a_dangling_link, "cache-not-ours"),
    (_newer_format, "cache-format"),
    (_read_only, "io"),
    (_run_is_full, "disk-full"),
    (_run_is_a_file, "io"),
    (_no_etc, "config"),
    (_not_yaml, "config"),
    (_config_of_a_user, "config"),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("spoil", "reason"), TROUBLE)
def test_prolog_on_a_broken_node_fails_with_a_reason_and_the_path_shows_the_source(
    node: Node, capfd: pytest.CaptureFixture[str], spoil: Callable[[Node], None], reason: str
) -> None:
    path = node.put("alice/image.sqsh")
    spoil(node)
    ran = node.prolog(7, path)
    assert ran.said == ("failed", reason)
    assert ran.outcome.detail
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert f"reason={reason}" in line
    assert node.shows_source(path)
    assert len(node.epilog(7).outcomes) == 1


def test_removed_configuration_key_is_logged_once_and_not_for_each_job(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    node.configure(on_error="drain", partitions={"batch": {"on_error": "drain"}})
    path = node.put("alice/image.sqsh")
    for job in (7, 8):
        assert node.prolog(job, path).outcome.result in ("copied", "hit")
        node.epilog(job)
    lines = [one for one in capfd.readouterr().err.splitlines() if "result=warning" in one]
    (line,) = lines
    assert " job=7 result=warning reason=removed-key detail=" in line
    assert "forestage.yaml: on_error was removed: no failure of forestage drains a node" in line


def test_prolog_with_an_unknown_configuration_key_fails_with_reason_config(node: Node) -> None:
    node.configure(excluded=["/lustre"])
    assert node.prolog(7, node.put("alice/image.sqsh")).said == ("failed", "config")


def test_full_run_directory_is_reported_with_the_path_that_lacks_space(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    _run_is_full(node)
    detail = node.prolog(7, path).outcome.detail
    assert "No space left on device" in detail
    assert str(node.places.leases) in detail


def test_explain_reports_that_events_of_the_job_were_lost(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    log = node.places.events.parent
    fill_with_tmpfs(log)
    assert node.prolog(7, path).code == 0
    with pytest.raises(NotFoundError) as nothing:
        explain.read_job_history(node.places, 8)
    lost = f"No space left on device: '{node.places.events}'"
    assert "nothing is recorded about job 8" in str(nothing.value)
    assert lost in str(nothing.value)
    (problem,) = explain.read_job_history(node.places, 7).problems  # it has a lease, and no event
    assert lost in problem
    assert explain.read_job_history(node.places, 7, ALICE.uid).runs, "which are in /run"
    with pytest.raises(OSError, match=re.escape(str(log))):
        metrics.write_metrics(node.places, Clock(), "1")
    # The disk has space again: what was lost meanwhile is lost, and is still told.
    unmount(log)
    assert node.epilog(7).code == 0
    (problem,) = explain.read_job_history(node.places, 7).problems
    assert lost in problem
    node.prolog(9, path)
    node.epilog(9)
    assert explain.read_job_history(node.places, 9).problems == ()


def test_missing_cache_disk_is_refused_and_no_cache_is_created_on_the_root_disk(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.put("alice/image.sqsh")
    everything = mounts.list_mounts()
    monkeypatch.setattr(mounts, "list_mounts", lambda: [m for m in everything if m.point == "/"])
    assert node.prolog(7, path).said == ("failed", "cache-not-mounted")
    assert not node.cache.root.exists()
    node.configure(require_mount=False)
    assert node.prolog(8, path).outcome.result == "copied"


def test_prolog_with_a_read_only_cache_fails_and_the_path_shows_the_source(node: Node) -> None:
    path = node.staged(1)
    node.epilog(1)
    make_read_only(node.nvme)
    assert node.prolog(2, path).said == ("failed", "io")
    assert node.shows_source(path)


def test_redirect_to_a_disk_gone_read_only_is_unmounted_by_the_epilog(node: Node) -> None:
    node.staged(1)
    make_read_only(node.nvme)
    node.epilog(1)
    subprocess.run(["mount", "-o", "remount,rw", node.nvme], check=True)
    node.epilog(1)
    assert node.binds() == {}
    assert node.lease(1) is None


def test_epilog_unmounts_redirects_to_a_missing_disk_and_creates_no_cache(
    node: Node,
) -> None:
    path = node.staged(1)
    unmount(node.nvme)
    node.epilog(1)
    assert node.shows_source(path)
    assert not node.cache.root.exists()


class Sleeper(Clock):
    """A clock that goes on only while somebody sleeps, and then fast: nothing else takes time."""

    def __init__(self) -> None:
        self.now = super().monotonic()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_prolog_waits_for_another_hooks_copy_no_longer_than_the_deadline(
    node: Node,
) -> None:
    node.configure(deadline="10m")
    path = node.put("alice/image.sqsh")
    node.cache.prepare(require_mount=True)
    with lock.held(node.cache.key_lock(node.identity(path).key), 0):
        assert node.prolog(7, path, clock=Sleeper()).ended == (0, "declined", "deadline")
    assert node.shows_source(path)
    assert node.entries() == set()
    node.configure()
    assert node.prolog(8, path).outcome.result == "copied"


@pytest.mark.parametrize(
    ("comment", "seconds"),
    [("", 15), ("stage-wait=1s", 1), ("stage-wait=5m", 300), ("stage-wait=1d", 600)],
)
def test_stage_wait_is_limited_by_max_stage_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch, comment: str, seconds: float
) -> None:
    asked: list[float] = []

    def noting(patience: float, clock: Clock) -> Deadline:
        asked.append(patience)
        return Deadline(clock.monotonic() + patience, clock)

    monkeypatch.setattr(Deadline, "after", noting)
    node.configure(deadline="15s", max_stage_wait="10m")
    node.prolog(7, node.put("alice/image.sqsh"), comment=comment)
    assert asked[:2] == [max(15.0, seconds), seconds], "what it may take, and wait for the copy"


def test_opening_a_source_has_its_own_timeout_within_a_long_deadline(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that hangs would hold up a step for minutes, without a word to its user."""
    asked: list[float] = []
    open_as_user = opening.open_as_user

    def noting(path: str, user: User, *rest: Any, **named: Any) -> Any:
        asked.append(rest[2])
        return open_as_user(path, user, *rest, **named)

    monkeypatch.setattr(opening, "open_as_user", noting)
    node.configure(deadline="1h")
    assert node.prolog(7, node.put("alice/image.sqsh")).outcome.result == "copied"
    assert asked[0] == opening.HOOK_TIMEOUT


def test_epilog_with_a_broken_configuration_releases_the_job(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    node.staged(7)
    node.write_config("deadline: soon")
    ran = node.epilog(7)
    assert (ran.code, *ran.said, ran.outcome.unmounted) == (0, "released", "", 1)
    assert "reason=config" in capfd.readouterr().err
    assert node.binds() == {}
    assert node.lease(7) is None


def test_epilog_releases_the_cache_of_the_lease_not_the_configured_cache(
    node: Node,
) -> None:
    path = node.staged(7)
    node.configure(cache="/mnt/nvme/elsewhere")
    ran = node.epilog(7)
    assert (ran.code, *ran.said, ran.outcome.unmounted) == (0, "released", "", 1)
    assert node.shows_source(path)


def test_second_epilog_of_a_job_releases_nothing_of_other_jobs(node: Node) -> None:
    path = node.staged(7)
    node.prolog(8, path)
    node.epilog(7)
    ran = node.epilog(7)
    assert (ran.code, *ran.said, ran.outcome.unmounted) == (0, "released", "", 0)
    assert node.lease(8) is not None
    assert set(node.binds()) == {str(path)}


@pytest.mark.parametrize("text", ["", "{"], ids=["no lease", "damaged lease"])
def test_epilog_without_a_cache_deletes_the_image_mark(node: Node, text: str) -> None:
    """It lies in /run, whichever cache is meant."""
    node.write_config("deadline: soon")
    node.places.images.mkdir(parents=True)
    own, others = (node.places.images / f"{job}.asked" for job in (1, 11))
    own.touch()
    others.touch()
    if text:
        node.leases.lease_file(1).parent.mkdir(parents=True, exist_ok=True)
        node.leases.lease_file(1).write_text(text)
    node.epilog(1)
    assert (own.exists(), others.exists()) == (False, True)


def test_epilog_with_a_damaged_lease_and_a_broken_configuration_fails_with_lease_damaged(
    node: Node,
) -> None:
    node.prolog(7, node.put("alice/image.sqsh"))
    node.leases.lease_file(7).write_bytes(b"{")
    node.write_config("deadline: soon")
    assert node.epilog(7).ended == (1, "failed", "lease-damaged")


@pytest.mark.cases(2)
@pytest.mark.parametrize("flags", [(), (mounts.MS_REMOUNT | mounts.MS_BIND | mounts.MS_RDONLY,)])
@pytest.mark.parametrize("evicted", [False, True])
def test_mount_point_left_by_a_killed_hook_does_not_stop_later_redirects(
    node: Node, flags: tuple[int, ...], evicted: bool
) -> None:
    path, other = node.put("alice/image.sqsh"), node.put("alice/other.sqsh", content(2))
    key = node.prolog(1, path).outcome.key

    def killed() -> None:
        spot = node.places.redirects / key
        spot.touch()
        for one in (mounts.MS_BIND, *flags):
            mounts.mount(str(node.cache.image_path(key)), str(spot), one)

    for job in (2, 3):  # twice, one upon the other
        killed()
        assert node.epilog(1).said == ("released", "")
        killed()
        if evicted:
            evict.evict_keys(node.cache, node.leases, [key])
        ran = node.prolog(job, path)
        assert (ran.code, ran.outcome.redirect) == (0, "mounted")
        killed()
        assert node.prolog(9, other).outcome.redirect == "mounted"
        assert [node.epilog(one).said for one in (9, job)] == [("released", "")] * 2
        assert node.binds() == {}
        assert list(node.places.redirects.iterdir()) == []


def test_leftovers_of_a_killed_hook_are_removed_by_the_next_hook(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    key = node.prolog(1, path).outcome.key
    # Killed between the bind and the end of the hook; and one half-way through a copy.
    node.leases.drop_lease(1)
    other = node.put("alice/other.sqsh", content(2))
    part = node.cache.part_dir(node.identity(other).key)
    part.mkdir()
    (part / "image").write_bytes(b"half")
    (node.cache.evicted / f"{key}.0").mkdir()
    (node.places.redirects / "leftover").touch()

    ran = node.prolog(2, other)

    assert ran.outcome.result == "copied"
    assert other.read_bytes() == content(2)
    node.epilog(2)
    assert node.binds() == {}
    for empty in (node.cache.parts, node.cache.evicted, node.places.redirects):
        assert list(empty.iterdir()) == []
