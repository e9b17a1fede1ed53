"""Reads plugstack.conf: the plugins that slurmd loads into steps, in their order.

As src/common/plugstack.c of Slurm 22.05 does it (spank.c since 23.02): a line is one of
`required|optional PLUGIN ARGUMENTS...` and `include GLOB`, in lower case; any other is passed over.
Nothing is joined or escaped.
"""

import glob
from collections.abc import Iterator
from pathlib import Path

from forestage.slurm.slurm_conf import ConfLine, IncludeCounter, ReadText, SlurmConf


class IncludeLine(ConfLine, frozen=True, gc=False):
    """A line that includes the files that a pattern matches on this host: none is no error.

    `pattern` is absolute.
    """

    pattern: str


class PluginLine(ConfLine, frozen=True, gc=False):
    """A line that names a plugin; `path` may be a file's name alone.

    `included_by` is the line that includes its file; None in plugstack.conf itself.
    """

    path: str
    required: bool
    arguments: tuple[str, ...]
    included_by: IncludeLine | None = None

    def format_line(self, *more: str) -> str:
        """The line, with more arguments at its end."""
        kind = "required" if self.required else "optional"
        return " ".join((kind, self.path, *self.arguments, *more))

    def find_argument(self, name: str) -> str:
        """What `name=` is set to; of several the last one, "" for none."""
        values = [a.partition("=")[2] for a in self.arguments if a.startswith(f"{name}=")]
        return values[-1] if values else ""


def find_plugstack_path(conf: SlurmConf) -> str:
    """Where plugstack.conf is, as slurm.conf says. Raises OSError, ValueError."""
    named = conf.values.get("plugstackconfig")
    return named or str(Path(conf.path).with_name("plugstack.conf"))


def read_plugins(path: str, text: ReadText, root: Path = Path("/")) -> Iterator[PluginLine]:
    """All plugins in the order in which Slurm loads them; `root` is above the paths of the node.

    A file that is not there is an empty one, and so is a directory that an include matches. Raises
    what `text` does, and ValueError beyond the bounds of includes.
    """
    return (one for one in read_lines(path, text, root) if isinstance(one, PluginLine))


def read_lines(
    path: str, text: ReadText, root: Path = Path("/")
) -> Iterator[PluginLine | IncludeLine]:
    """Plugins and the lines that include, each before what it brings.

    Raises as `read_plugins` does.
    """
    yield from _read_file_lines(path, None, text, root, IncludeCounter())


def _read_file_lines(
    path: str,
    by: IncludeLine | None,
    text: ReadText,
    root: Path,
    limit: IncludeCounter,
    depth: int = 0,
) -> Iterator[PluginLine | IncludeLine]:
    limit.count(path, depth)
    try:
        rows = text(path).split("\n")
    except (FileNotFoundError, IsADirectoryError):
        return
    for number, raw in enumerate(rows, 1):
        bare = raw.partition("#")[0].strip()
        kind, *words = bare.split() or [""]
        line = (path, number, number, bare)
        if words and kind == "include":
            include = IncludeLine(*line, str(Path(path).parent / words[0]))
            yield include
            pattern = include.pattern.lstrip("/")
            for found in sorted(glob.glob(pattern, root_dir=root)):  # noqa: PTH207
                yield from _read_file_lines(f"/{found}", include, text, root, limit, depth + 1)
        elif words and kind in ("required", "optional"):
            yield PluginLine(*line, words[0], kind == "required", tuple(words[1:]), by)
