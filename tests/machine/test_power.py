"""The power goes: what the NVMe have then is right, or nobody is shown it.

A copy of the disks of a machine that stands still is what a cut leaves: qemu keeps back what was
not flushed, as a drive does. So one life of a node gives many cuts, each looked at outside
(cut.py); some are real ones, with a boot. They come at random, and at points of forestage's work
(traced.py).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest
from compute import IMAGES, Compute, command
from install import CACHE
from power import Power

EXTRA = 3  # cuts after each one at a point, within two seconds
SHOTS = 8  # cuts at random, of a node on which jobs come and go
ENOUGH = 40
TREE = f"{IMAGES}/tree"
MOMENTS = [
    ("image", "claimed", ""),
    ("image", "chunk", ""),
    ("image", "copied", ""),
    ("image", "checked", ""),
    ("image", "os.rename", f" {CACHE}/entries/"),
    ("image", "published", ""),
    ("tree", "checked", ""),
    ("tree", "os.rename", f" {CACHE}/entries/"),
    ("tree", "published", ""),
    ("evict", "os.rename", f"{CACHE}/evicted/"),
    ("evict", "os.rmdir", f"{CACHE}/evicted/"),
    ("directory", "job room", ""),
    ("directory", "os.remove", "/run/forestage/leases/"),
    ("directory", "job aside", ""),
    ("directory", "job detached", ""),
    ("epilog", "os.rename", f"{CACHE}/evicted/"),
    ("epilog", "os.rmdir", f"{CACHE}/evicted/"),
]
BOOTED = [
    ("image", "chunk", ""),
    ("image", "os.rename", f" {CACHE}/entries/"),
    pytest.param("image", "published", "", marks=pytest.mark.releases),
    ("evict", "os.rename", f"{CACHE}/evicted/"),
    ("directory", "job aside", ""),
    ("epilog", "os.rmdir", f"{CACHE}/evicted/"),
]
SMALL = "max_size: 4MiB\n"  # so that an Epilog evicts what its job has used
UNFINISHED = f"cd {CACHE}; ls -d jobs/* parts/* evicted/* 2>&- || true"


@pytest.fixture(scope="module")
def power(booted: Compute) -> Iterator[Power]:
    power = Power(booted)
    power.trace()
    yield power
    print(f"\n{power.cuts} cuts, {power.entries} entries, {len(power.wrong)} wrong")


def new(power: Power, name: str, mib: int = 8) -> str:
    """A new image's path."""
    image = power.node.image(name, mib=mib)
    power.images[image.path] = image.sha256
    return image.path


def story(power: Power, kind: str, name: str) -> str:
    """Something that is under way when the power goes, as a script of root's."""
    path = new(power, name)
    if kind == "evict":
        power.node.srun(f"stage={path} stage-wait=5m", "true")
        return "forestage evict --all"
    if kind == "tree":
        power.node.run(
            f"cd /export/images; rm -rf tree; mkdir tree; for i in $(seq 200); do"
            f" echo {name}$i >tree/$i; done; head -c 4M /dev/urandom >tree/large; sync -f ."
        )
        return command(f"stage={TREE}/ stage-wait=5m", "true")
    if kind == "epilog":
        power.node.srun(f"stage={path} stage-wait=5m", "true")
        power.node.idle()
    also = " stage-dir=50MiB" if kind == "directory" else ""
    return command(f"stage={path} stage-wait=5m{also}", "true")


@pytest.mark.parametrize(("kind", "point", "word"), MOMENTS)
def test_power_cut_at_a_trace_point_leaves_only_right_entries(
    node: Compute, power: Power, kind: str, point: str, word: str
) -> None:
    name = f"{kind}{MOMENTS.index((kind, point, word))}"
    script = story(power, kind, name)
    power.arm(point, word)
    with node.configured(SMALL) if kind == "epilog" else contextlib.nullcontext():
        running = node.begin(script, user="root" if kind == "evict" else "alice")
        power.stands()
        power.cut(f"{kind} at {point}")
        power.go_on()
        for _ in range(EXTRA):
            time.sleep(random.uniform(0, 0.7))
            power.cut(f"{kind} after {point}")
        assert running.wait().code == 0
    power.learn()
    assert power.judge() == []


def test_random_power_cuts_during_jobs_leave_only_right_entries(
    node: Compute, power: Power
) -> None:
    paths = [new(power, f"random{number}", mib=4 * number) for number in range(1, 5)]
    jobs = [command(f"stage={path} stage-dir=20MiB", f"sha256sum <{path}") for path in paths]
    running = node.begin("; ".join([*jobs, *jobs]), user="alice")
    for number in range(SHOTS):
        time.sleep(random.uniform(0, 8))
        if number == SHOTS // 2:
            node.begin("forestage evict --all")
        power.cut("jobs come and go")
    done = running.wait()
    assert done.code == 0, done.err
    digests = [line.split()[0] for line in done.out.splitlines() if line.endswith("-")]
    assert digests == 2 * [power.images[path] for path in paths]
    power.learn()
    assert power.judge() == []


@pytest.mark.parametrize(("kind", "point", "word"), BOOTED)
def test_node_serves_right_bytes_and_has_no_leftovers_after_a_power_cut_and_boot(
    node: Compute, power: Power, kind: str, point: str, word: str
) -> None:
    name = f"boot{power.cuts}"
    kept = new(power, f"{name}-kept")
    node.srun(f"stage={kept} stage-wait=5m", "true")
    with node.configured(SMALL) if kind == "epilog" else contextlib.nullcontext():
        script = story(power, kind, name)
        power.arm(point, word)
        node.begin(script, user="root" if kind == "evict" else "alice")
        power.stands()
        node.vm.cut_power()
        power.cuts += 1
        node.boot()
        node.run("forestage sweep")
        assert node.left() == ""
        assert node.run(UNFINISHED).out == ""
        node.run("forestage verify --all")
        for path in (kept, f"{IMAGES}/{name}.sqsh"):
            done = node.srun(f"stage={path}", f"sha256sum <{path}")
            assert done.out.split()[0] == power.images[path]


def test_entry_with_one_wrong_byte_is_detected_by_the_check_after_a_power_cut(
    node: Compute,
) -> None:
    """Who finds nothing wrong in all cuts would find it."""
    judge = Power(node)
    path = new(judge, "spoilt")
    node.srun(f"stage={path} stage-wait=5m", "true")
    spoil = "dd of=$(echo */image) bs=1 seek=5000000 conv=notrunc,fsync status=none"
    node.run(f"cd {CACHE}/entries; printf X | {spoil}")
    judge.cut("spoilt")
    wrong, swept = judge.judge()
    assert wrong.startswith(f"spoilt: wrong bytes: {path} ")
    assert swept.startswith("spoilt: the sweep says bad of ")


def test_power_cut_tests_made_enough_cuts_and_found_no_wrong_entry(power: Power) -> None:
    assert power.cuts >= ENOUGH
    assert power.wrong == []
