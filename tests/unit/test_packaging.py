"""What the packages consist of agrees with what the program, its hooks and its units expect."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
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


def pins() -> dict[str, str]:
    lines = (PACKAGING / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str], seen: set[str]) -> set[str]:
    """The names of all that these requirements bring along, here."""
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        if plain(wanted.name) not in seen:
            seen.add(plain(wanted.name))
            needed(importlib.metadata.requires(wanted.name) or [], seen)
    return seen


def test_dependency_of_the_package_has_one_version() -> None:
    """Else two builds of one commit differ, and nobody has tested the second."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert needed(project["dependencies"], set()) <= set(pins())
    for text in project["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins()[plain(wanted.name)]), text


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


def test_completions_are_made_for_each_shell(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PACKAGING / "completions", tmp_path], check=True)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in made} == {"forestage", "_forestage", "forestage.fish"}
    assert all("_FORESTAGE_COMPLETE" in path.read_text() for path in made)
