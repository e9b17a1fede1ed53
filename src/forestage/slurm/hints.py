"""The hints of a job, in its comment or its --stage options: what is to be staged. Pure.

    stage=PATH[,PATH…]          an image, over its own path; a directory with a slash: PATH/
    stage=FILE@/mount/point     a squashfs file, mounted there
    stage=PATH@job              a tree copied, a tar archive unpacked, into the job's own directory
    stage=TREE@seed:NAME        a tree copied there, and the variable NAME says where
    stage=off                   or no, or none
    stage-list=FILE             more of them, a line each, in a file that the user can read
    stage-dir=SIZE[,ram]        the job's own directory on the node's disk, or in memory
    stage-wait=DURATION
    stage-tell=yes|no           one line at the first step: what happened, and what it saved

A feature may have words that it reads itself (`raw_words` of its row).

A value is split at commas; the last `@` that is followed by one of these endings separates; other
ones belong to the path. Then {node} (0 for the job's first node), {nodes} and {node:03} are
replaced, and %2C, %20, %40, %7B decoded. Nothing else in braces has a meaning.

--stage, --stage-wait, --stage-dir and --stage-tell of srun, sbatch and salloc are the same words,
which the companion joins with newlines (src/spank/stage_options.c). Each --stage is one path, from
/ on, in which commas, spaces and % mean nothing. A word that is given as an option counts alone:
what the comment says with the same word is ignored.
"""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from forestage.features import FEATURES
from forestage.units import is_utf8, make_printable, parse_duration, parse_size, quote_value

MAX_HINTED_PATHS = 16
"""Images read from one comment, and as many data; more are reported. A hook's time is short."""

MAX_PROBLEMS = 8
"""Problems reported for one comment."""

MAX_SHOWN = 200
"""Characters of an option in a problem."""

MAX_OPTION_CHARS = 16384
"""Characters that all words given as options may have; execve(2) takes 128 KiB in one variable."""

OPTIONS = tuple(sorted(word for feature in FEATURES for word in feature.options))
RAW = tuple(word for feature in FEATURES for word in feature.raw_words)
KNOWN_WORDS = (*OPTIONS, *(word for feature in FEATURES for word in feature.words), *RAW)

OF_OPTION = "option --"
"""Begins a problem of a word that was given as an option."""

ABSOLUTE = "the path from / on"
OFF_WORDS = ("off", "no", "none")  # values of stage=

REFUSED_EXIT_STATUS = 65
"""The exit status of `forestage hints` by which the companion, which runs it
(src/spank/stage_options.c), knows a refusal: no crash and no older release ends so."""

RequestOrigin = Literal["option", "hint"]
RequestKind = Literal["image", "imported", "directory", "mount", "fill"]
IMPORTED: Literal["imported"] = "imported"


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One path as the user wrote it, and where: pyxis' option or a `stage=` hint.

    `at` is where it is to show: "" over its own path, an absolute mount point, `job`, `seed:NAME`.
    No user writes `imported`: an image that was imported from a registry, over the path which pyxis
    was told.
    """

    path: str
    via: RequestOrigin
    at: str = ""

    @property
    def kind(self) -> RequestKind:
        """What is to be done with it."""
        if self.at.startswith("/"):
            return "mount"
        if self.at:
            return "imported" if self.at == IMPORTED else "fill"
        return "directory" if self.via == "hint" and self.path.endswith("/") else "image"

    @property
    def is_data(self) -> bool:
        """Whether it is data, and no image."""
        return self.kind in ("directory", "mount", "fill")

    @property
    def is_redirected(self) -> bool:
        """Whether it is an image that shows at its own path."""
        return self.kind == "image"


class NodeIndex(msgspec.Struct, frozen=True):
    """Which of a job's nodes this is: 0 for the first of `nodes`; None where that is not known."""

    node: int | None = None
    nodes: int = 0


UNKNOWN_NODE_INDEX = NodeIndex()


class JobHints(msgspec.Struct, frozen=True):
    """What the user says to us. `wait` is in seconds; `problems` are sentences for the user.

    `requests` has each request once. `room` is the size of the job's own directory in bytes, `ram`
    whether that lies in memory; `listed` is the file of stage-list=. `tell`: they want to read what
    happened. `options` are the words that were given as options, `ignored` those of them that the
    comment has as well. `words` are those that features read themselves, each with its value.
    """

    requests: tuple[Request, ...] = ()
    off: bool = False
    wait: float | None = None
    problems: tuple[str, ...] = ()
    room: int | None = None
    ram: bool = False
    listed: str = ""
    tell: bool = False
    options: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    words: tuple[tuple[str, str], ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The images."""
        return tuple(one.path for one in self.requests if not one.is_data)

    @property
    def data(self) -> tuple[Request, ...]:
        """What is more than an image."""
        return tuple(one for one in self.requests if one.is_data)

    @property
    def has_data(self) -> bool:
        """Whether the job wants more than images."""
        return bool(self.data or self.listed) or self.room is not None

    @property
    def for_steps(self) -> bool:
        """Whether the job's steps have to know of it: they see no comment."""
        return self.off or self.tell or self.wait is not None or bool(self.words)


class _HintParser:
    """What was read so far, of the options and then of the comment."""

    def __init__(self, rank: NodeIndex) -> None:
        self.rank = rank
        self.settings: dict[str, object] = {}
        self.wanted: list[Request] = []
        self.problems: list[str] = []
        self.words: list[tuple[str, str]] = []

    def parse_options(self, text: str) -> tuple[str, ...]:
        """Reads the words of an option's variable; returns their names."""
        if len(text) > MAX_OPTION_CHARS:
            self.problems.append(f"{OF_OPTION}stage: longer than {MAX_OPTION_CHARS} characters")
            return ()
        found = [line.partition("=") for line in text.split("\n") if line]
        for name, _, value in found:
            try:
                if name not in OPTIONS:
                    raise ValueError(f"unknown (known: {', '.join(map('--{}'.format, OPTIONS))})")
                if name == "stage" and value not in OFF_WORDS:
                    self.wanted.append(
                        _parse_request(_check_option_path(value), self.rank, plain=True)
                    )
                else:
                    self.set(name, value)
            except ValueError as error:
                self.problems.append(f"{OF_OPTION}{_format_option(name, value)}: {error}")
        return tuple(dict.fromkeys(name for name, _, _ in found if name in OPTIONS))

    def parse_comment(self, tokens: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
        """Reads the words of a comment; returns those that do not count beside the options."""
        ignored: list[str] = []
        for token in tokens:
            name, equals, value = token.partition("=")
            if not equals or not (name == "stage" or name.startswith("stage-")):
                continue
            if name in options or (name == "stage-list" and "stage" in options):
                ignored.append(name)
                continue
            if name not in KNOWN_WORDS:
                known = ", ".join(map("{}=".format, KNOWN_WORDS))
                self.problems.append(f"unknown hint {name}= (known: {known})")
                continue
            try:
                if name == "stage" and value not in OFF_WORDS:
                    if not _is_foreign_word(value):
                        self.wanted += parse_requests(value.split(","), self.rank, self.problems)
                    elif "stage-tell=yes" in tokens:
                        self.problems.append(f"stage={value} names no path: a path begins with /")
                else:
                    self.set(name, value)
            except ValueError as error:
                self.problems.append(f"{name}: {error}")
        return tuple(dict.fromkeys(ignored))

    def set(self, name: str, value: str) -> None:
        """Read a word that names no image. Raises ValueError."""
        if name not in RAW:
            self.settings |= _parse_setting(name, value, self.rank)
        elif not is_utf8(value):  # it is noted for the job's steps, as JSON
            raise ValueError(f"{quote_value(value)} is not UTF-8")
        elif len(self.words) == MAX_HINTED_PATHS:
            raise ValueError(f"is the word after {MAX_HINTED_PATHS}, which are read")
        else:
            self.words.append((name, value))


def parse_hints(comment: str, rank: NodeIndex = UNKNOWN_NODE_INDEX, option: str = "") -> JobHints:
    """Reads our tokens out of a job's comment; everything else in it is the user's own business.

    `option` are the words that were given as options, each on a line.
    """
    tokens, reading = comment.replace(";", " ").split(), _HintParser(rank)
    options = reading.parse_options(option) if option else ()
    ignored = reading.parse_comment(tokens, options)
    problems = reading.problems
    unique = tuple(dict.fromkeys(reading.wanted))
    images = tuple(one for one in unique if not one.is_data)
    data = tuple(one for one in unique if one.is_data)
    for kind, what in ((images, "images"), (data, "data")):
        if len(kind) > MAX_HINTED_PATHS:
            by = f"{OF_OPTION}stage" if "stage" in options else "stage="
            problems.append(f"{by} names {len(kind)} {what}, the first {MAX_HINTED_PATHS} are read")
    return JobHints(
        requests=(*images[:MAX_HINTED_PATHS], *data[:MAX_HINTED_PATHS]),
        problems=tuple(make_printable(problem) for problem in problems[:MAX_PROBLEMS]),
        options=options,
        ignored=ignored,
        words=tuple(reading.words),
        **reading.settings,  # type: ignore[arg-type]
    )


def _format_option(name: str, value: str) -> str:
    """Pure: an option as its user wrote it, if it is not long."""
    written = name if name == "stage-tell" else f"{name}={value}"
    return written if len(written) <= MAX_SHOWN else f"{written[:MAX_SHOWN]}…"


def _check_option_path(value: str) -> str:
    """Pure: what one --stage names, as it is. Raises ValueError for what cannot be meant so."""
    if not value:
        raise ValueError("names no path (write --stage=/path/to/image, or --stage=no)")
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ValueError("holds a control character")
    if ",/" in value.replace(" ", ""):
        raise ValueError("is several paths: write --stage once for each")
    if "://" in value and not value.startswith("/"):
        raise ValueError("is no path: an image of a registry is for --container-image")
    if not value.startswith(("/", "~", "$", '"', "'")):  # which have a sentence of their own
        raise ValueError(f"write {ABSOLUTE}: a relative one would depend on where it is written")
    return value


def _is_foreign_word(value: str) -> bool:
    """Pure: whether it is a word as others write one: stage=prod, stage=build_2."""
    return value.isascii() and value.replace("-", "").replace("_", "").isalnum()


def _parse_setting(name: str, value: str, rank: NodeIndex) -> dict[str, object]:
    """Pure: what one hint that names no paths changes. Raises ValueError."""
    if name == "stage":
        return {"off": True}
    if name == "stage-wait":
        return {"wait": parse_duration(value)}
    if name == "stage-tell":
        if value not in ("yes", "no"):
            raise ValueError(f"expected yes or no, got {quote_value(value)}")
        return {"tell": value == "yes"}
    if name == "stage-list":
        return {"listed": _parse_path(value, rank)}
    size, comma, where = value.partition(",")
    if comma and where != "ram":
        raise ValueError(f"expected SIZE or SIZE,ram, got {quote_value(value)}")
    return {"room": parse_size(size), "ram": bool(comma)}


def parse_requests(parts: Sequence[str], rank: NodeIndex, problems: list[str]) -> list[Request]:
    """Pure: the requests of a value that was split, or of a list's lines; adds to `problems`."""
    if not any(parts):
        problems.append("stage= names no image (write stage=/path/to/image, or stage=off)")
    found = []
    for part in filter(None, parts):
        try:
            found.append(_parse_request(part, rank))
        except ValueError as error:
            problems.append(f"stage: {error}")
    return found


def _parse_request(part: str, rank: NodeIndex, plain: bool = False) -> Request:
    """Pure: what one path asks for; `plain`: it has no escapes. Raises ValueError."""
    if part.startswith(("~", "$", '"', "'")):
        raise ValueError(
            f"{quote_value(part)}: ~, $HOME and quotes mean nothing here, write {ABSOLUTE}"
        )
    path, at = _split_destination(part)
    path = _fill_placeholders(path, rank, plain) if "{" in path else path
    request = (
        Request(path, "hint", at)
        if plain
        else Request(_decode_percent(path), "hint", _decode_percent(at))
    )
    # Data is noted for the job's steps, as JSON, which takes no other.
    if request.is_data and not is_utf8(request.path + request.at):
        raise ValueError(f"{quote_value(part)} is not UTF-8")
    return request


def _split_destination(part: str) -> tuple[str, str]:
    """Pure: the path, and where it is to show."""
    path, _, at = part.rpartition("@")
    is_place = at == "job" or at.startswith("/") or (at.startswith("seed:") and at != "seed:")
    return (path, at) if path and is_place else (part, "")


def _parse_path(text: str, rank: NodeIndex) -> str:
    return _decode_percent(_fill_placeholders(text, rank) if "{" in text else text)


def _fill_placeholders(text: str, rank: NodeIndex, plain: bool = False) -> str:
    """Raises ValueError for what is no placeholder; never format(), whose widths take memory."""

    def value(match: re.Match[str]) -> str:
        if rank.node is None:
            raise ValueError(f"{match[0]}: which node of the job this is, is not known here")
        if match[1] == "nodes":
            return str(rank.nodes)
        return str(rank.node).rjust(int(match[2] or 1), "0")

    placed = re.sub(r"\{(node|nodes|node:0([1-9]))\}", value, text)
    if "{" in placed:
        unknown = placed[placed.index("{") :].partition("}")[0][:40]
        escape = "" if plain else "; a brace of a path is %7B"
        raise ValueError(
            f"unknown placeholder {unknown}}} (known: {{node}}, {{nodes}}, {{node:03}}{escape})"
        )
    return placed


def _decode_percent(part: str) -> str:
    if "%" not in part:
        return part
    from urllib.parse import unquote  # its import costs a hook 3 ms; few paths need it

    return unquote(part, errors="surrogateescape")
