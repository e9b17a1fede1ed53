"""Which tests ./test leaves to .ci/run: tests/README.md, "What runs when"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from suites import suite_of

TESTS = Path(__file__).resolve().parent
# Each test in these starts a node, a registry, a step or a cluster: together most of all processes.
BY_RULES = ("faults", "hooks", "registry", "slurm", "spank")


class SafetyRule(NamedTuple):
    """A row of safety-rules.md; `tests` are pairs of a file, or "", and a function."""

    rule: str
    where: str
    tests: tuple[tuple[str, str], ...]


def read_rules() -> list[SafetyRule]:
    """Read the rows of safety-rules.md."""
    lines = (TESTS / "safety-rules.md").read_text().split("\n")
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    named = re.compile(r"`(?:(\S+\.py)::)?(test_\w+)`")
    return [
        SafetyRule(rule, where, tuple(named.findall(tests)))
        for rule, where, tests in rows
        if rule != "rule"
    ]


def find_left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return those of the tests, all cases of which are among `items`, that ./test leaves out."""
    named = {test for rule in read_rules() for test in rule.tests}
    cases: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        file, name = str(item.path.relative_to(TESTS)), test.rpartition("::")[2]
        is_chosen = (
            suite_of(file) not in BY_RULES
            or not named.isdisjoint({("", name), (file, name)})
            or item.get_closest_marker("always")
        )
        first = item.get_closest_marker("cases")
        is_later = first and cases[test] > first.args[0]
        if not is_chosen or is_later or item.get_closest_marker("ci"):
            left_out.append(item)
    return left_out
