"""Images in the cache without a job: the copies of a hook, its rules, and no lease."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import NOW, Site
from forestage.commands.command_context import ExitStatus
from forestage.events import CopyOutcome, read_events
from forestage.features.prepare import stage_images
from forestage.stage import copy_wait
from forestage.system import lock
from node import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a stager is root's")


@pytest.fixture
def site(open_path: Path) -> Site:
    return Site(open_path, f"sources: [{open_path}]\nredirect: spank\n")


def results(site: Site, *args: str, code: int = 0) -> list[str]:
    return [one["result"] for one in site.json("stage", *args, code=code)["images"]]


def test_stage_command_copies_an_image_without_a_lease_and_then_has_a_hit(site: Site) -> None:
    paths = [site.image("a.sqsh"), site.image("b.sqsh", b"another")]
    assert results(site, *map(str, paths)) == ["copied", "copied"]
    assert len(site.keys()) == 2
    assert site.json("status")["leases"] == []
    copies = [
        one for one in read_events(site.places.events) if isinstance(one.outcome, CopyOutcome)
    ]
    assert {(one.job, one.outcome.result) for one in copies} == {(0, "copied")}
    assert results(site, str(paths[0])) == ["hit"]
    printed = site.run("stage", str(paths[0])).stdout
    assert printed.startswith("1 of 1 image here\n")


def test_stage_command_updates_the_use_time_of_a_cached_image(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"), age=5000)
    results(site, str(site.lustre / "a.sqsh"))
    assert site.json("show", key)[0]["item"]["used"] == NOW


def test_stage_command_declines_bad_paths_and_copies_the_other_images(site: Site) -> None:
    good = site.image("a.sqsh")
    assert results(site, "/etc/hostname", "/nowhere", str(good), code=ExitStatus.NOT_FOUND) == [
        "declined",
        "declined",
        "copied",
    ]


def test_stage_command_opens_the_image_as_the_user_given_by_the_user_option(site: Site) -> None:
    path = site.image("a.sqsh")
    path.chmod(0o600)
    done = site.json("stage", "--user", "nobody", str(path), code=ExitStatus.NOT_FOUND)
    assert [one["reason"] for one in done["images"]] == ["no-permission"]
    assert results(site, str(path)) == ["copied"]
    assert site.run("stage", "--user", "nosuch", str(path)).exit_code == ExitStatus.USAGE


def test_stage_command_run_by_a_user_exits_with_permission_and_says_run_as_root(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = site.run("stage", str(site.lustre / "a.sqsh"))
    assert (done.exit_code, done.stderr) == (
        ExitStatus.PERMISSION,
        "forestage: the cache is root's (run as root)\n",
    )


@pytest.mark.parametrize("by", ["enabled", "file", "doubt"])
def test_stage_command_declines_on_a_switched_off_node_or_a_suspect_disk(
    site: Site, by: str
) -> None:
    path = site.image("a.sqsh")
    if by == "enabled":
        site.configure(f"sources: [{site.places.root}]\nenabled: false\n")
    else:
        site.places.run.mkdir(parents=True)
    if by == "file":
        site.places.disabled.touch()
    if by == "doubt":
        site.start_disk_doubt()
    (image,) = site.json("stage", str(path), code=ExitStatus.NOT_FOUND)["images"]
    assert image["result"] in ("declined", "failed")
    assert image["reason"] == ("disk-errors" if by == "doubt" else "disabled")


def test_stage_command_without_arguments_copies_the_images_of_warm_at_boot(site: Site) -> None:
    path = site.image("a.sqsh")
    site.configure(f"sources: [{site.places.root}]\nredirect: spank\nwarm_at_boot: [{path}]\n")
    assert results(site) == ["copied"]
    site.configure(f"sources: [{site.places.root}]\n")
    assert results(site) == []


def test_stage_command_exits_at_its_time_limit_and_the_copy_continues(site: Site) -> None:
    config = f"sources: [{site.places.root}]\nredirect: spank\nchunk_size: 1M\nbandwidth: 2M\n"
    site.configure(config)
    path = site.image("a.sqsh", b"x" * (3 << 20))
    (image,) = site.json("stage", "--within", "0", str(path), code=ExitStatus.NOT_FOUND)["images"]
    assert (image["result"], image["reason"]) == ("copying", "deadline")
    key = image["key"]
    until(lambda: site.node.cache.image_path(key).exists(), "the copy")
    until(lambda: lock.is_free(site.node.cache.key_lock(key)), "its end")


def test_stage_command_runs_a_limited_number_of_copies_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_images, "MAX_AT_ONCE", 2)
    here, peak = 0, 0

    @contextlib.contextmanager
    def counted(*facts: Any) -> Iterator[Any]:
        nonlocal here, peak
        with begun(*facts) as channel:
            here += 1
            peak = max(peak, here)
            yield channel
            here -= 1

    begun = copy_wait.ensure_copy_started
    monkeypatch.setattr(copy_wait, "ensure_copy_started", counted)
    paths = [str(site.image(f"{number}.sqsh", b"%d" % number)) for number in range(5)]
    assert results(site, *paths) == ["copied"] * 5
    assert peak == 2
    more = [str(site.image(f"{number}.sqsh", b"%d" % number)) for number in range(5, 9)]
    late = site.json("stage", "--within", "0", *more, code=ExitStatus.NOT_FOUND)["images"]
    assert [one["reason"] for one in late] == ["deadline"] * 4
    assert [one["result"] for one in late] == ["copying"] * 2 + ["declined"] * 2
    for one in late[:2]:
        until(lambda key=one["key"]: lock.is_free(site.node.cache.key_lock(key)), "its end")
