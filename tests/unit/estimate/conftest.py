"""forestage-estimate is a folder of its own, which is on no path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "src/estimate"))
