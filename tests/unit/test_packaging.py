"""What the packages consist of agrees with what the program, its hooks and its units expect."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

from forestage.config import Config
from forestage.paths import Places

REPO = Path(__file__).resolve().parents[2]
PACKAGING = REPO / "packaging"
SCRIPTS = sorted((PACKAGING / "scripts").iterdir())
WHEELS = runpy.run_path(str(PACKAGING / "wheels"))
PYTHONS: tuple[str, ...] = WHEELS["PYTHONS"]
# For Markdown and source code, of which no command shows any.
LEFT_OUT = {"markdown-it-py": "markdown_it", "mdurl": "mdurl", "pygments": "pygments"}


def pins() -> dict[str, str]:
    lines = (PACKAGING / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str], python: str, seen: set[str]) -> set[str]:
    """The names of all that these requirements bring along with that Python."""
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": "", "python_version": python}):
            continue
        if plain(wanted.name) not in seen | LEFT_OUT.keys():
            seen.add(plain(wanted.name))
            try:
                brings = importlib.metadata.requires(wanted.name) or []
            except importlib.metadata.PackageNotFoundError:  # what this Python does not need
                brings = []
            needed(brings, python, seen)
    return seen


@pytest.mark.parametrize("python", PYTHONS)
def test_dependency_of_the_package_has_one_version(python: str) -> None:
    """Else two builds of one commit differ, and nobody has tested the second."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert needed(project["dependencies"], python, set()) <= set(pins())
    for text in project["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins()[plain(wanted.name)]), text


def test_no_command_needs_what_is_left_out() -> None:
    """All of the program is imported where none of it can be, and something is shown."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({[*LEFT_OUT.values()]}))\n"
        "import importlib, pkgutil, rich.live, rich.table, forestage\n"
        "for one in pkgutil.walk_packages(forestage.__path__, 'forestage.'):\n"
        "    importlib.import_module(one.name)\n"
        "from forestage.cli.main import main\n"
        "sys.argv = ['forestage', '--help']\n"
        "main()\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "explain" in shown.stdout


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_wheels_of_several_pythons_share_one_directory(tmp_path: Path) -> None:
    unpack: Callable[[Path, Path], None] = WHEELS["unpack"]
    for python in ("310", "311"):
        own = f"x/fast.cpython-{python}-x86_64-linux-gnu.so"
        files = {"x/__init__.py": "same", own: python, "x-1.dist-info/WHEEL": python}
        unpack(wheel(tmp_path / f"{python}.whl", **files), tmp_path / "site")
    there = {str(one.relative_to(tmp_path / "site")) for one in (tmp_path / "site").rglob("*.*")}
    names = [f"x/fast.cpython-{python}-x86_64-linux-gnu.so" for python in ("310", "311")]
    assert there == {"x/__init__.py", *names}


def test_wheels_that_bring_different_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """Else one of two Pythons would run what was made for the other."""
    unpack: Callable[[Path, Path], None] = WHEELS["unpack"]
    unpack(wheel(tmp_path / "a.whl", **{"x/__init__.py": "one"}), tmp_path / "site")
    with pytest.raises(SystemExit, match=r"x/__init__\.py"):
        unpack(wheel(tmp_path / "b.whl", **{"x/__init__.py": "two"}), tmp_path / "site")


def test_packages_name_the_pythons_that_they_serve() -> None:
    """In their dependencies, and where postinstall looks for one."""
    first, last = PYTHONS[0], PYTHONS[-1]
    beyond = f"3.{int(last.removeprefix('3.')) + 1}"
    overrides = yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())["overrides"]
    deb, rpm = overrides["deb"]["depends"], overrides["rpm"]["depends"]
    assert {f"python3 (>= {first})", f"python3 (<< {beyond})"} <= set(deb)
    assert f"(python3 >= {first} with python3 < {beyond})" in rpm[0]
    (names,) = re.findall(r"for name in (.*);", _commands("postinstall"))
    assert names.split() == ["python3", *(f"python{one}" for one in reversed(PYTHONS))]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == f">={first}"
    assert project["tool"]["mypy"]["python_version"] == first


@pytest.mark.parametrize(
    ("python3", "others", "chosen"),
    [
        ("3.11", [], "python3"),  # Debian 12
        ("3.9", ["3.11", "3.12"], "python3.12"),  # EL 9
        ("", ["3.11"], "python3.11"),  # EL 8 without a default
        ("3.15", ["3.13"], "python3.13"),  # newer than what the package has modules for
    ],
)
def test_postinstall_chooses_the_nodes_python(
    tmp_path: Path, python3: str, others: list[str], chosen: str
) -> None:
    assert _postinstall(tmp_path, python3, others).returncode == 0
    link = tmp_path / "lib/forestage/bin/python3"
    assert link.readlink() == tmp_path / "bin" / chosen


def test_postinstall_without_a_python_says_so_and_has_hooks_in_place(tmp_path: Path) -> None:
    done = _postinstall(tmp_path, "3.9", [])
    assert (done.returncode, "no Python 3.10 to 3.14" in done.stderr) == (1, True)
    assert (tmp_path / "libexec/forestage/prolog").exists(), "slurm.conf may name it already"


def _postinstall(root: Path, python3: str, others: list[str]) -> subprocess.CompletedProcess[str]:
    """postinstall after dpkg's trigger, with these Pythons in /usr/bin."""
    named = {"python3": python3} if python3 else {}
    named |= {f"python{one}": one for one in others}
    for folder in ("bin", "lib/forestage/bin", "lib/forestage/hooks"):
        (root / folder).mkdir(parents=True)
    for name, version in named.items():
        (root / "bin" / name).write_text(f"#!/bin/sh\necho {version}\n")
        (root / "bin" / name).chmod(0o755)
    for one in PYTHONS:
        (root / "lib/forestage/lib" / f"python{one}").mkdir(parents=True)
    for hook in ("prolog", "epilog"):
        (root / "lib/forestage/hooks" / hook).touch()
    (root / "share/forestage").mkdir(parents=True)
    (root / "share/forestage/forestage.yaml").write_text("# a key of this release\n")
    script = (PACKAGING / "scripts/postinstall").read_text()
    for old in ("/usr/lib/forestage", "/usr/libexec", "/usr/bin", "/usr/share", "/etc"):
        assert old in script
        script = script.replace(old, f"{root}{old.removeprefix('/usr')}")
    command = ["sh", "-c", script, "postinstall", "triggered"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("own", ["", "sources: [/lustre]\n"])
def test_upgrade_asks_nothing_about_the_configuration(tmp_path: Path, own: str) -> None:
    """dpkg asks about a file of the package, and fails where nobody answers: staging stays off."""
    contents = yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())["contents"]
    assert [one for one in contents if one.get("type", "").startswith("config")] == []
    file = tmp_path / "etc/forestage/forestage.yaml"
    if own:
        file.parent.mkdir(parents=True)
        file.write_text(own)
    assert _postinstall(tmp_path, "3.11", []).returncode == 0
    assert file.read_text() == (own or "# a key of this release\n")


def test_each_script_is_run_and_is_plain_sh() -> None:
    config = yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())
    assert set(config["scripts"].values()) == {f"scripts/{path.name}" for path in SCRIPTS}
    for script in SCRIPTS:
        subprocess.run(["sh", "-n", script], check=True)
        assert script.read_text().startswith("#!/bin/sh\n")


def test_hooks_that_slurm_names_are_no_files_of_the_package() -> None:
    """They would go with it, and a Prolog that is missing drains its node."""
    directory = str(Places().prolog.parent)
    assert directory == "/usr/libexec/forestage"
    said = (PACKAGING / "nfpm.yaml").read_text() + (PACKAGING / "build").read_text()
    assert directory not in said
    assert directory in (PACKAGING / "scripts/postinstall").read_text()
    assert not re.search(rf"rm .*{directory}", _commands("postremove") + _commands("preremove"))


def test_upgrade_switches_on_what_it_switched_off() -> None:
    scripts = _commands("preinstall") + _commands("preremove")
    said = re.findall(r'echo "(forestage [^"]+)" >/run', scripts)
    pattern = re.search(r"grep -qxE '([^']+)'", _commands("postinstall"))
    assert pattern
    assert len(said) == 2
    assert all(re.fullmatch(pattern[1], text) for text in said)
    assert Places().disabled == Path("/run/forestage/disabled")


def _commands(script: str) -> str:
    """Without what it only prints to people."""
    lines = (PACKAGING / "scripts" / script).read_text().splitlines()
    return "\n".join(x for x in lines if not re.match(r'\s*(#|echo "[^"]*"$)', x))


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("", ["own"]),
        ("metrics: {textfile: /own/x.prom}\n", ["default"]),
        ("metrics: [\n", ["own"]),  # then the default file is what was written
        ("metrics: {textfile: null}\n", ["default", "own"]),
    ],
)
def test_removed_package_leaves_no_metrics(tmp_path: Path, said: str, left: list[str]) -> None:
    """By node exporter, to which a file is as good as new: all would be well, on each node."""
    etc = tmp_path / "etc/forestage"
    files = {"default": Path(f"{tmp_path}{Config().metrics.textfile}")}
    files["own"] = tmp_path / "own/x.prom"
    for folder in (etc, tmp_path / "run", *(file.parent for file in files.values())):
        folder.mkdir(parents=True)
    for file in files.values():
        file.touch()
    (etc / "forestage.yaml").write_text(said)
    script = (PACKAGING / "scripts/preremove").read_text()
    for old, new in (
        ("/usr/lib/forestage/bin/forestage", "true"),
        ("/usr/lib/forestage/bin/python3", sys.executable),
        ("/run/", f"{tmp_path}/run/"),
        ("paths.Places().etc", f'paths.Path("{etc}")'),
        ('"$textfile" ||', f'"{tmp_path}$textfile" ||'),
    ):
        assert old in script
        script = script.replace(old, new)
    subprocess.run(["sh", "-c", script, "preremove", "remove"], check=True)
    assert [name for name, file in files.items() if file.exists()] == left


def test_users_find_the_command() -> None:
    """pack, publish and warm are for them; sbin is not in a Debian user's PATH."""
    contents = yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())["contents"]
    (link,) = [one["dst"] for one in contents if one.get("type") == "symlink"]
    assert link == "/usr/bin/forestage"


def test_file_that_the_documents_name_is_installed() -> None:
    """Units, alerts and the dashboard: who has the package has no checkout to copy from."""
    said = (REPO / "docs/operations.md").read_text()
    named = re.findall(r"/usr/share/forestage/([\w./]+)", said)
    assert named
    build = (PACKAGING / "build").read_text()
    assert [name for name in named if name not in build or not (PACKAGING / name).is_file()] == []
    assert "packaging/" not in said


def test_links_of_the_shipped_documents_lead_to_shipped_files() -> None:
    """Below /usr/share/doc they are as in the checkout, less what is not shipped."""
    build = (PACKAGING / "build").read_text()
    (names,) = re.findall(r"for file in (README.*); do", build)
    shipped = [REPO / name for name in names.split()]
    assert 'cp -r "$repo/docs" "$doc/docs"' in build
    shipped += (REPO / "docs").rglob("*")
    dead = [
        f"{page.relative_to(REPO)}: {link}"
        for page in shipped
        if page.suffix == ".md"
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in link and (page.parent / link).resolve() not in shipped
    ]
    assert dead == []


@pytest.mark.parametrize(
    ("file", "installed"),
    [("health", "/usr/lib/forestage/bin/forestage-health"),
     ("nhc/forestage.nhc", "/usr/share/forestage/nhc/forestage.nhc")],
)  # fmt: skip
def test_health_check_lies_where_the_docs_say(file: str, installed: str) -> None:
    assert (PACKAGING / file).is_file()
    assert re.search(rf"packaging/{file}\"|[ =]{file}\b", (PACKAGING / "build").read_text())
    assert installed in (REPO / "docs/operations.md").read_text()


@pytest.mark.parametrize(
    ("manager", "asked"),
    [
        ("apt-get", "apt-get install -y --no-install-recommends gcc libc6-dev make binutils gzip"),
        ("dnf", "dnf install -y --setopt=install_weak_deps=False gcc glibc-devel make binutils"),
    ],
)
def test_prepare_asks_for_what_a_build_needs_and_no_daemon(
    tmp_path: Path, manager: str, asked: str
) -> None:
    """On a machine that has nothing; the package manager is a stand-in that notes its words."""
    said = tmp_path / "said"
    (tmp_path / manager).write_text(f'#!/bin/sh\necho {manager} "$@" >>{said}\n')
    (tmp_path / manager).chmod(0o755)
    for tool in ("sh", "dirname", "env", "mktemp", "rm", "id", "cat", "cmp"):
        (tmp_path / tool).symlink_to(Path("/usr/bin", tool))
    home = tmp_path / "home"
    home.mkdir()
    for name in ("prepare", "build-requirements.txt"):
        (home / name).write_bytes((PACKAGING / name).read_bytes())
    env = {"PATH": str(tmp_path), "CC": "none"}
    script = (home / "prepare").read_text().replace('"$(id -u)" = 0', "0 = 0")
    (home / "prepare").write_text(script)
    subprocess.run(["/bin/sh", str(home / "prepare")], env=env, capture_output=True)
    words = said.read_text()
    assert asked in words
    assert "slurm-devel" in words or "libslurm-dev" in words
    assert not re.search("slurmctld|slurmd|gluster|prometheus|munge", words)


def test_completions_are_made_for_each_shell(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PACKAGING / "completions", tmp_path], check=True)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in made} == {"forestage", "_forestage", "forestage.fish"}
    assert all("_FORESTAGE_COMPLETE" in path.read_text() for path in made)
