"""The hints in a job's comment: what is to be staged, how long that may take. Pure.

    stage=PATH[,PATH…]          an image, over its own path; a directory with a slash: PATH/
    stage=FILE@/mount/point     a squashfs file, mounted there
    stage=PATH@job              a tree copied, a tar archive unpacked, into the job's own directory
    stage=TREE@seed:NAME        a tree copied there, and the variable NAME says where
    stage=off                   or no, or none
    stage-list=FILE             more of them, a line each, in a file that the user can read
    stage-dir=SIZE[,ram]        the job's own directory on the node's disk, or in memory
    stage-wait=DURATION
    stage-tell=yes|no           one line at the first step: what happened, and what it saved

A value is split at commas; the last `@` that is followed by one of these endings separates; other
ones belong to the path. Then {node} (0 for the job's first node), {nodes} and {node:03} are
replaced, and %2C, %20, %40, %7B decoded. Nothing else in braces has a meaning.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forestage.slurm.near import KNOWN, misses, words
from forestage.units import parse_duration, parse_size, printable, quote

MAX_HINTED = 16
"""Images read from one comment, and as many data; more are reported. A hook's time is short."""

MAX_PROBLEMS = 8
"""Problems reported for one comment."""

ABSOLUTE = "the path from / on"
OFF = ("off", "no", "none")  # values of stage=

Via = Literal["option", "hint"]
Kind = Literal["image", "imported", "directory", "mount", "fill"]
IMPORTED: Literal["imported"] = "imported"


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One path as the user wrote it, and where: pyxis' option or a `stage=` hint.

    `at` is where it is to show: "" over its own path, an absolute mount point, `job`, `seed:NAME`.
    No user writes `imported`: an image that was imported from a registry, over the path which pyxis
    was told.
    """

    path: str
    via: Via
    at: str = ""

    @property
    def kind(self) -> Kind:
        """What is to be done with it."""
        if self.at.startswith("/"):
            return "mount"
        if self.at:
            return "imported" if self.at == IMPORTED else "fill"
        return "directory" if self.via == "hint" and self.path.endswith("/") else "image"

    @property
    def is_seed(self) -> bool:
        """Whether a variable of the job says where it is."""
        return self.at.startswith("seed:")

    @property
    def is_data(self) -> bool:
        """Whether it is more than an image."""
        return self.kind in ("directory", "mount", "fill")

    @property
    def is_redirected(self) -> bool:
        """Whether it is an image that shows at its own path."""
        return self.kind == "image"


class Rank(msgspec.Struct, frozen=True):
    """Which of a job's nodes this is: 0 for the first of `nodes`; None where that is not known."""

    node: int | None = None
    nodes: int = 0


NOWHERE = Rank()


class Hints(msgspec.Struct, frozen=True):
    """What the comment says to us. `wait` is in seconds; `problems` are sentences for the user.

    `wanted` has each request once. `room` is the size of the job's own directory in bytes, `ram`
    whether that lies in memory; `listed` is the file of stage-list=. `tell`: they want to read what
    happened.
    """

    wanted: tuple[Request, ...] = ()
    off: bool = False
    wait: float | None = None
    problems: tuple[str, ...] = ()
    room: int | None = None
    ram: bool = False
    listed: str = ""
    tell: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The images."""
        return tuple(one.path for one in self.wanted if not one.is_data)

    @property
    def data(self) -> tuple[Request, ...]:
        """What is more than an image."""
        return tuple(one for one in self.wanted if one.is_data)

    @property
    def has_data(self) -> bool:
        """Whether the job wants more than images."""
        return bool(self.data or self.listed) or self.room is not None

    @property
    def for_steps(self) -> bool:
        """Whether the job's steps have to know of it: they see no comment."""
        return self.off or self.tell or self.wait is not None


def read_hints(comment: str, rank: Rank = NOWHERE) -> Hints:
    """Reads our tokens out of a job's comment; everything else in it is the user's own business."""
    hints = Hints()
    wanted: list[Request] = []
    problems: list[str] = []
    tokens = words(comment)
    for token in tokens:
        name, equals, value = token.partition("=")
        if not equals or not (name == "stage" or name.startswith("stage-")):
            continue
        if name not in KNOWN:
            problems.append(f"unknown hint {name}= (known: {', '.join(map('{}='.format, KNOWN))})")
            continue
        try:
            if name == "stage" and value not in OFF:
                if not _is_another_tools(value):
                    wanted += requests(value.split(","), rank, problems)
                elif "stage-tell=yes" in tokens:
                    problems.append(f"stage={value} names no path: a path begins with /")
            else:
                hints = msgspec.structs.replace(hints, **_setting(name, value, rank))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    problems += misses(tokens)
    unique = tuple(dict.fromkeys(wanted))
    images = tuple(one for one in unique if not one.is_data)
    data = tuple(one for one in unique if one.is_data)
    for kind, what in ((images, "images"), (data, "data")):
        if len(kind) > MAX_HINTED:
            problems.append(f"stage= names {len(kind)} {what}, the first {MAX_HINTED} are read")
    return msgspec.structs.replace(
        hints,
        wanted=(*images[:MAX_HINTED], *data[:MAX_HINTED]),
        problems=tuple(printable(problem) for problem in problems[:MAX_PROBLEMS]),
    )


def _is_another_tools(value: str) -> bool:
    """Pure: whether it is a word as others write one: stage=prod, stage=build_2."""
    return value.isascii() and value.replace("-", "").replace("_", "").isalnum()


def _setting(name: str, value: str, rank: Rank) -> dict[str, object]:
    """Pure: what one hint that names no paths changes. Raises ValueError."""
    if name == "stage":
        return {"off": True}
    if name == "stage-wait":
        return {"wait": parse_duration(value)}
    if name == "stage-tell":
        if value not in ("yes", "no"):
            raise ValueError(f"expected yes or no, got {quote(value)}")
        return {"tell": value == "yes"}
    if name == "stage-list":
        return {"listed": _path(value, rank)}
    size, comma, where = value.partition(",")
    if comma and where != "ram":
        raise ValueError(f"expected SIZE or SIZE,ram, got {quote(value)}")
    return {"room": parse_size(size), "ram": bool(comma)}


def requests(parts: Sequence[str], rank: Rank, problems: list[str]) -> list[Request]:
    """Pure: the requests of a value that was split, or of a list's lines; adds to `problems`."""
    if not any(parts):
        problems.append("stage= names no image (write stage=/path/to/image, or stage=off)")
    found = []
    for part in filter(None, parts):
        path, at = _split(part)
        try:
            if part.startswith(("~", "$", '"', "'")):
                raise ValueError(
                    f"{quote(part)}: ~, $HOME and quotes mean nothing here, write {ABSOLUTE}"
                )
            request = Request(_path(path, rank), "hint", _decoded(at))
            # Data is noted for the job's steps, as JSON, which takes no other.
            if request.is_data and not _is_text(request.path + request.at):
                raise ValueError(f"{quote(part)} is not UTF-8")
            found.append(request)
        except ValueError as error:
            problems.append(f"stage: {error}")
    return found


def _is_text(name: str) -> bool:
    """Pure: whether a name that may hold undecodable bytes holds none."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _split(part: str) -> tuple[str, str]:
    """Pure: the path, and where it is to show."""
    path, _, at = part.rpartition("@")
    is_place = at == "job" or at.startswith("/") or (at.startswith("seed:") and at != "seed:")
    return (path, at) if path and is_place else (part, "")


def _path(text: str, rank: Rank) -> str:
    return _decoded(_placed(text, rank) if "{" in text else text)


def _placed(text: str, rank: Rank) -> str:
    """Raises ValueError for what is no placeholder; never format(), whose widths take memory."""
    import re  # few comments need it

    def value(match: "re.Match[str]") -> str:
        if rank.node is None:
            raise ValueError(f"{match[0]}: which node of the job this is, is not known here")
        if match[1] == "nodes":
            return str(rank.nodes)
        return str(rank.node).rjust(int(match[2] or 1), "0")

    placed = re.sub(r"\{(node|nodes|node:0([1-9]))\}", value, text)
    if "{" in placed:
        unknown = placed[placed.index("{") :].partition("}")[0][:40]
        raise ValueError(
            f"unknown placeholder {unknown}}} (known: {{node}}, {{nodes}}, {{node:03}};"
            " a brace of a path is %7B)"
        )
    return placed


def _decoded(part: str) -> str:
    if "%" not in part:
        return part
    from urllib.parse import unquote  # its import costs a hook 3 ms; few paths need it

    return unquote(part, errors="surrogateescape")
