"""How many lives a node is led through: a few, always the same, or new ones for minutes."""

from __future__ import annotations

import os
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from lab import Lab

MINUTES = "FORESTAGE_STATE_MINUTES"  # how long a long run takes
BATCH = 25  # examples between two looks at the clock


def few(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """The same ones each time, so that a good commit never fails."""
    _run(machine, examples, steps, derandomize=True)


def many(machine: type[RuleBasedStateMachine], lab: Lab, steps: int, minutes: float) -> None:
    """New ones each time; prints what was done."""
    end = time.monotonic() + 60 * float(os.environ.get(MINUTES, minutes))
    while time.monotonic() < end:
        _run(machine, BATCH, steps, derandomize=False)
    print(f"\n{lab.tally.total()} events:", dict(lab.tally.most_common()))


def _run(
    machine: type[RuleBasedStateMachine],
    examples: int,
    steps: int,
    derandomize: bool,
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=derandomize,
            phases=[Phase.generate],  # shrinking takes longer than reading what happened
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
