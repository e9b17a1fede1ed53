"""Slurm's own files: which line of which file says what? They are read, nothing is run.

Like slurmd: a comment goes first, then lines that end in a backslash are joined, names are in any
case, several settings may share a line, includes are followed (parse_config.c). Line numbers count
from 1.
"""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage import edits
from forestage.edits import File
from forestage.errors import Failed

MAX_FILES = 64  # of one configuration, includes and all
_SETTING = re.compile(r'(?:^|\s)([A-Za-z]\w*)\s*=\s*("[^"]*"|\S*)', re.ASCII)


class Line(msgspec.Struct, frozen=True):
    """One line as Slurm reads it: the lines `first` to `last` of a file, joined, no comment."""

    file: str
    first: int
    last: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.first}"


class Setting(msgspec.Struct, frozen=True):
    """`name` in lower case; `alone`: its line says nothing else."""

    line: Line
    name: str
    value: str
    alone: bool


class Plugin(msgspec.Struct, frozen=True):
    """A line of plugstack.conf(5) that names a plugin."""

    line: Line
    path: str


class Read(msgspec.Struct, frozen=True):
    """A configuration with all that it includes, in the order in which Slurm reads it."""

    files: tuple[File, ...]
    lines: tuple[Line, ...]

    def settings(self, name: str) -> tuple[Setting, ...]:
        """Every setting of that name, which is in lower case."""
        return tuple(one for line in self.lines for one in _settings(line) if one.name == name)

    def plugins(self) -> tuple[Plugin, ...]:
        """Of plugstack.conf: `required|optional PATH ARGUMENTS`."""
        words = ((line, line.text.split()) for line in self.lines)
        return tuple(
            Plugin(line, found[1])
            for line, found in words
            if len(found) > 1 and found[0].lower() in ("required", "optional")
        )


def read(path: Path) -> Read:
    """The file and its includes; one that is not there is an empty configuration.

    Raises Failed where something cannot be read: what it says is not known then.
    """
    files: list[File] = []
    return Read(lines=tuple(_read(path, files)), files=tuple(files))


def is_glob(value: str) -> bool:
    """Pure: whether slurmd takes the value for a pattern (glob(7))."""
    return glob.has_magic(value)


def matches(pattern: str) -> tuple[str, ...]:
    """What a pattern with an absolute path matches now, dangling links included."""
    return tuple(sorted(glob.glob(pattern)))  # noqa: PTH207 - Path.glob() needs a directory


def _read(path: Path, files: list[File], missing_ok: bool = True) -> Iterator[Line]:
    real = os.path.realpath(path)
    if len(files) >= MAX_FILES:
        raise Failed("slurm-conf", f"{path}: includes that never end")
    try:
        text = edits.read(real)
    except FileNotFoundError:
        if missing_ok:
            return
        raise Failed("slurm-conf", f"{path} is included, but is not there") from None
    files.append(File(real, text))
    for line in joined(real, text):
        words = line.text.split(None, 1)
        if len(words) == 2 and words[0].lower() == "include":
            for included in _included(path.parent, words[1].strip()):
                yield from _read(included, files, missing_ok=False)
        else:
            yield line


def _included(directory: Path, word: str) -> list[Path]:
    pattern = os.path.join(directory, word.strip('"'))
    return [Path(one) for one in matches(pattern)] if is_glob(word) else [Path(pattern)]


def joined(file: str, text: str) -> Iterator[Line]:
    """Pure: the lines as Slurm reads them, without those that say nothing."""
    begun: list[str] = []
    for number, raw in enumerate(text.split("\n"), 1):
        bare = raw.partition("#")[0].rstrip()
        begun.append(bare.removesuffix("\\"))
        if bare.endswith("\\"):
            continue
        whole = "".join(begun).strip()
        if whole:
            yield Line(file, number - len(begun) + 1, number, whole)
        begun = []
    if whole := "".join(begun).strip():
        last = text.count("\n") + 1
        yield Line(file, last - len(begun) + 1, last, whole)


def _settings(line: Line) -> Iterator[Setting]:
    found = list(_SETTING.finditer(line.text))
    for one in found:
        alone = one.group().strip() == line.text
        yield Setting(line, one[1].lower(), one[2].strip('"'), alone)
