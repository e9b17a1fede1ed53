"""What ./test leaves to .ci/run: never all tests of a safety rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import choice
from choice import TESTS, find_left_out, read_rules

# What shows these is neither a node nor a cluster that can be had in seconds.
NOWHERE_ELSE = {
    "test_copy_made_during_a_write_parked_on_an_nfs_client_is_no_hit_afterwards": "two NFS clients",
    "test_host_without_the_companion_prints_no_error_for_the_include_line": "the packages",
}
LEFT_OUT = {"pytest.mark.ci", "pytest.mark.long"}


def is_left_out(marks: list[ast.expr]) -> bool:
    return not LEFT_OUT.isdisjoint(map(ast.unparse, marks))


def chosen(file: Path) -> Iterator[str]:
    """The functions of a file that no mark of theirs, or of the file, leaves out."""
    tree = ast.parse(file.read_text())
    for line in tree.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "pytestmark":
            marks = line.value.elts if isinstance(line.value, ast.List) else [line.value]
            if is_left_out(marks):
                return
    for line in tree.body:
        if isinstance(line, ast.FunctionDef) and not is_left_out(line.decorator_list):
            yield line.name


def test_every_safety_rule_has_a_test_that_runs_outside_ci() -> None:
    runs = {
        (one, name)
        for file in TESTS.rglob("test_*.py")
        if TESTS / "machine" not in file.parents
        for name in chosen(file)
        for one in ("", str(file.relative_to(TESTS)))
    }
    for rule, _, tests in read_rules():
        names = {name for _, name in tests}
        assert not runs.isdisjoint(tests) or names & NOWHERE_ELSE.keys(), rule


def item(test: str, **marks: Any) -> Any:
    """A test as pytest collects it, with marks that have an argument or are just there."""
    file = test.partition("::")[0]
    found = {name: SimpleNamespace(args=(value,)) for name, value in marks.items()}
    return SimpleNamespace(nodeid=f"tests/{test}", path=TESTS / file, get_closest_marker=found.get)


def test_tests_of_safety_rules_and_of_cheap_suites_are_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = [choice.SafetyRule("a", "b", (("", "test_a"), ("hooks/test_x.py", "test_b")))]
    monkeypatch.setattr(choice, "read_rules", lambda: rules)
    stays = [
        item("hooks/test_x.py::test_a[1]"),
        item("hooks/test_x.py::test_b"),
        item("hooks/test_x.py::test_c", always=True),
        item("unit/test_x.py::test_d"),
        item("hooks/test_y.py::test_a[1]", cases=2),
        item("hooks/test_y.py::test_a[2]", cases=2),
    ]
    goes = [
        item("hooks/test_x.py::test_c"),
        item("slurm/test_y.py::test_b"),
        item("unit/test_x.py::test_e", ci=True),
        item("hooks/test_x.py::test_a[2]", ci=True),
        item("hooks/test_y.py::test_a[3]", cases=2),
    ]
    assert find_left_out([*stays, *goes]) == goes
