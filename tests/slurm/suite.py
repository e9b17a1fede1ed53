"""Trees of other distributions: for a cluster to run in, or to be booted.

Each is made once by debootstrap, from the mirror of the machine's own apt (Ubuntu's: one that the
environment names), below a directory that is root's alone. In a cluster's tree forestage lies where
a package would put it, in a virtual environment of the tree's own Python. Needs a network the first
time. Standard library only, as `cluster` itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomllib
from host import ClusterError
from mirror import mirror, proxy, ubuntu_mirror
from spec import REPO, ClusterSpec

TREES = Path("/var/cache/forestage-test")
PACKAGES = (
    "slurmd,slurmctld,slurm-client,munge,libslurm-dev,gcc,libc6-dev,make,python3,python3-venv,"
    "squashfs-tools,squashfuse,fuse3,rsync,acl,attr,iproute2,mount,util-linux,e2fsprogs,procps"
)
VENV = "usr/lib/forestage"
PRIVATE = ("unshare", "--mount", "--propagation", "private")

INIT = "ca-certificates,systemd,systemd-sysv,dbus"
# Debian 12 has neither Ubuntu's keys nor scripts for all of its releases: the keys come from Debian
# 13's package, and all scripts since `gutsy` are that one.
FRESH: Mapping[str, str] = {"trixie": "ubuntu-keyring,"}
UBUNTU = ("jammy", "noble")
KEYS = "usr/share/keyrings/ubuntu-archive-keyring.gpg"

# Nodes share one kernel, and the release that Slurm 22.05 is of does not know this word.
NO_CGROUPS = {"/etc/slurm/cgroup.conf": "CgroupPlugin=disabled\n"}
SUITES: Mapping[str, Mapping[str, str]] = {"bookworm": {}, "trixie": NO_CGROUPS, "sid": NO_CGROUPS}
# Debian 12 with what writes a real accounting.
ACCOUNTING = "accounting"
MORE: Mapping[str, tuple[str, str]] = {
    ACCOUNTING: ("bookworm", ",slurmdbd,mariadb-server-core,mariadb-client-core")
}


def on_suite(spec: ClusterSpec, suite: str) -> ClusterSpec:
    """The same cluster on that suite's Slurm. Makes the tree if it is not there."""
    tree = prepared(suite)
    files = {**SUITES.get(suite, {}), **spec.files}
    return dataclasses.replace(spec, lower=str(tree), venv=str(tree / VENV), files=files)


def prepared(suite: str) -> Path:
    """The suite's tree, with Slurm and forestage."""
    release, more = MORE.get(suite, (suite, ""))
    with tree(suite, release, PACKAGES + more) as made:
        if _read(made / "project") != _project():
            _make_venv(made)
            (made / "project").write_text(_project())
        return made


def fresh(suite: str) -> Path:
    """As the distribution's installer leaves it: with systemd, without Slurm and forestage.

    Not to be changed.
    """
    with tree(f"fresh-{suite}", suite, FRESH.get(suite, "") + INIT) as made:
        return made


@contextlib.contextmanager
def tree(name: str, suite: str, packages: str) -> Iterator[Path]:
    """A tree with these packages, locked. What a killed run has left of one is not taken for one.

    Nor does what a killed debootstrap has mounted stay, to be deleted with the rest.
    """
    TREES.mkdir(mode=0o700, parents=True, exist_ok=True)
    made, unfinished = TREES / name, TREES / f"{name}.new"
    with (TREES / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _read(made / "packages") != packages:
            for old in (made, unfinished):
                shutil.rmtree(old, ignore_errors=True)
            uri, options, script = mirror(), ["--variant=minbase", f"--include={packages}"], []
            if suite in UBUNTU:
                uri, script = ubuntu_mirror(), ["gutsy"]
                # Slurm is in universe.
                options += [f"--keyring={fresh('trixie') / KEYS}", "--components=main,universe"]
            argv = [*PRIVATE, "debootstrap", *options, suite, str(unfinished), uri, *script]
            _run(argv, env=os.environ | proxy(uri))
            shutil.rmtree(unfinished / "var/cache/apt/archives", ignore_errors=True)
            (unfinished / "packages").write_text(packages)
            unfinished.rename(made)
        yield made


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _project() -> str:
    """What a virtual environment is good for: these dependencies, and this checkout."""
    return f"{REPO}\n{(REPO / 'pyproject.toml').read_text()}"


def _make_venv(tree: Path) -> None:
    """The host's pip brings the wheels, so that nothing in the tree needs a network."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    pip = REPO / ".venv/bin/python3"
    if not pip.exists():
        raise ClusterError(f"{pip} is not there (run tests/prepare)")
    version = os.readlink(tree / "usr/bin/python3").removeprefix("python")
    shutil.rmtree(tree / VENV, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=tree) as directory:
        wheels = f"/{Path(directory).name}"
        download = [str(pip), "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        download += [f"--python-version={version}", f"--dest={directory}"]
        _run([*download, "editables", *wanted])
        _run_in(tree, ["python3", "-m", "venv", f"/{VENV}"])
        install = [f"/{VENV}/bin/pip", "install", "--quiet", "--no-index"]
        _run_in(tree, [*install, f"--find-links={wheels}", "--editable", str(REPO)])


def _run_in(tree: Path, argv: Sequence[str]) -> None:
    """Runs a command in the tree. Its mounts are in a namespace that ends with it."""
    inside = f"{tree}{REPO}"
    mounts = 'mkdir -p "$1"; mount --bind "$2" "$1"; mount -t proc proc "$3/proc"'
    script = f'set -e; {mounts}; root=$3; shift 3; exec chroot "$root" env -i "$@"'
    clean = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"]
    _run([*PRIVATE, "sh", "-c", script, "sh", inside, str(REPO), str(tree), *clean, *argv])


def _run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o022, env=env
    )
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)}\n{done.stdout[-4000:]}")
