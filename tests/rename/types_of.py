"""The classes of expressions, and what calls call, as mypy infers them."""

from __future__ import annotations

import ast
import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.nodes import CallExpr, Expression, MemberExpr, NameExpr, RefExpr
from mypy.traverser import TraverserVisitor
from mypy.types import (
    CallableType,
    Instance,
    Overloaded,
    Type,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

import checked

Place = tuple[str, int, int, str]


class Types:
    def __init__(self, repository: Path) -> None:
        options = checked.options(repository)
        options.export_types = True
        options.preserve_asts = True
        options.incremental = False
        options.cache_dir = os.devnull
        program = [
            BuildSource(str(path.relative_to(repository)), ".".join(path.parts[-len(parts) :]))
            for path in sorted((repository / "src/forestage").rglob("*.py"))
            for parts in [path.relative_to(repository / "src").parts]
        ]
        for source in program:
            name = str(source.path)[len("src/") : -len(".py")].replace("/", ".")
            source.module = name.removesuffix(".__init__")
        gc.disable()
        result = build.build([*program, *checked.sources(repository)], options)
        self._members: dict[Place, set[str]] = defaultdict(set)
        self._called: dict[Place, tuple[set[str], set[str]]] = {}
        self._of: dict[Place, set[str]] = defaultdict(set)
        for tree in result.files.values():
            if not os.path.isabs(tree.path):
                tree.accept(_Reader(self, tree.path, result.types))

    def members(self, path: str, node: ast.Attribute) -> set[str]:
        """Return the classes, with their bases, of what this is an attribute of."""
        return self._members.get((path, node.lineno, node.col_offset, node.attr), set())

    def called(self, path: str, node: ast.Call) -> tuple[set[str], set[str]]:
        """Return the functions that a call calls, and the classes whose fields are its keywords."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        place = (path, node.func.lineno, node.func.col_offset, name)
        return self._called.get(place, (set(), set()))

    def of(self, path: str, node: ast.expr) -> set[str]:
        """Return the classes of a name or an attribute."""
        name = getattr(node, "attr", getattr(node, "id", ""))
        return self._of.get((path, node.lineno, node.col_offset, name), set())


class _Reader(TraverserVisitor):
    def __init__(self, found: Types, path: str, types: dict[Expression, Type]) -> None:
        super().__init__()
        self._found, self._path, self._types = found, path, types

    def _place(self, node: Expression, name: str) -> Place:
        return self._path, node.line, node.column, name

    def visit_member_expr(self, o: MemberExpr) -> None:
        super().visit_member_expr(o)
        self._found._members[self._place(o, o.name)] |= {*_classes(self._types.get(o.expr))}
        self._found._of[self._place(o, o.name)] |= {*_classes(self._types.get(o))}

    def visit_name_expr(self, o: NameExpr) -> None:
        self._found._of[self._place(o, o.name)] |= {*_classes(self._types.get(o))}

    def visit_call_expr(self, o: CallExpr) -> None:
        super().visit_call_expr(o)
        if not isinstance(o.callee, (NameExpr, MemberExpr)):
            return
        functions: set[str] = set()
        classes: set[str] = set()
        if isinstance(o.callee, RefExpr) and o.callee.fullname == "msgspec.structs.replace":
            classes = {*_classes(self._types.get(o.args[0]))}
        for one in _callables(self._types.get(o.callee)):
            if one.is_type_obj():
                classes |= {info.fullname for info in one.type_object().mro}
                functions.add(f"{one.type_object().fullname}.__init__")
            elif one.definition is not None:
                functions.add(one.definition.fullname)
        self._found._called[self._place(o.callee, o.callee.name)] = functions, classes


def _classes(found: Type | None) -> Iterator[str]:
    proper = get_proper_type(found)
    if isinstance(proper, TypeVarType):
        yield from _classes(proper.upper_bound)
    elif isinstance(proper, TypeType):
        yield from _classes(proper.item)
    elif isinstance(proper, Instance):
        yield from (info.fullname for info in proper.type.mro)
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _classes(item)
    elif isinstance(proper, (CallableType, Overloaded)) and proper.is_type_obj():
        yield from (info.fullname for info in proper.type_object().mro)


def _callables(found: Type | None) -> Iterator[CallableType]:
    proper = get_proper_type(found)
    if isinstance(proper, CallableType):
        yield proper
    elif isinstance(proper, Overloaded):
        yield from proper.items
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _callables(item)
