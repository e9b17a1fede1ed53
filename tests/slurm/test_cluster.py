"""The cluster itself: what the other tests rest on, each named by what would mislead them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, ClusterError, state_path
from host import Leader, file_identity, loop_files, wait_until
from images import make_image, sha256
from spec import ALICE, ClusterSpec

HOOK = "#!/bin/sh\nexec >/var/log/forestage/$1.$SLURM_JOB_ID\ntr '\\0' '\\n' </proc/self/environ\n"
TRIVIAL = ClusterSpec(
    nodes=4,
    nvme_mib=64,
    prolog="/etc/prolog",
    epilog="/etc/epilog",
    files={
        "/etc/prolog": HOOK.replace("$1", "prolog"),
        "/etc/epilog": HOOK.replace("$1", "epilog"),
    },
)
OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_image"
IMAGE = "/shared/alice/image.sqsh"


@pytest.fixture
def name() -> str:
    """Of a cluster. No PID: each ./test has its own, and all of them have the same /tmp."""
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def trivial(machine: None) -> Iterator[Cluster]:
    """A cluster whose Prolog and Epilog only note their environment."""
    with Cluster.up(TRIVIAL) as cluster:
        make_image(cluster, IMAGE, mib=2, name="image")
        yield cluster


@pytest.mark.parametrize(
    ("option", "env"),
    [([f"--container-image={IMAGE}"], {}), ([], {"PYXIS_CONTAINER_IMAGE": IMAGE})],
    ids=["option", "environment"],
)
def test_pyxis_stand_in_reports_the_image_and_runs_the_task_in_the_image(
    trivial: Cluster, option: list[str], env: dict[str, str]
) -> None:
    output = trivial.run(["srun", *option, "cat", "/etc/os-release"], env=env).stdout
    source = trivial.host_path(IMAGE)
    report = trivial.pyxis_reports()[-1]
    assert report["path"] == IMAGE
    assert report["sha256"] == sha256(source)
    assert (report["ino"], report["size"]) == (source.stat().st_ino, source.stat().st_size)
    assert (report["uid"], report["error"]) == (ALICE.uid, None)
    assert report["mount_point"] == "/shared"
    assert output == 'NAME="image"\nID=image\n', "not run in the image"


def test_cluster_nodes_have_private_disks_and_mounts_and_one_shared_file_system(
    trivial: Cluster,
) -> None:
    for path in ("/mnt/nvme/mine", "/run/forestage/mine"):
        trivial.write(path, "n1", node="n1")
        assert not trivial.host_path(path, "n2").exists()
    for node in trivial.nodes:
        points = [line.split()[4] for line in trivial.mounts(node).splitlines()]
        assert {"/shared", "/mnt/nvme", "/run"} <= set(points)
    trivial.run(["mount", "--bind", "/etc/hostname", IMAGE], user="root", node="n1")
    seen = {node: IMAGE in trivial.mounts(node) for node in ("n1", "n2", None)}
    trivial.run(["umount", IMAGE], user="root", node="n1")
    assert seen == {"n1": True, "n2": False, None: False}


def test_missing_image_fails_the_step_and_not_the_node(trivial: Cluster) -> None:
    step = trivial.run(["srun", "--container-image=/shared/no.sqsh", "cat"], check=False)
    assert step.returncode != 0
    assert "could not open /shared/no.sqsh: No such file" in step.stderr
    assert trivial.pyxis_reports()[-1]["error"] == "No such file or directory"
    trivial.wait_idle()


def test_image_option_is_in_the_prologs_environment_but_not_in_the_epilogs(
    trivial: Cluster,
) -> None:
    job = trivial.run(
        ["srun", f"--container-image={IMAGE}", "-w", "n3", "sh", "-c", "echo $SLURM_JOB_ID"]
    )
    trivial.wait_idle()
    prolog = trivial.read(f"/var/log/forestage/prolog.{job.stdout.strip()}", "n3")
    epilog = trivial.read(f"/var/log/forestage/epilog.{job.stdout.strip()}", "n3")
    assert f"{OPTION}={IMAGE}" in prolog.splitlines()
    assert OPTION not in epilog


def test_node_reboot_keeps_the_disk_but_neither_run_nor_processes(trivial: Cluster) -> None:
    trivial.write("/mnt/nvme/kept", "kept", node="n4")
    trivial.write("/run/forestage/lost", "lost", node="n4")
    stray = trivial.popen(["sleep", "60"], node="n4")
    trivial.node_reboot("n4")
    assert stray.wait(240) != 0
    assert trivial.read("/mnt/nvme/kept", "n4") == "kept"
    assert not trivial.host_path("/run/forestage/lost", "n4").exists()
    assert trivial.run(["srun", "-w", "n4", "hostname"]).stdout == "n4\n"
    trivial.wait_idle()


def net_namespace(cluster: Cluster) -> str:
    """The login's, which all nodes are in as well."""
    return os.readlink(f"/proc/{Leader(cluster.state / 'init.pid').pid}/ns/net")


def processes_in(namespace: str) -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns/net") == namespace:
                found.add(int(process.name))
    return found


def await_nobody_in(namespace: str) -> None:
    """An nsenter that led there ends after those that it has led there."""
    wait_until(lambda: not processes_in(namespace), 60, lambda: f"{processes_in(namespace)} live")


def test_ended_cluster_leaves_nothing_on_the_host_and_does_not_affect_another_cluster(
    trivial: Cluster,
) -> None:
    with Cluster.up(TRIVIAL) as cluster:
        make_image(cluster, IMAGE)
        stray = "setsid -f sleep 61; exec sleep 61"
        cluster.popen(["srun", "-N2", f"--container-image={IMAGE}", "sleep", "61"])
        cluster.popen(["sh", "-c", stray], node="n1", user="root")
        wait_until(lambda: len(cluster.pyxis_reports()) == 2, 60, lambda: "no change")
        namespace = net_namespace(cluster)
        disks = {file_identity(disk) for disk in cluster.state.glob("nodes/*/nvme.img")}
        assert len(processes_in(namespace)) > 10
        assert disks <= loop_files()
    await_nobody_in(namespace)
    assert not disks & loop_files()
    assert str(cluster.state) not in Path("/proc/self/mountinfo").read_text()
    assert not cluster.state.exists()
    cluster.down()  # once more, with nothing to do
    assert trivial.run(["srun", "-N4", "true"]).returncode == 0
    trivial.wait_idle()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_cluster_ends_when_its_owner_process_is_killed(
    machine: None, name: str, end: signal.Signals
) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from cluster import Cluster, ClusterSpec; from host import exit_on_sigterm\n"
        "exit_on_sigterm(); spec = ClusterSpec(nodes=1, prolog='/bin/true', epilog='/bin/true')\n"
        "Cluster.up(spec, name=sys.argv[1])"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, name])
    init = Leader(state_path(name) / "init.pid")
    wait_until(lambda: init.alive, 60, lambda: "no cluster")
    namespace = os.readlink(f"/proc/{init.pid}/ns/net")
    owner.send_signal(end)
    owner.wait(240)
    await_nobody_in(namespace)
    assert end == signal.SIGKILL or not state_path(name).exists()
    shutil.rmtree(state_path(name), ignore_errors=True)


def test_detached_cluster_can_be_used_and_ended_by_name(machine: None, name: str) -> None:
    command = [str(Path(__file__).with_name("cluster"))]

    def call(*words: str) -> str:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        call("up", "--name", name, "--nodes=1")
        assert call("exec", "--name", name, "--node=n1", "--", "whoami") == "alice\n"
        assert "n1 idle" in call("status", "--name", name)
    finally:
        call("down", "--name", name)
    assert not state_path(name).exists()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ClusterSpec(prolog="/no/prolog"), "/no/prolog is not there"),
        (ClusterSpec(venv="/no/venv"), "forestage from /no/venv .run tests/prepare"),
    ],
    ids=["hook", "venv"],
)
def test_failed_cluster_start_raises_the_cause_and_leaves_no_state(
    machine: None, name: str, spec: ClusterSpec, why: str
) -> None:
    with pytest.raises(ClusterError, match=why):
        Cluster.up(spec, name=name)
    assert not state_path(name).exists()


def test_cluster_up_in_a_fresh_clone_runs_tests_prepare_first(
    machine: None, name: str, tmp_path: Path
) -> None:
    """Without .venv each hook fails open, and all jobs look right."""
    tests = tmp_path / "tests"
    shutil.copytree(Path(__file__).parent, tests / "slurm")
    (tests / "prepare").write_text("#!/bin/sh\necho asked\nexit 1\n")
    (tests / "prepare").chmod(0o755)
    up = [tests / "slurm/cluster", "up", "--name", name]
    done = subprocess.run(up, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "asked\n")
    assert "tests/prepare failed" in done.stderr
    assert not state_path(name).exists()
