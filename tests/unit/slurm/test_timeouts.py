"""Limits of a hook's wait: below what drains the node or costs the job a step.

How slurm.conf is read: test_slurm_conf.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from forestage.slurm.slurm_conf import SlurmConf
from forestage.slurm.timeouts import (
    SAFE,
    UNKNOWN,
    HookTimeLimits,
    compute_limits,
    prolog_budget,
    read_limits,
    step_budget,
)

BOTH = "PrologFlags=Alloc,DeferBatch"
LONG = "BatchStartTimeout=3600"


def conf(text: str) -> dict[str, str]:
    lines = (line.partition("=") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in lines}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Slurm's defaults: BatchStartTimeout 10 s + MessageTimeout 10 s, less a quarter.
        ("", HookTimeLimits(None, 15.0)),
        ("BatchStartTimeout=50", HookTimeLimits(None, 45.0)),
        # Of MessageTimeout no more than 10 s count.
        ("MessageTimeout=30", HookTimeLimits(None, 15.0)),
        ("MessageTimeout=6", HookTimeLimits(None, 12.0)),
        ("MessageTimeout=1\nBatchStartTimeout=1", HookTimeLimits(None, 0.0)),
        # Unset, nonsense and 0 are Slurm's defaults.
        ("MessageTimeout=0\nBatchStartTimeout=soon", HookTimeLimits(None, 15.0)),
        ("MessageTimeout=-5\nBatchStartTimeout=\u0661\u0662", HookTimeLimits(None, 15.0)),
        # Beyond this Slurm kills the Prolog and drains the node.
        ("PrologEpilogTimeout=60", HookTimeLimits(45.0, 15.0, 45.0)),
        ("PrologEpilogTimeout=10", HookTimeLimits(7.0, 7.0, 7.0)),
        ("PrologEpilogTimeout=3", HookTimeLimits(0.0, 0.0, 0.0)),
        ("PrologEpilogTimeout=65534", HookTimeLimits(None, 15.0)),
        # Since 25.05 each has one of its own as well.
        ("PrologTimeout=40\nPrologEpilogTimeout=100", HookTimeLimits(30.0, 15.0, 75.0)),
        ("PrologTimeout=100\nPrologEpilogTimeout=40", HookTimeLimits(75.0, 15.0, 30.0)),
        ("PrologTimeout=65534\nPrologEpilogTimeout=100", HookTimeLimits(75.0, 15.0, 75.0)),
        ("EpilogTimeout=40\nPrologEpilogTimeout=100", HookTimeLimits(75.0, 15.0, 30.0)),
        # The flags do not keep slurmctld from ending a job whose Prolog outlasts a registration.
        (BOTH, HookTimeLimits(None, 15.0)),
        (f"{BOTH}\nPrologEpilogTimeout=600", HookTimeLimits(450.0, 15.0, 450.0)),
        # Nothing but BatchStartTimeout does; then the job's credential expires, after 120 s.
        (LONG, HookTimeLimits(None, 90.0)),
        ("BatchStartTimeout=100\nAuthInfo=cred_expire=600", HookTimeLimits(None, 82.5)),
        (f"{LONG}\nPrologEpilogTimeout=60", HookTimeLimits(45.0, 45.0, 45.0)),
        (f"{LONG}\nAuthInfo=cred_expire=60", HookTimeLimits(None, 45.0)),
        (
            f"{LONG}\nAuthInfo=socket=/run/munge/s, CRED_EXPIRE=400,ttl=5",
            HookTimeLimits(None, 300.0),
        ),
        (f"{LONG}\nAuthInfo=cred_expire=0", HookTimeLimits(None, 90.0)),
        ("AuthInfo=cred_expire=8", HookTimeLimits(None, 5.0)),
    ],
)
def test_time_limits_of_hooks_come_from_slurm_conf(text: str, expected: HookTimeLimits) -> None:
    assert compute_limits(conf(text)) == expected


@pytest.mark.parametrize(
    ("limit", "wish", "expected"),
    [
        (HookTimeLimits(None, 15), None, 15),
        (HookTimeLimits(45, 15), 300, 15),
        (HookTimeLimits(45, 15), 5, 5),
        (HookTimeLimits(45, 15), 0, 0),
        (UNKNOWN, 600, SAFE),
    ],
)
def test_prolog_budget_is_limited_by_slurm_whatever_the_configured_deadline(
    limit: HookTimeLimits, wish: float | None, expected: float
) -> None:
    assert prolog_budget(limit, wish) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PrologEpilogTimeout=60\n", HookTimeLimits(45.0, 15.0, 45.0)),
        ("PrologEpilogTimeout=600\nInclude more.conf\n", HookTimeLimits(30.0, 15.0, 30.0)),
        ("#PrologEpilogTimeout=60\n", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_time_limits_are_read_from_slurm_conf_and_its_includes(
    tmp_path: Path, text: str, expected: HookTimeLimits
) -> None:
    (tmp_path / "slurm.conf").write_text(text)
    (tmp_path / "more.conf").write_text("PrologEpilogTimeout=40\n")
    assert read_limits(SlurmConf(str(tmp_path / "slurm.conf"))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Include slurm.conf\n",
        "Include loop.conf\n",
        "Include nothing.conf\n",
        "Include %c.conf\n",
        "Include .\n",
        "Include binary\n",
        # Slurm refuses such a line; a slurmd that runs may have read it in two.
        "MessageTimeout=60 PrologEpilogTimeout=60\n",
    ],
)
def test_slurm_conf_that_cannot_be_read_completely_gives_unknown_time_limits(
    tmp_path: Path, text: str
) -> None:
    """Half a configuration could lack the very line that drains."""
    (tmp_path / "loop.conf").write_text("Include slurm.conf\n" * 3)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "slurm.conf").write_text(f"{BOTH}\n{text}")
    for path in (tmp_path / "slurm.conf", tmp_path, tmp_path / "nothing", "", "a\0b"):
        assert read_limits(SlurmConf(str(path))) == UNKNOWN


@pytest.mark.parametrize(
    ("configured", "timeout", "seconds"),
    [
        (600.0, "900", 600.0),
        (600.0, "600", 595.0),
        (600.0, "60", 55.0),
        (600.0, "1", 0.5),
        (1.0, "60", 1.0),
        # Not the companion's: nothing kills us.
        (600.0, "", 600.0),
        (600.0, "0", 600.0),
        (600.0, "\u0665", 600.0),
    ],
)
def test_step_budget_ends_before_the_companions_timeout(
    configured: float, timeout: str, seconds: float
) -> None:
    assert step_budget(configured, timeout) == seconds
