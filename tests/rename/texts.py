"""Names in comments, docstrings, strings and pages: `folder/module.name` and its like.

A word of English is never taken for a name: a reference has its module before it, or stands in
backticks in the file that imports it, or is written in CamelCase of two words.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import token
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from names import Module, Program, dotted

PAGES = (".md", ".c", ".h", ".txt", ".lua", ".conf", ".toml")
WIDTH = 100
LEFT = ("CHANGELOG.md", "tests/rename/")
PATH = re.compile(
    r"((?<![\w/.])(?:[a-z_]\w*/)+[a-z_]\w*)\.(\w+)(?:\.(\w+))?((?:, \w+(?:\.\w+)?)*`)?"
)
WHOLE = re.compile(r"\bforestage(?:\.\w+)+(?::\w+(?:\.\w+)*)?")
MEMBER = re.compile(r"(?<![\w.])([a-z_]\w*)\.(\w+)")
OWN = re.compile(r"(?<=`)(\w+)(?=(?:\(\))?`)|(?<=`self\.)\w+(?=`)")
QUOTED = re.compile(r"(?<=`)(\w+)(?=(?:\(\))?`)")
CAMEL = re.compile(r"(?<![\w.`])([A-Z][a-z]+(?:[A-Z][a-z]+)+)\b")
RAISES = re.compile(r"\bRaises (?:[^.]|\.(?=\w))+")
OF_CLASS = re.compile(r"(?<![\w.])([A-Z]\w+)\.([a-z_]\w*)")
CLASS = re.compile(r"(?<![\w.])[A-Z]\w+")
IMPORT = re.compile(r"from (forestage[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))")


def edit_texts(program: Program, edited: dict[Path, str]) -> dict[Path, str]:
    """Return the files that change: the edited ones, and what is edited in texts."""
    texts = Texts(program)
    changed = {**edited}
    of_path = {module.path: module for module in program.modules.values()}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=program.repository, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        path = program.repository / name
        if name.startswith(LEFT) or not path.is_file() or path.is_symlink():
            continue
        if path in of_path:
            before = of_path[path].text
            text = texts.in_python(of_path[path], edited.get(path, before))
        elif path.suffix in PAGES:
            before = path.read_text()
            text = texts.in_page(before)
        else:
            continue
        if text != before:
            changed[path] = text
    return changed


class Texts:
    def __init__(self, program: Program) -> None:
        self._program = program
        last = Counter(name.rpartition(".")[2] for name in program.modules)
        rows = program.table.rows
        self._words = {row.old: row.new for row in rows if row.kind == "text"}
        self._words |= {row.old: row.new for row in rows if row.old.startswith("test_")}
        for row in rows:
            if row.kind in ("class", "function", "constant") and row.where:
                for where in {row.where, program.module(dotted(row.where)).replace(".", "/")}:
                    module = where.removesuffix(".py").rpartition("/")[2]
                    if last[module] <= 1:
                        self._words[f"{module}.{row.old}"] = f"{module}.{row.new}"
        classes = [row for row in rows if row.kind == "class"]
        count = Counter(row.old for row in classes)
        self._classes = {row.old: row.new for row in classes if count[row.old] == 1}
        count = Counter(name.rpartition(".")[2] for _, name in program.members)
        self._members = {
            name.rpartition(".")[2]: renamed
            for (_, name), renamed in program.members.items()
            if count[name.rpartition(".")[2]] == 1
        }
        words = "|".join(map(re.escape, sorted(self._words, key=len, reverse=True)))
        self._word = re.compile(rf"(?<![\w/.])(?:{words})\b") if words else None

    def in_page(self, text: str) -> str:
        """Return a text with its references edited that need no imports to be understood."""
        text = PATH.sub(self._path, text)
        text = WHOLE.sub(lambda found: self._whole(found[0]), text)
        text = OF_CLASS.sub(self._of_class, text)
        return self._word.sub(lambda found: self._words[found[0]], text) if self._word else text

    def _of_class(self, found: re.Match[str]) -> str:
        renamed = self._members.get(found[1]) or self._members.get(self._classes.get(found[1], ""))
        return f"{found[1]}.{(renamed or {}).get(found[2], found[2])}"

    def in_python(self, module: Module, text: str) -> str:
        """Return a Python file with its comments and strings edited."""
        lines = text.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        edits = []
        classes = self._spans(module, text)
        for kind, first, last in _texts(text):
            start, end = (starts[row - 1] + column for row, column in (first, last))
            old = text[start:end]
            new = self.in_page(old)
            new = self._in_prose(module, new) if kind == "prose" else self._in_string(new)
            if kind == "prose":
                for top, bottom, renamed in classes:
                    if top <= first[0] <= bottom:
                        new = OWN.sub(lambda word: renamed.get(word[0], word[0]), new)  # noqa: B023
            if new != old:
                indent = " " * first[1]
                is_text = kind == "prose" and old.startswith('"')
                edits.append((start, end, _folded(new, indent) if is_text else new))
        for start, end, new in reversed(edits):
            text = text[:start] + new + text[end:]
        return text

    def _spans(self, module: Module, text: str) -> list[tuple[int, int, dict[str, str]]]:
        """Return the lines of each class of which a member is renamed, and what is."""
        return [
            (node.lineno, node.end_lineno or 0, renamed)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ClassDef)
            and (renamed := self._program.members.get((module.name, node.name)))
        ]

    def _in_prose(self, module: Module, text: str) -> str:
        def member(found: re.Match[str]) -> str:
            first, name = found.groups()
            bound = module.top.bound.get(first)
            owner = self._program.is_module(*bound) if bound else ""
            if not bound or not owner:
                return found[0]
            is_alias = first in module.top.aliased
            here = first if is_alias else self._program.canon(*bound)[1]
            return f"{here}.{self._program.canon(owner, name)[1]}"

        def name(found: re.Match[str]) -> str:
            bound = module.top.bound.get(found[0])
            is_own = bound and found[0] not in module.top.aliased
            return self._program.canon(*bound)[1] if bound and is_own else found[0]

        def error(found: re.Match[str]) -> str:
            return self._classes.get(found[0], "") or name(found)

        text = MEMBER.sub(member, text)
        text = RAISES.sub(lambda found: CLASS.sub(error, found[0]), text)
        return CAMEL.sub(name, QUOTED.sub(name, text))

    def _in_string(self, text: str) -> str:
        """Return a string with its edits: a module's name, or a program that imports ours."""
        if found := re.fullmatch(r"([\"'])((?:\w+\.)+\w+)\1", text):
            whole = self._whole(f"forestage.{found[2]}").removeprefix("forestage.")
            return f"{found[1]}{whole}{found[1]}"
        for statement in list(IMPORT.finditer(text)):
            names = statement[2] or statement[3]
            new_names, edits = names, []
            for part in names.replace("\\n", " ").split(","):
                name = part.strip()
                if not name.isidentifier():
                    continue
                new = self._program.canon(statement[1], name)[1]
                if new != name:
                    new_names = re.sub(rf"\b{name}\b", new, new_names)
                    edits.append((name, new))
                if whole := self._program.is_module(statement[1], name):
                    text = re.sub(rf"(?<![\w.]){name}\.(\w+)", self._of(new, whole), text)
            text = text.replace(statement[0], statement[0].replace(names, new_names))
            for name, new in edits:
                text = re.sub(rf"(?<![\w.\"']){name}\b(?![\"'])", new, text)
        return text

    def _of(self, name: str, module: str) -> Callable[[re.Match[str]], str]:
        return lambda found: f"{name}.{self._program.canon(module, found[1])[1]}"

    def _path(self, found: re.Match[str]) -> str:
        """Return `folder/module.name` with its new names; `.name` may be `.py`."""
        path, first, second, others = found.groups()
        prefix = "src/forestage/" if path.startswith("src/forestage/") else ""
        module = self._program.module(dotted(path.removeprefix(prefix)))
        if module not in self._program.modules:
            return found[0]
        path = prefix + module.removeprefix("forestage.").replace(".", "/")
        names = [self._names(module, first, second)]
        is_of_class = second and others
        for other in (others or "").rstrip("`").split(", ")[1:]:
            name, _, rest = other.partition(".")
            new = self._names(module, name, rest)
            if new == other and is_of_class:  # another of the first one's methods
                new = self._names(module, first, name).partition(".")[2]
            names.append(new)
        end = "`" if others else ""
        return f"{path}.{', '.join(names)}{end}"

    def _names(self, module: str, first: str, second: str | None) -> str:
        if first == "py":
            return first
        owner, new = self._program.canon(module, first)
        if not second:
            return new
        return f"{new}.{self._program.members.get((owner, new), {}).get(second, second)}"

    def _whole(self, whole: str) -> str:
        """Return a dotted name with its new names; its module may end with a colon."""
        if ":" in whole:
            module, _, name = whole.partition(":")
            new, both = self._whole(module), self._whole(f"{module}.{name}")
            return f"{new}:{both.removeprefix(f'{new}.')}"
        parts = whole.split(".")
        for length in range(len(parts), 1, -1):
            module = self._program.module(".".join(parts[:length]))
            if module in self._program.modules:
                rest = parts[length:]
                if not rest:
                    return module
                names = self._names(module, rest[0], rest[1] if len(rest) > 1 else None)
                return ".".join([module, names, *rest[2:]])
        return whole


def _folded(text: str, indent: str) -> str:
    """Return a docstring whose lines are no longer than they may be, where that is simple."""
    first, *lines = text.split("\n")
    if len(indent + first) > WIDTH and (found := re.search(r"\. Raises ", first)):
        rest = first[found.start() + 2 :]
        first = first[: found.start() + 1]
        if not lines:
            lines = ["", indent + rest.removesuffix('"""'), f'{indent}"""']
        else:
            lines[:1] = ["", indent + rest]
    number = 0
    while number < len(lines):
        line = lines[number]
        if len(line) > WIDTH and " " in line.strip():
            at = line.rindex(" ", 0, WIDTH + 1)
            rest, lines[number] = line[at + 1 :], line[:at]
            following = lines[number + 1] if number + 1 < len(lines) else ""
            is_same = following.startswith(line[: len(line) - len(line.lstrip())])
            if is_same and re.match(r"\s*[A-Za-z`]", following):
                lines[number + 1] = f"{indent}{rest} {following.lstrip()}"
            else:
                lines.insert(number + 1, indent + rest)
        number += 1
    return "\n".join([first, *lines])


def _texts(text: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yield comments and docstrings as prose, and other strings."""
    is_first = True
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        if one.type == token.STRING:
            yield ("prose" if is_first else "string", one.start, one.end)
        elif one.type == token.COMMENT:
            yield ("prose", one.start, one.end)
        if one.type in (token.NEWLINE, token.INDENT, token.DEDENT):
            is_first = True
        elif one.type not in (token.NL, token.COMMENT):
            is_first = False
