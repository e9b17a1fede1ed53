"""Which names of a Python program mean which definitions, and the edits that rename them.

The kinds of a row, and what `where` is: the module that has the name now, as docs write it
(`bind/namespaces`; of tests and benches the file, `tests/node.py`), with the class or function.

    class, function, constant   the module                        bind/namespaces
    module                      nothing; old and new are          bind/namespaces
    parameter                   the function, or the method       bind/unmount.claim
    method, field               the class                         cache/lease.Leases
    text                        nothing: a word in comments, docstrings and pages, matched whole

`where` may use names from before or after the renaming. A name is resolved through imports, also
those in functions and those that another module passes on; a local variable of the same name stays.
Members of a class, and keywords, are resolved by the types that mypy finds (receivers.py): a row
renames what the class defines, its overrides in subclasses, and each use of an object of these. An
object of unknown type has the new name if every class that defines the old one has it; such uses
are reported.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from receivers import Class, Places, Types

import checked

KINDS = ("class", "function", "constant", "module", "parameter", "method", "field", "text")
SETTERS = ("setattr", "delattr", "getattr", "hasattr", "object")
"""Functions whose second argument is the name of an attribute of the first."""
Name = tuple[str, str]
"""A module and a name in it, which may be a module, too."""


class Collision(Exception):
    """A new name has another meaning where it would be used."""


@dataclass(frozen=True)
class Row:
    old: str
    new: str
    kind: str
    where: str


@dataclass
class Table:
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Table:
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line and not line.startswith("#"):
                fields = line.split("\t")
                fields += [""] * (4 - len(fields))
                if len(fields) != 4 or fields[2] not in KINDS:
                    raise ValueError(f"{path}:{number}: not old, new, kind and where")
                rows.append(Row(*fields))
        return cls(rows)


def dotted(where: str) -> str:
    """Return the name by which modules are imported: `bind/namespaces`, or a file."""
    if where.endswith(".py"):
        return Path(where).stem
    return "forestage." + where.replace("/", ".")


@dataclass
class Scope:
    """Names bound in a module, class, function or comprehension: what each imports, or None."""

    node: ast.AST
    bound: dict[str, Name | None] = field(default_factory=dict)
    aliased: set[str] = field(default_factory=set)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


class Module:
    def __init__(self, path: Path, name: str, is_package: bool) -> None:
        self.path, self.name, self.is_package = path, name, is_package
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self._starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = self.text.splitlines(keepends=True)
        self.scopes: dict[ast.AST, Scope] = {}
        self.top = self._scope(self.tree)
        for name, bound in self.top.bound.items():
            if bound is None:
                self.top.bound[name] = (self.name, name)

    def offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column

    def start(self, node: Any) -> int:
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)

    def _scope(self, node: ast.AST) -> Scope:
        scope = self.scopes[node] = Scope(node)
        outside: set[str] = set()
        for child in _of_scope(node):
            if isinstance(child, (ast.Global, ast.Nonlocal)):
                outside |= {*child.names}
            elif isinstance(child, ast.Import):
                _bind_modules(scope, child)
            elif isinstance(child, ast.ImportFrom):
                for one in child.names:
                    scope.bound[one.asname or one.name] = (child.module or "", one.name)
                    if one.asname and one.asname != one.name:
                        scope.aliased.add(one.asname)
            elif name := _bound_by(child):
                scope.bound.setdefault(name, None)
        for name in outside:
            scope.bound.pop(name, None)
        return scope

    def scope(self, node: ast.AST) -> Scope:
        return self.scopes.get(node) or self._scope(node)


def _bound_by(node: ast.AST) -> str | None:
    """Return the name that a node binds to a value."""
    if isinstance(node, ast.Name):
        return None if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.arg):
        return node.arg
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    kinds += (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)
    return node.name if isinstance(node, kinds) else None


def _bind_modules(scope: Scope, node: ast.Import) -> None:
    for one in node.names:
        owner, _, last = one.name.rpartition(".")
        if one.asname:
            scope.bound[one.asname] = (owner, last)
            scope.aliased.add(one.asname)
        else:
            first = one.name.split(".")[0]
            scope.bound[first] = ("", first)


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef, *COMPREHENSIONS)
Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


def _of_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below this one, without what is in scopes of their own."""
    for child in _inside(node):
        yield child
        if not isinstance(child, SCOPES):
            yield from _of_scope(child)
        elif isinstance(child, COMPREHENSIONS):  # := binds outside of it
            for inner in ast.walk(child):
                if isinstance(inner, ast.NamedExpr):
                    yield inner.target


def _inside(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node that are in the scope it makes, if it makes one."""
    outside = {id(one) for one in _outside(node)}
    return [one for one in ast.iter_child_nodes(node) if id(one) not in outside]


def _outside(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node that makes a scope that are in the scope around it."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*node.decorator_list, *([node.returns] if node.returns else [])]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    return []


class Program:
    def __init__(self, repository: Path, table: Table) -> None:
        self.repository, self.table = repository, table
        self.modules: dict[str, Module] = {}
        self._moves = {
            dotted(row.old): dotted(row.new) for row in table.rows if row.kind == "module"
        }
        for path, name in self._files():
            is_package = path.name == "__init__.py"
            self.modules[self.module(name)] = Module(path, self.module(name), is_package)
        self.top: dict[Name, str] = {}
        self._known: dict[Name, Name] = {}
        self._by_old: dict[str, list[Name]] = defaultdict(list)
        self.members: dict[Name, dict[str, str]] = defaultdict(dict)  # of a class
        self.fields: dict[Name, dict[str, str]] = defaultdict(dict)  # keywords that make a class
        self.remarks: list[str] = []
        self.parameters: dict[Name, dict[str, str]] = defaultdict(dict)  # of a function
        for row in table.rows:
            if row.kind in ("class", "function", "constant"):
                owner = self.module(dotted(row.where))
                self.top[owner, row.old] = row.new
                self._by_old[row.old].append((owner, row.new))
        self.types: Types | None = None
        self._classes: dict[Class, Name] = {}
        self.bases: dict[Name, list[Name]] = {}
        if any(row.kind in ("parameter", "method", "field") for row in table.rows):
            self.types = Types.read(repository, [*self._files()])
            self._add_members(self.types)
        for row in table.rows:
            if row.kind == "parameter":
                owner, name = self._within(row.where)
                class_name, _, method = name.rpartition(".")
                if class_name:
                    method = self.members.get((owner, class_name), {}).get(method, method)
                    name = f"{class_name}.{method}"
                self.parameters[owner, name][row.old] = row.new

    def _within(self, where: str) -> Name:
        """Return the module and the name of a class, function or method, as they are afterwards."""
        place, _, name = where.partition(".")
        if where.startswith(("tests/", "bench/")):
            place, _, name = where.partition(".py.")
            place += ".py"
        module = dotted(place)
        if place.endswith(".py"):
            paths = dict(self._files())
            module = paths.get(self.repository / place, module)
        owner, *rest = [self.module(module), *name.split(".")]
        owner, first = self.canon(owner, rest[0])
        return owner, ".".join([first, *rest[1:]])

    def _add_members(self, types: Types) -> None:
        rows: dict[Name, dict[str, Row]] = defaultdict(dict)
        for row in self.table.rows:
            if row.kind in ("method", "field"):
                rows[self._within(row.where)][row.old] = row
        self._classes = {one: self._class(one) for one in types.bases}
        self.bases = {
            self.after(one): [self.after(base) for base in bases]
            for one, bases in types.bases.items()
        }
        known = {afterwards: one for one, afterwards in self._classes.items()}
        for owner, renamed in rows.items():
            for row in renamed.values():
                self._check_row(row, types.defined.get(known.get(owner, owner)))
        for one in types.bases:
            self._add_members_of(types, one, rows)

    def _add_members_of(self, types: Types, one: Class, rows: dict[Name, dict[str, Row]]) -> None:
        line = self._line(one)
        for base in reversed(line):
            for old, row in rows.get(base, {}).items():
                self.members[line[0]][old] = row.new
                if row.kind == "field" and not types.has_own_init[one]:
                    self.fields[line[0]][old] = row.new
        for old, new in self.members.get(line[0], {}).items():
            for base in types.bases[one]:
                if old in types.defined[one]:
                    self._check_override(types, one, base, old, new, rows)

    def _check_row(self, row: Row, defined: set[str] | None) -> None:
        if defined is None:
            self.remarks.append(f"no such class: {row}")
        elif not {row.old, row.new} & defined:
            self.remarks.append(f"not defined there: {row}")
        elif {row.old, row.new} <= defined:
            raise Collision(f"both are defined: {row}")

    def _check_override(
        self, types: Types, one: Class, base: Class, old: str, new: str, rows: Any
    ) -> None:
        defined = types.defined.get(base, set())
        is_renamed = any(old in rows.get(other, {}) for other in self._line(base))
        if old in defined and not is_renamed:
            self.remarks.append(f"{base} has {old}, which {one} overrides as {new}")
        if new in defined and not is_renamed:
            raise Collision(f"{one}: {new} of {base} has another meaning")

    def _line(self, one: Class) -> list[Name]:
        """Return a class and its bases as they are afterwards."""
        afterwards = self.after(one)
        return [afterwards, *self.bases.get(afterwards, [])]

    def _class(self, one: Class) -> Name:
        first, dot, rest = one[1].partition(".")
        owner, first = self.canon(one[0], first)
        return owner, first + dot + rest

    def after(self, one: Class) -> Name:
        return self._classes.get(one, one)

    @cached_property
    def unique(self) -> dict[str, str]:
        """Return the old names that only classes define where the new name is the same."""
        if not self.types:
            return {}
        found = {}
        for old, classes in self.types.defining.items():
            new = {self.members.get(self.after(one), {}).get(old) for one in classes}
            if len(new) == 1 and None not in new and old not in self.types.of_modules:
                found[old] = new.pop() or ""
        return found

    @cached_property
    def old_names(self) -> set[str]:
        return {old for renamed in self.members.values() for old in renamed}

    def _files(self) -> Iterator[tuple[Path, str]]:
        for top in ("src", "src/estimate", "src/window"):
            for path in sorted((self.repository / top).rglob("*.py")):
                parts = path.relative_to(self.repository / top).with_suffix("").parts
                if top != "src" or parts[0] == "forestage":
                    name = ".".join(parts)
                    yield path, name.removesuffix(".__init__")
        for source in checked.sources(self.repository):
            assert source.path
            yield self.repository / source.path, source.module

    def moved_files(self) -> Iterator[tuple[Path, Path]]:
        for row in self.table.rows:
            if row.kind == "module":
                old, new = (
                    self.repository / (name if name.endswith(".py") else f"src/forestage/{name}.py")
                    for name in (row.old, row.new)
                )
                if old.exists():
                    yield old, new

    # --- what names mean

    def module(self, name: str) -> str:
        return self._moves.get(name, name)

    def canon(self, owner: str, name: str) -> Name:
        """Return where this name is defined, and what it is called afterwards."""
        if (owner, name) not in self._known:
            self._known[owner, name] = self._canon(owner, name, frozenset())
        return self._known[owner, name]

    def _canon(self, owner: str, name: str, seen: frozenset[Name]) -> Name:
        owner = self.module(owner)
        whole = f"{owner}.{name}" if owner else name
        if whole in self._moves:
            owner, _, name = self._moves[whole].rpartition(".")
            return owner, name
        if new := self.top.get((owner, name)):
            return owner, new
        module = self.modules.get(owner)
        if not module or whole in self.modules or (owner, name) in seen:
            return owner, name
        seen |= {(owner, name)}
        bound = module.top.bound.get(name)
        if name in module.top.aliased:
            return owner, name  # a name of this module's own
        if bound and bound[0] != owner:
            return self._canon(*bound, seen)
        if bound is None:
            for target in self._by_old.get(name, ()):
                if target[1] in module.top.bound and self._canon(owner, target[1], seen) == target:
                    return target
        return owner, name

    def is_module(self, owner: str, name: str) -> str:
        """Return the module's whole name if this name is one."""
        owner, name = self.canon(owner, name)
        whole = f"{owner}.{name}" if owner else name
        return whole if whole in self.modules or whole in self._folders else ""

    @cached_property
    def _folders(self) -> set[str]:
        return {folder for name in self.modules for folder in _prefixes(name)}

    # --- edits

    def edit(self) -> dict[Path, str]:
        changed = {}
        for module in self.modules.values():
            text = Editor(self, module).edit()
            if text != module.text:
                changed[module.path] = text
        return changed


class Editor:
    """The edits of one file."""

    def __init__(self, program: Program, module: Module) -> None:
        self._program, self._module = program, module
        self._edits: dict[tuple[int, int], str] = {}
        self._strings: list[tuple[int, int]] = []  # f-strings around a node
        self._parameters: dict[ast.AST, dict[str, str]] = {}
        self._chain = [module.top]
        self._names: list[str] = []  # of classes and functions around
        places = program.types.places.get(module.path) if program.types else None
        self._places = places or Places()

    def edit(self) -> str:
        for child in ast.iter_child_nodes(self._module.tree):
            self._visit(child)
        text = self._module.text
        for (start, end), new in sorted(self._edits.items(), reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def _replace(self, start: int, old: str, new: str) -> None:
        text = self._module.text
        if old == new:
            return
        if text[start : start + len(old)] == old:
            self._edits[start, start + len(old)] = new
            return
        if not self._strings:  # in f-strings Python 3.11 gives no true positions
            raise AssertionError(f"{self._module.path}: {old} is not at {start}")
        first, last = self._strings[0]
        for part in re.finditer(r"\{[^{}]*\}", text[first:last]):
            for found in re.finditer(rf"\b{re.escape(old)}\b(?!=)", part[0]):
                at = first + part.start() + found.start()
                self._edits[at, at + len(old)] = new

    def _visit(self, node: ast.AST) -> None:
        method = getattr(self, f"_{type(node).__name__}", None)
        if method:
            method(node)
        if isinstance(node, SCOPES):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._enter_function(node)
            outside = _outside(node)
            for child in outside:
                self._visit(child)
            scope = self._module.scope(node)
            self._chain.append(scope)
            self._names.append(getattr(node, "name", "<>"))
            for child in _inside(node):
                self._visit(child)
            self._names.pop()
            self._chain.pop()
        else:
            for child in ast.iter_child_nodes(node):
                self._visit(child)
        if isinstance(node, ast.JoinedStr):
            self._strings.pop()

    # names

    def _look_up(self, name: str) -> Scope | None:
        """Return the innermost scope that binds a name here."""
        for number, scope in enumerate(reversed(self._chain)):
            is_seen = number == 0 and name not in _methods(scope.node)  # an annotation's
            if name in scope.bound and (is_seen or not scope.is_class):
                return scope
        return None

    def _meaning(self, name: str) -> Name | None:
        """Return what a name means here if it is one of a module."""
        scope = self._look_up(name)
        if scope:
            bound = scope.bound[name]
            return self._program.canon(*bound) if bound else None
        found = self._program.canon(self._module.name, name)
        return found if found != (self._module.name, name) else None

    def _Name(self, node: ast.Name) -> None:
        if own := self._places.members.get(_span(node)):
            new = self._program.members.get(self._program.after(own), {}).get(node.id)
            if new:
                self._replace(self._module.start(node), node.id, new)
                return
        scope = self._look_up(node.id)
        if scope and scope.node in self._parameters:
            new = self._parameters[scope.node].get(node.id)
            if new:
                self._must_be_free(node, new, scope, None)
                self._replace(self._module.start(node), node.id, new)
                return
        if scope and node.id in scope.aliased:
            return
        meaning = self._meaning(node.id)
        if meaning and meaning[1] != node.id:
            self._must_be_free(node, meaning[1], scope, meaning)
            self._replace(self._module.start(node), node.id, meaning[1])

    def _must_be_free(self, node: Any, new: str, until: Scope | None, meaning: Name | None) -> None:
        for number, scope in enumerate(reversed(self._chain)):
            if new in scope.bound and (number == 0 or not scope.is_class):
                bound = scope.bound[new]
                if not bound or self._program.canon(*bound) != meaning:
                    at = f"{self._module.path}:{node.lineno}"
                    raise Collision(f"{at}: {new} has another meaning here")
            if scope is until:
                return

    def _module_of(self, node: ast.AST) -> str:
        """Return the whole name of the module that an expression is, or nothing."""
        if isinstance(node, ast.Name):
            scope = self._look_up(node.id)
            bound = scope.bound[node.id] if scope else None
            return self._program.is_module(*bound) if bound else ""
        if isinstance(node, ast.Attribute) and (owner := self._module_of(node.value)):
            return self._program.is_module(owner, node.attr)
        return ""

    def _definition(self, node: ast.AST) -> Name | None:
        """Return the module and name of what an expression names."""
        if isinstance(node, ast.Name):
            return self._meaning(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._module_of(node.value)):
            return self._program.canon(owner, node.attr)
        return None

    def _Attribute(self, node: ast.Attribute) -> None:
        end = self._module.end(node) - len(node.attr)
        if owner := self._module_of(node.value):
            self._replace(end, node.attr, self._program.canon(owner, node.attr)[1])
            return
        is_setter = node.attr in ("setter", "deleter") and self._chain[-1].is_class
        if is_setter and isinstance(node.value, ast.Name):
            old = node.value.id
            self._replace(self._module.start(node.value), old, self._members_here().get(old, old))
        if new := self._new_attribute(node):
            self._replace(end, node.attr, new)

    def _new_attribute(self, node: ast.Attribute) -> str | None:
        if node.attr not in self._program.old_names:
            return None
        classes = self._places.attributes.get((_span(node), node.attr), set())
        definition = self._definition(node.value)
        if classes <= {None} and definition in self._program.members:
            return self._program.members[definition].get(node.attr)
        at = f"{self._module.path}:{node.lineno}: {ast.unparse(node)}"
        new = {
            self._program.members.get(self._program.after(one), {}).get(node.attr)
            for one in classes
            if one
        }
        if None in classes:
            unique = self._program.unique.get(node.attr)
            self._program.remarks.append(f"{at}: of unknown type: {unique or 'left'}")
            new.add(unique)
        if len(new) > 1:
            self._program.remarks.append(f"{at}: one of {new}: left")
            return None
        return new.pop() if new else None

    # definitions

    def _define(self, node: Any, keyword: str) -> None:
        start = self._module.start(node) + len(keyword)
        if not self._names:
            new = self._program.canon(self._module.name, node.name)[1]
            if new != node.name and new in self._module.top.bound:
                raise Collision(f"{self._module.path}:{node.lineno}: {new} is defined here, too")
            self._replace(start, node.name, new)
        elif self._chain[-1].is_class and (new := self._members_here().get(node.name)):
            self._replace(start, node.name, new)

    def _members_here(self) -> dict[str, str]:
        """Return what is renamed of the class whose body this is."""
        names: list[str] = []
        for scope, name in zip(reversed(self._chain), reversed(self._names), strict=False):
            if not scope.is_class:
                break
            names.insert(0, name)
        if len(names) == len(self._names):
            names[0] = self._program.canon(self._module.name, names[0])[1]
        return self._program.members.get((self._module.name, ".".join(names)), {})

    def _ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node, "class ")

    def _FunctionDef(self, node: ast.FunctionDef) -> None:
        self._define(node, "def ")

    def _AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._define(node, "async def ")

    def _enter_function(self, node: Function) -> None:
        names = [*self._names, node.name]
        names[0] = self._program.canon(self._module.name, names[0])[1]
        if len(names) > 1:
            members = self._program.members.get((self._module.name, ".".join(names[:-1])), {})
            names[-1] = members.get(names[-1], names[-1])
        renamed = self._program.parameters.get((self._module.name, ".".join(names)))
        if renamed:
            self._parameters[node] = renamed
        self._quoted(node.returns)

    def _arg(self, node: ast.arg) -> None:
        if new := self._parameters.get(self._chain[-1].node, {}).get(node.arg):
            if new in self._chain[-1].bound:
                at = f"{self._module.path}:{node.lineno}"
                raise Collision(f"{at}: {new} has another meaning here")
            self._replace(self._module.start(node), node.arg, new)
        self._quoted(node.annotation)

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        target = node.target
        if self._chain[-1].is_class and isinstance(target, ast.Name):
            new = self._members_here().get(target.id, target.id)
            self._replace(self._module.start(target), target.id, new)
        self._quoted(node.annotation)

    def _Assign(self, node: ast.Assign) -> None:
        names = {one.id for one in node.targets if isinstance(one, ast.Name)}
        if self._chain[-1].is_class and names & {"__slots__", "__match_args__"}:
            for one in ast.walk(node.value):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    new = self._members_here().get(one.value, one.value)
                    self._replace(self._module.start(one) + 1, one.value, new)

    # imports

    def _Import(self, node: ast.Import) -> None:
        for one in node.names:
            self._replace(self._module.start(one), one.name, self._program.module(one.name))

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.module:
            return
        here = self._program.module(node.module)
        start = self._module.start(node)
        self._replace(start + len("from "), node.module, here)
        moved = []
        for one in node.names:
            whole = f"{node.module}.{one.name}"
            owner, new = self._program.canon(node.module, one.name)
            if whole in self._program._moves and owner != here:
                moved.append((one, owner, new))
            elif new != one.name:
                is_passed_on = one.asname == one.name  # `import X as X`
                local = new if is_passed_on else one.asname or new
                first, last = self._module.start(one), self._module.end(one)
                is_short = local == new and not is_passed_on
                self._edits[first, last] = new if is_short else f"{new} as {local}"
                if local == new:
                    self._must_be_free(one, new, self._chain[-1], (owner, new))
        if moved:
            self._move(node, moved, here)

    def _move(
        self, node: ast.ImportFrom, moved: list[tuple[ast.alias, str, str]], here: str
    ) -> None:
        """Import modules from the folder that they have moved to."""
        gone = {one for one, _, _ in moved}
        start, end = self._module.start(node), self._module.end(node)
        lines = []
        kept = []
        for one in node.names:
            if one not in gone:
                new = self._program.canon(node.module or "", one.name)[1]
                kept.append(f"{new} as {one.asname}" if one.asname else new)
        if kept:
            lines.append(f"from {here} import {', '.join(kept)}")
        for one, owner, new in moved:
            also = f" as {one.asname}" if one.asname and one.asname != new else ""
            lines.append(f"from {owner} import {new}{also}")
            if not one.asname:
                self._must_be_free(one, new, self._chain[-1], (owner, new))
        for span in [span for span in self._edits if start <= span[0] < end]:
            del self._edits[span]
        indent = " " * node.col_offset
        self._edits[start, end] = f"\n{indent}".join(lines)

    # keywords and strings

    def _Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        renamed = self._keywords(node)
        for keyword in node.keywords:
            if keyword.arg and (new := renamed.get(keyword.arg)):
                self._replace(self._module.start(keyword), keyword.arg, new)
        if len(node.args) > 1:
            self._setter(node.args[0], node.args[1])
            if name in SETTERS:
                for owner in self._places.targets.get(_span(node), ()):
                    self._member_string(self._program.after(owner), node.args[1])
        if name in ("cast", "TypeVar"):
            for argument in [*node.args[:1], *(one.value for one in node.keywords)]:
                self._quoted(argument)

    def _keywords(self, node: ast.Call) -> dict[str, str]:
        """Return what is renamed of the fields or parameters of what a call calls."""
        renamed: dict[str, str] = {}
        program = self._program
        classes = {program.after(one) for one in self._places.fields.get(_span(node), ())}
        functions = {self._function(*one) for one in self._places.parameters.get(_span(node), ())}
        if definition := self._definition(node.func):
            classes.add(definition)
            functions.add(definition)
        for one in classes:
            renamed |= program.fields.get(one, {})
            for base in (one, *program.bases.get(one, ())):
                renamed |= program.parameters.get((base[0], f"{base[1]}.__init__"), {})
        for function in functions:
            renamed |= program.parameters.get(function, {})
        return renamed

    def _function(self, module: str, name: str) -> Name:
        """Return the module and name of a function or method as they are afterwards."""
        owner, dot, method = name.rpartition(".")
        if not dot:
            return self._program.canon(module, name)
        module, owner = self._program.after((module, owner))
        renamed = self._program.members.get((module, owner), {})
        return module, f"{owner}.{renamed.get(method, method)}"

    def _member_string(self, owner: Name, name: ast.expr) -> None:
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            new = self._program.members.get(owner, {}).get(name.value, name.value)
            self._replace(self._module.start(name) + 1, name.value, new)

    def _Tuple(self, node: ast.Tuple) -> None:
        if len(node.elts) > 1:
            self._setter(node.elts[0], node.elts[1])

    def _setter(self, target: ast.expr, name: ast.expr) -> None:
        """Rename what a string names after its module or class, as in setattr, or in a pair."""
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            return
        if owner := self._module_of(target):
            new: str | None = self._program.canon(owner, name.value)[1]
        else:
            definition = self._definition(target)
            new = self._program.members.get(definition or ("", ""), {}).get(name.value)
        if new:
            self._replace(self._module.start(name) + 1, name.value, new)

    def _MatchClass(self, node: ast.MatchClass) -> None:
        definition = self._definition(node.cls)
        renamed = self._program.members.get(definition or ("", ""), {})
        for attribute, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            if new := renamed.get(attribute):
                before = self._module.text[: self._module.start(pattern)].rindex(attribute)
                self._replace(before, attribute, new)

    def _Global(self, node: ast.Global) -> None:
        for name in node.names:
            new = self._program.canon(self._module.name, name)[1]
            if new != name:
                line = self._module.text[self._module.start(node) : self._module.end(node)]
                found = re.search(rf"\b{name}\b", line)
                assert found
                self._replace(self._module.start(node) + found.start(), name, new)

    def _JoinedStr(self, node: ast.JoinedStr) -> None:
        self._strings.append((self._module.start(node), self._module.end(node)))

    def _quoted(self, node: ast.AST | None) -> None:
        """Rename in annotations that are strings, but not in the strings of Literal."""
        values = {id(one) for one in _of_literals(node)}
        for one in ast.walk(node) if node else ():
            if not (isinstance(one, ast.Constant) and isinstance(one.value, str)):
                continue
            if id(one) in values:
                continue
            start = self._module.start(one) + 1
            text = self._module.text[start : start + len(one.value)]
            if text != one.value or not re.fullmatch(r"[\w.\[\], |]+", text):
                continue
            for found in re.finditer(r"\b([A-Za-z_]\w*)(?:\.(\w+))?", text):
                first, second = found.groups()
                owner = self._module_of(ast.Name(first))
                if second and owner:
                    new = self._program.canon(owner, second)[1]
                    self._replace(start + found.start(2), second, new)
                elif (meaning := self._meaning(first)) and not self._is_alias(first):
                    self._replace(start + found.start(1), first, meaning[1])

    def _is_alias(self, name: str) -> bool:
        scope = self._look_up(name)
        return bool(scope and name in scope.aliased)


def _span(node: Any) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _of_literals(node: ast.AST | None) -> Iterator[ast.AST]:
    for one in ast.walk(node) if node else ():
        if isinstance(one, ast.Subscript) and ast.unparse(one.value) == "Literal":
            yield from ast.walk(one.slice)


def _methods(node: ast.AST) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name for one in ast.iter_child_nodes(node) if isinstance(one, kinds)}


def _prefixes(whole: str) -> Iterator[str]:
    while "." in whole:
        whole = whole.rpartition(".")[0]
        yield whole
