"""Which plugins does slurmd load into steps, and in which order? Reads plugstack.conf.

As plugstack.c does it: `required|optional PLUGIN ARGUMENTS...` or `include GLOB` in a line; any
other line is passed over.
"""

import glob
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.files import Files

MAX_INCLUDES = 64


class Line(msgspec.Struct, frozen=True):
    """A plugin as a line names it; `file` and `number` say which line."""

    plugin: str
    required: bool
    arguments: tuple[str, ...]
    file: str
    number: int

    def argument(self, name: str) -> str:
        """What `name=` is set to; of several the last one, "" for none."""
        values = [a.partition("=")[2] for a in self.arguments if a.startswith(f"{name}=")]
        return values[-1] if values else ""


def read(files: Files, path: str) -> tuple[Line, ...] | None:
    """All lines in the order in which Slurm loads them; None where there is no such file."""
    if files.text(path) is None:
        return None
    return tuple(_lines(files, path, [MAX_INCLUDES]))


def _lines(files: Files, path: str, left: list[int]) -> Iterator[Line]:
    left[0] -= 1
    if left[0] < 0:
        return
    for number, raw in enumerate((files.text(path) or "").splitlines(), start=1):
        words = raw.partition("#")[0].split()
        if len(words) < 2:
            continue
        kind, name, *arguments = words
        if kind == "include":
            pattern = name if name.startswith("/") else str(Path(path).parent / name)
            for found in sorted(glob.glob(str(files.at(pattern)))):  # noqa: PTH207 - as Slurm's
                inside = f"/{found.removeprefix(str(files.root)).lstrip('/')}"
                yield from _lines(files, inside, left)
        elif kind in ("required", "optional"):
            yield Line(name, kind == "required", tuple(arguments), path, number)
