"""The worker for real: as an unprivileged user, on one store, with an enroot that stands in."""

from __future__ import annotations

import os
import random
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import registries
from imports import ALICE, BOB, NEW, OLD, Registry, Site, last, processes, until

import node as waited
from forestage.features.registry import user_notes
from forestage.features.registry.worker_messages import (
    DigestResolved,
    ImageReady,
    ImportRefused,
    ImportUnderWay,
)
from forestage.paths import NodePaths
from forestage.system import as_user, mounts, run
from forestage.system.as_user import User


@pytest.fixture
def site(private_mounts: None, open_path: Path) -> Site:
    return Site(open_path)


@pytest.fixture
def registry(site: Site) -> Iterator[Callable[..., Registry]]:
    made: list[Registry] = []

    def making(**facts: object) -> Registry:
        made.append(Registry(**facts))  # type: ignore[arg-type]
        return made[-1]

    yield making
    for one in made:
        one.stop()


def test_second_worker_finds_the_imported_image_without_an_import(site: Site) -> None:
    with site.start() as first:
        said = until(first)
    assert [type(word) for word in said] == [DigestResolved, ImportUnderWay, ImageReady]
    with site.start() as second:
        assert [type(word) for word in until(second)] == [DigestResolved, ImageReady]
    assert len(site.imports) == 1
    assert isinstance(said[-1], ImageReady)
    path = Path(said[-1].path)
    assert path.read_bytes() == site.image.read_bytes()
    assert site.names() == {"sqsh", "json"}


def test_imported_image_and_its_directory_are_private_to_the_user(site: Site) -> None:
    word = last(site.start())
    assert isinstance(word, ImageReady)
    found = os.stat(word.path)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (ALICE.uid, 0o600)
    assert stat.S_IMODE(site.folder().stat().st_mode) == 0o700
    assert site.imports[0].split()[1] == str(ALICE.uid)


def test_enroot_import_runs_with_nice_10_and_umask_0022(site: Site) -> None:
    """The mode of an image's root is that of a directory which enroot makes."""
    assert isinstance(last(site.start()), ImageReady)
    assert site.imports[0].split()[2:4] == ["umask=0022", "nice=10"]


def test_each_user_has_a_separate_import_of_the_same_image(site: Site) -> None:
    first, second = last(site.start()), last(site.start(BOB))
    assert isinstance(first, ImageReady)
    assert isinstance(second, ImageReady)
    assert first.path != second.path
    assert len(site.imports) == 2


def test_two_concurrent_workers_make_one_import(site: Site, open_path: Path) -> None:
    wait = {"STANDIN_WAIT": str(open_path / "go on")}
    with site.start(environ=wait) as first, site.start(environ=wait, host="n2") as second:
        said = [until(one, ImportUnderWay)[-1] for one in (first, second)]
        names = {one.where for one in said if isinstance(one, ImportUnderWay)}
        assert len(names) == 1, "both name the one that imports"
        assert sorted(one.here for one in said if isinstance(one, ImportUnderWay)) == [False, True]
        assert "part" not in {name for name in site.names() if name.endswith("sqsh")}
        (open_path / "go on").touch()
        assert until(first)[-1] == until(second)[-1]
    assert len(site.imports) == 1


def test_image_in_the_store_gets_its_name_only_when_complete(site: Site, open_path: Path) -> None:
    wait = {"STANDIN_WAIT": str(open_path / "go on")}
    with site.start(environ=wait) as first:
        until(first, ImportUnderWay)
        while not any(name.endswith("part") for name in site.names()):
            os.sched_yield()
        assert not any(name.endswith("sqsh") for name in os.listdir(site.folder()))
        (open_path / "go on").touch()
        assert isinstance(until(first)[-1], ImageReady)


def test_waiting_worker_of_the_same_machine_imports_at_once_after_the_importing_worker_was_killed(
    site: Site, open_path: Path
) -> None:
    wait = {"STANDIN_WAIT": str(open_path / "never")}
    with site.start(environ=wait) as first:
        until(first, ImportUnderWay)
        with site.start(host="n2") as second:
            until(second, ImportUnderWay)
            os.kill(first.pid, signal.SIGKILL)
            assert isinstance(until(second)[-1], ImageReady)
    assert len(site.imports) == 2


def test_worker_stopped_by_its_parent_releases_the_import_to_the_next_worker(
    site: Site, open_path: Path
) -> None:
    wait = {"STANDIN_WAIT": str(open_path / "never")}
    first = site.start(environ=wait)
    until(first, ImportUnderWay)
    with site.start(host="n2") as second:
        until(second, ImportUnderWay)
        first.kill()
        assert isinstance(until(second)[-1], ImageReady)
    assert site.names() == {"sqsh", "json"}, "neither a part nor a lease is left"


def test_processes_of_enroot_end_with_the_worker(site: Site, open_path: Path) -> None:
    first = site.start(environ={"STANDIN_WAIT": str(open_path / "never")})
    until(first, ImportUnderWay)
    while not site.imports:
        os.sched_yield()
    first.kill()
    assert processes(ALICE) == []


@pytest.mark.parametrize("by_slurm", [False, True])
def test_cancelled_import_leaves_no_temporary_files(
    site: Site, open_path: Path, by_slurm: bool
) -> None:
    """Slurm signals all of the step's cgroup; elsewhere the worker's stdin ends."""
    environ = {"STANDIN_WAIT": str(open_path / "never"), "STANDIN_TIDY": "1"}
    first = site.start(environ=environ)
    until(first, ImportUnderWay)
    temp = site.temp / str(ALICE.uid)
    waited.until(lambda: list(temp.glob("*/*/image")), "what enroot has unpacked")
    if by_slurm:
        run._send_signal(processes(ALICE), signal.SIGTERM)
        waited.until(lambda: not processes(ALICE), "their end")
    else:
        first.kill()
    assert list(temp.iterdir()) == []
    assert "has deleted" in site.imports[-1]  # enroot itself: it has more than these files
    assert site.names() == set()
    first.kill()


def test_killed_import_leaves_no_temporary_files(site: Site, open_path: Path) -> None:
    """By the kernel, say, for want of memory."""
    with site.start(environ={"STANDIN_WAIT": str(open_path / "never")}) as first:
        until(first, ImportUnderWay)
        temp = site.temp / str(ALICE.uid)
        waited.until(lambda: list(temp.glob("*/*/image")), "what enroot has unpacked")
        (work,) = temp.glob("*/*")
        closed = work / "root/etc"
        closed.mkdir(parents=True)
        (closed / "file").touch()
        for path in (closed / "file", closed, closed.parent):
            os.chown(path, ALICE.uid, ALICE.gid)
            path.chmod(0o555)
        of_enroot = [pid for pid in processes(ALICE) if b"enroot import" in title(pid)]
        run._send_signal(of_enroot, signal.SIGKILL)
        word = until(first)[-1]
    assert isinstance(word, ImportRefused)
    assert "killed by signal 9" in word.detail
    assert list(temp.iterdir()) == []


def title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")


def test_failed_import_is_reported_to_all_waiting_workers(site: Site, open_path: Path) -> None:
    fifo = open_path / "go on"
    fails = {"STANDIN_WAIT": str(fifo), "STANDIN_IMAGE": "/dev/null"}
    with site.start(environ=fails) as first, site.start(environ=fails, host="n2") as second:
        until(first, ImportUnderWay), until(second, ImportUnderWay)
        fifo.touch()
        words = [until(first)[-1], until(second)[-1]]
    assert [word.reason for word in words if isinstance(word, ImportRefused)] == [
        "import-failed"
    ] * 2
    assert len(site.imports) == 1


def test_next_worker_imports_again_after_a_failed_import(site: Site) -> None:
    word = last(site.start(environ={"STANDIN_FAIL": "URL error code: 401 Unauthorized"}))
    assert isinstance(word, ImportRefused)
    assert word.reason == "import-failed"
    assert "401 Unauthorized" in word.detail
    assert isinstance(last(site.start()), ImageReady)


def test_enroots_error_text_is_printable(site: Site) -> None:
    word = last(site.start(environ={"STANDIN_FAIL": "\x1b[2Jgone \x07"}))
    assert isinstance(word, ImportRefused)
    assert word.detail.isprintable()


def test_import_into_a_full_store_is_refused_and_leaves_no_part(site: Site) -> None:
    mounts.mount("tmpfs", str(site.store), 0, "tmpfs", "size=1M,mode=1777")
    word = last(site.start(environ={"STANDIN_FILL": "4"}))
    assert isinstance(word, ImportRefused)
    assert word.reason == "store-full"
    assert not {name for name in site.names() if name.endswith("part")}


def test_full_temporary_directory_fails_the_import_on_that_node_only(
    site: Site, open_path: Path
) -> None:
    """The store has room, and another node's disk may have."""
    temp = site.temp / str(ALICE.uid)
    owner = f"size=64k,uid={ALICE.uid},gid={ALICE.gid},mode=700"
    mounts.mount("tmpfs", str(temp), 0, "tmpfs", owner)
    with site.start() as first:
        word = until(first)[-1]
    assert isinstance(word, ImportRefused)
    assert word.reason == "enroot-full"
    assert f"enroot's temporary files, {temp}, is full" in word.detail
    assert list(temp.iterdir()) == []
    assert "failed" not in site.names()
    mounts.umount(str(temp))
    assert isinstance(last(site.start(host="n2")), ImageReady)


def test_full_store_is_reported_to_all_waiting_workers(site: Site, open_path: Path) -> None:
    """What says so needs room itself, which the half of an image takes until it is deleted."""
    mounts.mount("tmpfs", str(site.store), 0, "tmpfs", "size=1M,mode=1777")
    fifo = open_path / "go on"
    fills = {"STANDIN_WAIT": str(fifo), "STANDIN_FILL": "4"}
    with site.start(environ=fills) as first, site.start(environ=fills, host="n2") as second:
        until(first, ImportUnderWay), until(second, ImportUnderWay)
        fifo.touch()
        words = [until(first)[-1], until(second)[-1]]
    assert [word.reason for word in words if isinstance(word, ImportRefused)] == ["store-full"] * 2
    assert len(site.imports) == 1


def test_import_refused_by_a_full_store_is_not_repeated_until_space_is_free(
    site: Site, open_path: Path
) -> None:
    places = NodePaths(open_path)
    places.images.mkdir(parents=True)
    mounts.mount("tmpfs", str(site.store), 0, "tmpfs", "size=1M,mode=1777")
    marks = {"marks": str(places.images)}
    with site.start(environ={"STANDIN_FILL": "4"}, **marks) as at_work:
        resolved, *_, failed = until(at_work)
    assert isinstance(resolved, DigestResolved)
    assert isinstance(failed, ImportRefused)
    assert 0 < failed.free < 1 << 20
    user_notes.record_full_store(
        places, ALICE, resolved.name, failed.detail, failed.free, time.time()
    )
    again = last(site.start(**marks))
    assert isinstance(again, ImportRefused)
    assert (again.reason, again.detail) == ("store-full", failed.detail)
    assert len(site.imports) == 1
    assert isinstance(last(site.start(user=BOB, **marks)), ImageReady)
    other = last(site.start(reference=f"here#other@{NEW}", **marks))
    assert isinstance(other, ImageReady)
    user_notes.record_full_store(
        places,
        ALICE,
        resolved.name,
        failed.detail,
        failed.free,
        time.time() - user_notes.FULL_SECONDS,
    )
    assert isinstance(last(site.start(**marks)), ImageReady)


def test_full_store_note_is_ignored_once_the_store_has_more_free_space(
    site: Site, open_path: Path
) -> None:
    places = NodePaths(open_path)
    places.images.mkdir(parents=True)
    with site.start(environ={"STANDIN_FAIL": "gone"}) as at_work:
        resolved = until(at_work)[0]
    assert isinstance(resolved, DigestResolved)
    user_notes.record_full_store(places, ALICE, resolved.name, "full", 5, time.time())
    assert isinstance(last(site.start(marks=str(places.images))), ImageReady)


def test_image_with_layers_larger_than_the_stores_free_space_is_refused_before_the_import(
    site: Site, open_path: Path, tmp_path: Path
) -> None:
    real = registries.start(tmp_path / "registry")
    try:
        noise = {"large": random.Random(1).randbytes(2 << 20)}
        digest = real.push("team/tool:1", noise)
        mounts.mount("tmpfs", str(site.store), 0, "tmpfs", "size=1M,mode=1777")
        word = last(site.start(reference=f"{real.host}#team/tool@{digest}"))
        assert isinstance(word, ImportRefused)
        assert (word.reason, site.imports) == ("store-full", [])
        assert "its layers have 2" in word.detail
        mounts.mount("tmpfs", str(site.store), 0, "tmpfs", "size=9M,mode=1777")
        assert isinstance(last(site.start(reference=f"{real.host}#team/tool@{digest}")), ImageReady)
    finally:
        real.stop()


@pytest.mark.parametrize(
    ("user", "mode", "may"), [(ALICE, "r", True), (ALICE, "r+", False), (BOB, "r", False)]
)
def test_full_store_note_is_readable_only_by_its_user_and_not_writable(
    open_path: Path, user: User, mode: str, may: bool
) -> None:
    """On /run, which is memory, whoever owns a file may take all of it."""
    places = NodePaths(open_path)
    places.images.mkdir(parents=True)
    user_notes.record_full_store(places, ALICE, "name", "full", 5, 0.0)
    (file,) = places.images.iterdir()
    assert file.stat().st_uid == 0

    def work() -> as_user.ChildResult[bool]:
        as_user.set_effective_user(user)
        try:
            file.open(mode).close()
        except PermissionError:
            return False, []
        return True, []

    assert as_user.run_in_child(work, bool, 60.0)[0] == may


def test_import_larger_than_max_size_is_refused(site: Site) -> None:
    word = last(site.start(max_size=1 << 20, environ={"STANDIN_FILL": "4"}))
    assert isinstance(word, ImportRefused)
    assert word.reason == "too-large", word


def test_read_only_store_serves_its_images_and_refuses_imports(site: Site) -> None:
    assert isinstance(last(site.start()), ImageReady)
    mounts.mount(str(site.store), str(site.store), mounts.MS_BIND)
    flags = mounts.MS_REMOUNT | mounts.MS_BIND | mounts.MS_RDONLY
    mounts.mount(str(site.store), str(site.store), flags)
    assert isinstance(last(site.start()), ImageReady)
    word = last(site.start(reference=f"here#other@{NEW}"))
    assert isinstance(word, ImportRefused)
    assert word.reason == "store-gone"


def test_missing_store_directory_is_refused_as_store_gone(site: Site, open_path: Path) -> None:
    word = last(site.start(directory=str(open_path / "not mounted")))
    assert isinstance(word, ImportRefused)
    assert word.reason == "store-gone"
    assert not (open_path / "not mounted").exists()


@pytest.mark.parametrize("kind", ["another's", "open to others", "link"])
def test_users_store_directory_with_another_owner_open_mode_or_link_is_refused(
    site: Site, kind: str
) -> None:
    folder, mine = site.folder(), site.home / str(ALICE.uid)
    if kind == "link":
        folder.symlink_to(mine)
    else:
        folder.mkdir()
        folder.chmod(0o700 if kind == "another's" else 0o770)
        owner = BOB if kind == "another's" else ALICE
        os.chown(folder, owner.uid, owner.gid)
    word = last(site.start())
    assert isinstance(word, ImportRefused)
    assert word.reason == "store-foreign"
    assert not site.imports


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["link", "fifo", "half", "text"])
def test_invalid_file_with_an_images_name_in_the_store_is_replaced_by_an_import(
    site: Site, kind: str
) -> None:
    word = last(site.start())
    assert isinstance(word, ImageReady)
    path = Path(word.path)
    path.unlink()
    if kind == "link":
        path.symlink_to(site.image)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(site.image.read_bytes()[:1000] if kind == "half" else b"text" * 1000)
        os.chown(path, ALICE.uid, ALICE.gid)
    assert last(site.start()) == word
    assert len(site.imports) == 2
    assert path.read_bytes() == site.image.read_bytes()


def test_all_nodes_of_a_job_use_the_first_digest_after_the_tag_moves(
    site: Site, registry: Callable[..., Registry]
) -> None:
    there = registry(digest=OLD)
    facts = {"reference": there.reference(), "job": "12"}
    with site.start(**facts) as first:
        assert [word.digest for word in until(first) if isinstance(word, DigestResolved)] == [OLD]
    there.digest = NEW
    with site.start(**facts, leads=False) as second:
        assert [word.digest for word in until(second) if isinstance(word, DigestResolved)] == [OLD]
    with site.start(**{**facts, "job": "13"}) as next_job:
        assert [word.digest for word in until(next_job) if isinstance(word, DigestResolved)] == [
            NEW
        ]
    assert there.asked == 2


def test_node_resolves_the_tag_for_its_job_if_the_lead_node_is_silent(
    site: Site, registry: Callable[..., Registry]
) -> None:
    there = registry(digest=OLD)
    facts = {"reference": there.reference(), "job": "12"}
    assert isinstance(last(site.start(**facts, leads=False, patience=0.3)), ImageReady)
    there.digest = NEW
    with site.start(**facts) as leader:
        assert [word.digest for word in until(leader) if isinstance(word, DigestResolved)] == [OLD]


def test_step_uses_its_jobs_digest_or_resolves_the_tag_itself(
    site: Site, registry: Callable[..., Registry]
) -> None:
    there = registry(digest=OLD)
    facts = {"reference": there.reference()}
    last(site.start(**facts, job="12"))
    there.digest = NEW
    found = {}
    for job in ("12.0", "13.0"):
        with site.start(**facts, job=job) as step:
            found[job] = [word.digest for word in until(step) if isinstance(word, DigestResolved)]
    assert found == {"12.0": [OLD], "13.0": [NEW]}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_CLUSTER_NAME": "west"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_START_TIME": "1800000001"},  # a cluster that counts from 1 again
    ],
)
def test_jobs_with_the_same_number_on_other_clusters_or_runs_share_no_digest(
    site: Site, registry: Callable[..., Registry], other: dict[str, str]
) -> None:
    there = registry(digest=OLD)
    facts = {"reference": there.reference(), "job": "12"}
    environ = {"SLURM_CLUSTER_NAME": "east", "SLURM_JOB_START_TIME": "1800000000"}
    last(site.start(**facts, environ=environ))
    there.digest = NEW
    for given, digest in ((environ, OLD), ({**environ, **other}, NEW)):
        with site.start(**facts, environ=given) as one:
            assert [word.digest for word in until(one) if isinstance(word, DigestResolved)] == [
                digest
            ]


@pytest.mark.parametrize(("status", "reason"), [(503, ""), (403, "registry-denied")])
def test_last_known_digest_is_used_for_a_silent_registry_but_not_after_a_refusal(
    site: Site, registry: Callable[..., Registry], status: int, reason: str
) -> None:
    there = registry(digest=OLD)
    facts = {"reference": there.reference(), "offline": "use-last"}
    assert isinstance(last(site.start(**facts)), ImageReady)
    there.status = status
    word = last(site.start(**facts))
    assert (word.reason if isinstance(word, ImportRefused) else "") == reason, word


def test_silent_registry_is_refused_without_offline_use_last(
    site: Site, registry: Callable[..., Registry]
) -> None:
    there = registry(digest=OLD)
    assert isinstance(last(site.start(reference=there.reference())), ImageReady)
    there.status = 503
    word = last(site.start(reference=there.reference()))
    assert isinstance(word, ImportRefused)
    assert word.reason == "registry-silent"


def test_busy_registry_gets_one_import_by_tag_for_all_nodes_of_a_job(
    site: Site, registry: Callable[..., Registry]
) -> None:
    there = registry(status=429)
    facts = {"reference": there.reference(), "job": "12"}
    first = last(site.start(**facts))
    assert isinstance(first, ImageReady)
    assert last(site.start(**facts, leads=False)) == first
    assert [line.split()[0] for line in site.imports] == [f"docker://{there.reference()}"]
    assert last(site.start(**{**facts, "job": "13"})) != first


def test_import_by_an_old_enroot_is_discarded_if_the_tag_moved_meanwhile(
    site: Site, registry: Callable[..., Registry], open_path: Path
) -> None:
    there = registry(digest=OLD)
    old = {"STANDIN_VERSION": "3.0.0", "STANDIN_WAIT": str(open_path / "go on")}
    with site.start(reference=there.reference(), environ=old) as at_work:
        until(at_work, ImportUnderWay)
        there.digest = NEW
        (open_path / "go on").touch()
        word = until(at_work)[-1]
    assert isinstance(word, ImportRefused)
    assert word.reason == "registry-moved"
    assert "sqsh" not in site.names()


@pytest.mark.parametrize("by_link", [False, True])
def test_store_on_the_caches_disk_is_refused_as_store_local(
    site: Site, open_path: Path, by_link: bool
) -> None:
    """Whoever has a directory there fills the disk, and nothing bounds it."""
    cache = Path("/mnt/link" if by_link else open_path, "cache")
    Path("/mnt/link").symlink_to(open_path)
    word = last(site.start(cache=str(cache)))
    assert isinstance(word, ImportRefused)
    assert word.reason == "store-local"
    assert not site.folder().exists()
    mounts.mount("tmpfs", str(site.store), 0, "tmpfs", "mode=1777")
    assert isinstance(last(site.start(cache=str(cache))), ImageReady)


def test_worker_refuses_an_invalid_reference(site: Site) -> None:
    word = last(site.start(reference="docker://A B"))
    assert isinstance(word, ImportRefused)
    assert word.reason == "bad-reference"


def test_six_nodes_of_a_job_make_one_head_request_and_one_import(
    site: Site, started: Callable[..., registries.Registry]
) -> None:
    there = started()
    digest = there.push("team/tool:1", {"etc/x": b"1" * 5000})
    before = len(there.log)
    order = {"reference": f"{there.host}#team/tool:1", "patience": 60.0}
    real = {"STANDIN_IMAGE": ""}
    nodes = [
        site.start(environ=real, **order, job="12", leads=n == 0, host=f"n{n}") for n in range(6)
    ]
    said = [until(node) for node in nodes]
    for node in nodes:
        node.kill()
    assert {type(words[-1]) for words in said} == {ImageReady}, said
    assert {words[0].digest for words in said if isinstance(words[0], DigestResolved)} == {digest}
    assert len({words[-1] for words in said}) == 1
    asked = [one for one in there.log[before:] if one.method == "HEAD"]
    brought = [
        one.path for one in there.log[before:] if one.method == "GET" and "sha256" in one.path
    ]
    assert len(asked) == 1
    assert len(brought) == len(set(brought)) == 3, "manifest, configuration, one layer"
    before = len(there.log)
    assert isinstance(last(site.start(environ=real, **order, job="13")), ImageReady)
    assert [one.method for one in there.log[before:]] == ["HEAD"]


def test_worker_that_lost_its_import_lease_stops_and_imports_again_later(
    site: Site, open_path: Path
) -> None:
    wait = {"STANDIN_WAIT": str(open_path / "never")}
    with site.start(environ=wait) as first:
        until(first, ImportUnderWay)
        while not (parts := list(site.folder().glob("*.part"))):
            os.sched_yield()
        younger = site.folder() / f"{parts[0].name.partition('.')[0]}.lease.2"
        younger.touch()
        os.chown(younger, ALICE.uid, ALICE.gid)
        while any(one.endswith("part") for one in site.names()):
            os.sched_yield()
        younger.unlink()
        (open_path / "never").touch()
        assert isinstance(until(first)[-1], ImageReady)
    assert len(site.imports) == 2
