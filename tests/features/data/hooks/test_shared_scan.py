"""A directory for the nodes of one job: the first looks at all of it, the others believe what they
can see for themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forestage.cache.job_notes import DirectoryCopyState
from forestage.cache.node import Node as Bare
from forestage.clock import Clock
from forestage.config import load_config
from forestage.features.data import data_view, manifest, shared_scan
from forestage.features.data import requests as data
from forestage.features.data.manifest import DirectoryManifest, ManifestEntry
from forestage.features.data.shared_scan import ScannedFiles, ScanNotice, SharedScan
from forestage.features.peers import activation, connection, protocol, silent_nodes
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.slurm.job import Job
from forestage.system import as_user, loop, mounts
from node import ALICE, BOB, HANGS, Later, Node, until
from peering import PATIENT, SERVE, find_at, free_port
from suites import fixtures_of

patient_with_peers = fixtures_of("features/peers/hooks")["patient_with_peers"]

HOUR = 3600.0
FILES = 300
NODES = ("n1", "n2")


class Cluster:
    """Two nodes with one shared file system; n1's peer service runs while `serving`."""

    def __init__(self, first: Node) -> None:
        other = Node(first.places.root.parent / "n2")
        other.shared, other.server = first.shared, first.server
        other.nvme.mkdir(parents=True)
        self.nodes = dict(zip(NODES, (first, other), strict=True))
        self.counts = {name: multiprocessing.Value("q") for name in NODES}
        self.ports = {name: free_port() for name in NODES}
        find_at({name: f"127.0.0.1:{port}" for name, port in self.ports.items()})
        for name, node in self.nodes.items():
            key = node.places.etc / "peer.key"
            key.parent.mkdir(parents=True, exist_ok=True)
            key.write_bytes(b"k" * 64)
            key.chmod(0o600)
            self.configure(name, True)

    def configure(self, name: str, enabled: bool | str) -> None:
        node = self.nodes[name]
        peers = {"enabled": enabled, "port": self.ports[name], "listen": "127.0.0.1"}
        key = str(node.places.etc / "peer.key")
        node.configure(redirect="spank", peers={**peers, "key_file": key})

    @contextlib.contextmanager
    def serving(self, name: str = "n1") -> Iterator[None]:
        root = str(self.nodes[name].places.root)
        argv = [sys.executable, "-Bc", PATIENT + SERVE, root, "", name]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, cwd="/") as process:
            assert process.stderr is not None
            assert b"peer serves at" in process.stderr.readline()
            try:
                yield
            finally:
                process.kill()

    def job(self, name: str, comment: str = "", **facts: str) -> Job:
        environ = self.nodes[name].environ(1, comment=comment)
        environ |= {"SLURMD_NODENAME": name, "SLURM_JOB_NODELIST": "n[1-2]", **facts}
        return Job.from_environ(environ)

    def bare(self, name: str) -> Bare:
        """As the node's hooks have it, an hour after the files' last change."""
        node = self.nodes[name]
        config = load_config(node.places.etc).for_partition("batch")
        return Bare(config, node.places, node.cache, node.leases, Later(HOUR))

    def start(self, name: str, path: Path, **facts: str) -> DirectoryCopyState:
        """The job's start on a node, until its process has ended."""
        bare = self.bare(name)
        limit = HookDeadlines.from_seconds(Clock(), 600.0, None)
        with self.counting(name):
            (begun,) = data.start_job_data(
                bare, self.job(name, f"stage={path}/", **facts), limit, None
            )
        assert (begun.result, begun.reason) == ("started", "")

        def ended() -> DirectoryCopyState | None:
            one = data_view.read_job_data(bare.leases, 1).trees[f"{path}/"]
            return one if one.state in ("ready", "declined") else None

        found = until(ended, f"the directory on {name}")
        assert found is not None
        return msgspec.structs.replace(found, seconds=0.0)  # as long as it takes on this node

    def start_everywhere(self, path: Path) -> None:
        """The job's start on each node; what its scans counted does not count for a step."""
        for name in NODES:
            self.start(name, path)
            self.looked(name)

    def step(self, name: str, number: int = 0, **facts: str) -> data.StepPart:
        limit = HookDeadlines.from_seconds(Clock(), 600.0, None)
        facts = {"SLURM_STEP_ID": str(number), "SLURM_STEP_NODELIST": "n[1-2]", **facts}
        with self.counting(name):
            return data.show_job_data(self.bare(name), self.job(name, **facts), limit, None)

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Counts the looks of all that is begun in here, processes that live longer too."""
        real = manifest._inspect_name
        with pytest.MonkeyPatch.context() as patch:

            def look(fd: int, path: bytes, *rest: object) -> ManifestEntry:
                with self.counts[name].get_lock():
                    self.counts[name].value += 1
                return real(fd, path, *rest)  # type: ignore[arg-type]

            patch.setattr(manifest, "_inspect_name", look)
            yield

    def looked(self, name: str) -> int:
        """The looks at files since the last question."""
        count, self.counts[name].value = self.counts[name].value, 0
        return int(count)


@pytest.fixture
def cluster(node: Node, quick: None) -> Iterator[Cluster]:
    made = Cluster(node)
    yield made
    for one in loop.list_attached_devices():
        if any(one.is_on_file_system(each.nvme.stat()) for each in made.nodes.values()):
            loop.detach_device(one)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has nothing to wait for in a test does not wait."""
    monkeypatch.setattr(shared_scan, "START_BEGIN_TIMEOUT", 0.05)
    monkeypatch.setattr(shared_scan, "STEP_BEGIN_TIMEOUT", 0.05)
    # Beside a load a service that runs may take longer than a step would wait.
    monkeypatch.setattr(shared_scan, "CONNECT_TIMEOUT", 60.0)


@pytest.fixture
def path(cluster: Cluster) -> Path:
    for number in range(FILES):
        cluster.nodes["n1"].put(f"alice/set/{number % 7}/{number}", os.urandom(number))
    return cluster.nodes["n1"].shared / "alice/set"


ALL = FILES + 7  # and the folders


def test_first_node_of_a_job_scans_the_whole_directory_and_the_other_a_sample(
    cluster: Cluster, path: Path
) -> None:
    with cluster.serving():
        first = cluster.start("n1", path)
        assert cluster.looked("n1") >= ALL
        assert cluster.start("n2", path) == first
        assert first.state == "ready"
        # What it believed, its own share of reading, and what is there once that is over.
        assert cluster.looked("n2") <= 2 * manifest.SAMPLE + FILES
        shown = [cluster.step(name) for name in NODES]
    assert [one.outcomes[0].result for one in shown] == ["hit", "hit"]
    assert cluster.looked("n1") == ALL
    assert cluster.looked("n2") == manifest.SAMPLE


@pytest.mark.parametrize("has_service", [False, True])
def test_node_without_a_peer_service_scans_the_directory_itself_by_default(
    cluster: Cluster, path: Path, has_service: bool
) -> None:
    cluster.configure("n2", "auto")
    sign = activation.hold_sign(cluster.nodes["n2"].places)
    with cluster.serving(), sign if has_service else contextlib.nullcontext():
        assert cluster.start("n1", path) == cluster.start("n2", path)
        cluster.step("n1")
        cluster.looked("n2")
        assert cluster.step("n2").outcomes[0].result == "hit"
    assert cluster.looked("n2") == (manifest.SAMPLE if has_service else ALL)


def test_later_job_scans_all_on_the_first_node_and_a_sample_on_the_other(
    cluster: Cluster, path: Path
) -> None:
    with cluster.serving():
        cluster.start_everywhere(path)
        again = {name: cluster.start(name, path) for name in NODES}
    assert again["n1"] == again["n2"]
    assert (cluster.looked("n1"), cluster.looked("n2")) == (ALL, manifest.SAMPLE)


def test_nodes_that_share_a_scan_make_identical_copies_with_acls_and_links(
    cluster: Cluster, path: Path
) -> None:
    server = cluster.nodes["n1"].server / "alice/set"
    subprocess.run(["setfacl", "-m", f"u:{BOB.uid}:r", server / "1/1"], check=True)
    (server / "link").symlink_to("1/1")
    os.chown(server, ALICE.uid, ALICE.gid)
    with cluster.serving():
        keys = {cluster.start(name, path).key for name in NODES}
    (key,) = keys
    copies = [cluster.nodes[name].cache.image_path(key).read_bytes() for name in NODES]
    assert copies[0] == copies[1]


def test_nodes_that_share_a_scan_copy_hard_links_identically(cluster: Cluster, path: Path) -> None:
    server = cluster.nodes["n1"].server / "alice/set"
    for name in ("0/link", "3/link", "6/link"):
        (server / name).hardlink_to(server / "5/96")
    with cluster.serving():
        first = cluster.start("n1", path)
        cluster.looked("n2")
        assert cluster.start("n2", path) == first
        assert cluster.looked("n2") < 2 * ALL, "it looked itself"
        for name in NODES:
            assert cluster.step(name).outcomes[0].result == "hit"
    copies = [cluster.nodes[name].cache.image_path(first.key).read_bytes() for name in NODES]
    assert copies[0] == copies[1]


@pytest.mark.parametrize("when", ["start", "step"])
def test_node_scans_the_directory_itself_if_the_first_node_publishes_no_scan(
    cluster: Cluster, path: Path, when: str
) -> None:
    if when == "start":
        assert cluster.start("n1", path) == cluster.start("n2", path)
        assert cluster.looked("n2") >= ALL
        return
    with cluster.serving():
        cluster.start_everywhere(path)
        # The first node's step has not begun to look.
        assert cluster.step("n2").outcomes[0].result == "hit"
    assert cluster.looked("n2") == ALL
    cluster.step("n1")
    cluster.looked("n2")
    assert cluster.step("n2").outcomes[0].result == "hit"  # and nobody serves any more
    assert cluster.looked("n2") == ALL


def test_step_scans_the_directory_itself_if_the_first_nodes_service_hangs(
    cluster: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.serving():
        cluster.start_everywhere(path)
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT", 3600.0)
    monkeypatch.setattr(connection, "SILENCE_TIMEOUT", 3600.0)
    monkeypatch.setattr(shared_scan, "CONNECT_TIMEOUT", 0.2)

    def ask(*about: object) -> None:
        raise AssertionError("the step waits for a service that did not answer")

    monkeypatch.setattr(shared_scan, "_wait_for_notice", ask)
    with socket.create_server(("127.0.0.1", cluster.ports["n1"])):  # which accepts no connection
        assert cluster.step("n2").outcomes[0].result == "hit"
    assert cluster.looked("n2") == ALL


def test_step_scans_without_user_lookups_while_the_name_service_hangs(
    cluster: Cluster, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is left there may hold a lock of it when the look is forked, for ever there."""
    with cluster.serving():
        cluster.start_everywhere(path)
    hangs, ends, asked = threading.Event(), threading.Event(), tmp_path / "asked"

    def hang(*_: object, **__: object) -> list[object]:
        hangs.set()
        ends.wait(HANGS)
        return []

    def note(*about: object) -> object:
        asked.write_text(repr(about))
        raise KeyError

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    for module, function in ((os, "getgrouplist"), (pwd, "getpwuid"), (pwd, "getpwnam")):
        monkeypatch.setattr(module, function, note)
    monkeypatch.setattr(shared_scan, "CONNECT_TIMEOUT", 0.2)
    try:
        of_slurm = {"FORESTAGE_GROUPS": str(ALICE.gid), "FORESTAGE_HOME": "/home/alice"}
        assert cluster.step("n2", **of_slurm).outcomes[0].result == "hit"
        assert hangs.is_set()
    finally:
        ends.set()
    assert (cluster.looked("n2"), asked.exists()) == (ALL, False)


def test_step_does_not_query_a_first_node_that_was_silent_recently(
    cluster: Cluster, path: Path
) -> None:
    other = cluster.nodes["n2"]
    with cluster.serving():
        for name in NODES:
            cluster.start(name, path)
        cluster.step("n1")
        cluster.looked("n2")
        silent_nodes.record_silence(other.places, "n1", Later(HOUR).monotonic())
        cluster.step("n2")
        assert cluster.looked("n2") == ALL
        silent_nodes.delete_silence(other.places, "n1")
        cluster.step("n2")
        assert cluster.looked("n2") < ALL


def test_step_does_not_use_the_scan_of_another_step_or_of_an_earlier_run(
    cluster: Cluster, path: Path
) -> None:
    server = cluster.nodes["n1"].server / "alice/set"
    with cluster.serving():
        for name in NODES:
            cluster.start(name, path)
        cluster.step("n1", 0)
        (server / "1/1").write_bytes(b"another")
        shown = cluster.step("n2", 1)
        assert (shown.lines, shown.outcomes[0].reason) == ([], "changed")
        # The job is requeued on both nodes, and its step has the number that it had.
        for name in NODES:
            cluster.nodes[name].leases.drop_lease(1)
            cluster.start(name, path, SLURM_RESTART_COUNT="1")
            cluster.looked(name)
        (server / "1/1").write_bytes(b"once more")
        shown = cluster.step("n2", 0)
    assert (shown.lines, shown.outcomes[0].reason) == ([], "changed")


def test_change_found_by_the_first_node_declines_the_other_nodes_step_without_a_scan(
    cluster: Cluster, path: Path
) -> None:
    with cluster.serving():
        cluster.start_everywhere(path)
        (cluster.nodes["n1"].server / "alice/set/1/1").write_bytes(b"another")
        shown = [cluster.step(name).outcomes[0].reason for name in NODES]
    assert shown == ["changed", "changed"]
    assert cluster.looked("n2") == 0


def test_step_scans_the_directory_itself_at_once_if_the_first_node_lost_its_copy(
    cluster: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_scan, "STEP_BEGIN_TIMEOUT", 600.0)
    with cluster.serving():
        first = cluster.start("n1", path)
        cluster.start("n2", path)
        cluster.looked("n2")
        cluster.nodes["n1"].cache.evict_entry(first.key)
        assert cluster.step("n1").lines == []
        assert cluster.step("n2").outcomes[0].result == "hit"
    assert cluster.looked("n2") == ALL


def test_step_without_the_jobs_first_node_scans_on_the_first_node_of_its_own_list(
    cluster: Cluster, path: Path
) -> None:
    with cluster.serving():
        cluster.start_everywhere(path)
        shown = cluster.step("n2", SLURM_STEP_NODELIST="n2")
    assert shown.outcomes[0].result == "hit"
    assert cluster.looked("n2") == ALL


def test_step_node_list_with_nodes_outside_the_job_is_reduced_to_the_jobs_nodes(
    cluster: Cluster,
) -> None:
    """It is a user's word."""
    bare, job = cluster.bare("n2"), cluster.job("n2", SLURM_STEP_ID="0")
    job = msgspec.structs.replace(job, step_nodelist="evil,n[1-2]")
    found = shared_scan.find_shared_scan(bare, job, 0, "/a/", 0)
    assert found is not None
    assert (found.first, found.is_leader) == ("n1", False)
    job = msgspec.structs.replace(job, step_nodelist="evil,n2")
    assert shared_scan.find_shared_scan(bare, job, 0, "/a/", 0) is None


# --- what the other node sees for itself


class Told:
    """What a first node told, and what this one has at hand to judge it."""

    def __init__(self, path: Path) -> None:
        os.setgroups(as_user.list_group_ids(ALICE))
        self.root, self.path = manifest.open_root(str(path), ALICE)
        seen = manifest.scan_directory(self.root, self.path, ALICE, 10**4)
        self.found = ScannedFiles(seen, manifest.read_acls(self.root, seen, ALICE))
        self.look = shared_scan.make_notice(self.root, seen, ALICE, 0.0)

    def holds(self, **facts: object) -> bool:
        look = msgspec.structs.replace(self.look, **facts)
        return shared_scan.is_scan_valid_here(look, self.found, self.root, self.path, ALICE)


@pytest.fixture
def received_scan(path: Path) -> Iterator[Told]:
    groups = os.getgroups()
    made = Told(path)
    yield made
    os.close(made.root)
    os.setgroups(groups)


def test_scan_from_the_first_node_is_accepted_if_files_and_rights_are_equal_here(
    received_scan: Told,
) -> None:
    assert received_scan.holds()


@pytest.mark.parametrize(
    "facts",
    [
        {"place": "nfs other:/export /"},
        {"place": ""},
        {"groups": (1, 2, 3)},
        {"path": "/elsewhere"},
    ],
)
def test_scan_of_another_file_system_path_or_group_list_is_rejected(
    received_scan: Told, facts: dict[str, object]
) -> None:
    assert not received_scan.holds(**facts)


def test_local_disk_file_system_has_no_cluster_wide_name(
    tmp_path: Path, received_scan: Told, node: Node
) -> None:
    """Nodes made of one image of a disk have files with the same numbers and times."""
    image = node.nvme / "disk"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    device = loop.attach_file(image, read_only=False)
    mounts.mount(device, str(tmp_path), 0, "ext4")
    root = os.open(tmp_path, os.O_RDONLY)
    assert mounts.find_cluster_wide_name(root) == ""
    assert mounts.find_cluster_wide_name(received_scan.root).startswith("tmpfs tmpfs /")
    os.close(root)
    mounts.umount(str(tmp_path))


@pytest.mark.parametrize("what", ["top", "files", "rights", "acls"])
def test_scan_is_rejected_if_the_files_rights_or_acls_differ_on_this_node(
    received_scan: Told, path: Path, what: str
) -> None:
    if what == "top":
        path.chmod(0o711)
    elif what == "acls":
        acls = {one.path: b"\2\0\0\0" for one in received_scan.found.manifest.files}
        received_scan.found = msgspec.structs.replace(received_scan.found, acls=acls)
    else:
        for file in path.glob("*/*"):
            file.write_bytes(b"x") if what == "files" else os.chown(file, BOB.uid, BOB.gid)
    assert not received_scan.holds()


def test_scan_with_files_unreadable_for_the_user_on_this_node_is_declined(
    received_scan: Told, path: Path
) -> None:
    for file in path.glob("*/*"):
        os.chown(file, BOB.uid, BOB.gid)
        file.chmod(0o600)
    seen = received_scan.found.manifest
    there = {os.fsencode(f.relative_to(path)): f.stat() for f in path.glob("*/*")}
    files = tuple(
        msgspec.structs.replace(
            one,
            mode=there[one.path].st_mode,
            uid=BOB.uid,
            gid=BOB.gid,
            ctime_ns=there[one.path].st_ctime_ns,
        )
        if one.path in there
        else one
        for one in seen.files
    )
    received_scan.found = ScannedFiles(DirectoryManifest(seen.path, files), {})
    with pytest.raises(manifest.Declined, match="not readable"):
        received_scan.holds()


def test_scan_older_or_newer_than_the_allowed_clock_skew_is_not_fresh(received_scan: Told) -> None:
    assert shared_scan.is_fresh(received_scan.look, shared_scan.SKEW)
    assert not shared_scan.is_fresh(received_scan.look, shared_scan.SKEW + 1)
    assert not shared_scan.is_fresh(received_scan.look, -shared_scan.SKEW - 1)


@pytest.mark.parametrize("lie", ["size", "digest", "unsound", "garbage"])
def test_node_scans_the_directory_itself_if_the_first_nodes_scan_is_false_or_corrupt(
    cluster: Cluster, path: Path, lie: str, received_scan: Told
) -> None:
    """Bytes never come from a look; but root makes of it what the kernel parses."""
    one = SharedScan(cluster.nodes["n1"].cache, 1, told_name(cluster, path), "n1", is_leader=True)
    one.cache.prepare(require_mount=False)
    shared_scan.make_scan_directory(one.cache, 1)
    files = list(received_scan.found.manifest.files)
    if lie == "size":
        files = [msgspec.structs.replace(f, size=10**6) if f.is_file else f for f in files]
    elif lie == "unsound":
        files.append(msgspec.structs.replace(files[-1], path=b"../../etc/passwd"))
    seen = DirectoryManifest(received_scan.path, tuple(files))
    one.save_files(ScannedFiles(seen, {}))
    if lie == "garbage":
        (one.cache.looks / "1" / f"{one.name}.files").write_bytes(b"\xc1" * 1000)
    digest = "0" * 64 if lie == "digest" else seen.digest
    one.publish_notice(msgspec.structs.replace(received_scan.look, digest=digest))
    with cluster.serving():
        found = cluster.start("n2", path)
    assert (found.state, found.key) == ("ready", received_scan.found.manifest.digest[:32])
    # It has looked at all of it twice, as who has no peers does.
    assert cluster.looked("n2") >= 2 * ALL


def told_name(cluster: Cluster, path: Path) -> str:
    found = shared_scan.find_shared_scan(cluster.bare("n2"), cluster.job("n2"), 0, f"{path}/", None)
    assert found is not None
    return found.name


def test_each_node_scans_a_directory_that_has_just_changed(
    cluster: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further change might not show in its times."""
    monkeypatch.setattr(Later, "wall", Clock.wall)
    with cluster.serving():
        assert cluster.start("n1", path) == cluster.start("n2", path)
    assert cluster.looked("n2") >= 2 * ALL  # also once it was copied


def test_file_that_changes_after_it_was_copied_makes_no_entry(cluster: Cluster, path: Path) -> None:
    file = cluster.nodes["n1"].server / "alice/set/6/6"
    with cluster.serving():
        first = cluster.start("n1", path)
        cluster.nodes["n1"].cache.evict_entry(first.key)  # its bytes are n2's own to read
        real = manifest.sample_files
        calls: list[int] = []

        def sample(found: DirectoryManifest) -> list[ManifestEntry]:
            calls.append(1)
            if len(calls) == 2:
                file.write_bytes(b"changed")
                return [found.files[0]]
            return real(found)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifest, "sample_files", sample)
            found = cluster.start("n2", path)
    assert (found.state, found.reason) == ("declined", "changed")
    assert cluster.nodes["n2"].entries() == set()


def test_epilog_and_sweep_remove_the_scans_of_ended_jobs(cluster: Cluster, path: Path) -> None:
    cluster.start("n1", path)
    node = cluster.nodes["n1"]
    assert len(list((node.cache.looks / "1").iterdir())) == 2
    shared_scan.delete_stale_scans(node.cache, node.leases)
    assert (node.cache.looks / "1").is_dir()
    assert node.epilog(1).said == ("released", "")
    assert list(node.cache.looks.iterdir()) == []
    shared_scan.make_scan_directory(node.cache, 2)
    shared_scan.delete_stale_scans(node.cache, node.leases)
    assert list(node.cache.looks.iterdir()) == []


def test_scan_notice_of_an_ended_job_is_not_stored(cluster: Cluster) -> None:
    one = SharedScan(cluster.nodes["n1"].cache, 1, "0" * 32, "n1", is_leader=True)
    one.publish_notice(ScanNotice("looked"))  # the job is over: its directory has gone
    assert one.find_files() is None
    assert not one.cache.looks.exists()
