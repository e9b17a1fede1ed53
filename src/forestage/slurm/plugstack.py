"""Reads plugstack.conf: the plugins that slurmd loads into steps, in their order.

As src/common/plugstack.c of Slurm 22.05 does it (spank.c since 23.02): a line is one of
`required|optional PLUGIN ARGUMENTS...` and `include GLOB`, in lower case; any other is passed over.
Nothing is joined or escaped.
"""

import glob
from collections.abc import Iterator
from pathlib import Path

from forestage.slurm.slurm_conf import MAX_FILES, Line, Text


class Plugin(Line, frozen=True, gc=False):
    """A line that names a plugin; `path` may be a file's name alone."""

    path: str
    required: bool
    arguments: tuple[str, ...]

    def argument(self, name: str) -> str:
        """What `name=` is set to; of several the last one, "" for none."""
        values = [a.partition("=")[2] for a in self.arguments if a.startswith(f"{name}=")]
        return values[-1] if values else ""


def read(path: str, text: Text, root: Path = Path("/")) -> Iterator[Plugin]:
    """All plugins in the order in which Slurm loads them; `root` is above the paths of the node.

    A file that is not there is an empty one, and so is a directory that an include matches. Raises
    what `text` does, and ValueError where includes never end.
    """
    yield from _read(path, text, root, [MAX_FILES])


def _read(path: str, text: Text, root: Path, left: list[int]) -> Iterator[Plugin]:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"{path}: includes that never end")
    try:
        lines = text(path).split("\n")
    except (FileNotFoundError, IsADirectoryError):
        return
    for number, raw in enumerate(lines, 1):
        bare = raw.partition("#")[0].strip()
        kind, *words = bare.split() or [""]
        if words and kind == "include":
            pattern = str(Path(path).parent / words[0]).lstrip("/")
            for found in sorted(glob.glob(pattern, root_dir=root)):  # noqa: PTH207
                yield from _read(f"/{found}", text, root, left)
        elif words and kind in ("required", "optional"):
            line = (path, number, number, bare)
            yield Plugin(*line, words[0], kind == "required", tuple(words[1:]))
