"""Each feature can be deleted, by tests/delete_feature in a copy of the tree; the rest passes."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forestage.features import FEATURES
from last_uses import find_declared, find_unused

TREE = Path(__file__).resolve().parents[1]
IN_CI = ("report", "metrics")
"""Those that .ci/run deletes, beside the one of the page."""
OURS = ("FORESTAGE_", "PYTEST_")  # what this pytest is told is not for another
LEFT_BEHIND = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
LEFT = {
    "system.pid_namespace": {"has_other_processes", "signal_other_processes"},
    "system.forked_child": {
        "has_child_owned_by",
        "join_slurm_cgroups",
        "read_job_memory_limit",
        "reap_ended_children",
        "remove_empty_cgroups",
    },
    "system.file_systems": {"is_inode_number_true", "read_file_handle"},
    "system.files": {"remove_tree"},
    "system.daemon": {"fetch_mount_clone", "lock_pid_file", "stop_daemon"},
    "system.libc": {"preload_libc"},
    "system.lock": {"acquire_slot"},
    "system.loop": {
        "attach_file",
        "detach_device",
        "format_file_id",
        "is_below_cache",
        "is_file_deleted",
    },
    "system.mounts": {"find_cluster_wide_name", "has_server_times", "open_hidden_mount"},
    "system.processes": {"find_identity", "is_running"},
    "system.records": {"rename_no_replace"},
    "system.run": {
        "close_stdin",
        "run_as_current_user",
        "start_as_user",
        "start_in_current_session",
        "start_piped_program",
    },
}
"""What features alone use of system/, and may leave there: what any program may do on Linux."""


def test_names_left_in_system_exist() -> None:
    for module, names in LEFT.items():
        path = TREE / f"src/forestage/{module.replace('.', '/')}.py"
        declared = {name for name, _ in find_declared(ast.parse(path.read_text()))}
        assert names <= declared, module


RUN = """
set -eu
mount --bind "$TREE/.venv" "$COPY/.venv"
mount --rbind "$COPY" "$TREE"  # what is called by its path, such as a hook, is the copy's as well
cd "$TREE"
tests/delete_feature "$NAME"
.venv/bin/python3 -m pytest tests/test_layers.py tests/test_linters.py -k "not use_only_names"
# Suites that need not pass know several features.
.venv/bin/python3 tests/checked.py tests/unit tests/hooks tests/features
.venv/bin/python3 packaging/constants | cmp - src/spank/constants.h
for suite in $SUITES; do
    for folder in tests/$suite tests/features/*/$suite; do
        .venv/bin/python3 -m pytest "$folder"
    done
done
"""


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one.name, marks=pytest.mark.ci if one.name in IN_CI else pytest.mark.long)
        for one in FEATURES
        if one.name != "core"
    ],
)
def test_tree_with_a_feature_deleted_passes_its_tests(
    machine: None, open_path: Path, name: str
) -> None:
    copy = open_path / "tree"
    shutil.copytree(TREE, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    (copy / ".venv").mkdir()
    also = os.environ.get("FORESTAGE_TEST_ALSO", "").split()
    environ = {one: text for one, text in os.environ.items() if not one.startswith(OURS)}
    environ |= {"TREE": str(TREE), "COPY": str(copy), "NAME": name}
    environ |= {"SUITES": "unit hooks" if "long" in also else "unit"}
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", RUN],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-20000:]
    before, after = (
        find_unused(tree / "src/forestage", tree / "packaging/constants") for tree in (TREE, copy)
    )
    unused = after - before
    assert unused <= {f"{module}.{one}" for module, names in LEFT.items() for one in names}


PLAY = """
set -eu
mount --bind "$TREE/.venv" "$COPY/.venv"
mount --rbind "$COPY" "$TREE"
cd "$TREE"
.venv/bin/python3 packaging/conformance > tests/features/conformance.py
.venv/bin/python3 -m mypy
.venv/bin/python3 -m pytest tests/test_layers.py tests/test_features.py tests/test_feature_names.py
.venv/bin/python3 -m ruff check src tests
.venv/bin/python3 -m pytest tests/features/rocket/hooks
.venv/bin/forestage --help
tests/delete_feature rocket
"""


@pytest.mark.ci
@pytest.mark.timeout(3600)
def test_example_feature_of_features_md_works_and_is_deleted_without_a_trace(
    machine: None, open_path: Path
) -> None:
    copy = open_path / "tree"
    shutil.copytree(TREE, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    (copy / ".venv").mkdir()
    source = copy / "src/forestage"
    page = (TREE / "docs/features.md").read_text()
    row, keys = re.findall(r":\n\n```(?:text|python)\n(.*?)```", page, re.DOTALL)
    for name, text in re.findall(
        r"^`(\S+\.py)`\n\n```python\n(.*?)```", page, re.DOTALL | re.MULTILINE
    ):
        file = (copy if name.startswith("tests/") else source) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    table, config = source / "features/__init__.py", source / "config/keys.py"
    table.write_text(table.read_text().replace("\n)\n", f"\n{row})\n", 1))
    text = config.read_text().replace("class Config(", f"{keys}\n\nclass Config(")
    field = "    metrics: MetricsSection = MetricsSection()\n"
    config.write_text(text.replace(field, f"{field}    rocket: Rocket = Rocket()\n"))
    environ = {one: text for one, text in os.environ.items() if not one.startswith(OURS)}
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", PLAY],
        env=environ | {"TREE": str(TREE), "COPY": str(copy)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-20000:]
    assert re.search(r"^1 passed", ran.stdout, re.MULTILINE), "the page's own test"
    assert "List the rockets that a job can name." in ran.stdout
    left_out = [f"--exclude={name}" for name in (*LEFT_BEHIND, "build")]
    for folder in ("src", "tests", "docs"):
        words = ["diff", "-r", *left_out, TREE / folder, copy / folder]
        assert subprocess.run(words, capture_output=True, text=True, check=False).stdout == ""
