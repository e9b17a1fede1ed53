"""Which lines of a text file go, which come? Everything else in it stays as it is."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from forestage.errors import Failed
from forestage.system import atomic


class File(msgspec.Struct, frozen=True):
    """A file as it was read; `path` is the real one, no symbolic link."""

    path: str
    text: str


class Edit(msgspec.Struct, frozen=True):
    """A change of one file; "" as `before`: it is empty, or not there yet."""

    path: str
    before: str
    after: str
    removed: tuple[str, ...]
    added: tuple[str, ...]


class Lines:
    """Files while a plan changes them, line by line. Nothing is written."""

    def __init__(self, files: Iterable[File]) -> None:
        self._before = {one.path: one.text for one in files}
        self._dropped: dict[str, set[int]] = {}
        self._first: dict[str, list[str]] = {}
        self._last: dict[str, list[str]] = {}

    def drop(self, path: str, first: int, last: int) -> None:
        """The lines from `first` to `last`, counted from 1."""
        self._dropped.setdefault(path, set()).update(range(first - 1, last))

    def begin(self, path: str, line: str) -> None:
        """Before all others."""
        self._first.setdefault(path, []).append(line)

    def append(self, path: str, line: str) -> None:
        self._last.setdefault(path, []).append(line)

    def edits(self) -> tuple[Edit, ...]:
        return tuple(map(self._edit, sorted({*self._dropped, *self._first, *self._last})))

    def _edit(self, path: str) -> Edit:
        before = self._before.get(path, "")
        lines = before.split("\n")
        dropped = self._dropped.get(path, set())
        kept = "\n".join(line for at, line in enumerate(lines) if at not in dropped)
        first, last = self._first.get(path, []), self._last.get(path, [])
        if last and kept and not kept.endswith("\n"):
            kept += "\n"
        end = kept.removesuffix("\n").rpartition("\n")[2].partition("#")[0].rstrip()
        if last and end.endswith("\\"):  # it would take our line for the rest of its own
            kept += "\n"
        after = "".join(f"{line}\n" for line in first) + kept
        after += "".join(f"{line}\n" for line in last)
        removed = tuple(lines[at] for at in sorted(dropped))
        return Edit(path, before, after, removed, (*first, *last))


def read(path: str) -> str:
    """Byte for byte. Raises OSError."""
    with Path(path).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


def text_of(path: str) -> str:
    """Byte for byte; "" where there is no such file. Raises OSError."""
    try:
        return read(path)
    except FileNotFoundError:
        return ""


def check(edits: Iterable[Edit]) -> None:
    """Raises Failed where a file is not any more what the plan was made for; OSError."""
    for edit in edits:
        if text_of(edit.path) != edit.before:
            raise Failed("changed", f"{edit.path} was changed just now", "look again")


def write(edit: Edit) -> None:
    """Replaces the file; its owner and mode stay, so that no reader is ever refused. Raises
    OSError."""
    path = Path(edit.path)
    data = edit.after.encode(errors="surrogateescape")
    try:
        was = path.stat()
    except FileNotFoundError:
        atomic.write(path, data, 0o644)
        return
    atomic.write(path, data, was.st_mode & 0o7777, (was.st_uid, was.st_gid))


def take_back(edit: Edit, was_there: bool) -> None:
    """Puts back what `write` has replaced. Raises OSError."""
    if was_there:
        write(msgspec.structs.replace(edit, before=edit.after, after=edit.before))
    else:
        Path(edit.path).unlink(missing_ok=True)
