#!/usr/bin/env python3
"""mypy over tests, bench and packaging: it reports names that do not exist, and no other types.

A renamed function, class, field or keyword of the program is an error here wherever one of them
uses the old name. src is checked strictly, by pyproject.toml. Run as a program, prints the errors,
of the named folders alone if any are named.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.options import Options

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("tests", "bench", "packaging")
IMPORTED_TWICE = ("conftest", "test_bind", "test_data", "test_through")
"""Names that several files have: which one an import finds, sys.path decides in each process."""

OFF = (
    *("arg-type", "assignment", "call-overload", "dict-item", "func-returns-value", "index"),
    *("list-item", "misc", "no-redef", "operator", "return-value", "str-bytes-safe", "str-format"),
    *("type-var", "valid-type", "var-annotated"),
)
"""Codes of errors that are of types alone: tests pass what the program's types forbid."""

UNION = re.compile(r'(.*?): error: Item "(.*)" of "(.*)" (has no attribute ".*")  \[union-attr\]')


def sources(repository: Path = REPOSITORY) -> list[BuildSource]:
    """Return the Python programs of FOLDERS, each with the name that an import of it has.

    Where two files have one name, neither can be imported by it, except the one that is in tests
    itself: the folders' conftest.py make sys.path, which mypy does not follow.
    """
    files = [path for folder in FOLDERS for path in sorted(_programs(repository / folder))]
    count = Counter(path.name for path in files)
    named = []
    for path in files:
        is_first = path.parent == repository / "tests" and path.stem not in IMPORTED_TWICE
        name = re.sub(r"[/.]", "_", str(path.relative_to(repository)))
        if path.suffix and (count[path.name] == 1 or is_first):
            name = path.stem
        named.append(BuildSource(str(path.relative_to(repository)), name))
    return named


def _programs(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.suffix == ".py":
            yield path
        elif not path.suffix and path.is_file():
            with path.open("rb") as file:
                first = file.readline(100)
            if first.startswith(b"#!") and b"python" in first:
                yield path


def options(repository: Path = REPOSITORY) -> Options:
    """Return mypy's options: every function is checked, and None has any attribute."""
    made = Options()
    made.python_version = sys.version_info[:2]  # they run with this one, the program with 3.10 too
    made.mypy_path = [str(repository / part) for part in ("src", "src/estimate", "src/window")]
    made.plugins = [str(repository / "tests/mypy_plugin.py")]
    made.config_file = str(repository / "pyproject.toml")  # what paths of plugins are relative to
    made.cache_dir = str(repository / ".mypy_cache/tests")
    made.check_untyped_defs = True
    made.strict_optional = False
    made.disable_error_code = [*OFF]
    made.process_error_codes(error_callback=sys.exit)
    for module in ("ClusterShell.*", "pyslurm", "tomllib", *IMPORTED_TWICE):
        made.per_module_options[module] = {"ignore_missing_imports": True}
    made.build_per_module_cache()
    return made


def errors(checked: list[BuildSource]) -> list[str]:
    """Return what mypy reports of these files, and of what they import."""
    try:
        found = build.build(checked, options()).errors
    except build.CompileError as error:
        found = error.messages
    return [*_of_no_item(found)]


def _of_no_item(found: Iterable[str]) -> Iterator[str]:
    """Yield the errors, without those of a union of which some item has the attribute.

    Which event of the log it is, a test knows that has made it.
    """
    without: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for line in found:
        if match := UNION.fullmatch(line):
            place, item, union, has_none = match.groups()
            without[place, union, has_none].add(item)
        else:
            yield line
    for (place, union, has_none), items in without.items():
        if items >= set(union.split(" | ")) - {"None"}:
            yield f'{place}: error: No item of "{union}" {has_none}'


if __name__ == "__main__":
    folders = tuple(f"{folder}/" for folder in sys.argv[1:]) or ("",)
    sys.exit("\n".join(line for line in errors(sources()) if line.startswith(folders)) or 0)
