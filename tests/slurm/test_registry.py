"""Images of a registry on a real Slurm: asked for once, imported once, a copy on each node."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import registry as registries
from cluster import Cluster
from host import wait_until
from jobs import CLI, RELEASE, Ran, Site
from registry import GATE, IMPORTS, STORE, Registry, imports, with_importer
from spec import ALICE, BOB, REPO, ClusterSpec
from steps import accompanied

from forestage.events import Outcome, RequestOutcome
from forestage.features.registry.step_files import PROCESS_NAME

NODES = 4
ALL = f"n[1-{NODES}]"
SHOW = " ".join(RELEASE)
DENIED = "refuses"
NVME_STORE = "/mnt/nvme/store"  # beside the cache


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return with_importer(accompanied(NODES))


@pytest.fixture(scope="module")
def served(site_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registries.serving(site_cluster, tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture
def registry(served: Registry, site: Site) -> Registry:
    """Nothing asked, nothing imported."""
    served.behaves()
    site.cluster.run(["sh", "-c", f"rm -rf {STORE} {GATE} {IMPORTS}"], user="root")
    site.cluster.run(["mkdir", "-m", "1777", STORE], user="root")
    site.cluster.run(["install", "-m", "666", "/dev/null", IMPORTS], user="root")
    for user in (ALICE, BOB):
        home = f"/home/{user.name}/.config/enroot"
        site.cluster.run(["rm", "-rf", home], user="root")
    configure(site)
    return served


def configure(site: Site, **changes: object) -> None:
    keys = {"store": STORE, **changes}
    site.configure(redirect="spank", cold="through", user_messages="all", registry=keys)


def environment(**more: str) -> str:
    given = {"STANDIN_LOG": IMPORTS, **more}
    return "\n".join(f"export {name}='{value}'" for name, value in given.items())


def batch(site: Site, script: str, *, nodes: str = ALL, user: str = "alice", **env: str) -> Ran:
    count = nodes.count(",") + 1 if "[" not in nodes else NODES
    return site.sbatch(
        f"{environment(**env)}\n{script}", f"--nodes={count}", f"--nodelist={nodes}", user=user
    )


def names(ran: Ran) -> list[str]:
    return re.findall(r'NAME="(\S+)"', ran.stdout)


def handled(site: Site, job: int, node: str = "n1") -> list[RequestOutcome]:
    found: list[Outcome] = site.outcomes(job, node, "step")
    return [one for one in found if isinstance(one, RequestOutcome) and one.digest]


def step(image: str, *options: str) -> str:
    return " ".join(["srun", *options, f"--container-image={image}", SHOW])


def test_one_registry_import_serves_all_nodes_and_steps_and_the_next_job(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    steps = "\n".join(f"{step(image, f'-n{2 * NODES}', '--overcommit')}" for _ in range(4))
    ran = batch(site, steps)
    assert names(ran) == ["first"] * 2 * NODES * 4, ran.stdout
    assert len(imports(site.cluster)) == 1
    assert registry.count("HEAD") <= 2  # the one that gets an answer, and skopeo's own
    blobs = registry.count("GET", "/v2/.*/blobs/.*")
    before = registry.count("GET"), blobs, registry.count("HEAD")
    for node in site.cluster.nodes:
        assert len(site.entries(node)) == 1

    command = f"sh -c '{SHOW}; echo result=$FORESTAGE_RESULT'"
    again = batch(site, f"srun -n{NODES} --container-image={image} {command}")
    assert names(again) == ["first"] * NODES, again.stdout
    assert again.stdout.count("result=hit\n") == NODES, again.stdout
    after = registry.count("GET"), registry.count("GET", "/v2/.*/blobs/.*"), registry.count("HEAD")
    assert after == (before[0], before[1], before[2] + 1)
    for node in site.cluster.nodes:
        assert [one.result for one in handled(site, again.job, node)] == ["hit"]
    stored = [path.name for path in site.source(f"{STORE}/{ALICE.uid}").glob("*.sqsh")]
    assert len(stored) == 1


@pytest.mark.ci
def test_tag_moved_during_a_batch_job_keeps_its_digest_for_that_job(
    site: Site, registry: Registry
) -> None:
    first = registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    flag, pushed = (f"/shared/alice/{name}" for name in ("ran", "pushed"))
    wait = f"touch {flag}; until test -e {pushed}; do sleep 0.05; done"
    for name in (flag, pushed):
        site.source(name).unlink(missing_ok=True)
    script = f"{step(image)}\n{wait}\n{step(image)}"
    job = site.cluster.submit(
        f"#!/bin/sh\n{environment()}\n{script}\n",
        "--output=moved",
        "--nodes=2",
        "--nodelist=n[1-2]",
    )
    wait_until(lambda: site.source(flag).exists(), 90, site.cluster.overview)
    second = registry.push("team/tool:1", "second")
    site.source(pushed).touch()
    site.wait_over(job)
    out = site.cluster.read("/shared/alice/moved")
    assert re.findall(r'NAME="(\S+)"', out) == ["first"] * 4
    assert {one.digest for node in ("n1", "n2") for one in handled(site, job, node)} == {first}

    later = batch(site, step(image), nodes="n1")
    assert names(later) == ["second"], later.stdout
    assert {one.digest for one in handled(site, later.job)} == {second}


def test_image_pushed_to_a_tag_is_used_by_the_next_srun(site: Site, registry: Registry) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    first = site.srun(image)
    registry.push("team/tool:1", "second")
    second = site.srun(image)
    assert (names(first), names(second)) == (["first"], ["second"])


@pytest.mark.ci
def test_user_without_registry_credentials_gets_the_registrys_refusal(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "secret")
    registry.wants(alice="word")
    image = f"{registry.host}#team/tool:1"
    host = registry.host.partition(":")[0]
    login(site, "alice", f"machine {host} login alice password word\n")
    mine = batch(site, step(image), nodes="n1", STANDIN_IMAGE=site.image("secret"))
    assert names(mine) == ["secret"], mine.stdout

    other = site.sbatch(f"{environment()}\n{step(image)}", user="bob", node="n1")
    assert names(other) == [], other.stdout
    assert DENIED in other.stdout
    assert "status code 401" in other.stdout or "unauthorized" in other.stdout  # enroot's own words
    assert handled(site, other.job) == []
    for path in site.source(STORE).rglob("*"):
        assert path.lstat().st_uid == ALICE.uid or path.is_relative_to(
            site.source(f"{STORE}/{BOB.uid}")
        )
    look = site.cluster.run(["ls", f"{STORE}/{ALICE.uid}"], user="bob", check=False)
    assert look.returncode != 0


def test_image_missing_in_the_registry_is_queried_once_besides_enroots_own_requests(
    site: Site, registry: Registry
) -> None:
    """A HEAD, and a GET, as registries that know no HEAD say 404 as well."""
    image = f"{registry.host}#team/none:1"
    alone = ["enroot", "import", "--output", "/tmp/none.sqsh", "--", f"docker://{image}"]
    assert site.cluster.run(alone, node="n1", check=False).returncode != 0
    enroots = {method: registry.count(method) for method in ("HEAD", "GET")}
    registry.behaves()
    ran = batch(site, step(image), nodes="n1")
    assert names(ran) == [], ran.stdout
    assert "404" in ran.stdout or "unknown" in ran.stdout, ran.stdout  # enroot's own words
    assert {method: registry.count(method) - enroots[method] for method in enroots} == {
        "HEAD": 1,
        "GET": 1,
    }


def login(site: Site, user: str, text: str) -> None:
    folder = f"/home/{user}/.config/enroot"
    site.cluster.run(["mkdir", "-p", folder], user=user)
    site.cluster.run(["sh", "-c", f"umask 077; cat >{folder}/.credentials"], user=user, input=text)


def test_import_of_a_killed_worker_is_done_again_by_another_node(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    job = site.cluster.submit(
        f"#!/bin/sh\n{environment(STANDIN_WAIT=GATE)}\n{step(image)}\n",
        "--output=killed",
        "--nodes=2",
        "--nodelist=n[1-2]",
    )
    wait_until(lambda: len(imports(site.cluster)) == 1, 90, site.cluster.overview)
    killed = kill_import(site)
    wait_until(lambda: len(imports(site.cluster)) == 2, 90, site.cluster.overview)
    site.source(GATE).touch()
    site.wait_over(job)
    out = site.cluster.read("/shared/alice/killed")
    assert re.findall(r'NAME="(\S+)"', out) == ["first"] * 2
    assert killed
    assert parts(site) == []


def kill_import(site: Site) -> list[str]:
    """Kills the workers and all that they run on the one node that imports; returns the node."""
    found = []
    for node in site.cluster.nodes:
        ran = site.cluster.run(
            ["pgrep", "-f", "enroot import"], user="root", node=node, check=False
        )
        if ran.stdout:
            site.root(["pkill", "-9", "-f", "forestage.features.registry.worker_main"], node)
            site.cluster.run(
                ["pkill", "-9", "-f", "enroot import"], user="root", node=node, check=False
            )
            found.append(node)
    return found


@pytest.mark.ci
def test_slurmd_restarted_during_an_import_does_not_interrupt_the_import(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    job = waiting(site, image, "n1")
    site.root(["sh", "-c", "kill -9 $(cat /run/slurmd.pid); exec slurmd -N n1"], "n1")
    site.source(GATE).touch()
    site.wait_over(job)
    assert names_in(site, job) == ["first"]
    assert len(imports(site.cluster)) == 1
    assert handled(site, job)[0].came == "imported"


def waiting(site: Site, image: str, node: str, before: int = 0, **env: str) -> int:
    """A job whose step waits for an import that has begun."""
    script = f"#!/bin/sh\n{environment(STANDIN_WAIT=GATE, **env)}\n{step(image)}\n"
    job = site.cluster.submit(script, "--output=%j.out", f"--nodelist={node}")
    wait_until(lambda: len(imports(site.cluster)) == before + 1, 90, site.cluster.overview)
    return job


def names_in(site: Site, job: int) -> list[str]:
    return re.findall(r'NAME="(\S+)"', site.cluster.read(f"/shared/alice/{job}.out"))


@pytest.mark.long  # nobody can tell a node that died from one that is slow, but by a minute
def test_import_of_a_dead_node_is_done_again_by_another_node(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    dead = waiting(site, image, "n1")
    script = f"#!/bin/sh\n{environment()}\n{step(image)}\n"
    job = site.cluster.submit(script, "--output=%j.out", "--nodelist=n2")
    wait_until(lambda: status(site, "n2") == ["n1"], 60, site.cluster.overview)
    site.root(["sh", "-c", "kill -9 -1; true"], "n1")
    site.wait_over(job)
    assert names_in(site, job) == ["first"]
    assert len(imports(site.cluster)) == 2
    assert [one.came for one in handled(site, job, "n2")] == ["imported"]
    site.root(["slurmd", "-N", "n1"], "n1")
    site.cluster.run(["scancel", str(dead)])
    site.wait_over(dead)
    site.command("sweep")


@pytest.fixture
def west(registry: Registry) -> Iterator[Site]:
    """Another cluster, of one node, with the same node names and job numbers."""
    spec = with_importer(accompanied(1))
    conf = {**spec.slurm_conf, "ClusterName": "west"}
    with Cluster.up(dataclasses.replace(spec, slurm_conf=conf)) as cluster:
        yield Site(cluster)


@pytest.mark.ci
def test_two_clusters_with_one_store_import_an_image_once(
    site: Site, west: Site, registry: Registry
) -> None:
    # The checkout is what both see at one path.
    with tempfile.TemporaryDirectory(dir=REPO / ".venv") as folder:
        shared = Path(folder)
        (shared / "store").mkdir()
        for path, mode in ((shared, 0o1777), (shared / "store", 0o1777)):
            path.chmod(mode)
        shutil.copy(site.source(site.image("both")), shared / "image")
        (shared / "image").chmod(0o644)
        env = {"STANDIN_LOG": f"{shared}/log", "STANDIN_WAIT": f"{shared}/gate"}
        given = environment(**env, STANDIN_IMAGE=f"{shared}/image")
        script = f"#!/bin/sh\n{given}\n{step(f'here#team/tool@sha256:{7:064x}')}\n"
        jobs = []
        for one in (site, west):
            configure(one, store=f"{shared}/store")
            options = ("--output=%j.out", "--nodelist=n1")
            jobs.append(one.cluster.submit(script, *options))
            wait_until(lambda: status(one, "n1") == ["n1"], 60, one.cluster.overview)  # noqa: B023
        (shared / "gate").touch()
        for one, job in zip((site, west), jobs, strict=True):
            one.wait_over(job)
            assert names_in(one, job) == ["both"]
        came = [handled(one, job)[0].came for one, job in zip((site, west), jobs, strict=True)]
        assert came == ["imported", "waited"]
        assert len((shared / "log").read_text().splitlines()) == 1
        west.await_stagers()


def status(site: Site, node: str) -> list[str]:
    """Who imports, as a node's `status` says of its steps that wait."""
    told = site.cluster.run([CLI, "status", "--json"], user="root", node=node).stdout
    return [one["where"] for one in json.loads(told)["imports"]]


def parts(site: Site) -> list[Path]:
    return list(site.source(STORE).rglob("*.part"))


@pytest.mark.ci
@pytest.mark.parametrize("why", ["gone", "read-only"])
def test_job_runs_though_the_image_store_is_missing_or_read_only(
    site: Site, registry: Registry, why: str
) -> None:
    registry.push("team/tool:1", "first")
    if why == "gone":
        site.cluster.run(["rmdir", STORE], user="root")
    else:
        site.cluster.run(["chmod", "0555", STORE], user="root")
    ran = batch(site, step(f"{registry.host}#team/tool:1"), nodes="n1")
    assert names(ran) == ["first"], ran.stdout
    assert "for this step alone" in ran.stdout


@pytest.mark.ci
def test_unavailable_registry_with_use_last_resolves_a_tag_to_its_last_digest(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    assert names(batch(site, step(image), nodes="n1")) == ["first"]
    registry.says("HEAD", 503)
    registry.says("GET", 503)
    configure(site, offline="use-last")
    ran = batch(site, step(image), nodes="n2")
    assert names(ran) == ["first"], ran.stdout
    registry.says("HEAD", 403)
    registry.says("GET", 403)
    refused = batch(site, step(image), nodes="n2")
    assert names(refused) == [], refused.stdout


@pytest.mark.parametrize("store", ["none", "on the cache's disk"])
def test_without_a_shared_store_enroot_imports_and_leaves_no_lease_or_entry(
    site: Site, registry: Registry, store: str
) -> None:
    registry.push("team/tool:1", "first")
    configure(site, store=None)
    if store != "none":
        site.cluster.run(["mkdir", "-p", "-m", "1777", NVME_STORE], user="root", node="n1")
        configure(site, store=NVME_STORE)
    image = f"{registry.host}#team/tool:1"
    ran = batch(site, f"{step(image)}\n{step(image)}", nodes="n1")
    assert names(ran) == ["first"] * 2, ran.stdout
    assert len(imports(site.cluster)) == 2
    found: list[Outcome] = site.outcomes(ran.job, "n1", "step")
    reasons = {one.reason for one in found if isinstance(one, RequestOutcome)}
    assert reasons == {"registry" if store == "none" else "store-local"}
    assert (site.leases("n1"), site.entries("n1")) == ([], {})
    nvme = site.cluster.host_path("/mnt/nvme", "n1")
    assert list(nvme.glob("store/*")) == []


def test_step_without_the_jobs_first_node_resolves_its_tag_itself(
    site: Site, registry: Registry
) -> None:
    digest = registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    ran = batch(site, step(image, "-w", "n2", "-N1"), nodes="n1,n2")
    assert names(ran) == ["first"], ran.stdout
    assert [one.digest for one in handled(site, ran.job, "n2")] == [digest]


def test_batch_script_with_a_registry_image_sees_the_nodes_copy(
    site: Site, registry: Registry
) -> None:
    """Its environment has no number of a step."""
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    batch(site, step(image), nodes="n1")
    site.await_stagers()
    ran = site.sbatch("true", f"--container-image={image}", node="n1")
    (seen,) = site.seen(ran.job)
    assert seen.path == f"/run/forestage/images/{ran.job}.4294967291.sqsh"
    (key,) = site.entries("n1")
    assert seen.file == site.copy(key)


def test_processes_started_by_bash_env_end_with_the_import(site: Site, registry: Registry) -> None:
    """bash sources BASH_ENV: what it starts in a session of its own is no process of Slurm's."""
    registry.push("team/tool:1", "first")
    left = "/shared/alice/left.sh"
    site.cluster.write(left, "setsid sleep 4242 </dev/null >/dev/null 2>&1 &\n")
    image = f"{registry.host}#team/tool:1"
    ran = batch(site, step(image), nodes="n1", BASH_ENV=left)
    assert names(ran) == ["first"], ran.stdout
    look = ["pgrep", "-f", "sleep 4242"]
    assert site.cluster.run(look, user="root", node="n1", check=False).stdout == ""


@pytest.mark.parametrize("why", ["disabled", "damaged"])
def test_disabled_or_damaged_configuration_leaves_the_image_to_enroot(
    site: Site, registry: Registry, why: str
) -> None:
    registry.push("team/tool:1", "first")
    if why == "disabled":
        configure(site, enabled=False)
    else:
        site.cluster.write("/etc/forestage/forestage.yaml", "registry: [")
    ran = batch(site, step(f"{registry.host}#team/tool:1"), nodes="n1")
    assert names(ran) == ["first"], ran.stdout
    assert parts(site) == []
    configure(site)


def test_cancelling_a_step_ends_its_import_and_leaves_no_part(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    job = site.cluster.submit(
        f"#!/bin/sh\n{environment(STANDIN_WAIT=GATE)}\n{step(image)}\n", "--nodelist=n1"
    )
    wait_until(lambda: len(imports(site.cluster)) == 1, 90, site.cluster.overview)
    site.cluster.run(["scancel", str(job)])
    site.wait_over(job)

    def at_work() -> str:
        look = ["pgrep", "-af", "registry.work|enroot import|forestage step"]
        return site.cluster.run(look, user="root", node="n1", check=False).stdout

    wait_until(lambda: not at_work(), 60, at_work)
    assert parts(site) == []
    assert not list(site.cluster.host_path("/run/forestage/images", "n1").iterdir())


@pytest.mark.ci
def test_import_that_ends_after_its_step_was_cancelled_leaves_no_lease(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    job = waiting(site, image, "n1")
    site.cluster.run(["scancel", str(job)])
    site.source(GATE).touch()  # within the seconds in which another task may come
    site.wait_over(job)
    wait_until(lambda: not site.named("n1", PROCESS_NAME), 60, lambda: "its helper lives on")
    assert site.leases("n1") == []
    assert not list(site.cluster.host_path("/run/forestage/images", "n1").iterdir())
    assert site.entries("n1") == {}


def test_explain_names_reference_digest_store_and_entry_of_a_registry_image(
    site: Site, registry: Registry
) -> None:
    digest = registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    ran = batch(site, step(image), nodes="n1")
    told = site.command("explain", str(ran.job))
    for fact in (image, digest, f"{STORE}/{ALICE.uid}/", "entry"):
        assert fact in told


@pytest.mark.ci
def test_warm_of_a_registry_image_imports_once_and_the_next_job_is_a_hit(
    site: Site, registry: Registry
) -> None:
    registry.push("team/tool:1", "first")
    image = f"{registry.host}#team/tool:1"
    command = f"{CLI} warm -w n2 docker://{image}"
    # Its user reads what became of the copy in events of their own.
    ran = site.cluster.run(["sh", "-c", f"{environment()}; {command}"], check=False)
    assert "1 of 1 node warm: 1 " in ran.stdout, ran.stdout + ran.stderr
    assert len(imports(site.cluster)) == 1
    job = batch(site, step(image), nodes="n2")
    assert names(job) == ["first"], job.stdout
    assert [one.result for one in handled(site, job.job, "n2")] == ["hit"]
    assert len(imports(site.cluster)) == 1
