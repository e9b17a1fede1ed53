"""Reads slurm.conf and its includes as Slurm does, and remembers where each setting stands.

As src/common/parse_config.c and read_config.c of Slurm have it, from 22.05 to 26.05 where nothing
else is said; tried with scontrol of 22.05, 24.11 and 26.05. Nothing is run.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from forestage.system.tree import RecordingTree

# Where packages keep slurm.conf, and where slurmd puts what it got from slurmctld.
USUAL_CONF = (
    "/etc/slurm/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/usr/local/etc/slurm.conf",
)
# Bounds that no site meets: there are sites with a file for each of 200 partitions. Slurm itself
# ends where it can open no more files: it keeps each open while it reads what that one includes.
MAX_FILES = 4096  # of one configuration, includes and all; one that is included twice counts twice
MAX_DEPTH = 64  # of files that include each other
# Settings behind one of these names hold for that node or partition only.
_OF_LINES = {"nodename", "partitionname", "downnodes", "frontendname", "nodeset", "poweraction"}
_OPERATORS = " \t-+*/"  # before the =: they mean nothing in slurm.conf

ReadText = Callable[[str], str]
"""What a file of the node holds, as `read_conf_text` reads it; raises OSError."""


class ConfLine(msgspec.Struct, frozen=True, gc=False):
    """One line as Slurm reads it: from line `first` to `last` of a file, joined, no comment."""

    file: str
    first: int
    last: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.first}"


class ConfSetting(msgspec.Struct, frozen=True, gc=False):
    """`name` in lower case. A line has one; Slurm refuses to read on where there are more."""

    line: ConfLine
    name: str
    value: str


class IncludeCounter:
    """Counts the files of one configuration, so that reading it ends."""

    def __init__(self) -> None:
        self._files = 0

    def count(self, file: str, depth: int) -> None:
        """Count a file; `depth` files include it. Raises ValueError beyond the bounds."""
        self._files += 1
        if depth >= MAX_DEPTH:
            raise ValueError(f"{file}: includes that never end (more than {MAX_DEPTH} levels)")
        if self._files > MAX_FILES:
            raise ValueError(f"{file}: more than {MAX_FILES} files are included")


class SlurmConf:
    """slurm.conf as one hook reads it: once, for all that the hook takes from it.

    `named` is slurmd's $SLURM_CONF, or "". `files` notes what was read, plugstack.conf too.
    """

    def __init__(self, named: str) -> None:
        self.named = named
        self.files = RecordingTree()

    def read_text(self, path: str) -> str:
        """Return what one of Slurm's files holds, and note the file. Raises OSError."""
        self.files.record_path(path)
        return read_conf_text(path)

    @functools.cached_property
    def path(self) -> str:
        """Where it is: in a usual place if none is named. Raises FileNotFoundError."""
        if path := self.named or find_usual_conf():
            return path
        raise FileNotFoundError(errno.ENOENT, "it is in none of its usual places", "slurm.conf")

    @functools.cached_property
    def values(self) -> dict[str, str]:
        """The value that counts for each name. Raises OSError, ValueError."""
        return {one.name: one.value for one in read_settings(self.path, self.read_text)}


def read_settings(path: str, text: ReadText) -> Iterator[ConfSetting]:
    """What slurm.conf and its includes set, in their order; of a name the last one counts.

    Raises what `text` does, and ValueError beyond the bounds of includes or where a line says more
    than one thing. Slurm then starts with none of it; and slurmd may run with what the file said
    before, so that nothing is known of a time-out that stands there.
    """
    for line in _read_all_lines(path, text):
        name, equals, value = line.text.partition("=")
        name = name.rstrip(_OPERATORS).lower()
        if name in _OF_LINES or not equals:
            continue
        value = value.strip()
        quoted = value.startswith('"') and value.find('"', 1) == len(value) - 1
        if not quoted and len(value.split(None, 1)) > 1:
            raise ValueError(f"{line.where} says more than one thing, which Slurm refuses")
        yield ConfSetting(line, name, value.strip('"'))


def read_conf_text(path: str) -> str:
    """Return the text of one of Slurm's files, whatever bytes it has. Raises OSError.

    Slurm reads bytes, and a name in a comment may be Latin-1: such bytes are kept as os.fsdecode
    does, so that a path in the text still leads to its file.
    """
    return os.fsdecode(Path(path).read_bytes())


def find_usual_conf(root: Path = Path("/")) -> str:
    """Return where slurm.conf usually is and something is there; "" for nowhere.

    What is there and cannot be asked counts: it is to be reported, and another is not Slurm's.
    """
    for path in USUAL_CONF:
        try:
            (root / path.lstrip("/")).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass
        return path
    return ""


def locate_conf(named: str, root: Path) -> str:
    """Return the slurm.conf to open: the one that is `named`, else a usual one below the root.

    "" where there is none.
    """
    usual = "" if named else find_usual_conf(root)
    return str(root / usual.lstrip("/")) if usual else named


def explain_read_error(error: OSError | ValueError) -> str:
    """Return which of Slurm's files cannot be read, and why, as a sentence. Pure."""
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)


def list_partitions(path: str, text: ReadText) -> Iterator[str]:
    """The names of all partitions. Raises as `read_settings` does."""
    for line in _read_all_lines(path, text):
        name, equals, value = line.text.partition("=")
        if equals and name.strip().lower() == "partitionname" and value.split():
            yield value.split()[0]


def node_lines(path: str, text: ReadText) -> Iterator[dict[str, str]]:
    """Yield what each line about nodes that are always there says, by lower-case names.

    A cloud's node has an address only while it runs. Raises as `read_settings` does.
    """
    default = ""
    for line in _read_all_lines(path, text):
        words = dict(one.partition("=")[::2] for one in line.text.split())
        said = {name.lower(): value for name, value in words.items()}
        if "nodename" not in said:
            continue
        state = said.get("state", default).lower()
        if said["nodename"].lower() == "default":
            default = state
        elif state not in ("cloud", "future"):
            yield said


def list_node_names(path: str, text: ReadText) -> Iterator[str]:
    """Return the lists of nodes that are always there, as n[1-4].

    Raises as `read_settings` does.
    """
    return (said["nodename"] for said in node_lines(path, text))


def _read_include(top: str, file: str, name: str, text: ReadText) -> tuple[str, str]:
    """Return the file that an include names, and its text. Raises what `text` does.

    A relative name is one beside slurm.conf; before 23.02, beside the file that says it. Where both
    are there, it is read as 23.02 does.
    """
    found, former = (str(Path(one).parent / name) for one in (top, file))
    if found != former:
        with contextlib.suppress(FileNotFoundError):
            return found, text(found)
    return former, text(former)


def _read_all_lines(path: str, text: ReadText) -> Iterator[ConfLine]:
    return _read_file_lines(path, text(path), path, text, {}, IncludeCounter())


def _read_file_lines(
    file: str,
    content: str,
    top: str,
    text: ReadText,
    found: dict[str, str],
    limit: IncludeCounter,
    depth: int = 0,
) -> Iterator[ConfLine]:
    """An include stands for its file's lines: one file, no pattern; %c is the cluster's name.

    `found` has that name, once a line before has set it.
    """
    limit.count(file, depth)
    for line in join_lines(file, content):
        words = line.text.split(None, 2) if line.text[0] in "iI" else ()
        if len(words) > 1 and words[0].lower() == "include":
            name = words[1].replace("%c", found.get("clustername", "%c").lower())
            included = _read_include(top, file, name, text)
            yield from _read_file_lines(*included, top, text, found, limit, depth + 1)
        else:
            if line.text[0] in "cC":
                setting, _, value = line.text.partition("=")
                if setting.rstrip(_OPERATORS).lower() == "clustername":
                    found["clustername"] = value.strip().strip('"')
            yield line


def join_lines(file: str, text: str) -> Iterator[ConfLine]:
    """Pure: the lines of one file, without those that say nothing.

    _get_next_line(): a comment goes, then a backslash at the end joins the next line, then the
    other backslashes go, each of which keeps the character behind it.
    """
    lines = text.split("\n")
    begun, first = "", 0
    for number, raw in enumerate(lines, 1):
        if "\\" not in raw and not first:  # as most: a Prolog waits for this
            if whole := raw.partition("#")[0].strip():
                yield ConfLine(file, number, number, whole)
            continue
        # What is escaped stays out of the way until the line is whole.
        bare = raw.replace("\\\\", "\0").replace("\\#", "\1").partition("#")[0].rstrip()
        begun, first = begun + bare, first or number
        if bare.endswith("\\") and number < len(lines):
            continue
        whole = begun.replace("\\", "").replace("\0", "\\").replace("\1", "#").strip()
        if whole:
            yield ConfLine(file, first, number, whole)
        begun, first = "", 0
