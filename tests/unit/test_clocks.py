"""Every place that reads the wall clock, or a file's time, is one that docs/clocks.md judges."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SRC = REPO / "src"
TIMES = {f"st_{kind}time{unit}" for kind in ("a", "c", "m", "birth") for unit in ("", "_ns")}
CALLS = {"wall", "utime", "localtime", "gmtime"}
OF_TIME = {"time", "time_ns"}  # of the module of this name
IN_C = re.compile(
    r"CLOCK_REALTIME|\bst_[acm]tim|\b(?:time|gettimeofday|utimes|utimensat|futimens)\("
)
PLACE = re.compile(r"`([a-z_/]+\.[A-Za-z_.]+)`")


def readers(node: ast.AST, name: str = "") -> Iterator[str]:
    """The functions, with the classes around them, that read a time; "" for a module itself."""
    for inner in ast.iter_child_nodes(node):
        its = name
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            its = f"{name}.{inner.name}".lstrip(".")
        if isinstance(inner, ast.Attribute) and _is_time(inner):
            yield name
        if isinstance(inner, ast.ImportFrom) and inner.module in ("time", "datetime"):
            names = {one.name for one in inner.names}
            if names & OF_TIME:
                yield name
        yield from readers(inner, its)


def _is_time(found: ast.Attribute) -> bool:
    of_module = isinstance(found.value, ast.Name) and found.value.id == "time"
    is_now = found.attr in ("now", "today", "utcnow") and "date" in ast.unparse(found.value)
    return found.attr in TIMES | CALLS or (of_module and found.attr in OF_TIME) or is_now


def sites() -> set[str]:
    found = {"spank/" + file.name for file in (SRC / "spank").glob("*.[ch]")
             if IN_C.search(file.read_text())}  # fmt: skip
    for file in SRC.rglob("*.py"):
        module = str(file.relative_to(SRC).with_suffix(""))
        module = module.removeprefix("forestage/").replace(
            "estimate/forestage_estimate", "estimate"
        )
        module = module.replace("window/forestage_window", "window")
        found |= {f"{module}.{name}" for name in readers(ast.parse(file.read_text()))}
    return found - {"clock.Clock.wall"}


def test_every_function_that_reads_a_time_is_listed_in_clocks_md() -> None:
    """One that is new gets a row: what is compared, whose clocks those are, what a step does."""
    listed = set(PLACE.findall((REPO / "docs/clocks.md").read_text()))
    assert sites() - listed == set()
    known = sites() | {"config/switch.find_off_file_reason"}
    gone = {
        place for place in listed - known
        if "/" in place and not place.startswith(("tests/", "system/mounts."))
    }  # fmt: skip
    assert gone == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def a():\n    return os.stat(b).st_mtime", {"a"}),
        ("class A:\n    def b(self):\n        return self.clock.wall()", {"A.b"}),
        ("import time\nNOW = time.time()", {""}),
        ("from time import time", {""}),
        ("def a():\n    return datetime.now()", {"a"}),
        ("def a():\n    return time.monotonic() + clock.monotonic()", set()),
    ],
)
def test_clock_scan_finds_functions_that_read_a_time(code: str, found: set[str]) -> None:
    assert set(readers(ast.parse(code))) == found
