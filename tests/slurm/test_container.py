"""slurmd in a container: a hit, reading through, slurmd restarted, the container killed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import images
import pytest
from cluster import Cluster
from container import CACHE, Container, Store, layered
from host import wait_until
from spec import ClusterSpec

from forestage.system import loop
from forestage.system.loop import LoopDevice

pytestmark = pytest.mark.long
PLUGSTACK = "include /usr/lib/forestage/spank/plugstack-22.05*.conf"
HEALTH = "/usr/lib/forestage/bin/forestage-health"


@pytest.fixture(scope="module")
def cluster_spec(machine: None) -> ClusterSpec:
    """One node, whose own slurmd makes way for that of the container."""
    return ClusterSpec(
        nodes=1,
        prolog="",
        epilog="",
        slurm_conf={
            "Prolog": "/etc/slurm/prolog.d/*",
            "Epilog": "/etc/slurm/epilog.d/*",
            "HealthCheckProgram": HEALTH,
            "HealthCheckInterval": "2",
            "SlurmdTimeout": "30",
        },
        plugstack=(PLUGSTACK, "required {state}/pyxis.so container=no"),
    )


@pytest.fixture(scope="module")
def store(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with layered(tmp_path_factory.mktemp("store"), built) as store:
        yield store


@pytest.fixture(scope="module")
def site_cluster(cluster_spec: ClusterSpec) -> Iterator[Cluster]:
    with Cluster.up(cluster_spec) as cluster:
        cluster.node_kill("n1")
        yield cluster


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(params=[True, False], ids=["privileged", "least"])
def container(
    store: Store, site_cluster: Cluster, volumes: Path, request: pytest.FixtureRequest
) -> Iterator[Container]:
    with Container(store, site_cluster, volumes, privileged=request.param) as container:
        container.configure()
        yield container
        await_idle(container)
        assert container.leases() == []


def await_idle(container: Container) -> None:
    ask = ["sh", "-c", "squeue --noheader; sinfo --noheader --format=%T"]

    def idle() -> bool:
        return container.cluster.run(ask, user="root").stdout.split() == ["idle"]

    wait_until(idle, 120, lambda: container.cluster.overview() + container.log.read_text())


def srun(container: Container, image: str, script: str) -> tuple[int, str]:
    """A job with that image; its number, and what its task has said besides."""
    command = ["srun", f"--container-image={image}", "sh", "-c", f"echo $SLURM_JOB_ID; {script}"]
    said = container.cluster.run(command).stdout
    number, _, rest = said.partition("\n")
    await_idle(container)
    return int(number), rest


def image(container: Container, name: str, mib: int = 4) -> tuple[str, str]:
    """Its path, and its checksum."""
    path = f"/shared/alice/{name}.sqsh"
    return path, images.sha256(images.make_image(container.cluster, path, mib=mib, name=name))


def test_job_in_a_container_reads_through_then_hits(container: Container) -> None:
    path, sha256 = image(container, "cold", mib=24)
    container.configure(bandwidth="4MiB", chunk_size="1MiB", cold="through")
    first, said = srun(container, path, f"sha256sum <{path}; grep cold.sqsh /proc/self/mountinfo")
    assert said.split()[0] == sha256
    assert container.results(first) == ["through"]
    assert "fuse" in said
    second, said = srun(container, path, f"sha256sum <{path}")
    assert said.split()[0] == sha256
    assert container.results(second) == ["hit"]
    assert container.run("grep", "-c", "cold.sqsh", "/proc/self/mountinfo", check=False) == "0\n"


def test_prolog_redirect_in_a_container_is_not_mounted_on_the_host(container: Container) -> None:
    """Nobody else of the host sees it; the Epilog takes it off."""
    container.configure(redirect="bind", cold="wait", deadline="30s")
    path, sha256 = image(container, "bind")
    job, said = srun(container, path, f"sha256sum <{path}; grep -c bind.sqsh /proc/self/mountinfo")
    assert said.split() == [sha256, "-", "1"]
    assert container.results(job, "prolog") == ["copied"]
    assert "bind.sqsh" not in Path("/proc/self/mountinfo").read_text()
    assert container.run("grep", "-c", "bind.sqsh", "/proc/self/mountinfo", check=False) == "0\n"


def test_job_in_a_container_sees_staged_directory_mounted_file_and_job_directory(
    container: Container,
) -> None:
    """A directory, and the job's own one: its /dev lacks their loop devices; a mounted file."""
    container.configure(cold="wait", deadline="30s")
    path, _ = image(container, "data")
    script = "mkdir -p tree mnt; echo one >tree/one"
    container.cluster.run(["sh", "-c", f"cd /shared/alice; {script}"])
    hints = f"stage=/shared/alice/tree/ stage-wait=60s stage={path}@/shared/alice/mnt"
    script = "cat /shared/alice/tree/one; echo two >$FORESTAGE_DIR/two; cat $FORESTAGE_DIR/two"
    script += "; grep -c -e /shared/alice/tree -e /shared/alice/mnt /proc/self/mountinfo"
    command = ["srun", f"--comment={hints} stage-dir=16MiB", "sh", "-c", script]
    assert container.cluster.run(command).stdout.split() == ["one", "two", "2"]
    await_idle(container)


def test_check_in_a_container_without_systemd_demands_a_health_check(container: Container) -> None:
    def ids() -> set[str]:
        said = container.run("forestage", "check", "--json", check=False)
        return {one["id"] for one in json.loads(said)["findings"]}

    path, _ = image(container, "checked")
    srun(container, path, "true")
    assert not {"no-systemd", "slurmd-mounts", "cache-not-mounted", "fuse-device"} & ids()
    conf = container.root / "etc/slurm/slurm.conf"
    before = conf.read_text()
    conf.write_text(before.replace(f"HealthCheckProgram={HEALTH}\n", ""))
    assert "no-systemd" in ids()
    conf.write_text(before)


def test_slurmd_restarted_in_a_container_does_not_interrupt_reading_through(
    container: Container,
) -> None:
    path, sha256 = image(container, "restart", mib=24)
    container.configure(bandwidth="2MiB", chunk_size="1MiB", cold="through")
    wait = "touch /shared/alice/on; until [ -e /shared/alice/off ]; do sleep 0.1; done"
    script = f"exec <{path}; head -c 4096 >/dev/null; {wait}; sha256sum <{path}; cat >/dev/null"
    on, off = (container.cluster.host_path(f"/shared/alice/{name}") for name in ("on", "off"))
    for file in (on, off):
        file.unlink(missing_ok=True)
    job = container.cluster.popen(["srun", f"--container-image={path}", "sh", "-c", script])
    wait_until(on.exists, 60, container.log.read_text)
    container.end_slurmd()
    assert len(container.leases()) == 1, "the job's"
    off.touch()
    said, problems = job.communicate(timeout=120)
    assert (job.returncode, said.split()[:1]) == (0, [sha256]), problems
    await_idle(container)
    number, _ = srun(container, path, "true")
    assert container.results(number) == ["hit"]


def test_killed_container_leaves_a_cache_that_the_next_container_hits(
    store: Store, site_cluster: Cluster, volumes: Path
) -> None:
    """Its leases stay, too, on a volume, until Slurm has run the job's Epilog in the next one."""
    with Container(store, site_cluster, volumes) as first:
        first.configure()
        path, sha256 = image(first, "killed")
        srun(first, path, "true")
        on = site_cluster.host_path("/shared/alice/on")
        on.unlink(missing_ok=True)
        job = site_cluster.popen(
            ["srun", f"--container-image={path}", "sh", "-c", "touch /shared/alice/on; sleep 600"]
        )
        wait_until(on.exists, 60, first.log.read_text)
        assert len(first.leases()) == 1
        first.kill()
        site_cluster.run(["scancel", "--user=alice"], user="root")
        job.kill()
        job.communicate()
    kept = volumes / "run/leases"
    assert [one.suffix for one in kept.glob("*.json")] == [".json"], "nobody has freed it"
    assert path.encode() not in Path("/proc/self/mountinfo").read_bytes()
    with Container(store, site_cluster, volumes) as second:
        second.configure()
        await_idle(second)
        wait_until(lambda: second.leases() == [], 120, lambda: str(second.leases()))
        number, said = srun(second, path, f"sha256sum <{path}")
        assert said.split()[0] == sha256
        assert second.results(number) == ["hit"]
        assert second.run("ls", f"{CACHE}/parts").split() == []
        await_idle(second)


def test_loop_device_of_a_killed_container_is_detached_by_the_next_containers_sweep(
    store: Store, site_cluster: Cluster, volumes: Path
) -> None:
    """It would keep an evicted entry's room. Its file's path is that of a mount that is gone."""

    def devices() -> list[LoopDevice]:
        copies = [one.stat() for one in (volumes / "nvme").glob("forestage/entries/*/image")]
        return [one for one in loop.list_attached_devices() if any(map(one.is_backed_by, copies))]

    on = site_cluster.host_path("/shared/alice/on")
    on.unlink(missing_ok=True)
    with Container(store, site_cluster, volumes) as first:
        first.configure()
        site_cluster.run(["sh", "-c", "mkdir -p /shared/alice/left; echo 1 >/shared/alice/left/1"])
        hint = "--comment=stage=/shared/alice/left/ stage-wait=60s"
        script = "cat /shared/alice/left/1; touch /shared/alice/on; sleep 600"
        job = site_cluster.popen(["srun", hint, "sh", "-c", script])
        wait_until(on.exists, 60, first.log.read_text)
        assert len(devices()) == 1
        first.kill()
        site_cluster.run(["scancel", "--user=alice"], user="root")
        job.kill()
        job.communicate()
    assert len(devices()) == 1
    with Container(store, site_cluster, volumes) as second:
        second.configure()
        await_idle(second)
        wait_until(lambda: second.leases() == [], 120, lambda: str(second.leases()))
        wait_until(lambda: devices() == [], 60, lambda: str(devices()))


def test_container_layer_installs_the_package_and_enables_no_service(store: Store) -> None:
    tree = store.tree("layer")
    for name in ("prolog", "epilog"):
        assert (tree / "usr/libexec/forestage" / name).exists()
    shown = subprocess.run(
        ["chroot", tree, "/usr/lib/forestage/bin/forestage", "--version"], capture_output=True
    )
    assert shown.returncode == 0, shown.stderr
    wants = list(tree.glob("etc/systemd/system/*.wants/forestage*"))
    assert wants == []
    assert not (tree / "var/tmp/forestage").exists()
