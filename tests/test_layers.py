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
    ("slurmconf",),
    ("errors", "units", "trace", "log", "child", "clock", "places", "address", "refusal"),
    ("elf", "finding"),
    ("kinds",),
    ("job", "config", "deadline", "digest", "buffers", "switch", "throttle", "records"),
    ("shares", "asks"),
    ("standing",),
    ("supply",),
    ("settings", "asuser", "mounts", "lock", "atomic", "run", "listen", "wire"),
    ("edits", "plugstack"),
    ("activation",),
    ("activate",),
    ("image", "events", "credential", "counters"),
    ("part", "lease", "exchange", "tally"),
    ("cache", "reserve", "peers"),
    ("slurm",),
    ("node", "evict", "redirect", "chunks"),
    ("from_peers",),
    ("copy", "compare"),
    ("opened", "resume"),
    ("bring",),
    ("stager",),
    ("stage",),
    ("request", "epilog"),
    ("prolog", "step"),
    ("hooks",),
    # What only the command line shows.
    ("exits", "screen", "source", "reasons"),
    ("entries",),
    ("copies",),
    ("status", "show", "explain", "pins", "evictions", "verify"),
    ("metrics",),
    # What `report` makes of events.
    ("report_sums", "report_markup", "report_style"),
    ("report_logs",),
    ("report",),
    ("report_words",),
    ("report_plots", "report_tables", "report_method"),
    ("report_html",),
    # What `check` looks at, below it.
    ("files",),
    ("blocks", "uses"),
    ("check_slurm", "check_disk", "check_sources", "check_striping", "check_node"),
    ("check_hooks", "check_plugins"),
    ("check_pyxis",),
    ("check",),
    ("proof",),
    ("sweep",),
    ("swept",),
    # The service for other nodes.
    ("connections", "sessions", "shelf"),
    ("turns",),
    ("service",),
    ("serve",),
    ("world",),
    ("unredirect",),
    ("activated",),
    ("warmed", "publish"),
    ("warm", "pack"),
    ("cli_site", "cli_check", "cli_images", "cli_report", "cli_unattended"),
    ("cli",),
    ("entry",),
)
"""From below to above: a module imports only from layers below its own, never its neighbours."""

ALLOWED = {
    "subprocess": {"run"},
    "yaml": {"settings"},
    "filelock": {"lock"},
    "xxhash": {"digest"},
    "concurrent": {"chunks", "warm"},
    "threading": {
        "bring",
        "chunks",
        "compare",
        "copy",
        "credential",
        "from_peers",
        "peers",
        "run",
        "stager",
        "throttle",
        "warm",
        "wire",
    },
    "socket": {"asuser", "image", "stager", "stage", "cli_unattended", "listen", "serve", "wire"},
    "asyncio": {"serve", "service", "turns"},
    "aiohttp": {"serve", "service"},
    "http": {"exchange", "wire"},
    "hmac": {"credential"},
    "ClusterShell": {"peers", "warm"},
    "ctypes": {"mounts", "chunks", "reserve", "buffers"},
    "syslog": {"log"},
    "click": {
        "cli",
        "cli_check",
        "cli_images",
        "cli_report",
        "cli_site",
        "cli_unattended",
        "world",
    },
    "rich": {"cli", "screen"},
    "prometheus_client": {"metrics"},
}
"""Who may import what is costly or dangerous."""

PLANNED: set[str] = set()
"""In the design, but not here yet."""


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
    assert names == {"annotations", "gc", "log", "os", "time"}
    top = [node for node in tree("log").body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {alias.name for node in top for alias in node.names} == {"os"}


def test_every_module_of_the_table_is_there() -> None:
    """A name that is gone would let its next bearer in unseen."""
    placed = [name for layer in LAYERS for name in layer]
    assert len(placed) == len(set(placed))
    assert set(placed) - set(MODULES) <= PLANNED
    assert {name for doors in ALLOWED.values() for name in doors} - set(MODULES) <= PLANNED


@pytest.mark.parametrize(
    "module",
    [name for name in MODULES if name not in ("cli", "cli_check", "cli_images", "cli_site")],
)
def test_the_environment_is_read_in_one_place(module: str) -> None:
    reads = [
        node
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name) and node.value.id == "os"
    ]  # fmt: skip
    assert not reads or module == "hooks"


ALONE = """
import os, sys
# What others wrote is loaded once, so that each module costs a fork and not an interpreter.
import aiohttp.web, concurrent.futures, http.client, logging, subprocess, typing
import click, filelock, msgspec, rich, xxhash, yaml
assert not [name for name in sys.modules if name.startswith("forestage")]
def watch(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.mkdir", "socket.connect", "os.rename"):
        raise RuntimeError(event)
for module in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        sys.addaudithook(watch)
        code = 1
        try:
            __import__(f"forestage.{module}")
            code = 0
        except BaseException as error:
            print(f"{module}: {error!r}")
            sys.stdout.flush()
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        print(f"{module} cannot be imported alone")
"""


def test_each_module_alone_can_be_imported_and_starts_nothing() -> None:
    """Cycles hide behind the order in which others import; and nothing may happen at import."""
    ran = subprocess.run(
        [sys.executable, "-BIc", ALONE, *MODULES], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


IDLE = """
import sys
made = []
WRITE = 0o1 | 0o2 | 0o100  # O_WRONLY, O_RDWR, O_CREAT
def watch(event, args):
    if event in ("os.mkdir", "os.rename", "os.remove", "os.fork", "subprocess.Popen"):
        made.append(event)
    if event == "open" and isinstance(args[2], int) and args[2] & WRITE:
        made.append(str(args[0]))
sys.addaudithook(watch)
from forestage.hooks import _main
code = _main(NAME)
heavy = {"yaml", "msgspec", "filelock", "typing", "pathlib", "subprocess", "dataclasses", "re"}
heavy |= {"ctypes", "socket", "threading", "xxhash", "contextlib", "hashlib"}
ours = {name for name in sys.modules if name.startswith("forestage.")}
print(code, sorted(heavy & set(sys.modules)), sorted(ours), made)
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
    assert ran.stdout == "0 [] ['forestage.hooks', 'forestage.log'] []\n"
    assert ran.stderr == f"forestage: {name} job=4294967294 result=none\n"


STEP = """
import sys
from forestage import hooks
def body(name):
    loaded = sorted({"click", "re", "typing", "forestage.cli"} & set(sys.modules) - before)
    print(name, loaded)
    sys.stdout.flush()
    return 0
hooks._main = body
before = set(sys.modules)
sys.argv = ["/usr/lib/forestage/bin/forestage", "step"]
from forestage.entry import main
main()
"""


def test_a_steps_helper_starts_without_the_command_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", STEP], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "step []\n", "")
