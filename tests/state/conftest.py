"""A node on which anything may happen."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

import properties  # noqa: E402, F401  (how many examples)
