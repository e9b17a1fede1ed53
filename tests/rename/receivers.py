"""What mypy knows of attributes, keywords and strings that name a member of a class.

names.py reads the syntax; here a place in a file has the classes that an expression may be there.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.nodes import (
    Argument,
    Block,
    CallExpr,
    ClassDef,
    Decorator,
    Expression,
    FakeInfo,
    FuncDef,
    MemberExpr,
    MypyFile,
    NameExpr,
    Node,
    OverloadedFuncDef,
    RefExpr,
    Statement,
    StrExpr,
    SuperExpr,
    TypeInfo,
)
from mypy.patterns import Pattern
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    Overloaded,
    TupleType,
    Type,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

import checked

Span = tuple[int, int, int, int]
Class = tuple[str, str]
"""A module and the name of a class in it, without the line of a class in a function."""

TREE = (Argument, Block, Expression, FuncDef, Pattern, Statement)
ELSEWHERE = ("analyzed", "def_var", "expanded", "info", "node", "original_def", "variable", "var")
"""Attributes of a node that are no part of the tree below it."""

REPLACE = ("msgspec.structs.replace", "dataclasses.replace", "copy.replace")


class Places:
    """What stands where in one file."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[Span, str], set[Class | None]] = defaultdict(set)
        """The classes of what has the attribute; None is one that mypy does not know."""
        self.members: dict[Span, Class] = {}
        """A name in the body of a class that is the class's own."""
        self.fields: dict[Span, set[Class]] = defaultdict(set)
        """A call whose keywords are fields."""
        self.parameters: dict[Span, set[tuple[str, str]]] = defaultdict(set)
        """A call whose keywords are parameters of this function."""
        self.targets: dict[Span, set[Class]] = defaultdict(set)
        """A call whose second argument is the name of an attribute of the first."""


class Types:
    """What mypy finds, which takes it a minute, and is kept until a file changes."""

    @classmethod
    def read(cls, repository: Path, sources: list[tuple[Path, str]]) -> Types:
        sources = [one for one in sources if one[0].parent != Path(__file__).parent]
        digest = hashlib.sha256(Path(__file__).read_bytes())
        for path, name in sources:
            digest.update(f"{path} {name} ".encode() + path.read_bytes())
        kept = repository / ".mypy_cache" / f"rename.{digest.hexdigest()}"
        if kept.exists():
            return cast(Types, pickle.loads(kept.read_bytes()))
        found = cls(repository, sources)
        kept.parent.mkdir(exist_ok=True)
        for older in kept.parent.glob("rename.*"):
            older.unlink()
        kept.write_bytes(pickle.dumps(found))
        return found

    def __init__(self, repository: Path, sources: Iterable[tuple[Path, str]]) -> None:
        made = checked.options(repository)
        made.incremental = False
        made.cache_dir = os.devnull
        made.export_types = made.preserve_asts = True
        found = build.build(
            [BuildSource(str(path.relative_to(repository)), name) for path, name in sources], made
        )
        self.places: dict[Path, Places] = {}
        self.bases: dict[Class, list[Class]] = {}
        self.defined: dict[Class, set[str]] = {}
        self.has_own_init: dict[Class, bool] = {}
        self.defining: dict[str, set[Class]] = defaultdict(set)
        """By the name of an attribute, the classes that define it, also those of libraries."""
        self.of_modules: set[str] = set()
        ours = {name for _, name in sources}
        for name, state in found.graph.items():
            if not state.tree:
                continue
            self.of_modules |= {*state.tree.names} if name in ours else set()
            for info in _classes(state.tree.names, name):
                self._add_class(info)
            if name in ours:
                self.places[repository / state.tree.path] = self._read(state.tree, found.types)

    def _read(self, tree: MypyFile, types: dict[Expression, Type]) -> Places:
        reader = _Reader(types)
        for node in _nodes(tree.defs):
            if isinstance(node, ClassDef):
                self._add_class(node.info)
            elif isinstance(node, MemberExpr):
                reader.add_attribute(node)
            elif isinstance(node, SuperExpr):
                reader.add_super(node)
            elif isinstance(node, NameExpr):
                reader.add_name(node)
            elif isinstance(node, CallExpr):
                reader.add_call(node)
        return reader.places

    def _add_class(self, info: TypeInfo) -> None:
        one = class_of(info)
        self.bases[one] = [class_of(base) for base in info.mro[1:]]
        self.defined.setdefault(one, set()).update(info.names)
        init = info.get("__init__")
        owner = getattr(init.node, "info", None) if init else None
        is_objects = owner is not None and owner.fullname == "builtins.object"
        self.has_own_init[one] = bool(init and not init.plugin_generated and not is_objects)
        for name in info.names:
            self.defining[name].add(one)


def class_of(info: TypeInfo) -> Class:
    module = info.module_name
    return module, re.sub(r"@\d+", "", info.fullname.removeprefix(f"{module}."))


def _classes(symbols: Any, within: str) -> Iterator[TypeInfo]:
    """Yield the classes that a module or class defines, of which it may have others' names."""
    for name, symbol in symbols.items():
        info = symbol.node
        if isinstance(info, TypeInfo) and info.fullname == f"{within}.{name}":
            yield info
            yield from _classes(info.names, info.fullname)


def _nodes(found: Any) -> Iterator[Node]:
    """Yield the nodes of a tree. mypy's visitors are compiled and accept no class of ours."""
    todo, seen = [found], set()
    while todo:
        one = todo.pop()
        if isinstance(one, (list, tuple)):
            todo += one
        elif isinstance(one, TREE) and id(one) not in seen:
            seen.add(id(one))
            yield one
            for name in one.__mypyc_attrs__:  # type: ignore[union-attr]
                if name not in ELSEWHERE:
                    todo.append(getattr(one, name, None))


def span(node: Any) -> Span:
    return node.line, node.column, node.end_line or 0, node.end_column or 0


class _Reader:
    def __init__(self, types: dict[Expression, Type]) -> None:
        self._types = types
        self.places = Places()

    def add_attribute(self, node: MemberExpr) -> None:
        if not (isinstance(node.expr, RefExpr) and isinstance(node.expr.node, MypyFile)):
            self.places.attributes[span(node), node.name] |= {*self._classes_of(node.expr)}

    def add_super(self, node: SuperExpr) -> None:
        if node.info:
            self.places.attributes[span(node), node.name].add(class_of(node.info))

    def add_name(self, node: NameExpr) -> None:
        info = getattr(node.node, "info", None)
        if isinstance(info, TypeInfo) and not isinstance(info, FakeInfo):
            symbol = info.names.get(node.name)
            if symbol and symbol.node is node.node:
                self.places.members[span(node)] = class_of(info)

    def add_call(self, node: CallExpr) -> None:
        self._add_callee(span(node), node.callee)
        name = getattr(node.callee, "name", "")
        if name == "partial" and node.args:
            self._add_callee(span(node), node.args[0])
        if isinstance(node.callee, RefExpr) and node.callee.fullname in REPLACE and node.args:
            self.places.fields[span(node)] |= {*self._known(node.args[0])}
        if name == "_replace" and isinstance(node.callee, MemberExpr):
            self.places.fields[span(node)] |= {*self._known(node.callee.expr)}
        if len(node.args) > 1 and isinstance(node.args[1], StrExpr):
            self.places.targets[span(node)] |= {*self._known(node.args[0])}

    def _known(self, node: Expression) -> Iterator[Class]:
        yield from (one for one in self._classes_of(node) if one)

    def _classes_of(self, node: Expression) -> Iterator[Class | None]:
        if isinstance(node, RefExpr) and isinstance(node.node, TypeInfo):
            yield class_of(node.node)
        elif found := self._types.get(node):
            for info in infos(found):
                yield class_of(info) if info else None
        else:
            yield None

    def _add_callee(self, place: Span, node: Expression) -> None:
        symbols = [*self._symbols(node)]
        if not any(_is_definition(one) for one in symbols):
            found = get_proper_type(self._types.get(node))
            if isinstance(found, CallableType) and found.is_type_obj():
                symbols.append(found.type_object())
            elif isinstance(found, TypeType):
                symbols += infos(found)
            elif isinstance(found, CallableType):
                symbols.append(found.definition)
        for symbol in symbols:
            self._add_definition(place, symbol)

    def _symbols(self, node: Expression) -> Iterator[Any]:
        if isinstance(node, RefExpr) and node.node:
            yield node.node
        elif isinstance(node, MemberExpr):
            for info in infos(self._types.get(node.expr)):
                symbol = info.get(node.name) if info else None
                yield symbol.node if symbol else None
        elif isinstance(node, SuperExpr) and node.info:
            for one in node.info.mro:
                if symbol := one.names.get(node.name):
                    yield symbol.node

    def _add_definition(self, place: Span, symbol: Any) -> None:
        if isinstance(symbol, OverloadedFuncDef):
            symbol = symbol.items[0]
        if isinstance(symbol, Decorator):
            symbol = symbol.func
        if isinstance(symbol, TypeInfo):
            self.places.fields[place].add(class_of(symbol))
        elif isinstance(symbol, FuncDef) and not isinstance(symbol.info, FakeInfo):
            module, name = class_of(symbol.info)
            self.places.parameters[place].add((module, f"{name}.{symbol.name}"))
        elif isinstance(symbol, FuncDef):
            module, _, name = symbol.fullname.rpartition(".")
            self.places.parameters[place].add((module, name))


def _is_definition(node: Any) -> bool:
    return isinstance(node, (FuncDef, Decorator, OverloadedFuncDef, TypeInfo))


def infos(type: Type | None) -> Iterator[TypeInfo | None]:
    """Yield the classes that an object of a type may have; None for one that is not known."""
    found = get_proper_type(type)
    if isinstance(found, TypeVarType):
        found = get_proper_type(found.upper_bound)
    if isinstance(found, UnionType):
        for item in found.items:
            yield from infos(item)
    elif isinstance(found, TypeType):
        yield from infos(found.item)
    elif isinstance(found, (CallableType, Overloaded)):
        yield found.type_object() if found.is_type_obj() else found.fallback.type
    else:
        yield from _info(found)


def _info(found: Type | None) -> Iterator[TypeInfo | None]:
    if isinstance(found, Instance):
        yield found.type
    elif isinstance(found, TupleType):
        yield found.partial_fallback.type
    elif isinstance(found, LiteralType):
        yield found.fallback.type
    elif found is None or isinstance(found, AnyType):
        yield None
