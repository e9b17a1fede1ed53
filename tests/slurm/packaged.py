"""forestage as its packages bring it: built once, then installed, upgraded, removed on a node."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster import Cluster
from spec import NO_VENV, REPO, ClusterSpec
from suite import prepared

NODE = "n1"
HOOKS = "/usr/libexec/forestage"
RELEASES = ("0.1.0", "0.1.1")
LOWER = {"deb": "bookworm", "rpm": ""}
COMMANDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "deb": {
        "install": ("dpkg", "--install"),
        "remove": ("dpkg", "--remove"),
        "wipe": ("dpkg", "--purge"),
    },
    # Debian's own rpm: it runs the scripts as any rpm does, but knows none of Debian's packages.
    "rpm": {
        "install": ("rpm", "--force-debian", "--nodeps", "--upgrade"),
        "remove": ("rpm", "--force-debian", "--nodeps", "--erase"),
        "wipe": ("rpm", "--force-debian", "--nodeps", "--erase"),
    },
}


def build(folder: Path) -> None:
    """Both releases, both kinds: the companion of this machine's Slurm too."""
    out = ["--out", str(folder), "--version"]
    _packaging("prepare")
    for release in RELEASES:
        _packaging("build", *out, release)
        _packaging("companion", *out, release, "--kind", "rpm")


def _packaging(*argv: str) -> None:
    command = [str(REPO / "packaging" / argv[0]), *argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def spec(kind: str) -> ClusterSpec:
    """One node, which has no forestage and whose slurm.conf knows of none."""
    lower = str(prepared(LOWER[kind])) if LOWER[kind] else "/"
    return ClusterSpec(
        nodes=1,
        lower=lower,
        venv=NO_VENV,  # the package brings its own
        prolog="",
        epilog="",
        slurm_conf={"Prolog": None, "Epilog": None},
    )


class Packages:
    """What a package manager does on the node."""

    def __init__(self, cluster: Cluster, kind: str, folder: Path) -> None:
        self.cluster = cluster
        self.kind = kind
        self._inside = "/var/tmp/packages"
        target = cluster.host_path(self._inside)
        target.mkdir(parents=True, exist_ok=True)
        for package in folder.glob(f"*.{kind}"):
            shutil.copy(package, target)

    def install(self, release: str = RELEASES[0], *names: str) -> str:
        """`names`: of packages, forestage alone if none is given."""
        files = [self._file(name, release) for name in names or ("forestage",)]
        return self.root(*COMMANDS[self.kind]["install"], *files)

    def remove(self, *names: str) -> str:
        return self.root(*COMMANDS[self.kind]["remove"], *(names or ("forestage",)))

    def wipe(self) -> None:
        """Nothing stays, whatever the test has left; the next one meets a clean node."""
        for name in ("forestage-spank", "forestage"):
            self.root(*COMMANDS[self.kind]["wipe"], name, check=False)
        self.root("rm", "-rf", HOOKS, "/etc/forestage", "/run/forestage/disabled")

    def root(self, *argv: str, check: bool = True) -> str:
        done = self.cluster.run(argv, user="root", node=NODE, check=check, timeout=180)
        return done.stdout + done.stderr

    def _file(self, name: str, release: str) -> str:
        folder = self.cluster.host_path(self._inside)
        (file,) = [
            one.name for one in folder.glob(f"{name}[-_]{release}*") if one.name.endswith(self.kind)
        ]
        return f"{self._inside}/{file}"
