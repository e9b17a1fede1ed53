"""Notations of the configuration file: how sizes, durations, paths and addresses are written.

A notation reads what YAML made of a value, or raises ValueError with what was expected, and
prints it as YAML that reads back as the same value.
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from forestage.units import (
    SizeOrShare,
    format_exact_duration,
    format_exact_size,
    is_number,
    parse_duration,
    parse_share,
    parse_size,
    quote_value,
)

MIN_CHUNK = 1 << 20  # bytes; a multiple of every disk's and file system's block
MAX_CHUNK = 1 << 30

_FUSE = r"fuse(\.[!-~]+|blk)? [1-9][0-9]{0,9}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
_UNQUOTED = r"[\w./+@-]+"  # paths that YAML reads as they are


class ValueNotation(msgspec.Struct, frozen=True):
    """How values of one kind are written."""

    parse: Callable[[Any], Any]
    format: Callable[[Any], str]


class ServiceAddress(msgspec.Struct, frozen=True):
    """Where a service is: `host` is a name or an address, IPv6 ones without brackets.

    `fallback_host` takes its place where that name does not resolve; "" for none.
    """

    host: str
    port: int
    fallback_host: str = ""


def parse_address(text: str, port: int) -> ServiceAddress:
    """Reads `host`, `host:port`, `::1` or `[::1]:port`; `port` is for one that names none.

    Raises ValueError.
    """
    host, after = text, ""
    if text.startswith("["):
        host, bracket, after = text[1:].partition("]")
        if not bracket or after[:1] not in ("", ":"):
            raise ValueError(f"expected an address such as [::1]:7717, got {quote_value(text)}")
    elif text.count(":") == 1:
        host, _, after = text.partition(":")
        after = f":{after}"
    if after:
        digits = after[1:]
        port = int(digits) if is_number(digits) else 0
        if not 0 < port < 65536:
            raise ValueError(f"expected a port from 1 to 65535, got {quote_value(digits)}")
    if not host:
        raise ValueError(f"expected a host's name or address, got {quote_value(text)}")
    return ServiceAddress(host, port)


def _return_unchanged(raw: Any) -> Any:
    return raw


def _parse_path(raw: object) -> str:
    if not isinstance(raw, str) or not raw.startswith("/"):
        raise ValueError(f"expected an absolute path, got {quote_value(raw)}")
    if not raw.isprintable():
        raise ValueError(f"expected a path without control characters, got {quote_value(raw)}")
    # POSIX gives a leading // a meaning of its own, so normpath leaves it alone.
    normal = os.path.normpath(raw).replace("//", "/")
    if normal == "/":
        raise ValueError(f"expected a path below /, got {quote_value(raw)}")
    # Paths are compared as text later on: /a/../b or /a//b would never match, or too much.
    if normal != raw:
        raise ValueError(f"expected {quote_value(normal)}, got {quote_value(raw)}")
    return raw


def _parse_paths(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise ValueError(f"expected a list of paths such as [/lustre], got {quote_value(raw)}")
    return tuple(_parse_path(entry) for entry in raw)


def _parse_cache_path(raw: object) -> str:
    path = _parse_path(raw)
    for private in ("/tmp", "/dev/shm"):  # noqa: S108 - named to be refused
        # job_container/tmpfs gives each job its own; what a hook puts there no job sees.
        if f"{path}/".startswith(f"{private}/"):
            raise ValueError(f"expected a directory outside {private}, got {quote_value(raw)}")
    return path


def _parse_address_pattern(raw: object) -> str:
    if not isinstance(raw, str) or not raw.isprintable() or "{node}" not in raw:
        raise ValueError(f"expected an address with {{node}} in it, got {quote_value(raw)}")
    parse_address(raw.replace("{node}", "n"), 1)
    return raw


def _parse_host(raw: object) -> str:
    name = raw.partition(":")[0] if isinstance(raw, str) else ""
    if not isinstance(raw, str) or not re.fullmatch(_NAME, name, re.ASCII):
        raise ValueError(f"expected a node's or a host's name, got {quote_value(raw)}")
    parse_address(raw, 1)
    return raw


def _parse_user_mounts(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, dict):
        raise ValueError(
            f"expected mount points, each with a type and a uid, got {quote_value(raw)}"
        )
    for point, mount in raw.items():
        _parse_path(point)
        # As mountinfo has it; what root has mounted needs no word here.
        if not isinstance(mount, str) or not re.fullmatch(_FUSE, mount):
            raise ValueError(
                f"expected a type and a uid such as fuse.juicefs 994, got {quote_value(mount)}"
            )
    return raw


def _format_quoted(value: object) -> str:
    """JSON is YAML, and quotes a name such as `no`, which YAML would take for false."""
    return msgspec.json.encode(value).decode()


def _format_path(path: str) -> str:
    """Quotes only what YAML would not read as it is: `: `, ` #`, `, ` or `]`."""
    return path if re.fullmatch(_UNQUOTED, path, re.ASCII) else _format_quoted(path)


def _format_paths(paths: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_format_path, paths))}]"


def _restrict_notation(
    parse: Callable[[Any], Any],
    format_value: Callable[[Any], str],
    is_allowed: Callable[[Any], Any],
    expected: str,
) -> ValueNotation:
    """What `parse` returns, where `is_allowed` accepts it; an error says what was `expected`."""

    def limited(raw: object) -> Any:
        value = parse(raw)
        if not is_allowed(value):
            raise ValueError(f"expected {expected}, got {quote_value(raw)}")
        return value

    return ValueNotation(limited, format_value)


def make_word_notation(literal: Any) -> ValueNotation:
    """The words of a Literal."""
    words = get_args(literal)

    def read(raw: object) -> Any:
        # YAML takes on and off for true and false.
        return ("on" if raw else "off") if isinstance(raw, bool) and "on" in words else raw

    return _restrict_notation(read, str, lambda word: word in words, " or ".join(words))


def make_integer_notation(least: int, most: int) -> ValueNotation:
    """A whole number within these limits."""
    return _restrict_notation(
        _return_unchanged,
        str,
        lambda raw: type(raw) is int and least <= raw <= most,
        f"a whole number from {least} to {most}",
    )


FLAG = _restrict_notation(
    _return_unchanged,
    lambda flag: str(flag).lower(),
    lambda raw: isinstance(raw, bool),
    "true or false",
)
UP_TO_64 = make_integer_notation(1, 64)
LIMIT = _restrict_notation(parse_size, format_exact_size, lambda size: size, "a size above 0")
CHUNK = _restrict_notation(
    parse_size,
    format_exact_size,
    lambda size: size in range(MIN_CHUNK, MAX_CHUNK + 1, MIN_CHUNK),
    f"a multiple of {format_exact_size(MIN_CHUNK)} up to {format_exact_size(MAX_CHUNK)}",
)
DURATION = ValueNotation(parse_duration, format_exact_duration)
AMOUNT = ValueNotation(SizeOrShare.parse, str)
CAPACITY = _restrict_notation(
    SizeOrShare.parse, str, lambda amount: amount.size or amount.share, "more than nothing"
)
SHARE = ValueNotation(lambda raw: SizeOrShare(share=parse_share(raw)), str)
PATH = ValueNotation(_parse_path, _format_path)
PATHS = ValueNotation(_parse_paths, _format_paths)
CACHE = ValueNotation(_parse_cache_path, _format_path)
TEXTFILE = _restrict_notation(
    _parse_path, _format_path, lambda path: path.endswith(".prom"), "a name that ends in .prom"
)
LISTEN = _restrict_notation(
    _return_unchanged,
    _format_quoted,
    lambda raw: isinstance(raw, str) and raw.isprintable() and len(raw) < 256,
    'an address, a name, an interface or ""',
)
HOST = ValueNotation(_parse_host, _format_quoted)
PATTERN = ValueNotation(_parse_address_pattern, _format_quoted)
USER_MOUNTS = ValueNotation(_parse_user_mounts, _format_quoted)
