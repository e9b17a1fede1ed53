"""Who may import whom, and what the hooks must not load: the shape of the program, as tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forestage

PACKAGE = Path(forestage.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")

LAYERS = (
    ("errors", "units"),
    ("job", "config", "places", "clock"),
    ("settings", "asuser", "mounts", "lock", "atomic", "run"),
    ("image", "events"),
    ("cache", "lease"),
    ("copy", "evict", "redirect"),
    ("stage",),
    ("prolog", "epilog"),
    ("hooks", "metrics", "check", "slurm"),
    # What only the command line shows.
    ("exits", "screen", "source"),
    ("entries",),
    ("status", "show", "explain", "pins", "evictions"),
    ("cli",),
)
"""From below to above: a module imports only from layers below its own, never its neighbours."""

ALLOWED = {
    "subprocess": {"run"},
    "yaml": {"settings"},
    "filelock": {"lock"},
    "ctypes": {"mounts"},
    "syslog": {"hooks"},
    "click": {"cli"},
    "rich": {"cli", "screen"},
    "prometheus_client": {"metrics"},
    "pyslurm": {"slurm"},
}
"""Who may import what is costly or dangerous."""


def rank(module: str) -> int:
    ranks = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    assert module in ranks, f"{module}.py has no place in LAYERS"
    return ranks[module]


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text())


def imported(module: str) -> Iterator[str]:
    """Every module named by an import anywhere in the file, also inside functions."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(module: str) -> set[str]:
    names = (name.split(".") for name in imported(module))
    return {parts[1] for parts in names if parts[0] == "forestage" and len(parts) > 1} & set(
        MODULES
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_layers_below(module: str) -> None:
    wrong = sorted(name for name in ours(module) if rank(name) >= rank(module))
    assert not wrong, f"{module}.py must not import {', '.join(wrong)}"


@pytest.mark.parametrize("module", MODULES)
def test_costly_and_dangerous_imports_stay_behind_their_door(module: str) -> None:
    for name in {name.split(".")[0] for name in imported(module)} & set(ALLOWED):
        assert module in ALLOWED[name], f"{module}.py imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_only_run_starts_programs(module: str) -> None:
    doors = {
        "system",
        "popen",
        "posix_spawn",
        "posix_spawnp",
        "execv",
        "execve",
        "execvp",
        "spawnv",
    }
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id == "os" and node.attr in doors), (
                f"{module}.py: os.{node.attr}"
            )


def broad(handler: ast.ExceptHandler) -> bool:
    """Whether it takes everything and keeps it; one that cleans up and raises again does not."""
    caught = handler.type
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    everything = caught is None or any(
        isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in names
    )
    last = handler.body[-1]
    return everything and not (isinstance(last, ast.Raise) and last.exc is None)


def test_the_fail_open_boundary_is_the_only_broad_except() -> None:
    found = [
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ExceptHandler) and broad(node)
    ]
    assert found == ["hooks"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_broad_is_suppressed(module: str) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            names = {ast.unparse(argument) for argument in node.args}
            assert not names & {"Exception", "BaseException"}


def test_the_hooks_import_nothing_before_they_know_that_there_is_work() -> None:
    top = [node for node in tree("hooks").body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top for alias in node.names}
    assert names == {"annotations", "os", "time"}


@pytest.mark.parametrize("module", [name for name in MODULES if name != "cli"])
def test_the_environment_is_read_in_one_place(module: str) -> None:
    reads = [
        node
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name) and node.value.id == "os"
    ]  # fmt: skip
    assert not reads or module == "hooks"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_alone_can_be_imported_and_starts_nothing(module: str) -> None:
    """Cycles hide behind the order in which others import; and nothing may happen at import."""
    script = (
        "import sys\n"
        "def watch(event, args):\n"
        "    if event in ('subprocess.Popen', 'os.fork', 'os.mkdir', 'socket.connect'):\n"
        "        raise RuntimeError(event)\n"
        "sys.addaudithook(watch)\n"
        f"import forestage.{module}\n"
    )
    ran = subprocess.run(
        [sys.executable, "-BIc", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


IDLE = """
import sys
made = []
WRITE = 0o1 | 0o2 | 0o100  # O_WRONLY, O_RDWR, O_CREAT
def watch(event, args):
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen"):
        made.append(event)
    if event == "open" and isinstance(args[2], int) and args[2] & WRITE:
        made.append(str(args[0]))
sys.addaudithook(watch)
from forestage.hooks import main
code = main(NAME)
heavy = {"yaml", "msgspec", "filelock", "typing", "pathlib", "subprocess", "dataclasses", "re"}
print(code, sorted(heavy & set(sys.modules)), made)
"""


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_job_without_an_image_costs_a_bare_interpreter_and_leaves_no_file(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", IDLE.replace("NAME", repr(name))],
        env={"SLURM_JOB_ID": "4294967294", "SLURM_JOB_COMMENT": "just words"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "0 [] []\n"
    assert ran.stderr == f"forestage: {name} job=4294967294 result=none\n"
