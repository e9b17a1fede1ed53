"""The linters as tests, so that pytest is the only command; what they say is the message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ["src", "tests", "bench"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["ruff", "check", *FOLDERS], id="ruff check"),
        pytest.param(["ruff", "format", "--check", "--diff", *FOLDERS], id="ruff format"),
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
