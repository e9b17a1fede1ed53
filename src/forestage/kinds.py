"""How is a setting read, and how is it printed? One `Kind` for each sort of value. Pure.

`parse` takes what YAML gave and returns a value or raises ValueError with what was expected.
"""

import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from forestage import address
from forestage.units import (
    Amount,
    exact_duration,
    exact_size,
    parse_duration,
    parse_share,
    parse_size,
    quote,
)

PER_PARTITION = True

Redirect: TypeAlias = Literal["bind", "spank", "none"]
UserMessages: TypeAlias = Literal["none", "problems", "all"]
Engine: TypeAlias = Literal["chunks", "rsync"]
Direct: TypeAlias = Literal["auto", "on", "off"]
OnDeadline: TypeAlias = Literal["continue", "abort"]
OnError: TypeAlias = Literal["continue", "drain"]

MIN_CHUNK = 1024 * 1024  # bytes; a multiple of every disk's and file system's block
MAX_CHUNK = 1024 * 1024 * 1024

_PLAIN = re.compile(r"[\w./+@-]+", re.ASCII)  # paths that need no quotes in YAML


class Kind(NamedTuple):
    """How a key's value is read (ValueError says what was expected) and printed as YAML."""

    parse: Callable[[object], object]
    show: Callable[[Any], str]


class Key(NamedTuple):
    """What there is to know about a key besides its type and default."""

    sentence: str
    kind: Kind
    per_partition: bool = False


def _flag(raw: object) -> bool:
    # Strictly: "no" in quotes is a non-empty string and must not switch anything on.
    if not isinstance(raw, bool):
        raise ValueError(f"expected true or false, got {quote(raw)}")
    return raw


def _one_of(choices: tuple[str, ...]) -> Kind:
    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw not in choices:
            raise ValueError(f"expected {' or '.join(choices)}, got {quote(raw)}")
        return raw

    return Kind(parse, str)


def _directory(raw: object) -> str:
    if not isinstance(raw, str) or not raw.startswith("/"):
        raise ValueError(f"expected an absolute directory, got {quote(raw)}")
    if not raw.isprintable():
        raise ValueError(f"expected a directory without control characters, got {quote(raw)}")
    # POSIX gives a leading // a meaning of its own, so normpath leaves it alone.
    normal = os.path.normpath(raw).replace("//", "/")
    if normal == "/":
        raise ValueError(f"expected a directory below /, got {quote(raw)}")
    # Paths are compared as text later on: /a/../b or /a//b would never match, or too much.
    if normal != raw:
        raise ValueError(f"expected {quote(normal)}, got {quote(raw)}")
    return raw


def _cache(raw: object) -> str:
    path = _directory(raw)
    for private in ("/tmp", "/dev/shm"):  # noqa: S108 - named to be refused
        # job_container/tmpfs gives each job its own; what a hook puts there no job sees.
        if f"{path}/".startswith(f"{private}/"):
            raise ValueError(f"expected a directory outside {private}, got {quote(raw)}")
    return path


def _file(raw: object) -> str | None:
    return None if raw is None else _directory(raw)


def _textfile(raw: object) -> str | None:
    path = _file(raw)
    if path is not None and not path.endswith(".prom"):
        raise ValueError(
            f"expected a name with .prom at its end, as others are not read, got {path}"
        )
    return path


def _address(raw: object) -> str:
    if not isinstance(raw, str) or not raw.isprintable() or "{node}" not in raw:
        raise ValueError(f"expected an address with {{node}} in it, got {quote(raw)}")
    address.parse(raw.replace("{node}", "n"), 1)
    return raw


def _addresses(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, dict):
        raise ValueError(f"expected nodes and their addresses, got {quote(raw)}")
    wrong = []
    for node, where in raw.items():
        texts = isinstance(node, str) and isinstance(where, str)
        if not (texts and node.isprintable() and where.isprintable()):
            wrong.append(f"expected a node's name and its address in quotes, got {quote(where)}")
            continue
        try:
            address.parse(where, 1)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return MappingProxyType(dict(raw))


def _listen(raw: object) -> str:
    if not isinstance(raw, str) or not raw.isprintable() or len(raw) > 255:
        raise ValueError(f'expected an address, a name, an interface or "", got {quote(raw)}')
    return raw


def _sources(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise ValueError(f"expected a list of directories such as [/lustre], got {quote(raw)}")
    wrong = []
    for number, entry in enumerate(raw, start=1):
        try:
            _directory(entry)
        except ValueError as error:
            wrong.append(f"entry {number}: {error}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(raw)


def _limit(raw: object) -> int | None:
    size = None if raw is None else parse_size(raw)
    if size == 0:
        raise ValueError("expected a size above 0, or null for no limit, got 0")
    return size


def _capacity(raw: object) -> Amount:
    amount = Amount.parse(raw)
    if not (amount.size or amount.share):
        raise ValueError(f"expected more than nothing, got {quote(raw)}")
    return amount


def _auto_or(kind: Kind) -> Kind:
    """The same, or `auto`, which is None in Config: decided where the facts for it are."""

    return Kind(
        lambda raw: None if raw == "auto" else kind.parse(raw),
        lambda value: "auto" if value is None else kind.show(value),
    )


def _whole(low: int, high: int) -> Kind:
    def parse(raw: object) -> int:
        if not isinstance(raw, int) or isinstance(raw, bool) or not low <= raw <= high:
            raise ValueError(f"expected a whole number from {low} to {high}, got {quote(raw)}")
        return raw

    return Kind(parse, str)


def _chunk(raw: object) -> int:
    size = parse_size(raw)
    if not MIN_CHUNK <= size <= MAX_CHUNK or size % MIN_CHUNK:
        raise ValueError(
            f"expected a multiple of {exact_size(MIN_CHUNK)} up to {exact_size(MAX_CHUNK)},"
            f" got {quote(raw)}"
        )
    return size


def _quoted(value: object) -> str:
    """JSON is YAML, and takes a name such as `no` for what it is."""
    return msgspec.json.encode(value).decode()


def _show_path(path: str) -> str:
    """As it is where YAML reads it so: not with `: `, ` #`, `, ` or `]` in it."""
    return path if _PLAIN.fullmatch(path) else _quoted(path)


FLAG = Kind(_flag, lambda on: "true" if on else "false")
SOURCES = Kind(_sources, lambda paths: f"[{', '.join(map(_show_path, paths))}]")
CACHE = Kind(_cache, _show_path)
LIMIT = Kind(_limit, lambda size: "null" if size is None else exact_size(size))
CAPACITY = Kind(_capacity, str)
AMOUNT = Kind(Amount.parse, str)
SHARE = Kind(lambda raw: Amount(share=parse_share(raw)), str)
DURATION = Kind(parse_duration, exact_duration)
REDIRECT = _one_of(get_args(Redirect))
ENGINE = _one_of(get_args(Engine))
ON_ERROR = _one_of(get_args(OnError))
ON_DEADLINE = _one_of(get_args(OnDeadline))
DIRECT = _one_of(get_args(Direct))
DEADLINE = _auto_or(DURATION)
MESSAGES = _one_of(get_args(UserMessages))
THREADS = _auto_or(_whole(1, 64))
COPIES = _whole(1, 64)
CHUNK = Kind(_chunk, exact_size)
PORT = _whole(1, 65535)
UPLOADS = _whole(1, 1024)
DOWNLOADS = _whole(1, 64)
FILE = Kind(_file, lambda path: "null" if path is None else _show_path(path))
TEXTFILE = Kind(_textfile, FILE.show)
LISTEN = Kind(_listen, _quoted)
ADDRESS = Kind(_address, _quoted)
ADDRESSES = Kind(_addresses, lambda known: _quoted(dict(known)))
