"""The linters as tests, so that pytest is the only command; what they say is the message."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mypy.modulefinder import BuildSource

import checked

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ["src", "tests", "bench", "packaging", "docs"]


def scripts() -> Iterator[str]:
    """Python programs without a suffix: ruff looks at those only if they are named."""
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix or not path.is_file() or ".venv" in path.parts:
                continue
            with path.open("rb") as file:
                first = file.readline(100)
            if first.startswith(b"#!") and b"python" in first:
                yield str(path.relative_to(REPOSITORY))


FILES = [*FOLDERS, *scripts()]


def test_linters_include_programs_without_a_suffix() -> None:
    assert {"tests/slurm/cluster", "packaging/completions"} <= set(FILES)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["ruff", "check", *FILES], id="ruff check"),
        pytest.param(["ruff", "format", "--check", "--diff", *FILES], id="ruff format"),
        pytest.param(["mypy"], id="mypy"),
    ],
)
def test_linter_reports_no_problem(arguments: list[str]) -> None:
    run_linter("-m", *arguments)


def test_tests_and_benches_use_only_names_that_exist() -> None:
    run_linter("tests/checked.py")


WRONG_NAMES = """
import msgspec, pytest
from forestage.cache import lease
from forestage.cache.lease import EntryUse

def test(monkeypatch: pytest.MonkeyPatch, use: EntryUse, either: EntryUse | lease.Lease | None):
    msgspec.structs.replace(use, kee="")
    msgspec.structs.replace(use, key="")
    use.kee
    either.kee
    either.key
    monkeypatch.setattr(lease, "Uses", None)
    monkeypatch.setattr(lease, "EntryUse", None)
    monkeypatch.setattr(EntryUse, "kee", None)
    monkeypatch.setattr(use, "kee", None)
    monkeypatch.setattr("forestage.cache.lease.Uses", None)
    monkeypatch.setattr("forestage.cache.leases.Use", None)
    monkeypatch.setattr("forestage.cache.lease.EntryUse.kee", None)
    monkeypatch.setattr("forestage.cache.lease.EntryUse.key", None)
    monkeypatch.delattr("forestage.cache.lease.Uses")
    setattr(use, "kee", "")
    setattr(use, "key", "")
    EntryUse(kee="")
    lease.Uses
    unheard
"""


def test_checker_reports_each_use_of_a_missing_name() -> None:
    found = checked.errors([BuildSource("wrong.py", "wrong", WRONG_NAMES)])
    lines = {int(error.split(":")[1]) for error in found if error.startswith("wrong.py:")}
    right = ("key=", "def ", "import ", '"EntryUse"', '"key"', "either.key", "Use.key")
    assert lines == {
        number
        for number, line in enumerate(WRONG_NAMES.splitlines(), 1)
        if line and not any(one in line for one in right)
    }, found


def run_linter(*arguments: str) -> None:
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
