"""The packages of another day and then today's, beneath jobs that use all that a node can show."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Cluster
from host import wait_until
from jobs import RELEASE, Site
from packaged import HOOKS, NODE, RELEASES, Packages, build_before, spec
from spec import ClusterSpec

import registry as registries
from registry import GATE, IMPORTS, STORE, Registry, with_importer

pytestmark = pytest.mark.long
BEFORE = "0ff1dc51"  # before records, processes and the words to steps were changed
OLD = "0.0.1"
HOME = "/shared/alice"
POINT, SET, TREE, AT = f"{HOME}/point", f"{HOME}/set", f"{HOME}/tree", "/forestage/job"
IMPORTER = "/usr/lib/forestage/bin/forestage-importer"


@dataclass(frozen=True)
class Use:
    """A job: how its steps ask, what each look must print, and whether its steps see a mount."""

    comment: str = ""
    image: str = ""
    look: str = " ".join(RELEASE)
    right: str = ""
    mount: str = ""
    environment: str = ""

    def script(self, name: str) -> str:
        """A step from before the upgrade until after it, and one that begins after it.

        Where the container has no /shared, as that of a registry's image, the script waits.
        """
        option = f"--container-image={self.image}" if self.image else ""
        wait = f"touch {HOME}/{name}.on; until test -e {HOME}/off; do sleep 0.1; done"
        look = f"{self.look}; cat /proc/self/mountinfo >&2"
        if self.environment:
            step = f"srun {option} {self.look}"
            return f"{self.environment}\n{step}\n{wait}\n{step}\n{step}\n"
        return f"srun {option} sh -c '{look}; {wait}; {self.look}'\nsrun {option} sh -c '{look}'\n"


@pytest.fixture(scope="module")
def cluster_spec(machine: None) -> ClusterSpec:
    """One node; Slurm and pyxis name files of packages that are not there yet."""
    line = "include /usr/lib/forestage/spank/plugstack-22.05*.conf"
    hooks = {"Prolog": f"{HOOKS}/prolog", "Epilog": f"{HOOKS}/epilog"}
    made: ClusterSpec = with_importer(spec("rpm"))  # in a tree with the tools that make images
    return dataclasses.replace(
        made,
        slurm_conf=hooks,
        plugstack=(line, f"required {{state}}/pyxis.so importer={IMPORTER}"),
        node_dirs=(*made.node_dirs, "/forestage"),
    )


@pytest.fixture
def registry(site_cluster: Cluster, tmp_path: Path) -> Iterator[Registry]:
    site_cluster.run(["mkdir", "-m", "1777", STORE], user="root")
    site_cluster.run(["install", "-m", "666", "/dev/null", IMPORTS], user="root")
    with registries.serving(site_cluster, tmp_path) as served:
        yield served


@pytest.fixture
def packages(site_cluster: Cluster, built: Path, tmp_path: Path) -> Packages:
    """Of both days, those of the other one installed."""
    folder = tmp_path / "both"
    build_before(folder, BEFORE, OLD)
    for package in built.glob(f"*{RELEASES[0]}*.deb"):
        (folder / package.name).symlink_to(package)
    packages = Packages(site_cluster, "deb", folder)
    packages.install(OLD, "forestage", "forestage-spank")
    return packages


def uses(site: Site, registry: Registry) -> Mapping[str, Use]:
    """A job of each kind."""
    big, env = site.image("big", mib=24), site.image("env", mib=2)
    blob = hashlib.sha256(b"x" * 3_000_000).hexdigest()
    make = f"mkdir -p {POINT} {SET} {TREE}; head -c 3000000 /dev/zero | tr '\\0' x >{SET}/blob"
    site.cluster.run(["sh", "-c", f"{make}; cp {SET}/blob {TREE}"], user="alice")
    tool, late = (f"{registry.host}#team/{name}:1" for name in ("tool", "late"))
    for name in ("tool", "late"):
        registry.push(f"team/{name}:1", name)
    own = f"echo own >>{AT}/own; sha256sum <{AT}/tree/blob; head -n1 {AT}/own"
    log = f"export STANDIN_LOG={IMPORTS}"
    return {
        "through": Use(
            image=big,
            look=f"exec <{big}; sha256sum",
            right=f"{site.sha256(big)}  -\n",
            mount=big,
        ),
        "registry": Use(image=tool, right='NAME="tool"\n', environment=log),
        "import": Use(
            image=late,
            right='NAME="late"\n',
            environment=f"{log}\nexport STANDIN_WAIT={GATE}",
        ),
        "mounted": Use(
            comment=f"stage={env}@{POINT}",
            look=f"cat {POINT}/etc/os-release",
            right='NAME="env"\nID=env\n',
            mount=POINT,
        ),
        "directory": Use(
            comment=f"stage={SET}/ stage-wait=1m",
            look=f"sha256sum <{SET}/blob",
            right=f"{blob}  -\n",
            mount=SET,
        ),
        "own": Use(
            comment=f"stage-dir=64M stage={TREE}@job stage-wait=1m",
            look=own,
            right=f"{blob}  -\nown\n",
            mount=AT,
        ),
    }


def begin(site: Site, jobs: Mapping[str, Use]) -> Mapping[str, int]:
    """Each, until its first step has looked, or its import is under way."""
    site.cluster.submit("#!/bin/sh\nsrun true\n", f"--comment=stage={SET}/", "--nodelist=n1")
    wait_until(lambda: SET in site.cached_paths(NODE), 60, site.cluster.overview)
    found = {}
    for name, use in jobs.items():
        options = [f"--output={name}.out", f"--error={name}.err", "--nodelist=n1"]
        comment = [f"--comment={use.comment}"] if use.comment else []
        script = f"#!/bin/sh\n{use.script(name)}"
        found[name] = site.cluster.submit(script, *options, *comment)
    waiting = [name for name in jobs if name != "import"]

    def begun() -> bool:
        imported = any("late" in line for line in registries.imports(site.cluster))
        return imported and all(site.source(f"{HOME}/{name}.on").exists() for name in waiting)

    wait_until(begun, 120, lambda: f"{outputs(site, jobs)}\n{site.cluster.overview()}")
    return found


def outputs(site: Site, jobs: Mapping[str, Use]) -> dict[str, str]:
    files = {name: site.source(f"{HOME}/{name}.out") for name in jobs}
    return {name: file.read_text() if file.exists() else "" for name, file in files.items()}


def left(site: Site) -> list[Path]:
    """What is in the folders of views and of jobs but locks."""
    run, cache = site.cluster.host_path("/run/forestage", NODE), site.cache(NODE).root
    found = [*run.glob("through/*/*"), *run.glob("served/*"), *cache.glob("jobs/*")]
    return [one for one in found if one.name != "lock"]


def test_jobs_from_before_an_upgrade_end_well_with_all_that_they_use(
    site: Site, registry: Registry, packages: Packages
) -> None:
    site.cluster.node_reboot(NODE)  # slurmd has the companion now
    site.cluster.wait_idle(60)
    site.configure(
        redirect="spank",
        cold="through",
        chunk_size="1MiB",
        bandwidth="1MiB",
        registry={"store": STORE},
    )
    before = sorted(site.processes(NODE).values())
    jobs = uses(site, registry)
    numbers = begin(site, jobs)
    said = packages.install(RELEASES[0], "forestage", "forestage-spank")
    site.source(GATE).touch()
    site.source(f"{HOME}/off").touch()
    for job in numbers.values():
        site.wait_over(job)

    found = outputs(site, jobs)
    errors = {name: site.cluster.read(f"{HOME}/{name}.err") for name in jobs}
    print(said, *(f"--- {n}\n{o}\n{errors[n]}" for n, o in found.items()), sep="\n")
    assert found == {name: use.right * 3 for name, use in jobs.items()}
    for name, use in jobs.items():
        assert errors[name].count(f"{use.mount} ") >= 2 or not use.mount, name
    assert " fuse.forestage " in errors["through"]
    site.cluster.wait_idle()
    wait_until(
        lambda: sorted(site.processes(NODE).values()) == before,
        120,
        lambda: f"live on: {site.processes(NODE)}",
    )
    assert (site.leftovers(), left(site)) == ([], [])
    assert site.command("sweep", "--json")
    site.command("verify", "--all")
