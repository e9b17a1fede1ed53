"""What did the admin decide? The keys, their defaults, and where each value comes from.

`Config` below is the only place where defaults are written; etc/forestage.yaml is generated from
it. Reading the files is settings.py's part.
"""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

import msgspec

from forestage.units import (
    Amount,
    exact_size,
    format_duration,
    parse_duration,
    parse_share,
    parse_size,
    quote,
)

PER_PARTITION = True

Redirect: TypeAlias = Literal["bind", "none"]
Engine: TypeAlias = Literal["chunks", "rsync"]
Direct: TypeAlias = Literal["auto", "on", "off"]
OnDeadline: TypeAlias = Literal["continue", "abort"]
OnError: TypeAlias = Literal["continue", "drain"]

MIN_CHUNK = 1024 * 1024  # bytes; a multiple of every disk's and file system's block
MAX_CHUNK = 1024 * 1024 * 1024


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


def _share(raw: object) -> Amount:
    return Amount(share=parse_share(raw))


def _auto_or(kind: Kind) -> Kind:
    """The same, or `auto`, which is None in Config: decided where the facts for it are."""

    def parse(raw: object) -> object:
        return None if raw == "auto" else kind.parse(raw)

    return Kind(parse, lambda value: "auto" if value is None else kind.show(value))


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


def _show_duration(seconds: float) -> str:
    text = format_duration(seconds)
    return text if parse_duration(text) == seconds else f"{seconds}s"


FLAG = Kind(_flag, lambda on: "true" if on else "false")
SOURCES = Kind(_sources, lambda paths: f"[{', '.join(paths)}]")
CACHE = Kind(_cache, str)
LIMIT = Kind(_limit, lambda size: "null" if size is None else exact_size(size))
CAPACITY = Kind(_capacity, str)
AMOUNT = Kind(Amount.parse, str)
SHARE = Kind(_share, str)
DURATION = Kind(parse_duration, _show_duration)
REDIRECT = _one_of(get_args(Redirect))
ENGINE = _one_of(get_args(Engine))
ON_ERROR = _one_of(get_args(OnError))
ON_DEADLINE = _one_of(get_args(OnDeadline))
DIRECT = _one_of(get_args(Direct))
DEADLINE = _auto_or(DURATION)
THREADS = _auto_or(_whole(1, 64))
COPIES = _whole(1, 64)
CHUNK = Kind(_chunk, exact_size)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings one job is served with. Sizes are bytes, durations seconds."""

    enabled: Annotated[bool, Key("If false, the hooks do nothing.", FLAG, PER_PARTITION)] = True
    sources: Annotated[
        tuple[str, ...],
        Key(
            "Absolute directories; only regular files below them are staged.",
            SOURCES,
            PER_PARTITION,
        ),
    ] = ()
    cache: Annotated[
        str, Key("Where the cache lies on the node; not below /tmp or /dev/shm.", CACHE)
    ] = "/mnt/nvme/forestage"
    require_mount: Annotated[
        bool, Key("Do not stage while the cache lies on the root file system.", FLAG)
    ] = True
    max_image_size: Annotated[
        int | None,
        Key("Images above this size are not staged; null is no limit.", LIMIT, PER_PARTITION),
    ] = None
    max_size: Annotated[
        Amount, Key("The most the cache may take: a size, or a share of its disk.", CAPACITY)
    ] = Amount(share=0.9)
    min_free: Annotated[
        Amount, Key("What always stays free on that disk: a size, or a share.", AMOUNT)
    ] = Amount(share=0.05)
    low_watermark: Annotated[
        Amount, Key("The Epilog and the timer evict down to this share of max_size.", SHARE)
    ] = Amount(share=0.8)
    redirect: Annotated[
        Redirect,
        Key("bind mounts the local copy over the path, none only stages.", REDIRECT, PER_PARTITION),
    ] = "bind"
    engine: Annotated[
        Engine, Key("chunks copies with several threads, rsync runs that program.", ENGINE)
    ] = "chunks"
    threads: Annotated[
        int | None, Key("Threads of one copy; auto is two for each core, 4 to 8.", THREADS)
    ] = None
    chunk_size: Annotated[
        int, Key("The unit of copying and resuming; memory is threads x chunk_size.", CHUNK)
    ] = 16 * 1024 * 1024
    direct: Annotated[
        Direct,
        Key("Copy past the page cache: auto where both sides are local disks.", DIRECT),
    ] = "auto"
    digest: Annotated[
        bool, Key("Keep a digest of each chunk, so that a copy can be verified.", FLAG)
    ] = True
    bandwidth: Annotated[
        int | None, Key("The most one copy may read in a second; null is no limit.", LIMIT)
    ] = None
    max_copies: Annotated[
        int, Key("Copies at once on a node; further ones queue in order.", COPIES)
    ] = 4
    deadline: Annotated[
        float | None,
        Key(
            "How long a hook may make a job wait; auto is what slurm.conf allows.",
            DEADLINE,
            PER_PARTITION,
        ),
    ] = None
    on_deadline: Annotated[
        OnDeadline,
        Key(
            "Then the job starts from its original path and the copy goes on: continue, or abort.",
            ON_DEADLINE,
            PER_PARTITION,
        ),
    ] = "continue"
    max_stage_wait: Annotated[
        float, Key("The most that a user's stage-wait= may ask for.", DURATION, PER_PARTITION)
    ] = 600.0
    on_error: Annotated[
        OnError,
        Key(
            "What our own failure does to the node: continue, or drain it.", ON_ERROR, PER_PARTITION
        ),
    ] = "continue"


KEYS: Mapping[str, Key] = MappingProxyType(
    {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(Config, include_extras=True).items()
    }
)
PARTITION_KEYS = tuple(name for name, key in KEYS.items() if key.per_partition)


def sample() -> str:
    """The text of etc/forestage.yaml: every key commented out, its default, one sentence."""
    keys = "\n".join(
        f"# {key.sentence}\n#{name}: {key.kind.show(getattr(Config(), name))}\n"
        for name, key in KEYS.items()
    )
    return f"""\
# forestage: what the admin decides. Every key is shown with its default.
# Files in conf.d/*.yaml beside this one are read after it, in sorted order; a later file
# wins key by key. `forestage config` shows what holds, and which file says so.

{keys}
# What differs for the jobs of a partition. Possible here:
# {", ".join(PARTITION_KEYS)}.
#partitions:
#  debug:
#    enabled: false
#  training:
#    deadline: 2m
"""
