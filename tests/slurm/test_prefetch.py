"""Images of pending jobs, on a real cluster: n1 reads the queue, n2 copies what it names."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest
from cluster import Cluster
from host import wait_until
from jobs import CACHE, CLI, Site, hooked
from spec import BOB, ClusterSpec

from forestage.cache.part import count_done_bytes
from forestage.events import CopyOutcome
from forestage.features.prefetch import expected_list
from forestage.paths import NodePaths

HOST, NODE = "n1", "n2"
RATE = "200M"
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(2, BatchStartTimeout="60")


@pytest.fixture(scope="module")
def service(site_cluster: Cluster) -> Iterator[None]:
    Site(site_cluster).configure(**keys())
    log = site_cluster.state / "log/peer-host.log"
    with open(log, "w") as out:
        service = site_cluster.popen(
            [CLI, "peer", "--node", HOST], user="root", node=HOST, stdout=out, stderr=out
        )
    wait_until(lambda: "serves at" in log.read_text(), 60, log.read_text)
    yield
    with contextlib.suppress(ProcessLookupError):
        site_cluster.signal(service, signal.SIGTERM)
    service.communicate(timeout=60)


def keys(rate: str | None = RATE, **more: object) -> dict[str, object]:
    # Only the host's service runs.
    return {"peers": {"enabled": True}, "prefetch": {"host": HOST, "bandwidth": rate}, **more}


class Queue:
    """A job that holds NODE, and what waits behind it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.places = {
            node: NodePaths(site.cluster.host_path("/", node)) for node in site.cluster.nodes
        }

    def old(self, name: str, **how: object) -> str:
        """An image that nobody has written to lately."""
        path = self.site.image(name, **how)  # type: ignore[arg-type]
        file = self.site.source(path)
        before = file.stat().st_mtime - 3600
        os.utime(file, (before, before))
        return path

    def submit(self, comment: str, *options: str, user: str = "alice", script: str = "") -> int:
        where = [f"--nodelist={NODE}", "--exclusive", f"--comment={comment}", "--output=/dev/null"]
        return self.site.cluster.submit(f"#!/bin/sh\n{script}\n", *where, *options, user=user)

    def tell(self) -> str:
        return self.command(HOST)

    def pull(self, *words: str) -> str:
        """What a node's pass says; the copy that it began has ended."""
        said = self.command(NODE, *words)
        self.site.await_stagers()
        return said

    def command(self, node: str, *words: str) -> str:
        ran = self.site.cluster.run(
            [CLI, "prefetch", "--node", node, *words], user="root", node=node, check=False
        )
        return ran.stdout + ran.stderr

    def listed(self, node: str = NODE) -> list[str]:
        found = expected_list.find_list(self.places[node])
        return [row.image for row in found.rows] if found else []

    def age(self, node: str, seconds: float) -> None:
        """Makes the list of a node older."""
        known = expected_list.find_list(self.places[node])
        assert known is not None
        times = {"made": known.made - seconds, "expires": known.expires - seconds}
        expected_list.write_list(self.places[node], msgspec.structs.replace(known, **times))


@pytest.fixture
def waiting(site: Site, service: None) -> Iterator[Queue]:
    site.configure(**keys())
    for node in site.cluster.nodes:
        for name in ("expected.json", "prefetched.json"):
            site.cluster.host_path(f"/run/forestage/{name}", node).unlink(missing_ok=True)
    with site.holding(None, node=NODE):
        yield Queue(site)
        site.cluster.run(["scancel", "--state=PENDING", "--user=alice"], user="root", check=False)
        site.cluster.run(["scancel", "--state=PENDING", "--user=bob"], user="root", check=False)
        site.await_stagers()


def test_image_of_a_pending_job_is_copied_before_the_job_starts(site: Site, service: None) -> None:
    site.configure(**keys())
    queue = Queue(site)
    path = queue.old("ahead", mib=4)
    with site.holding(None, node=NODE):
        job = queue.submit(f"stage={path}", script=f"sha256sum <{path} >/shared/alice/sum")
        assert path in queue.tell()
        assert "copying" in queue.pull()
        assert site.cached_paths(NODE) == [path]
        assert site.leases(NODE) == []

    site.wait_over(job)
    assert site.results(job, NODE) == ["hit"]
    assert site.cluster.read("/shared/alice/sum").split()[0] == site.sha256(path)
    said = site.cluster.run([CLI, "explain", str(job)], user="root", node=NODE).stdout
    assert "copied before the job began" in " ".join(said.split())


def test_forged_line_in_comment_name_or_admin_comment_prefetches_no_image(waiting: Queue) -> None:
    path = waiting.old("real")
    forged = f"x\n77777|{'0' * 32}<0|1|all|None|0|(null)|{'0' * 32}>stage=/shared/bob/f.sqsh\n"
    forged += "77777|n1|stage=/etc/shadow"
    job = waiting.submit(f"{forged} stage={path}", f"--job-name={forged}")
    words = ["scontrol", "update", f"jobid={job}", f"admincomment={forged}"]
    waiting.site.cluster.run(words, user="root")
    waiting.tell()
    assert waiting.listed(HOST) == [path]


def test_private_image_of_another_user_is_not_prefetched_and_writes_no_event(
    waiting: Queue,
) -> None:
    path = waiting.old("private", owner=BOB, mode=0o600)
    waiting.submit(f"stage={path}")
    waiting.tell()
    before = waiting.site.cluster.read("/var/log/forestage/events.jsonl", NODE)
    assert "no-permission" not in waiting.pull()
    assert "is not readable as " in waiting.pull("--dry-run")
    assert waiting.site.cached_paths(NODE) == []
    assert waiting.site.cluster.read("/var/log/forestage/events.jsonl", NODE) == before


def test_busy_node_prefetches_nothing_without_a_bandwidth_limit(waiting: Queue) -> None:
    path = waiting.old("busy")
    waiting.submit(f"stage={path}")
    waiting.site.configure(**keys(rate=None))
    waiting.tell()
    assert "a job runs on this node" in waiting.pull()
    assert waiting.site.cached_paths(NODE) == []


def test_held_dependent_and_later_jobs_are_not_in_the_prefetch_list(waiting: Queue) -> None:
    first = waiting.old("first")
    job = waiting.submit(f"stage={first}")
    waiting.submit(f"stage={waiting.old('held')}", "--hold")
    waiting.submit(f"stage={waiting.old('after')}", f"--dependency=afterok:{job}")
    waiting.submit(f"stage={waiting.old('tomorrow')}", "--begin=now+1day")
    said = waiting.tell()
    assert waiting.listed(HOST) == [first]
    assert "1 JobHeldUser" in said


def test_prefetch_list_of_a_dead_host_is_used_until_it_expires(waiting: Queue) -> None:
    path = waiting.old("dead")
    waiting.submit(f"stage={path}")
    waiting.tell()
    waiting.site.configure(**keys(), enabled=False)  # takes the list and copies nothing
    assert "enabled: false" in waiting.pull()
    dead = {"host": f"{HOST}:9", "bandwidth": RATE}  # a job runs on NODE
    waiting.site.configure(**{**keys(), "prefetch": dead})
    waiting.age(NODE, expected_list.LIST_LASTS)
    assert "gave no list" in waiting.pull()
    assert waiting.site.cached_paths(NODE) == []

    waiting.age(NODE, -expected_list.LIST_LASTS)
    waiting.pull()
    assert waiting.site.cached_paths(NODE) == [path]


def test_prefetch_list_older_than_the_nodes_own_list_is_refused(waiting: Queue) -> None:
    waiting.submit(f"stage={waiting.old('replayed')}")
    waiting.tell()
    old = waiting.site.cluster.read("/run/forestage/expected.json", HOST)
    waiting.site.cluster.run(["scancel", "--state=PENDING", "--user=alice"], user="root")
    waiting.tell()
    waiting.pull()
    waiting.site.cluster.write("/run/forestage/expected.json", old, HOST)
    assert "older than the one that is here" in waiting.pull()
    assert waiting.listed() == []


def test_hanging_squeue_is_given_up_and_the_prefetch_list_stays(waiting: Queue) -> None:
    path = waiting.old("hangs")
    waiting.submit(f"stage={path}")
    waiting.tell()
    before = waiting.site.cluster.read("/run/forestage/expected.json", HOST)
    pid = waiting.site.cluster.run(["pgrep", "-x", "slurmctld"], user="root").stdout.split()[0]
    waiting.site.cluster.run(["kill", "-STOP", pid], user="root")
    try:
        said = waiting.tell()
    finally:
        waiting.site.cluster.run(["kill", "-CONT", pid], user="root")
    assert "forestage: " in said
    assert waiting.site.cluster.read("/run/forestage/expected.json", HOST) == before
    waiting.site.await_stagers()


def test_prefetch_on_a_full_disk_evicts_no_recently_used_entry(waiting: Queue) -> None:
    site = waiting.site
    used, path = site.image("used", mib=8), waiting.old("big", mib=8)
    site.configure(**keys(), max_size="12M", min_free="1%")
    site.cluster.run([CLI, "stage", used], user="root", node=NODE)
    waiting.submit(f"stage={path}")
    waiting.tell()
    waiting.pull()
    assert site.cached_paths(NODE) == [used]


def test_prefetched_copy_of_a_cancelled_job_becomes_the_first_to_be_evicted(waiting: Queue) -> None:
    path = waiting.old("vanished")
    job = waiting.submit(f"stage={path}")
    waiting.tell()
    waiting.pull()
    (entry,) = waiting.site.entries(NODE).values()
    assert entry.used > 0
    waiting.site.cluster.run(["scancel", str(job)], user="root")
    waiting.tell()
    waiting.pull()
    (entry,) = waiting.site.entries(NODE).values()
    assert entry.used == 0


def test_job_resumes_the_prefetch_copy_of_its_image(site: Site, service: None) -> None:
    site.configure(**keys("256K"), chunk_size=MIB)  # that copy alone would take two minutes
    queue = Queue(site)
    path = queue.old("taken", mib=32)
    size = site.source(path).stat().st_size
    waits = queue.submit(f"stage={path}", "--begin=now+10minutes")
    queue.tell()
    ahead = site.cluster.popen([CLI, "prefetch", "--node", NODE], user="root", node=NODE)

    def copied() -> int:
        maps = [one.read_bytes() for one in site.cache(NODE).parts.glob("*/map")]
        return sum(count_done_bytes(one, MIB, size) for one in maps)

    wait_until(lambda: copied() >= 2 * MIB, 60, lambda: "no copy")
    before = copied()
    job = queue.submit(f"stage={path}", script=f"sha256sum <{path} >/shared/alice/sum")
    site.wait_over(job)
    ahead.communicate(timeout=60)
    site.cluster.run(["scancel", str(waits)], user="root")

    assert site.results(job, NODE) == ["copied"]
    assert site.cluster.read("/shared/alice/sum").split()[0] == site.sha256(path)
    (own,) = site.outcomes(job, NODE, "stager")
    assert isinstance(own, CopyOutcome)
    assert own.resumed >= before  # which it has not read again


def test_starting_job_ends_a_prefetch_copy_without_a_bandwidth_limit(
    site: Site, service: None
) -> None:
    site.configure(**keys(None), bandwidth="256K")
    site.cluster.run(
        ["touch", "-d", "1 hour ago", "/run/forestage/called.prolog"], user="root", node=NODE
    )
    queue = Queue(site)
    path = queue.old("ends", mib=64)
    waits = queue.submit(f"stage={path}", "--begin=now+10minutes")
    queue.tell()
    ahead = site.cluster.popen([CLI, "prefetch", "--node", NODE], user="root", node=NODE)
    wait_until(lambda: list(site.cache(NODE).parts.glob("*/map")) != [], 60, lambda: "no copy")
    site.srun(None, node=NODE)
    ahead.communicate(timeout=60)
    site.await_stagers()
    assert site.cached_paths(NODE) == []
    site.cluster.run(["scancel", str(waits)], user="root")
    site.cluster.run(["rm", "-rf", f"{CACHE}/parts"], user="root", node=NODE)


def test_prefetch_without_a_host_exits_3_and_writes_no_list(site: Site) -> None:
    known = site.cluster.host_path("/run/forestage/expected.json", NODE)
    known.unlink(missing_ok=True)
    ran = site.cluster.run([CLI, "prefetch"], user="root", node=NODE, check=False)
    assert ran.returncode == 3
    assert "nobody reads the queue" in ran.stderr
    assert not known.exists()
