"""What the companion and the Python program both know is the same in both."""

from __future__ import annotations

import subprocess
import sys

from companion import FOLDER, REPO


def test_constants_header_is_generated_from_the_python_constants() -> None:
    """After a change: .venv/bin/python3 packaging/constants > src/spank/constants.h."""
    made = subprocess.run(
        [sys.executable, REPO / "packaging/constants"], capture_output=True, text=True, check=True
    )
    assert made.stdout == (FOLDER / "constants.h").read_text()
