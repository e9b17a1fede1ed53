"""What the packages consist of agrees with what the program, its hooks and its units expect."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from forestage.config import Config

REPO = Path(__file__).resolve().parents[2]
PACKAGING = REPO / "packaging"
SCRIPTS = sorted((PACKAGING / "scripts").iterdir())
WHEELS = runpy.run_path(str(PACKAGING / "wheels"))
PYTHONS: tuple[str, ...] = WHEELS["PYTHONS"]
# For Markdown and source code, of which no command shows any.
LEFT_OUT = {"markdown-it-py": "markdown_it", "mdurl": "mdurl", "pygments": "pygments"}


def test_program_imports_without_the_modules_left_out_of_the_package() -> None:
    """All of the program is imported where none of it can be, and something is shown."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({[*LEFT_OUT.values()]}))\n"
        "import importlib, pkgutil, rich.live, rich.table, forestage\n"
        "for one in pkgutil.walk_packages(forestage.__path__, 'forestage.'):\n"
        "    importlib.import_module(one.name)\n"
        "from forestage.commands.main import main\n"
        "sys.argv = ['forestage', '--help']\n"
        "main()\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "explain" in shown.stdout


@pytest.mark.parametrize(
    ("python3", "others", "chosen"),
    [
        ("3.11", [], "python3"),  # Debian 12
        ("3.9", ["3.11", "3.12"], "python3.12"),  # EL 9
        ("", ["3.11"], "python3.11"),  # no default at all
        ("3.15", ["3.13"], "python3.13"),  # newer than what the package has modules for
    ],
)
def test_postinstall_links_the_nodes_best_supported_python(
    tmp_path: Path, python3: str, others: list[str], chosen: str
) -> None:
    assert _postinstall(tmp_path, python3, others).returncode == 0
    link = tmp_path / "lib/forestage/bin/python3"
    assert link.readlink() == tmp_path / "bin" / chosen


def test_postinstall_without_a_supported_python_exits_1_but_installs_the_hooks(
    tmp_path: Path,
) -> None:
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
def test_package_upgrade_keeps_the_admins_configuration_without_a_question(
    tmp_path: Path, own: str
) -> None:
    """dpkg asks about a file of the package, and fails where nobody answers: staging stays off."""
    contents = yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())["contents"]
    assert [one for one in contents if one.get("type", "").startswith("config")] == []
    file = tmp_path / "etc/forestage/forestage.yaml"
    if own:
        file.parent.mkdir(parents=True)
        file.write_text(own)
    assert _postinstall(tmp_path, "3.11", []).returncode == 0
    assert file.read_text() == (own or "# a key of this release\n")


def test_each_package_script_is_used_and_is_plain_sh() -> None:
    config = yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())
    assert set(config["scripts"].values()) == {f"scripts/{path.name}" for path in SCRIPTS}
    for script in SCRIPTS:
        subprocess.run(["sh", "-n", script], check=True)
        assert script.read_text().startswith("#!/bin/sh\n")


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("", ["own"]),  # no record: it was always the default
        ('{"path": "/own/x.prom"}', ["default"]),
        ("{", ["own"]),
        ('{"path": null}', ["default", "own"]),
    ],
)
def test_removed_package_deletes_its_metrics_file(
    tmp_path: Path, said: str, left: list[str]
) -> None:
    """By node exporter, to which a file is as good as new: all would be well, on each node."""
    record = tmp_path / "var/lib/forestage/textfile.json"
    files = {"default": Path(f"{tmp_path}{Config().metrics.textfile}")}
    files["own"] = tmp_path / "own/x.prom"
    for folder in (record.parent, tmp_path / "run", *(file.parent for file in files.values())):
        folder.mkdir(parents=True)
    for file in files.values():
        file.touch()
    if said:
        record.write_text(said)
    script = (PACKAGING / "scripts/preremove").read_text()
    for old, new in (
        ("/usr/lib/forestage/bin/forestage", "true"),
        ("/usr/lib/forestage/bin/python3", sys.executable),
        ("/run/", f"{tmp_path}/run/"),
        ("paths.NodePaths()", f'paths.NodePaths(paths.Path("{tmp_path}"))'),
        ('"$textfile" ||', f'"{tmp_path}$textfile" ||'),
    ):
        assert old in script
        script = script.replace(old, new)
    subprocess.run(["sh", "-c", script, "preremove", "remove"], check=True)
    assert [name for name, file in files.items() if file.exists()] == left


@pytest.mark.parametrize(
    ("manager", "asked"),
    [
        ("apt-get", "apt-get install -y --no-install-recommends gcc libc6-dev make binutils gzip"),
        ("dnf", "dnf install -y --setopt=install_weak_deps=False gcc glibc-devel make binutils"),
    ],
)
def test_packaging_prepare_installs_build_tools_and_no_daemon(
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


def test_shell_completions_are_generated_for_bash_zsh_and_fish(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PACKAGING / "completions", tmp_path], check=True)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in made} == {"forestage", "_forestage", "forestage.fish"}
    assert all("_FORESTAGE_COMPLETE" in path.read_text() for path in made)


@pytest.mark.parametrize(("called", "mode"), [(True, 0o711), (False, 0o755)])
def test_package_upgrade_makes_the_configuration_directory_unlistable_where_hooks_run(
    tmp_path: Path, called: bool, mode: int
) -> None:
    """A login node has the same package; conf.d may not be there."""
    etc, run = tmp_path / "etc/forestage", tmp_path / "run/forestage"
    for folder in (etc, run):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    if called:
        (run / "called.prolog").touch()
    script = (PACKAGING / "scripts/postinstall").read_text()
    part = script[script.index("# Where hooks run") :].partition("\nfi\n")[0] + "\nfi\n"
    part = part.replace("/run/", f"{tmp_path}/run/").replace("/etc/", f"{tmp_path}/etc/")
    subprocess.run(["sh", "-euc", part], check=True)
    assert etc.stat().st_mode & 0o7777 == mode
