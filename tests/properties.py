"""How long tests with random examples look; whoever has such tests imports this before they begin.

hypothesis makes a process larger by a quarter, and each fork dearer: other tests go without it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline and no too_slow: a slow machine is not a bug. No database: a run does not depend on
# the last one.
# Fewer examples than usual, as many tests share the time; more of them where there is time.
EXAMPLES = 300 if "long" in os.environ.get("FORESTAGE_TEST_ALSO", "").split() else 50

settings.register_profile(
    "forestage",
    deadline=None,
    database=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("forestage")
