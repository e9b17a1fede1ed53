"""What fails in CI is run once more, alone, and both results are told."""

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
def test_it(name, record):
    assert record(name) >= {passes_at}

def test_good(record):
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


def test_failure_that_passes_alone_is_told_and_costs_nothing(tmp_path: Path) -> None:
    done = ran(tmp_path, ["one", ODD], passes_at=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
    assert "2 passed, 1 deselected" in done.stdout
    _, _, told = done.stdout.partition("=== flaky ===")
    assert told.count("failed, then passed: test_suite.py::test_it[") == 2


def test_failure_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    done = ran(tmp_path, ["one", ODD], passes_at=3)
    assert done.returncode == 1
    assert done.stdout.count("failed, then FAILED AGAIN: test_suite.py::test_it[") == 2


def test_more_than_three_failures_are_not_tried_again(tmp_path: Path) -> None:
    done = ran(tmp_path, ["one", "two", "three", "four"], passes_at=2)
    assert done.returncode == 1
    assert "4 tests failed, more than 3" in done.stdout
    assert "flaky ===" not in done.stdout


def test_run_without_failures_is_left_as_it_is(tmp_path: Path) -> None:
    done = ran(tmp_path, ["one"], passes_at=1)
    assert done.returncode == 0
    assert "2 passed" in done.stdout
    assert "flaky" not in done.stdout


def test_suite_that_cannot_be_collected_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    done = ran(tmp_path, ["one"], passes_at=1)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "flaky ===" not in done.stdout
