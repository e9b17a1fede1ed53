"""Which names of the core nothing uses: after a feature was deleted these went with it in vain."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def find_unused(package: Path, constants: Path) -> set[str]:
    """Return `module.name` of what modules beside features/ declare and nothing uses.

    That is none of the package, and not the companion: `constants` is the program that makes its
    header, with lists of names in texts. By bare name, so a name that another thing has too counts
    as used. Not `__names__`.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    used = Counter(name for tree in trees.values() for name in _find_used(tree))
    names = _find_used(ast.parse(constants.read_text()))
    used.update(name for text in names for name in text.split())
    return {
        f"{'.'.join(path.relative_to(package).with_suffix('').parts)}.{name}"
        for path, tree in trees.items()
        if path.relative_to(package).parts[0] != "features"
        for name, node in find_declared(tree)
        # What a function says of itself, as one that calls itself, is no use.
        if not name.startswith("__") and not used[name] - [*_find_used(node)].count(name)
    }


def find_declared(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield functions, classes, constants, fields and methods, each with its node."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and "Enum" in "".join(map(ast.unparse, node.bases)):
            continue  # its members are also found by their values
        if isinstance(node, ast.ClassDef):
            yield from find_declared(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for one in (one for target in targets for one in ast.walk(target)):
                if isinstance(one, ast.Name):
                    yield one.id, ast.Pass()


def _find_used(tree: ast.AST) -> Iterator[str]:
    """Yield names that are read, attributes, keywords, imports, and whole texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.keyword, ast.MatchAs)):
            yield (node.arg if isinstance(node, ast.keyword) else node.name) or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
