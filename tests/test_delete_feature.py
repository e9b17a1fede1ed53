"""Each feature can be deleted, by tests/delete_feature in a copy of the tree; the rest passes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from forestage.features import FEATURES

TREE = Path(__file__).resolve().parents[1]
CHEAP = ("report", "metrics")
"""Those that .ci/run deletes: the fewest know of them."""
OURS = ("FORESTAGE_", "PYTEST_")  # what this pytest is told is not for another
LEFT_BEHIND = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
RUN = """
set -eu
mount --bind "$TREE/.venv" "$COPY/.venv"
mount --rbind "$COPY" "$TREE"  # what is called by its path, such as a hook, is the copy's as well
cd "$TREE"
tests/delete_feature "$NAME"
.venv/bin/python3 -m pytest tests/test_linters.py tests/test_layers.py
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
        pytest.param(one.name, marks=pytest.mark.ci if one.name in CHEAP else pytest.mark.long)
        for one in FEATURES
        if one.name != "core"
    ],
)
def test_tree_without_a_feature_passes(machine: None, open_path: Path, name: str) -> None:
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
