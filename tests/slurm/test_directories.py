"""Where hooks and commands resolve and make names, traced: nothing there can be held by a user.

docs/security.md has the list (### Directories that users cannot list), and the reasons.
"""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest
from jobs import CACHE, Site
from name_trace import STRACE, NameTrace, read_trace
from spec import ALICE, REPO, ClusterSpec
from steps import accompanied

from forestage.hooks.boundary import IMAGE_OPTION

NODE = "n1"
PYTHON = "/usr/lib/forestage/bin/python3"
PATIENT = (
    "from forestage.hooks import hook_worker; from forestage.system import probe;"
    " hook_worker.PROBE_INTERVAL = hook_worker.HANG_AFTER = probe.LIMIT = 600.0;"
    " probe.find_hang.__defaults__ = (600.0,); "
)
"""A process that is traced is slow, and its disk is not to count as one that hangs."""

LOOK = """
import json, os, sys
def facts(path):
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    found = os.stat(path)
    return found.st_mode, found.st_uid, found.st_gid
print(json.dumps({path: facts(path) for path in json.load(sys.stdin)}))
"""
FIRST_USER = 1000  # below are the system's own


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied(1)


class Traced:
    """Hooks as slurmd runs them, and commands as root does; what they did with names."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def run(self, name: str, argv: list[str], depth: int, environ: dict[str, str]) -> NameTrace:
        file = f"/shared/{name}.trace"
        words = [*STRACE, "-o", file, "env", "-i", *(f"{k}={v}" for k, v in environ.items())]
        self.site.root(["sh", "-c", f"cd / && exec {shlex.join([*words, *argv])}"], NODE)
        return read_trace(self.site.source(file).read_text(errors="replace"), depth)

    def hook(self, name: str, job: int, image: str = "") -> NameTrace:
        """Slurm waits for the guard, the interpreter, and the child that does the work."""
        environ = {
            "SLURM_CONF": "/etc/slurm/slurm.conf",
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_USER": ALICE.name,
            "SLURM_JOB_UID": str(ALICE.uid),
            "SLURM_JOB_GID": str(ALICE.uid),
            "SLURM_JOB_PARTITION": "all",
            "SLURM_JOB_WORK_DIR": "/shared",
            "SLURMD_NODENAME": NODE,
        } | ({IMAGE_OPTION: image} if image else {})
        guard = (REPO / name / "forestage").read_text()
        if image:
            guard = guard.replace("-c 'from", f"-c '{PATIENT}from")
        return self.run(f"{name}.{job}", ["/bin/sh", "-c", guard], 2, environ)

    def command(self, *words: str) -> NameTrace:
        """An admin waits for the command itself."""
        script = f"{PATIENT}import sys; from forestage.commands import console_script as entry"
        script += "; sys.exit(entry.main())"
        argv = [PYTHON, "-I", "-c", script, *words]
        return self.run(words[0], argv, 0, {"PATH": "/usr/sbin:/usr/bin"})

    def modes(self, paths: list[str]) -> dict[str, tuple[int, int, int]]:
        """Mode, uid and gid of each directory; of one that is gone, those of the one above."""
        argv = ["python3", "-c", LOOK]
        ran = self.site.cluster.run(argv, user="root", node=NODE, input=json.dumps(paths))
        return {path: tuple(facts) for path, facts in json.loads(ran.stdout).items()}


def listed() -> dict[str, str]:
    """The list: each directory, and what users may do there."""
    text = (REPO / "docs/security.md").read_text()
    section = text.split("### Directories that users cannot list")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("| ") and "`/" in line:
            names, _, users = (cell.strip() for cell in line.strip("|").split("|"))
            found |= dict.fromkeys(re.findall(r"`(/[^`]*)`", names), users)
    return found


def entry_of(path: str, known: dict[str, str]) -> str:
    """What the list says of a directory; "DIRECTORY/*" in it has all that is below."""
    if path in known:
        return known[path]
    above = path
    while above != "/":
        if found := known.get(f"{above}/*"):
            return found
        above = os.path.dirname(above)
    return ""


def may(facts: tuple[int, int, int], bits: int) -> bool:
    """Whether users have one of these bits (of the others' class) in a directory's mode."""
    mode, uid, gid = facts
    theirs = mode & bits
    theirs |= mode >> 3 & bits if gid >= FIRST_USER else 0
    return bool(theirs | (mode >> 6 & bits if uid >= FIRST_USER else 0))


def test_hooks_and_commands_resolve_names_only_in_directories_that_no_user_can_lock(
    site: Site,
) -> None:
    image = site.image("traced")
    traced = Traced(site)
    site.root(["chmod", "0750", "/var/log/forestage"], NODE)  # as the package makes it
    assert site.srun(image).code == 0
    site.command("sweep")  # a Prolog was called: users can list no directory of ours from now on
    traces = {}
    for number, way in enumerate(("bind", "spank"), 9001):
        site.configure(redirect=way)
        assert site.srun(image).code == 0
        site.await_stagers()
        traces[f"hit with {way}"] = traced.hook("prolog", number, image)
        traces[f"Epilog with {way}"] = traced.hook("epilog", number)
        assert site.results(number) == ["hit"]
    traces["bare hook"] = traced.hook("prolog", 9003)
    for word in ("off", "on", "sweep", "status"):
        traces[word] = traced.command(word)
    known = listed()
    paths = {path for trace in traces.values() for path in (*trace.made, *trace.waited)}
    modes = traced.modes(sorted(paths))
    made = {path for trace in traces.values() for path in trace.made}
    assert {"/run/forestage", "/etc/forestage", "/var/log/forestage"} <= made
    assert any(path.startswith(CACHE) for path in made)

    unlisted = sorted(path for path in made if not entry_of(path, known))
    assert unlisted == [], "directories that the list of docs/security.md does not have"
    bad = [
        (name, path, line)
        for name, trace in traces.items()
        for path, line in sorted(trace.waited.items())
        if may(modes[path], 0o2) or (path in made and may(modes[path], 0o4))
        if not entry_of(path, known).startswith("may list")
    ]
    assert not bad, "\n".join(map(str, bad))
