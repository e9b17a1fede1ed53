"""The pages that admins read say what this version does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGES = REPO / "packaging/man"


@pytest.mark.parametrize(
    ("words", "file"),
    [([], PAGES / "forestage.yaml.5"), (["sample"], REPO / "etc/forestage.yaml")],
    ids=["page", "sample"],
)
def test_configuration_page_and_sample_are_generated_from_the_keys(
    words: list[str], file: Path
) -> None:
    """After a change: packaging/man/configuration > packaging/man/forestage.yaml.5, and so on."""
    made = subprocess.run(
        [sys.executable, PAGES / "configuration", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == file.read_text()
