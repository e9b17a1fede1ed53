"""What the packages consist of agrees with what the program, its hooks and its units expect."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

from forestage.paths import NodePaths

REPO = Path(__file__).resolve().parents[2]
PACKAGING = REPO / "packaging"
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
def test_each_dependency_is_pinned_to_one_version(python: str) -> None:
    """Else two builds of one commit differ, and nobody has tested the second."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert needed(project["dependencies"], python, set()) <= set(pins())
    for text in project["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins()[plain(wanted.name)]), text


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_wheels_of_several_pythons_share_one_directory(tmp_path: Path) -> None:
    unpack: Callable[[Path, Path], None] = WHEELS["unpack_wheel"]
    for python in ("310", "311"):
        own = f"x/fast.cpython-{python}-x86_64-linux-gnu.so"
        files = {"x/__init__.py": "same", own: python, "x-1.dist-info/WHEEL": python}
        unpack(wheel(tmp_path / f"{python}.whl", **files), tmp_path / "site")
    there = {str(one.relative_to(tmp_path / "site")) for one in (tmp_path / "site").rglob("*.*")}
    names = [f"x/fast.cpython-{python}-x86_64-linux-gnu.so" for python in ("310", "311")]
    assert there == {"x/__init__.py", *names}


def test_wheels_that_bring_different_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """Else one of two Pythons would run what was made for the other."""
    unpack: Callable[[Path, Path], None] = WHEELS["unpack_wheel"]
    unpack(wheel(tmp_path / "a.whl", **{"x/__init__.py": "one"}), tmp_path / "site")
    with pytest.raises(SystemExit, match=r"x/__init__\.py"):
        unpack(wheel(tmp_path / "b.whl", **{"x/__init__.py": "two"}), tmp_path / "site")


def test_deb_and_rpm_packages_depend_on_the_supported_pythons() -> None:
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


def test_hooks_named_in_slurm_conf_are_created_by_postinstall_and_survive_removal() -> None:
    """They would go with it, and a Prolog that is missing drains its node."""
    directory = str(NodePaths().prolog.parent)
    assert directory == "/usr/libexec/forestage"
    said = (PACKAGING / "nfpm.yaml").read_text() + (PACKAGING / "build").read_text()
    assert directory not in said
    assert directory in (PACKAGING / "scripts/postinstall").read_text()
    assert not re.search(rf"rm .*{directory}", _commands("postremove") + _commands("preremove"))


def test_upgrade_switches_forestage_on_again_after_switching_off() -> None:
    scripts = _commands("preinstall") + _commands("preremove")
    said = re.findall(r'echo "(forestage [^"]+)" >/run', scripts)
    pattern = re.search(r"grep -qxE '([^']+)'", _commands("postinstall"))
    assert pattern
    assert len(said) == 2
    assert all(re.fullmatch(pattern[1], text) for text in said)
    assert NodePaths().disabled == Path("/run/forestage/disabled")


def _commands(script: str) -> str:
    """Without what it only prints to people."""
    lines = (PACKAGING / "scripts" / script).read_text().splitlines()
    return "\n".join(x for x in lines if not re.match(r'\s*(#|echo "[^"]*"$)', x))


def test_command_is_linked_into_the_users_path() -> None:
    """pack, publish and warm are for them; sbin is not in a Debian user's PATH."""
    contents = yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())["contents"]
    (link,) = [one["dst"] for one in contents if one.get("type") == "symlink"]
    assert link == "/usr/bin/forestage"


def test_file_that_operations_md_names_is_installed_by_the_package() -> None:
    """Units, alerts and the dashboard: who has the package has no checkout to copy from."""
    said = (REPO / "docs/operations.md").read_text()
    named = re.findall(r"/usr/share/forestage/([\w./]+)", said)
    assert named
    build = (PACKAGING / "build").read_text()
    assert [name for name in named if name not in build or not (PACKAGING / name).is_file()] == []
    assert "packaging/" not in said


def test_links_in_packaged_documents_lead_to_packaged_files() -> None:
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
def test_health_check_is_installed_at_the_documented_path(file: str, installed: str) -> None:
    assert (PACKAGING / file).is_file()
    assert re.search(rf"packaging/{file}\"|[ =]{file}\b", (PACKAGING / "build").read_text())
    assert installed in (REPO / "docs/operations.md").read_text()
