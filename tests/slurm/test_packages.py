"""The packages on a real cluster: installed, enabled, upgraded under a job, removed meanwhile."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from host import wait_until
from jobs import Site
from newcomer import told
from packaged import HOOKS, NODE, RELEASES, Packages, spec
from spec import REPO, ClusterSpec

pytestmark = pytest.mark.long
CONF = "/etc/slurm/slurm.conf"
STACK = "/etc/slurm/plugstack.conf"
HOME = "/usr/lib/forestage"


@pytest.fixture(scope="module", params=["deb", "rpm"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster_spec(kind: str, machine: None) -> ClusterSpec:
    return spec(kind)


@pytest.fixture
def packages(site_cluster: Cluster, kind: str, built: Path) -> Iterator[Packages]:
    """A node on which nothing of forestage has ever been."""
    if kind == "deb":  # the tree has it for other tests
        site_cluster.run(["rm", "-rf", HOME], user="root", node=NODE)
    packages = Packages(site_cluster, kind, built)
    before = {path: site_cluster.read(path) for path in (CONF, STACK)}
    yield packages
    for path, text in before.items():
        site_cluster.write(path, text)
    reconfigure(site_cluster)
    packages.wipe()


@pytest.fixture
def site(site_cluster: Cluster, packages: Packages) -> Iterator[Site]:
    site = Site(site_cluster)
    packages.root("rm", "-rf", "/mnt/nvme/forestage")
    yield site
    site_cluster.wait_idle(20)
    packages.root("rm", "-rf", "/run/forestage/leases")


def reconfigure(cluster: Cluster) -> None:
    cluster.run(["scontrol", "reconfigure"], user="root", node=NODE)
    cluster.wait_idle(30)


def change_lines(site: Site, packages: Packages, command: str) -> None:
    """Adds and removes the lines that `enable` or `disable` prints, as an admin does."""
    plan = json.loads(packages.root("forestage", command, "--json"))
    for change in plan["lines"]:
        text = site.cluster.read(change["file"])
        line = f"{change['text']}\n"
        if change["action"] == "remove":
            assert text.count(line) == 1
            text = text.replace(line, "")
        else:
            text = line + text if "first" in change["place"] else text + line
        site.cluster.write(change["file"], text)


def enable(site: Site, packages: Packages) -> str:
    """As the page says: the configuration, the lines, the links, then a reconfigure."""
    site.configure()
    change_lines(site, packages, "enable")
    said = packages.root("forestage", "enable", "--yes")
    reconfigure(site.cluster)
    return said


def disable(site: Site, packages: Packages) -> None:
    change_lines(site, packages, "disable")
    packages.root("forestage", "disable", "--yes")
    reconfigure(site.cluster)


def holes(folder: str, packages: Packages) -> str:
    """Whatever a program has written there since it was installed."""
    return packages.root("find", folder, "-newer", "/var/tmp/installed", "-print")


def test_installed_package_serves_jobs_only_between_enable_and_disable(
    site: Site, packages: Packages
) -> None:
    packages.install()
    site.configure()
    assert site.srun(site.image("quiet")).code == 0
    assert site.entries() == {}
    assert not site.cluster.host_path("/var/log/forestage/events.jsonl", NODE).exists()

    packages.root("touch", "/var/tmp/installed")
    before = site.cluster.read(CONF)
    assert "There is nothing to change." in enable(site, packages), "the lines are there"
    image = site.image("warm")
    cold, warm = site.srun(image), site.srun(image)
    assert [site.results(job.job) for job in (cold, warm)] == [["copied"], ["hit"]]
    assert not site.shows_source(site.saw(warm.job))
    assert packages.root("forestage", "explain", str(warm.job))
    page = packages.root("forestage", "report", "-o", "-")
    assert "</style>" in page, "template and style sheet are in the package"
    assert holes(HOME, packages) == "", "stale byte code would be written anew"
    disable(site, packages)
    after = site.srun(image)
    assert site.outcomes(after.job) == []
    assert site.cluster.read(CONF) == before


def test_package_upgrade_under_a_running_job_keeps_its_redirect_and_lease(
    site: Site, packages: Packages
) -> None:
    packages.install()
    enable(site, packages)
    image = site.image("long")
    before = site.cluster.read("/etc/forestage/forestage.yaml")
    with site.holding(image) as held:
        assert site.redirected() == [image]
        packages.install(RELEASES[1])
        assert site.redirected() == [image]
        assert [lease.job for lease in site.leases()] == [held.job]
        assert site.results(site.srun(image).job) == ["hit"], "it is not switched off any more"
    assert site.cluster.read("/etc/forestage/forestage.yaml") == before
    assert site.leftovers() == []


def test_jobs_that_start_during_a_package_upgrade_read_the_shared_path(
    site: Site, packages: Packages
) -> None:
    """The hook would load modules of both versions; here the upgrade stays in its middle."""
    packages.install()
    enable(site, packages)
    image = site.image("middle")
    script = Path(__file__).parents[2] / "packaging/scripts/preinstall"
    word = {"deb": "upgrade", "rpm": "2"}[packages.kind]
    packages.root("sh", str(script), word)
    job = site.srun(image)
    assert (job.code, site.outcome(job.job).reason) == (0, "disabled")
    packages.install(RELEASES[1])
    assert site.results(site.srun(image).job) == ["copied"]


def test_staging_switched_off_by_an_admin_stays_off_after_an_upgrade(
    site: Site, packages: Packages
) -> None:
    packages.install()
    enable(site, packages)
    packages.root("sh", "-c", "mkdir -p /run/forestage; echo INC-42 >/run/forestage/disabled")
    packages.install(RELEASES[1])
    assert site.cluster.read("/run/forestage/disabled", NODE) == "INC-42\n"


def test_package_removal_while_enabled_fails_no_job_and_drains_no_node(
    site: Site, packages: Packages
) -> None:
    packages.install()
    enable(site, packages)
    image = site.image("removed")
    with site.holding(image) as held:
        assert site.redirected() == [image]
        packages.remove()
        assert site.redirected() == [], "else it would hide later changes of the source"
        held.stop()
    site.cluster.wait_idle(20)
    assert not site.cluster.host_path(f"{HOME}/bin/python3", NODE).is_symlink()
    after = site.srun(image)
    assert after.code == 0, after
    assert site.shows_source(site.saw(after.job))
    site.cluster.wait_idle(20)
    packages.install()
    enable(site, packages)
    assert site.results(site.srun(image).job) == ["hit"]

    # The hooks themselves survive even a purge.
    packages.remove()
    if packages.kind == "deb":
        packages.root("dpkg", "--purge", "forestage")
        assert not site.cluster.host_path("/etc/forestage", NODE).exists()
    assert site.srun(image).code == 0
    site.cluster.wait_idle(20)
    assert sorted(packages.root("ls", HOOKS).split()) == ["epilog", "prolog"]


def test_link_in_a_prolog_directory_drains_no_node_when_the_package_is_removed(
    site: Site, packages: Packages
) -> None:
    for kind in ("prolog", "epilog"):
        site.cluster.write(f"/etc/slurm/{kind}.d/20-site", "#!/bin/sh\n", mode=0o755)
    pattern = "Prolog=/etc/slurm/prolog.d/*\nEpilog=/etc/slurm/epilog.d/*\n"
    site.cluster.write(CONF, site.cluster.read(CONF) + pattern)
    packages.install()
    said = enable(site, packages)
    assert "/etc/slurm/prolog.d/50-forestage" in said
    image = site.image("linked")
    assert site.results(site.srun(image).job) == ["copied"]
    packages.remove()
    assert site.srun(image).code == 0
    site.cluster.wait_idle(20)
    packages.install()
    packages.root("forestage", "disable", "--yes")
    assert packages.root("ls", "/etc/slurm/prolog.d", "/etc/slurm/epilog.d").count("20-site") == 2
    after = site.srun(image)
    assert (after.code, site.outcomes(after.job)) == (0, [])
    site.cluster.wait_idle(20)


def test_shared_hook_scripts_drain_no_node_before_install_and_after_removal(
    site: Site, packages: Packages
) -> None:
    """The site's scripts and ours lie there before the package comes, and after it has gone."""
    for kind in ("prolog", "epilog"):
        site.cluster.write(f"/etc/slurm/{kind}.d/90-site", "#!/bin/sh\n", mode=0o755)
    packages.install()
    (block,) = told("test_packages.py")
    packages.root("sh", "-eu", "-c", block)
    packages.remove()
    packages.root("rm", "-r", HOOKS)
    pattern = "Prolog=/etc/slurm/prolog.d/*\nEpilog=/etc/slurm/epilog.d/*\n"
    site.cluster.write(CONF, site.cluster.read(CONF) + pattern)
    reconfigure(site.cluster)
    try:
        image = site.image("shared")
        assert site.srun(image).code == 0
        site.cluster.wait_idle(20)
        packages.install()
        site.configure()
        plan = json.loads(packages.root("forestage", "enable", "--json"))
        assert (plan["links"], plan["refusals"]) == ([], []), "it is seen to be there"
        assert site.results(site.srun(image).job) == ["copied"]
        site.cluster.wait_idle(20)
        packages.remove()
        packages.root("rm", "-r", HOOKS)
        assert site.srun(image).code == 0
        site.cluster.wait_idle(20)
    finally:
        for kind in ("prolog", "epilog"):
            folder = f"/etc/slurm/{kind}.d"
            packages.root("rm", "-f", f"{folder}/50-all-forestage", f"{folder}/90-site")


def test_disable_is_refused_while_a_prolog_of_the_site_runs(site: Site, packages: Packages) -> None:
    """slurmd has listed the directory, and drains the node if the next script is gone."""
    runs, slow = "/var/tmp/prolog-runs", "/etc/slurm/prolog.d/90-slow"
    site.cluster.write("/etc/slurm/prolog.d/20-site", "#!/bin/sh\n", mode=0o755)
    site.cluster.write(CONF, site.cluster.read(CONF) + "Prolog=/etc/slurm/prolog.d/*\n")
    packages.install()
    enable(site, packages)
    wait = f"#!/bin/sh\ntouch {runs}\nwhile [ -e {runs} ]; do sleep 0.1; done\n"
    site.cluster.write(slow, wait, mode=0o755)
    try:
        site.cluster.submit("#!/bin/sh\ntrue\n")
        wait_until(site.cluster.host_path(runs, NODE).exists, 30, site.cluster.logs)
        said = packages.root("forestage", "disable", "--yes", check=False)
    finally:
        site.cluster.host_path(slow).unlink()
        site.cluster.host_path(runs, NODE).unlink(missing_ok=True)
    assert "may have listed the directory" in said
    site.cluster.wait_idle(30)
    packages.root("forestage", "disable", "--yes")
    assert packages.root("ls", "/etc/slurm/prolog.d").split() == ["20-site"]
    assert site.srun(site.image("after")).code == 0
    site.cluster.wait_idle(20)


def test_companion_package_can_be_removed_while_plugstack_conf_includes_the_companion(
    site: Site, packages: Packages
) -> None:
    packages.install(RELEASES[0], "forestage", "forestage-spank")
    enable(site, packages)
    assert site.cluster.read(STACK).startswith(f"include {HOME}/spank/plugstack-22.05*.conf\n")
    site.configure(redirect="spank")
    image = site.image("spank")
    step = f"srun --container-image={image} cat /etc/os-release"
    job = site.sbatch(step)
    assert [one.result for one in site.outcomes(job.job, hook="step")] == ["copied"]
    packages.remove("forestage-spank", "forestage")
    job = site.sbatch(step)
    assert "ID=spank" in job.stdout, job


def test_host_without_the_companion_prints_no_error_for_the_include_line(
    site: Site, packages: Packages
) -> None:
    """A submit host without the package, or with that of another Slurm: no user sees an error."""
    packages.install(RELEASES[0], "forestage", "forestage-spank")
    enable(site, packages)
    plugin = f"{HOME}/spank/forestage.so"
    without = f"mount -t tmpfs tmpfs {HOME}/spank"
    other = f"{without}; touch {plugin}; echo optional {plugin} >{HOME}/spank/plugstack-24.11.conf"
    jobs = "srun true && sbatch --output=/dev/null --wrap true"

    def errors(host: str) -> str:
        site.cluster.wait_idle(30)  # else srun says that it waits for the batch job's node
        shell = ["unshare", "--mount", "sh", "-c", f"{host}; {jobs}"]
        return site.cluster.run(shell, user="root").stderr

    assert [errors(host) for host in ("true", without, other)] == ["", "", ""]
    line = f"include {HOME}/spank/plugstack-22.05*.conf"
    stack = site.cluster.read(STACK)
    site.cluster.write(STACK, stack.replace(line, f"optional {plugin}"))
    assert all(plugin in errors(host) for host in (without, other)), "what the line is for"


ELS = {
    "el9": {"python3": "3.9.18", "python3.12": "3.12.1"},
    "el10": {"python3": "3.12.8"},
}
BASE = {"glibc": "2.34", "libgcc": "11.5", "libstdc++": "11.5", "util-linux": "2.37.4"}
LACKING = [
    ({"python3": "3.9.18"}, "python3.11"),
    ({"python3": "3.15.1"}, "python3.11"),
    # As on EL 8, whose setpriv has no --pdeathsig.
    ({"python3": "3.6.8", "python3.11": "3.11.9", "util-linux": "2.32.1"}, "util-linux >= 2.33"),
]


@pytest.mark.parametrize(("packages", "lacks"), [*((one, "") for one in ELS.values()), *LACKING])
def test_rpm_installs_on_an_el_only_with_its_dependencies(
    built: Path, tmp_path: Path, packages: dict[str, str], lacks: str
) -> None:
    """No EL is reached from here: a database that has its packages by name."""
    stubs = [_stub(tmp_path, name, version) for name, version in (BASE | packages).items()]
    rpm = ["rpm", "--force-debian", "--root", str(tmp_path / "root"), "--nosignature"]
    subprocess.run(["rpmdb", *rpm[2:4], "--initdb"], check=True)
    subprocess.run([*rpm, "--install", "--justdb", *stubs], check=True)
    (package,) = built.glob(f"forestage-{RELEASES[0]}-1.*.rpm")
    done = subprocess.run([*rpm, "--upgrade", "--test", package], capture_output=True, text=True)
    assert (done.returncode == 0) == (not lacks), done.stderr
    assert lacks in done.stderr


def _stub(folder: Path, name: str, version: str) -> str:
    """An empty package of that name."""
    config = folder / f"{name}.yaml"
    config.write_text(f"name: {name}\narch: all\nversion: {version}\nversion_schema: none\n")
    nfpm = REPO / "packaging/.venv/bin/nfpm"
    target = folder / f"{name}.rpm"
    pack = [nfpm, "package", "--config", config, "--packager", "rpm", "--target", target]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    return str(target)


def test_package_has_each_extension_module_for_each_python_and_needs_only_glibc_2_17(
    built: Path, tmp_path: Path
) -> None:
    (package,) = built.glob(f"forestage_{RELEASES[0]}-1_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path], check=True)
    found: dict[str, set[str]] = {}
    for module in (tmp_path / HOME.lstrip("/")).rglob("*.so"):
        name, python, *_ = module.name.split(".")
        found.setdefault(str(module.with_name(name)), set()).add(python.split("-")[1])
        shown = subprocess.run(
            ["objdump", "-T", module], capture_output=True, text=True, check=True
        )
        needed = {
            tuple(map(int, one.split("."))) for one in re.findall(r"GLIBC_([\d.]+)", shown.stdout)
        }
        assert max(needed) <= (2, 17), module
    assert len(found) > 10
    assert set(map(frozenset, found.values())) == {frozenset(("310", "311", "312", "313", "314"))}


def test_companion_package_is_named_by_slurm_and_distribution_and_conflicts_with_other_slurms(
    built: Path, tmp_path: Path
) -> None:
    """apt takes it off before it upgrades Slurm past it, and no srun ever meets the two."""
    (package,) = built.glob(f"forestage-spank_{RELEASES[0]}*.deb")
    assert re.fullmatch(
        rf"forestage-spank_{RELEASES[0]}\+slurm22\.05\.8-1~deb12_\w+\.deb", package.name
    )
    show = ["dpkg-deb", "--field", package, "Conflicts", "Depends", "Suggests"]
    shown = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    assert "slurmd (<< 22.05), slurmd (>= 22.06), slurm-client (<< 22.05)" in shown
    # A login node takes it alone.
    assert re.search(r"^Depends: libc6 \(>= 2\.\d+\)$", shown, re.MULTILINE)
    assert "Suggests: forestage\n" in shown


def test_packages_of_two_releases_from_one_source_have_equal_files(
    built: Path, tmp_path: Path
) -> None:
    sums = []
    for release in RELEASES:
        (package,) = built.glob(f"forestage_{release}*.deb")
        control = tmp_path / release
        subprocess.run(["dpkg-deb", "--control", package, control], check=True)
        sums.append((control / "md5sums").read_text())
    assert sums[0] == sums[1]
