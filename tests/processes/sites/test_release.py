"""packaging/release: what it refuses, and that it compares; its builds are mostly stand-ins."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
DATED = "# Changelog\n\n## 1.2.3 (2026-11-24)\n"
SAME = "echo bytes"
# Stand-ins of packaging/prepare, which makes tools, and packaging/build, which makes artefacts.
PREPARE = """\
#!/bin/sh
mkdir -p "$(dirname "$0")/.venv/bin"; cd "$(dirname "$0")/.venv/bin"
ln -sf "$(command -v python3)" python3
printf '#!/bin/sh\\nwhile [ "$1" != -o ]; do shift; done; echo {} >"$2"\\n' >cyclonedx-py
chmod 755 cyclonedx-py
"""
BUILD = """\
#!/bin/sh
set -e
out=$2; mkdir -p "$out" tree/usr/lib/forestage/bin
echo 'home = /usr/bin' >tree/usr/lib/forestage/pyvenv.cfg
tar -C tree --mtime=@0 --sort=name -cJf data.tar.xz .
ar rD "$out/forestage_1.2.3-1_amd64.deb" data.tar.xz
WHAT >"$out/forestage-1.2.3.rpm"
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    repo = tmp_path / "repo"
    (repo / "packaging").mkdir(parents=True)
    (repo / "pyproject.toml").write_text('version = "1.2.3"\n')
    (repo / "packaging/release").write_bytes((REPO / "packaging/release").read_bytes())
    (repo / "packaging/prepare").write_text(PREPARE)
    (repo / "packaging/build").write_text(
        BUILD.replace("set -e\n", 'set -e\ncd "$(dirname "$0")/.."\n').replace("WHAT", SAME)
    )
    for script in (repo / "packaging").iterdir():
        script.chmod(0o755)
    (repo / ".gitignore").write_text("/dist/\n")
    (repo / "CHANGELOG.md").write_text(DATED)
    git(repo, "init", "--quiet")
    commit(repo)
    return repo


def git(repo: Path, *argv: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", repo, *who, *argv], check=True)


def commit(repo: Path) -> None:
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--allow-empty", "--message=all")


def release(repo: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([repo / "packaging/release"], capture_output=True, text=True)


def test_release_has_sums_of_all_artefacts_and_an_sbom(repo: Path) -> None:
    done = release(repo)
    assert done.returncode == 0, done.stderr
    names = {line.split("  ")[1] for line in (repo / "dist/SHA256SUMS").read_text().splitlines()}
    assert names == {
        "forestage_1.2.3-1_amd64.deb",
        "forestage-1.2.3.rpm",
        "forestage-1.2.3.cdx.json",
    }
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=repo / "dist", check=True)


@pytest.mark.parametrize("what", ["pwd", "date +%Z", 'echo "$RANDOM$$"'])
def test_release_is_refused_if_two_builds_differ(repo: Path, what: str) -> None:
    build = repo / "packaging/build"
    build.write_text(build.read_text().replace(SAME, what))
    commit(repo)
    done = release(repo)
    assert done.returncode == 1
    assert "forestage-1.2.3.rpm" in done.stderr
    assert "two builds of" in done.stderr
    assert not (repo / "dist").exists()


@pytest.mark.parametrize(
    "text",
    [
        "# Changelog\n\n## Unreleased\n",
        "# Changelog\n\n## 1.2.2 (2026-11-24)\n",
        "## 1.2.3\n",
        f"## Unreleased\n{DATED}",
    ],
)
def test_release_is_refused_if_the_changelog_lacks_version_and_date(repo: Path, text: str) -> None:
    (repo / "CHANGELOG.md").write_text(text)
    commit(repo)
    done = release(repo)
    assert (done.returncode, "make it '## 1.2.3 (" in done.stderr) == (1, True)


def test_release_is_refused_if_the_work_tree_has_changes(repo: Path) -> None:
    (repo / "new").touch()
    done = release(repo)
    assert (done.returncode, "the work tree has changes" in done.stderr) == (1, True)


@pytest.mark.long
def test_release_of_this_checkout_is_reproducible_and_its_sbom_lists_the_pinned_requirements(
    tmp_path: Path,
) -> None:
    """Of what lies here, committed or not, in a clone whose change log has a date."""
    repo = tmp_path / "repo"
    git(REPO, "clone", "--quiet", "--no-hardlinks", str(REPO), str(repo))
    for folder in ("src", "packaging", "docs", "prolog", "epilog", "etc"):
        left_out = shutil.ignore_patterns(".venv", "__pycache__", "*.egg-info")
        shutil.copytree(REPO / folder, repo / folder, dirs_exist_ok=True, ignore=left_out)
    log = repo / "CHANGELOG.md"
    log.write_text(re.sub("^## .*$", "## 0.1.0 (2026-11-24)", log.read_text(), count=1, flags=re.M))
    commit(repo)
    done = release(repo)
    assert done.returncode == 0, done.stderr
    assert len(list((repo / "dist").glob("forestage*"))) >= 5
    parts = json.loads((repo / "dist/forestage-0.1.0.cdx.json").read_text())["components"]
    found = {f"{one['name'].lower().replace('_', '-')}=={one['version']}" for one in parts}
    pinned = (REPO / "packaging/requirements.txt").read_text().splitlines()
    assert found == {line for line in pinned if "==" in line}
