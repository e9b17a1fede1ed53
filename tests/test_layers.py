"""Who may import whom, and what the hooks must not load: the shape of the program, as tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import forestage
from forestage.cache.lease import LeaseDirectory
from forestage.features import FEATURES

PACKAGE = Path(forestage.__file__).parent
MODULES = sorted(
    str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".")
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
)
GROUND = ("errors", "units", "trace", "log", "clock", "paths")
FOLDERS = (
    *("system", "config", "slurm", "events", "cache", "bind", "sources", "stage"),
    *("views", "hooks", "check", "commands", "features"),
)
"""Each imports from itself, from those before it, and from the ground; see docs/architecture.md."""
DEBTS: dict[str, set[str]] = {}
"""What the core still imports of features; it may only get less."""

FRAME = {"features.doors", "features.contexts", "features.__init__"}
"""What is in features/ and of no feature."""

OF_CACHE = {
    "cache",
    "bind",
    "features.peers",
    "sources",
    "stage",
    "views",
    "hooks",
    "features.prefetch",
    "features.registry",
    "features.data",
}
"""Folders that read and write what is in the cache, or below /run/forestage."""

ALLOWED = {
    "subprocess": {"system.run"},
    "yaml": {"config"},
    "filelock": {"system.lock"},
    "xxhash": {"cache.digest"},
    "aiohttp": {"features.peers"},
    "ClusterShell": {"slurm", "features.prepare"},
    "click": {"commands", "features.doors"},  # in the latter for types
    "rich": {"commands", "system.render"},
    "jinja2": {"features.report"},
    "prometheus_client": {"features.metrics.export"},
}
"""What is costly or dangerous, and the modules or folders that may import it."""


STARTERS = {
    *(
        "features.prepare.pack",
        "features.prepare.publish",
        "commands.tend",
        "features.prepare.warm",
    ),  # as who calls them
    *(
        "check.enable_plan",
        "check.hook_findings",
        "features.registry.checks",
        "check.source_findings",
    ),
    *("slurm.slurm_client", "slurm.slurm_release"),
    *("features.data.job_disk", "features.data.directory", "features.peers.auth", "stage.engines"),
}
"""Modules that may start programs: none runs for a job's user, or parses what users wrote."""

FOR_USERS = {
    "features.data.job_dir_fill",
    "features.data.squashfs_server",
    "features.registry.step_image",
    "features.registry.worker",
    "stage.fstab",
}
"""Those that start one for a job's user, with all three ids theirs (run.start_as_user and its
like): bash with real uid 0 makes itself root again. See docs/security.md.
"""

FOR_WORKERS = {
    *(
        "features.registry.environment",
        "features.registry.resolve",
        "features.registry.enroot_import",
        "features.registry.parent_pipe",
    ),
}
"""Those that start one as the user whom their process is (run.run_as_current_user,
start_in_current_session): what runs there is the user's own, and so is what it may do.
"""

SEARCHERS = {
    *(
        "features.prepare.pack",
        "check.slurm_site",
        "check.enroot_findings",
        "check.hook_findings",
        "check.node_findings",
    ),
    *(
        "features.registry.registry_replies",
        "features.registry.credentials",
        "features.registry.environment",
        "features.registry.enroot_import",
    ),
    *(
        "features.registry.reference",
        "slurm.enroot",
        "slurm.nodelist",
        "features.peers.slurm_nodes",
        "features.prefetch.slurm_queries",
        "slurm.slurm_release",
    ),
    *("system.mksquashfs", "system.processes", "features.data.job_dir_fill"),
}
"""Modules that search in a text. Who can write into it, docs/security.md says ("Texts of others"):
where that is any user, and others would pay for what is found, it is matched whole.
"""

IN_FUNCTIONS = 30
"""Imports inside functions, outside commands/ and hooks/: what a hook or a look need not pay
for."""

ONE_IMPORTER = {
    "a process of its own": {
        *(
            "features.prepare.warm_node",
            "features.data.copy_in",
            "features.data.job_ram",
            "features.data.squashfs_server",
        ),
        *(
            "views.through.keeper_process",
            "views.through.read_server",
            "features.registry.image_import",
        ),
        "features.data.file_readers",
    },
    "imported late: who does without it does not pay for it": {
        *(
            "hooks.earlier_job",
            "hooks.prolog",
            "hooks.hook_work",
        ),
        *(
            "stage.pipeline",
            "features.report.page",
            "slurm.pyslurm",
            "system.render",
        ),
    },
    "pure, or nearly: it decides, its importer acts": {
        *("features.report.text", "views.through.read_policy"),
        "cache.baseline",
    },
    "a file, or what another program writes, read and written here only": {
        *("config.memo", "features.registry.credentials", "features.registry.import_lease"),
        *("features.registry.enroot_import", "stage.fstab", "features.peers.auth_key"),
    },
    "one side of a conversation": {
        *(
            "features.data.directory_record",
            "features.registry.waiting_tasks",
            "features.peers.local_chunks",
        ),
        *("features.peers.sessions", "features.peers.listen_sockets"),
    },
    "a kind of source": {"features.data.directory_source"},
    "all of a folder's door": {"config.load"},
}
"""Modules that one other imports, and why they are not a part of it. commands/ and check/ import
a module for each command and each finding, and do not count as importers; neither do doors.
"""

FEATURES_TOO = {"cache.job_notes", "hooks.bare_name", "system.pid_namespace", "system.mksquashfs"}
"""Modules that one other of the core imports, and a feature: it may be deleted."""

LATE = (
    *("features.data.requests", "features.registry.step_image", "features.registry.waiting_tasks"),
    "features.registry.worker_messages",
)
"""Modules that few hooks import, and that import as late as what is in hooks/ and commands/."""


def folder_of(module: str) -> str:
    """The folder of a module; of a feature, that of the feature."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first == "features" and rest else first


def feature_of(module: str) -> str:
    """The name of the feature that a module is of; of the core's, nothing."""
    first, *rest = module.split(".")
    return rest[0] if first == "features" and module not in FRAME else ""


def present(modules: Iterable[str]) -> set[str]:
    """Those of them that are no deleted feature's (tests/delete_feature)."""
    names = {"", *(feature.name for feature in FEATURES)}
    return {module for module in modules if feature_of(module) in names}


def is_command(module: str) -> bool:
    return module.startswith("commands.") or module.endswith(".commands")


def is_door(module: str) -> bool:
    """Whether the core loads it by the table of features: as late as what is in hooks/."""
    of = feature_of(module)
    doors = [door for one in FEATURES if one.name == of for door in one.doors]
    return any(module == f"features.{of}.{door.partition('.')[0]}" for door in doors)


def is_finding(module: str) -> bool:
    return module.startswith("check.") or module.endswith(".checks")


def tree(module: str) -> ast.Module:
    path = PACKAGE / module.replace(".", "/")
    return ast.parse(path.with_suffix(".py").read_text())


def imported(module: str) -> Iterator[str]:
    """Every module named by an import anywhere in the file, also inside functions."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(module: str) -> set[str]:
    """Those of forestage that it imports, without `forestage.`."""
    found = set()
    for name in imported(module):
        ours = name.removeprefix("forestage.")
        while ours != name and ours and ours not in MODULES:
            ours = ours.rpartition(".")[0]
        found |= {ours} - {name, ""}
    return found


def test_no_file_of_forestage_is_opened_in_a_way_that_blocks_on_a_fifo() -> None:
    """system/files.read_file and overwrite do not; in /proc and /sys there is none."""
    waiting = {"read_text", "read_bytes", "write_text", "write_bytes"}
    kernels = ("Path('/proc/", "Path(f'/proc/", "Path(CONNECTIONS,", "ahead")  # both in /sys
    alone = {
        "features.data.squashfs_server",
        "views.through.keeper_process",
    }  # below an empty file system
    for module in MODULES:
        for node in ast.walk(tree(module)):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in waiting:
                of = ast.unparse(called.value)
                is_ours = folder_of(module) in OF_CACHE and not of.startswith(kernels)
                is_ours = is_ours and not is_finding(module)
                assert not is_ours, f"{module}: {of}.{called.attr}"
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.BinOp) and not isinstance(node, ast.BinOp):
                    flags = set(re.findall(r"\bO_(\w+)", ast.unparse(child)))
                    if "WRONLY" in flags and module not in alone:
                        assert flags & {"NONBLOCK", "EXCL"}, f"{module}: {ast.unparse(child)}"


def test_folder_imports_only_from_itself_and_lower_layers() -> None:
    rank = dict.fromkeys(GROUND, 0) | {name: n for n, name in enumerate(FOLDERS, 1)}
    wrong = set()
    debts = set()
    for module in MODULES:
        mine = rank[module.split(".")[0]]
        for name in imported_modules(module) - FRAME:
            if mine < rank["features"] and feature_of(name):
                debts.add((module, name))
            elif rank[name.split(".")[0]] > mine or (mine == 0 and name not in GROUND):
                wrong.add(f"{module} imports {name}")
    assert sorted(wrong) == []
    listed = {(module, f"features.{name}") for module, names in DEBTS.items() for name in names}
    listed = {(module, name) for module, name in listed if present((name,))}
    assert debts == listed, "what the core imports of features may only get less"


def test_feature_imports_exactly_the_features_that_its_row_needs() -> None:
    used: dict[str, set[str]] = {feature.name: set() for feature in FEATURES}
    for module in MODULES:
        if mine := feature_of(module):
            used[mine] |= {feature_of(name) for name in imported_modules(module)} - {mine, ""}
    assert used == {feature.name: {*feature.needs} for feature in FEATURES}


def test_costly_and_dangerous_modules_are_imported_only_where_allowed() -> None:
    for module in MODULES:
        for name in {name.split(".")[0] for name in imported(module)} & set(ALLOWED):
            mine = {module, folder_of(module), *(("commands",) if is_command(module) else ())}
            doors = ALLOWED[name] & mine
            assert doors, f"{module} imports {name}"


def test_only_system_run_starts_programs() -> None:
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
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
                assert node.attr not in doors, f"{module}: os.{node.attr}"


def test_regular_expression_searches_are_only_in_listed_modules() -> None:
    found = {
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr in ("search", "findall", "finditer")
    }
    assert found == present(SEARCHERS)


def test_number_of_imports_inside_functions_is_limited() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if not (is_command(module) or is_door(module))
        if not (module.startswith("hooks.") or module in LATE)
        for function in ast.walk(tree(module))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert len(set(found)) <= IN_FUNCTIONS, found


def test_module_with_a_single_importer_is_listed_with_a_reason() -> None:
    importers: dict[str, set[str]] = {module: set() for module in MODULES}
    for module in MODULES:
        for name in set(imported(module)):
            importers.get(name.removeprefix("forestage."), set()).add(module)
    found = {
        module
        for module, by in importers.items()
        if len(by) == 1 and not module.endswith("__init__") and module not in FRAME
        if not any(is_command(one) or is_finding(one) or is_door(one) for one in by)
        if by != {"features.contexts"} and not is_door(module)
    }
    listed = [module for modules in ONE_IMPORTER.values() for module in modules]
    assert found - FEATURES_TOO == present(listed)
    assert len(listed) == len(set(listed))


OF_A_USER = {"read_notes", "has_data", "list_hinted_images", "clear_hints_flag", "read_nodelist"}
"""Methods of LeaseDirectory whose second argument is the job's user."""

WHOEVERS = {
    "hooks.leases",
    "hooks.epilog",
    "hooks.earlier_job",
    "hooks.background_prolog",
    "features.data.data_view",
}
WHOEVERS |= {"features.data.directory_record"}
"""Modules that read a lease to compare its user themselves."""


def test_hooks_and_views_pass_the_uid_when_reading_a_jobs_records() -> None:
    """A number comes again: with another user's job."""
    assert {*OF_A_USER, "find_lease"} <= {*dir(LeaseDirectory)}
    for module in MODULES:
        is_of_jobs = folder_of(module) in ("hooks", "views", "features.data") or module in LATE
        if not is_of_jobs and module != "cache.step_record":
            continue
        for call in ast.walk(tree(module)):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            name, of = call.func.attr, ast.unparse(call.func.value)
            if of.endswith("leases") or of == "noted":
                assert name not in OF_A_USER or len(call.args) == 2, (module, name)
                assert name != "find_lease" or module in WHOEVERS, module
            if of == "data_view" and name == "read_job_data":
                assert len(call.args) == 3, module


def test_only_config_and_peers_activation_read_peers_enabled() -> None:
    reading = {
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute)
        and node.attr == "enabled"
        and "peer" in ast.unparse(node.value)
    }
    assert reading == present(("config.load", "features.peers.activation"))


def test_registry_feature_does_not_import_peers() -> None:
    """By the shared store: so `peers.enabled` means nothing there."""
    asking = {
        module
        for module in MODULES
        if feature_of(module) == "registry"
        for name in imported(module)
        if name.startswith("forestage.features.peers")
    }
    assert not asking


def broad(handler: ast.ExceptHandler) -> bool:
    """Whether it takes everything and keeps it; one that cleans up and raises again does not."""
    caught = handler.type
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    everything = caught is None or any(
        isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in names
    )
    last = handler.body[-1]
    return everything and not (isinstance(last, ast.Raise) and last.exc is None)


def test_fail_open_boundary_has_the_only_broad_except() -> None:
    found = [
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ExceptHandler) and broad(node)
    ]
    assert found == ["hooks.boundary"]


def test_no_contextlib_suppress_catches_all_exceptions() -> None:
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                names = {ast.unparse(argument) for argument in node.args}
                assert not names & {"Exception", "BaseException"}, module


def test_hooks_boundary_imports_only_light_modules_at_the_top() -> None:
    top = [
        node
        for node in tree("hooks.boundary").body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {alias.name for node in top for alias in node.names}
    assert names == {"annotations", "gc", "log", "os", "time"}
    top = [node for node in tree("log").body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {alias.name for node in top for alias in node.names} == {"os", "time"}


def test_every_folder_is_in_a_layer_and_every_allowed_importer_exists() -> None:
    found = {module.split(".")[0] for module in MODULES}
    assert found - {*GROUND, *FOLDERS} == set()
    doors = {door for doors in ALLOWED.values() for door in doors}
    known = {*MODULES, *map(folder_of, MODULES)}
    assert present(doors) - known == set(), "a door that is gone would let another in unseen"


def test_programs_are_started_only_by_listed_modules_as_the_right_user() -> None:
    found = {module for module in MODULES if "forestage.system.run" in imported(module)}
    assert found == present(STARTERS | FOR_USERS | FOR_WORKERS)
    for module in present(FOR_USERS):
        nodes = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in nodes if ast.unparse(node.value) == "run"}
        known = {
            "find_program",
            "start_as_user",
            "start_filter",
            "FilterProcess",
            "start_piped_program",
            "PipedProcess",
            "run_program",
            "stay_in_cgroups",
        }
        assert used <= known | {"kill_session"}, module
    for module in present(FOR_WORKERS):
        nodes = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in nodes if ast.unparse(node.value) == "run"}
        assert used <= {
            "find_program",
            "run_as_current_user",
            "ProcessOutput",
            "start_in_current_session",
            "kill_session",
        }, module


def test_environment_is_read_only_by_hooks_and_commands() -> None:
    for module in MODULES:
        if module == "hooks.boundary" or is_command(module):
            continue
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                assert ast.unparse(node.value) != "os", f"{module} reads the environment"


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


@pytest.mark.ci
def test_each_module_can_be_imported_alone_and_starts_nothing() -> None:
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
from forestage.hooks.boundary import _run_to_exit_status
code = _run_to_exit_status(NAME)
heavy = {"yaml", "msgspec", "typing", "pathlib", "subprocess", "dataclasses", "re"}
heavy |= {"ctypes", "socket", "threading", "xxhash", "contextlib", "hashlib", "filelock"}
ours = {name for name in sys.modules if name.startswith("forestage.")}
print(code, sorted(heavy & set(sys.modules)), sorted(ours), made)
"""


@pytest.mark.parametrize(("name", "table"), [("prolog", []), ("epilog", ["forestage.features"])])
def test_hook_of_a_job_without_an_image_imports_three_modules_and_writes_one_mark(
    name: str, table: list[str]
) -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", IDLE.replace("NAME", repr(name))],
        env={"SLURM_JOB_ID": "4294967294", "SLURM_JOB_COMMENT": "just words"},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [*table, "forestage.hooks", "forestage.hooks.boundary", "forestage.log"]
    made = [f"/run/forestage/called.{name}"]  # one for all jobs: when Slurm called it last
    assert ran.stdout == f"0 [] {ours} {made}\n"
    assert ran.stderr == f"forestage: {name} job=4294967294 result=none\n"


AT_WORK = """
import sys
from forestage.hooks.boundary import import_msgspec
import_msgspec()
import forestage.hooks.prolog, forestage.hooks.step, forestage.hooks.epilog
import forestage.stage.stager, forestage.views.through.keeper, forestage.cache.step_record
heavy = {"yaml", "filelock", "xxhash", "typing_extensions", "hashlib", "shutil", "tempfile"}
heavy |= {"platform", "decimal", "uuid", "datetime", "urllib.parse", "ipaddress", "ctypes"}
heavy |= {f"msgspec.{name}" for name in ("inspect", "_json_schema", "toml", "yaml")}
print(sorted(heavy & set(sys.modules)), {"msgspec", "pathlib"} <= set(sys.modules))
import datetime, decimal, msgspec, platform, typing_extensions, urllib.parse, uuid
datetime.datetime.now(), decimal.Decimal("1.5"), uuid.uuid4(), urllib.parse.quote("a b")
msgspec.msgpack.decode(msgspec.msgpack.encode([1]))
from msgspec import inspect, toml, yaml
inspect.type_info(int), toml.decode, yaml.decode
"""


def test_hook_at_work_imports_no_unneeded_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", AT_WORK], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[] True\n", "")


STEP = """
import sys
from forestage.hooks import boundary
def body(name):
    loaded = sorted({"click", "re", "typing", "forestage.commands.main"} & set(sys.modules) -
    before)
    print(name, loaded)
    sys.stdout.flush()
    return 0
boundary._run_to_exit_status = body
before = set(sys.modules)
sys.argv = ["/usr/lib/forestage/bin/forestage", "step"]
from forestage.commands.console_script import main
main()
"""


def test_step_helper_starts_without_importing_click() -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", STEP], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "step []\n", "")


def test_class_name_is_unique_within_a_folder_and_among_a_modules_imports() -> None:
    classes = {
        module: {node.name for node in tree(module).body if isinstance(node, ast.ClassDef)}
        for module in MODULES
    }
    seen = {(module.rpartition(".")[0], module): names for module, names in classes.items()}
    for module in MODULES:
        names = {name.removeprefix("forestage.") for name in imported(module)}
        for one in {module, *names} & classes.keys():
            seen[module, one] = {name for name in classes[one] if not name.startswith("_")}
    where: dict[tuple[str, str], list[str]] = {}
    for (by, module), found in seen.items():
        for name in found:
            where.setdefault((by, name), []).append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}
