"""How many lives a node is led through: a few, always the same, or new ones for minutes."""

from __future__ import annotations

import os
import time

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from promises import Promises

MINUTES = "FORESTAGE_STATE_MINUTES"  # how long a long run takes
ONE = 2  # examples: the first is always the simplest of all, in which next to nothing happens

Machine = type[Promises]


def few(machine: Machine, examples: int, steps: int) -> None:
    """The same ones each time, so that a good commit never fails."""
    _run(machine, examples, steps, derandomize=True)


def few_of_processes(machine: Machine, examples: int, steps: int) -> None:
    """As `few`, where what may come next hangs on how fast processes are.

    One at a time: hypothesis lives through the beginning of one again, to vary it, and gives up
    where it is not as it was before. So these are the same choices, but not quite the same lives.
    """
    for number in range(examples):
        _run(seed(number)(machine), ONE, steps, derandomize=False)


def many(machine: Machine, steps: int, minutes: float, batch: int = ONE) -> None:
    """New ones each time; prints what was done."""
    end = time.monotonic() + 60 * float(os.environ.get(MINUTES, minutes))
    while time.monotonic() < end:
        _run(machine, batch, steps, derandomize=False)
    tally = machine.lab.tally
    print(f"\n{tally.total()} events:", dict(tally.most_common()))


def _run(machine: Machine, examples: int, steps: int, derandomize: bool) -> None:
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
