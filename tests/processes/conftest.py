"""One module at a time, with the processes that it starts."""

from __future__ import annotations

import properties  # noqa: F401  (how many examples)
from fixtures import *  # noqa: F403  (fixtures)
