"""What fails in CI is run once more, alone, and both results are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flaky

# Each test appends to a file of its own, so that it knows which run this is.
TESTS = """
import pytest

@pytest.mark.parametrize("name", {names!r})
def test_nth_run_passes(name, record):
    assert record(name) >= {passes_at}

def test_passing_test_runs_once(record):
    assert record("good") == 1, "what passed is not run again"
"""
CONFTEST = """
import pathlib, pytest

@pytest.fixture
def record():
    def count(name):
        file = pathlib.Path(__file__).parent / f"{abs(hash(name))}.runs"
        file.write_text((file.read_text() if file.exists() else "") + "x")
        return len(file.read_text())
    return count
"""
ODD = "a b'\"$(x)\\*;ü\n[]::"  # an id that no shell leaves as it is


def ran(folder: Path, names: list[str], passes_at: int) -> subprocess.CompletedProcess[str]:
    """The whole of it, on a suite in a folder of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_suite.py").write_text(TESTS.format(names=names, passes_at=passes_at))
    program = Path(flaky.__file__)
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "flaky", "-c", os.devnull]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FORESTAGE_", "PYTEST_"))
    }
    environment |= {"PYTHONPATH": str(program.parent), "PYTHONHASHSEED": "1"}
    return subprocess.run(
        [sys.executable, program, *pytest_there, "--rootdir", folder, folder],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


@pytest.mark.parametrize(
    ("names", "passes_at", "code", "said"),
    [
        (
            ["one", ODD],
            2,
            0,
            ["2 failed, 1 passed", "2 passed, 1 deselected", "failed, then passed"],
        ),
        (["one", ODD], 3, 1, ["failed, then FAILED AGAIN: test_suite.py::test_nth_run_passes["]),
        (["one", "two", "three", "four"], 2, 1, ["4 tests failed, more than 3: none is run again"]),
        (["one"], 1, 0, ["2 passed"]),
    ],
    ids=["passes-alone", "fails-again", "too-many", "none"],
)
def test_few_failed_tests_are_rerun_once_alone(
    tmp_path: Path, names: list[str], passes_at: int, code: int, said: list[str]
) -> None:
    done = ran(tmp_path, names, passes_at)
    assert done.returncode == code, done.stdout + done.stderr
    assert [words for words in said if words not in done.stdout] == []
    again = "=== flaky ===" in done.stdout
    assert again == (ODD in names)
    assert done.stdout.count("failed, then") == len(names) * again


def test_suite_with_a_collection_error_is_not_rerun(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    done = ran(tmp_path, ["one"], passes_at=1)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "flaky ===" not in done.stdout
