"""What hooks log, tell the companion, write to events and import; and what commands say of that.

A scene is what happens on a node with one feature in use. Its golden files are in `said` and
`imports`; tests/README.md, "Golden files", has the rule for the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "features/registry/registry"))

import recorded
from imports import ALICE as IMPORTER
from imports import IMAGE, Site

import helper
import jobdir
import node as nodes
import peering
from forestage.cache.node import Node as CacheNode
from forestage.clock import Clock
from forestage.commands.command_context import CommandContext
from forestage.commands.main import main
from forestage.config import load_config
from forestage.features.data import job_disk, squashfs_server
from forestage.features.prefetch import prefetch_node
from forestage.features.prefetch.expected_list import LIST_LASTS, ExpectedImageList
from forestage.features.prefetch.policy import ExpectedStarts
from forestage.features.registry import step_files
from forestage.hooks.boundary import IMAGE_OPTION
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import loop
from forestage.system.as_user import User
from goldens import as_text, compare, compare_imports, must_be_as_kept, normalise
from node import ALICE, Node, children_left, content, until

MANAGER = """exec 3>&1
setpriv --reuid={0} --regid={0} --clear-groups sh -c 'echo $$ >&3; exec sleep 600' & read end"""
OF_STEPS = (squashfs_server.PROCESS_NAME, step_files.PROCESS_NAME)
LINGERS = (*OF_STEPS, job_disk.PROCESS_NAME)
NOW = time.time() - 2000
OLD = 3600  # seconds: what was written to lately is not copied ahead


class Scene:
    """A node, its hooks, and what came of them, in sections."""

    def __init__(self, node: Node, folder: Path, user: User = ALICE) -> None:
        self.node, self.folder, self.user = node, folder, user
        self.hooks: dict[str, recorded.Ran] = {}
        self.printed: dict[str, list[str]] = {}
        self.others: set[int] = set()  # processes that are not the hooks'
        self.hidden: list[Path] = []

    def load_companion(self) -> None:
        """As Slurm does it, by its configuration."""
        conf = self.node.places.root / "plugstack.conf"
        conf.write_text(
            "optional /usr/lib/forestage/spank/forestage.so\n"
            "required /usr/lib/slurm/spank_pyxis.so importer=/usr/bin/forestage-importer\n"
        )
        self.node.places.loaded.touch()

    def prolog(self, what: str, job: int, **asked: object) -> None:
        self.hook(what, "prolog", self.node.environ(job, user=self.user, **asked))  # type: ignore[arg-type]

    def epilog(self, what: str, job: int) -> None:
        self.hook(what, "epilog", self.node.environ(job, user=self.user))

    def step(
        self, what: str, job: int, image: str | Path = "", manager: int = 0, **variables: str
    ) -> recorded.Ran:
        environ = helper.environ(self.node, job, image, self.user)
        environ["SLURM_CONF"] = self.node.environ(job)["SLURM_CONF"]
        if not image:
            del environ[IMAGE_OPTION]
        if manager:
            environ["FORESTAGE_MANAGER"] = str(manager)
        return self.hook(what, "step", environ, variables or {"HOME": "/home/alice"})

    def hook(
        self,
        what: str,
        name: str,
        environ: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
    ) -> recorded.Ran:
        """Runs it, and waits for all that is to end."""
        ran = recorded.run(self.node, name, environ, self.folder, variables)
        self.hooks[what] = ran
        until(lambda: not self.at_work(), "the hook's processes to end")
        self.printed[what] = []  # its place
        return ran

    def at_work(self) -> list[int]:
        left = children_left() - self.others
        return [pid for pid in left if nodes.comm(pid) not in LINGERS]

    def command(self, *words: str) -> None:
        """What it prints where each hook took a second, and began ten after the one before."""
        file = self.node.places.events
        before = file.read_bytes() if file.exists() else b""
        if before:
            file.write_text("".join(f"{line}\n" for line in self.events()))
        done = CliRunner().invoke(main, [*words], obj=CommandContext(self.node.places, Clock()))
        if before:
            file.write_bytes(before)
        shown = [line for line in done.output.splitlines() if not re.search("^#| 0.0$", line)]
        end = [f"exit status {done.exit_code}"] if done.exit_code else []
        heading = f"forestage {' '.join(words)}"
        while heading in self.printed:
            heading += ", again"
        self.printed[heading] = [*shown, *end]

    def events(self) -> list[str]:
        """In the order of their jobs: a stager and what began it may end in any order."""
        events = list(map(json.loads, self.node.places.events.read_text().splitlines()))
        ranks = ("prolog", "stager", "step", "epilog")
        events.sort(key=lambda event: (event["job"], ranks.index(event["hook"])))
        for number, event in enumerate(events):
            event |= {"time": NOW + 10 * number, "total": 1.0}
            for name in ("wait", "copying") & event["outcome"].keys():
                event["outcome"][name] = 0.5
        return [json.dumps(event, separators=(",", ":")) for event in events]

    def compare(self, name: str) -> None:
        """All that is recorded with the golden files of this name."""
        self.command("status", "--oneline")
        self.command("status")
        self.command("metrics", "--print")
        for what, ran in self.hooks.items():
            self.printed[what] = ran.said
        self.printed["events"] = self.events()
        text = normalise(as_text(self.printed), *self.hidden, self.node.places.root)
        imports = {what: ran.modules for what, ran in self.hooks.items()}
        must_be_as_kept(
            compare(f"said/{name}.txt", text), compare_imports(f"imports/{name}.txt", imports)
        )


@pytest.fixture
def scene(node: Node, terminal: None) -> Scene:
    folder = node.places.root.parent / "recorded"
    folder.mkdir(mode=0o755)
    node.places.run.mkdir(parents=True, mode=0o711)  # not the first hook since the boot
    return Scene(node, folder)


def named(names: Collection[str]) -> list[int]:
    return [pid for pid in children_left() if nodes.comm(pid) in names]


@contextlib.contextmanager
def manager(scene: Scene) -> Iterator[int]:
    """A step manager with a task of the user's; its pid."""
    argv = ["sh", "-c", MANAGER.format(scene.user.uid)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    task = int(process.stdout.readline())
    scene.others.add(process.pid)
    try:
        yield process.pid
    finally:
        for pid in (task, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        until(lambda: not named(OF_STEPS), "the end of all that served the step")


def test_output_of_hooks_with_redirect_bind_equals_the_golden_files(scene: Scene) -> None:
    path = scene.node.put("alice/image.sqsh")
    scene.prolog("Prolog, no image", 1)
    scene.epilog("Epilog, no image", 1)
    scene.prolog("Prolog, cold", 2, image=path)
    scene.prolog("Prolog, hit", 3, image=path)
    scene.command("explain", "3")
    scene.epilog("Epilog", 2)
    scene.epilog("Epilog, last", 3)
    scene.prolog("Prolog, declined", 4, image="/nowhere/image.sqsh")
    scene.epilog("Epilog, no lease", 4)
    scene.command("explain", "2")
    scene.command("explain", "4")
    scene.compare("bind")


def test_output_of_hooks_with_redirect_spank_equals_the_golden_files(scene: Scene) -> None:
    scene.node.configure(redirect="spank")
    scene.load_companion()
    path, other = (scene.node.put(f"alice/{name}.sqsh", content(n)) for n, name in enumerate("ab"))
    scene.prolog("Prolog, no image", 1)
    scene.epilog("Epilog, no image", 1)
    scene.step("step, no image", 1)
    scene.prolog("Prolog, first of the node", 2, image=path)
    scene.step("step, hit", 2, path)
    scene.command("explain", "2")
    scene.epilog("Epilog", 2)
    scene.prolog("Prolog, hit", 3, image=path)
    scene.epilog("Epilog, no step", 3)
    scene.prolog("Prolog, cold", 4, image=other)
    scene.epilog("Epilog, cold", 4)
    scene.node.cache.evict_entry(scene.node.identity(other).key)
    scene.step("step, cold", 5, other)
    scene.epilog("Epilog, step alone", 5)
    scene.prolog("Prolog, image of the comment", 6, comment=f"stage={path}")
    scene.step("step, image of the comment", 6)
    scene.epilog("Epilog, image of the comment", 6)
    for job in (4, 5, 6):
        scene.command("explain", str(job))
    scene.compare("spank")


def test_output_of_hooks_with_a_data_directory_equals_the_golden_files(scene: Scene) -> None:
    scene.node.configure(redirect="spank")
    scene.load_companion()
    for name in ("a", "b/c"):
        scene.node.put(f"alice/set/{name}", name.encode() * 1000)
    try:
        scene.prolog("Prolog", 7, comment=f"stage={scene.node.shared}/alice/set/")
        scene.command("explain", "7")
        scene.step("step", 7)
        scene.command("explain", "7")
        scene.epilog("Epilog", 7)
        scene.prolog("Prolog, hit", 8, comment=f"stage={scene.node.shared}/alice/set/")
        scene.epilog("Epilog, hit", 8)
        scene.compare("data-directory")
    finally:
        for one in loop.list_attached_devices():
            if one.is_on_file_system(scene.node.nvme.stat()):
                loop.detach_device(one)


def test_output_of_hooks_with_a_data_squashfs_equals_the_golden_files(
    scene: Scene, tmp_path: Path
) -> None:
    scene.node.configure(redirect="spank")
    scene.load_companion()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("data\n")
    argv = ["mksquashfs", tmp_path / "tree", tmp_path / "made", "-quiet", "-no-progress"]
    subprocess.run(argv, check=True)
    path = scene.node.put("alice/env.sqsh", (tmp_path / "made").read_bytes())
    point = scene.node.shared / "alice/point"
    point.mkdir()
    os.chown(point, ALICE.uid, ALICE.gid)
    with manager(scene) as pid:
        scene.prolog("Prolog", 7, comment=f"stage={path}@{point}")
        scene.step("step", 7, manager=pid)
        scene.command("explain", "7")
    scene.epilog("Epilog", 7)
    scene.compare("data-squashfs")


def test_output_of_hooks_with_a_job_directory_equals_the_golden_files(
    scene: Scene, tmp_path: Path
) -> None:
    with jobdir.made(scene.node, tmp_path / "disk"), manager(scene) as pid:
        scene.load_companion()
        scene.prolog("Prolog", 7, comment="stage-dir=64M")
        scene.command("explain", "7")
        scene.step("step", 7, manager=pid)
        scene.command("explain", "7")
        scene.epilog("Epilog", 7)
        scene.compare("job-dir")


def test_output_of_hooks_with_an_image_from_a_peer_equals_the_golden_files(
    scene: Scene, tmp_path: Path
) -> None:
    peer = peering.Node(tmp_path / "n2", "n2")
    peers = {
        "enabled": True,
        "port": peer.port,
        "key_file": str(peer.places.etc / "peer.key"),
    }
    scene.node.configure(redirect="spank", peers=peers)
    scene.load_companion()
    path = scene.node.put("alice/image.sqsh", peering.data())
    peering.give(peer, scene.node, path, peering.data())
    both = {"SLURM_JOB_NODELIST": "n[1-2]"}
    peering.find_at({"n1": f"127.0.0.1:{peering.free_port()}", "n2": f"127.0.0.1:{peer.port}"})
    with peer.serving():
        assert peer.process is not None
        scene.others.add(peer.process.pid)
        scene.prolog("Prolog, no image", 1)
        scene.epilog("Epilog, no image", 1)
        environ = scene.node.environ(7, path)
        scene.hook("Prolog, cold", "prolog", environ | both)
        scene.step("step, hit", 7, path)
        scene.command("explain", "7")
        scene.epilog("Epilog", 7)
        scene.hook("Prolog, hit", "prolog", scene.node.environ(8, path) | both)
        scene.epilog("Epilog, hit", 8)
    scene.compare("peers")


def test_output_of_hooks_with_a_prefetched_image_equals_the_golden_files(scene: Scene) -> None:
    scene.node.configure(redirect="spank", prefetch={"host": "ctl1"})
    scene.load_companion()
    path, late = (scene.node.put(f"alice/{name}.sqsh", content(n)) for n, name in enumerate("ab"))
    now = time.time()
    for one in (path, late):
        os.utime(scene.node.server / one.relative_to(scene.node.shared), (now - OLD, now - OLD))
    rows = tuple(ExpectedStarts("gpu", str(one), ALICE.uid, 1.0) for one in (path, late))
    told = ExpectedImageList(1, now, now + LIST_LASTS, {"gpu": "n[1-2]"}, rows[:1])
    config = load_config(scene.node.places.etc).node_config
    own = CacheNode.from_config(config, scene.node.places, Clock())
    prefetch_node.run_node_pass(
        own, SlurmClient("", proc=scene.node.places.root / "proc", node="n1"), told_by(told), False
    )
    until(lambda: not scene.at_work(), "the copy")
    scene.command("ls")
    scene.prolog("Prolog, no image", 1)
    scene.epilog("Epilog, no image", 1)
    scene.prolog("Prolog, hit", 7, image=path)
    scene.step("step, hit", 7, path)
    scene.command("explain", "7")
    scene.epilog("Epilog", 7)
    scene.prolog("Prolog, cold", 8, image=late)
    scene.epilog("Epilog, cold", 8)
    scene.compare("prefetch")


def told_by(listed: ExpectedImageList) -> Callable[[], ExpectedImageList]:
    return lambda: listed


@pytest.fixture
def site(private_mounts: None, open_path: Path) -> Site:
    """A store, a user and an enroot; before the node, which covers where its layers are."""
    return Site(open_path)


def test_output_of_hooks_with_a_registry_image_equals_the_golden_files(
    site: Site, scene: Scene
) -> None:
    scene.user = IMPORTER
    scene.hidden.append(site.store.parent)
    scene.node.configure(redirect="spank", registry={"store": str(site.store)})
    scene.load_companion()
    variables = {
        "HOME": str(site.home / str(IMPORTER.uid)),
        "STANDIN_LOG": str(site.log),
        "STANDIN_IMAGE": str(site.image),
    }
    scene.prolog("Prolog, no image", 1)
    scene.epilog("Epilog, no image", 1)
    for job, what in ((7, "imported"), (8, "hit")):
        scene.prolog(f"Prolog, {what}", job, image=IMAGE)
        with manager(scene) as pid:
            ran = scene.step(f"step, {what}", job, IMAGE, pid, **variables)
            later = ran.out.read_text().split("\t")[-1].strip()
            scene.printed[f"task, {what}"] = heard(later)
            until(lambda job=job: scene.node.outcomes("step", job), "the event")  # type: ignore[misc]
            scene.command("explain", str(job))
        scene.epilog(f"Epilog, {what}", job)
    scene.compare("registry")


def heard(name: str) -> list[str]:
    """What a task is told that waits there."""
    lines = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as task:
        task.settimeout(nodes.HANGS)
        task.connect(name)
        while not lines or lines[-1].split("\t")[0] not in ("use", "leave"):
            lines.append(task.recv(65536).decode())
            assert lines[-1], lines
    return lines
