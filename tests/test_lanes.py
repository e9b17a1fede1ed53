"""The lanes leave no test out, and none of them waits while there is a folder to go to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lanes

CLUSTERS, HOOKS, UNIT = lanes.CLUSTERS, lanes.TESTS / "hooks", lanes.TESTS / "unit/slurm"
SUMMARY = f"""
import sys
sys.path.insert(0, {os.fspath(lanes.TESTS)!r})
import lanes
def pytest_terminal_summary(terminalreporter):
    lanes.note(terminalreporter.stats, lanes.taken_here())
"""  # as the tests' own conftest.py


def test_every_test_file_is_in_a_folder_of_the_lanes() -> None:
    given = [file for folder in lanes.folders(lanes.TESTS) for file in folder.glob("test_*.py")]
    assert sorted(given) == sorted(lanes.TESTS.rglob("test_*.py"))


def test_every_name_in_the_list_of_longest_tests_exists() -> None:
    files = {file.stem.removeprefix("test_") for file in lanes.TESTS.rglob("test_*.py")}
    named = {lanes.CLUSTERS, *(lanes.TESTS / name for name in lanes.FOLDERS)}
    assert set(lanes.LONGEST) <= files
    assert named <= set(lanes.folders(lanes.TESTS))


@pytest.mark.parametrize(
    ("begun", "clusters_first", "wanted"),
    [
        ([], False, HOOKS),
        ([HOOKS], False, UNIT),
        ([HOOKS, UNIT], False, HOOKS),
        ([], True, CLUSTERS),
        ([CLUSTERS], True, CLUSTERS),
    ],
    ids=["first", "without a lane", "all with a lane", "clusters", "clusters together"],
)
def test_lane_prefers_a_folder_of_its_kind_that_has_no_lane(
    begun: list[Path], clusters_first: bool, wanted: Path
) -> None:
    assert lanes.next_folder([HOOKS, UNIT, CLUSTERS], begun, clusters_first) == wanted


def test_slowest_tests_are_listed_first(tmp_path: Path) -> None:
    times = tmp_path / "times"
    assert lanes.slowest(times) == []
    times.write_text("".join(f"{number}.5 tests/a.py::test_{number}\n" for number in range(40)))
    told = lanes.slowest(times)
    assert (len(told), told[0]) == (lanes.MOST, "39.5 tests/a.py::test_39")


def test_lane_chooses_the_remaining_folder_or_ends() -> None:
    assert lanes.next_folder([CLUSTERS], [CLUSTERS], clusters_first=False) == CLUSTERS
    assert lanes.next_folder([UNIT], [UNIT], clusters_first=True) == UNIT
    assert lanes.next_folder([], [UNIT], clusters_first=True) is None


@pytest.mark.parametrize(
    ("bodies", "code", "total"),
    [
        (["assert True", "assert True"], 0, "2 passed, 0 failed, 0 skipped"),
        (["assert True", "assert False", "assert True"], 1, "2 passed, 1 failed, 0 skipped"),
        (["assert False", "import nothing_of_that_name"], 1, "0 passed, 2 failed, 0 skipped"),
        ([], 5, "0 passed, 0 failed, 0 skipped"),
    ],
    ids=["good", "one fails", "last fails", "no tests"],
)
def test_lanes_exit_with_the_worst_folders_code_and_a_line_of_totals(
    tmp_path: Path, bodies: list[str], code: int, total: str
) -> None:
    # So pytest's root is here: it reads no conftest.py above that, wherever the project lies.
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text(SUMMARY)
    for number, body in enumerate(bodies):
        folder = tmp_path / f"folder{number}"
        folder.mkdir()
        (folder / "test_body.py").write_text(f"def test_body():\n    {body}\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FORESTAGE_")
    }
    ran = subprocess.run(
        [sys.executable, lanes.__file__, tmp_path],
        env=environment | {lanes.LANES: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert "1 lanes, " in ran.stdout
    assert ran.stdout.splitlines()[-1] == total
