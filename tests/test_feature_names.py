"""No name that a feature alone declares is in the core: feature_names.txt has those that still are.

A line is `module: name`, and may only go. `tests/test_feature_names.py` as a program prints them.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from test_layers import MODULES, feature_of, tree

LISTED = Path(__file__).parent / "feature_names.txt"
APART = {"config.keys", "features.__init__", "features.doors", "features.contexts"}
"""What knows the sections and doors of all features."""
FILE = re.compile(r"[a-z][\w-]*[.-][\w.-]*\w")
"""A text of this kind is a file's name, or a reason."""
COMMON = {*dir(builtins), *dir(str), *dir(bytes), *dir(dict), *dir(list), *dir(set)}


def find_declared(module: ast.Module) -> Iterator[str]:
    """Yield public names of classes, functions, constants and fields; reasons, names of files."""
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
            yield from (one.id for one in fields if isinstance(one, ast.Name))
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for one in ast.walk(node):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    yield one.id
                elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield from (one.value,) if FILE.fullmatch(one.value) else ()


def find_bound(module: ast.Module) -> Iterator[str]:
    """Yield what a module of the core gives a name to: that is the core's, whoever has it too."""
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            where = str(node.module).removeprefix("forestage.features")
            is_of_feature = where != node.module and where not in ("", ".doors", ".contexts")
            yield from (() if is_of_feature else (one.asname or one.name for one in node.names))


def find_used(module: ast.Module) -> Iterator[str]:
    """Yield names, attributes, keywords, and whole texts."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def find_names() -> list[str]:
    """Return a line for each name in a module of the core that features alone declare."""
    core = [module for module in MODULES if not feature_of(module) and module not in APART]
    known = {name for module in core for name in find_bound(tree(module))} | COMMON
    declared = {
        name
        for module in MODULES
        if feature_of(module)
        for name in find_declared(tree(module))
        if not name.startswith("_") and name not in known
    }
    return sorted(
        f"{module}: {name}" for module in core for name in declared & {*find_used(tree(module))}
    )


def test_names_declared_only_by_features_occur_in_the_core_only_as_listed() -> None:
    found = find_names()
    listed = LISTED.read_text().splitlines()
    gone = [line for line in listed if line not in found]
    assert [line for line in found if line not in listed] == []
    assert gone == [], "these names have gone from the core: take them out of feature_names.txt"


if __name__ == "__main__":
    print(*find_names(), sep="\n")
