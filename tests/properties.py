"""How long tests with random examples look; whoever has such tests imports this before they begin.

hypothesis makes a process larger by a quarter, and each fork dearer: other tests go without it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# No deadline and no too_slow: a slow machine is not a bug. No database: a run does not depend on
# the last one.
# Fewer examples than usual, as many tests share the time; more of them where there is time.
IS_LONG = "long" in os.environ.get("FORESTAGE_TEST_ALSO", "").split()
EXAMPLES = 300 if IS_LONG else 50
MORE = 30 if IS_LONG else 1  # of tests that look for a few of their own

settings.register_profile(
    "forestage",
    deadline=None,
    database=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("forestage")

# What users write. The environment of a process can hold any bytes but NUL, as Python decodes them.
_BYTES = st.binary(max_size=40).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
_PIECES = st.sampled_from(
    ["/", ".", "..", "stage=", ",", "%00", "%ff", "%2f", "\n", " ", "=", '"', "\\", "‮",
     "result=hit", "\x1b[2J", "stage-wait=", "1m", "\udcff", "é", "x" * 300]
)  # fmt: skip
TEXT = st.lists(_PIECES | _BYTES, max_size=8).map("".join)
