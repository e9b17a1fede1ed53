"""The linters as tests, so that pytest is the only command; what they say is the message."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_programs_without_a_suffix_are_seen() -> None:
    assert {"tests/slurm/cluster", "packaging/completions"} <= set(FILES)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["ruff", "check", *FILES], id="ruff check"),
        pytest.param(["ruff", "format", "--check", "--diff", *FILES], id="ruff format"),
        pytest.param(["mypy"], id="mypy"),
    ],
)
def test_the_linter_has_nothing_to_say(arguments: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
