"""Which file said it? Reads the configuration files; all that is wrong with them is told at once.

    defaults < <etc>/forestage.yaml < <etc>/conf.d/*.yaml (sorted) < the job's partition

A later file wins key by key.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec

from forestage.config import GROUPS, KEYS, PARTITION_KEYS, Config, replaced, value_of
from forestage.errors import ConfigError, Problem
from forestage.units import exact_size, quote

MAX_FILE_SIZE = 1 << 20  # bytes; a configuration is not a data file
MAX_DEPTH = 4  # the file, its partitions, one partition, a list of sources
DEFAULT = "default"  # the origin of a value that no file sets

Overrides: TypeAlias = Mapping[str, object]  # key -> value of the key's type in Config


class Row(NamedTuple):
    """One line of `forestage config`."""

    key: str
    value: str  # as it would be written in the file
    origin: str  # DEFAULT or a file's path


class Settings(msgspec.Struct, frozen=True):
    """All that the configuration says, and which file said it."""

    config: Config
    partitions: Mapping[str, Overrides]
    origins: Mapping[str, str]  # "deadline", "partitions.gpu.deadline" -> DEFAULT or path

    def for_partition(self, name: str | None) -> Config:
        """The settings for a job in this partition; None or an unknown one: the common ones."""
        return replaced(self.config, self.partitions.get(name or "", {}))

    def rows(self, partition: str | None = None) -> list[Row]:
        """Every key as it holds for `partition`; without one, every override follows."""
        config = self.for_partition(partition)
        rows = []
        for name, key in KEYS.items():
            origin = self.origins.get(dotted(partition, name), self.origins[name])
            rows.append(Row(name, key.kind.show(value_of(config, name)), origin))
        if partition is None:
            for place, overrides in self.partitions.items():
                for name, value in overrides.items():
                    full = dotted(place, name)
                    rows.append(Row(full, KEYS[name].kind.show(value), self.origins[full]))
        return rows


class _Value(NamedTuple):
    """One value that one file sets."""

    where: str
    partition: str | None
    key: str
    value: object


def load(etc: Path, owner: int | None = 0) -> Settings:
    """Read the configuration below `etc` (/etc/forestage); no file at all is all defaults.

    Run as root, it trusts only files of uid `owner` that nobody else may write, since they
    direct a root hook; with None it trusts any. Raises ConfigError with all problems at once.
    """
    trusted = owner if os.geteuid() == 0 else None
    found = list(_read_all(etc, trusted))
    if problems := tuple(item for item in found if isinstance(item, Problem)):
        raise ConfigError(problems)
    merged = _merge(item for item in found if isinstance(item, _Value))
    if problems := tuple(_contradictions(merged)):
        raise ConfigError(problems)
    return merged


def _merge(values: Iterable[_Value]) -> Settings:
    common: dict[str, object] = {}
    partitions: dict[str, dict[str, object]] = {}
    origins = dict.fromkeys(KEYS, DEFAULT)
    for where, partition, key, value in values:
        target = common if partition is None else partitions.setdefault(partition, {})
        target[key] = value
        origins[dotted(partition, key)] = where
    return Settings(
        config=replaced(Config(), common),
        partitions=MappingProxyType({k: MappingProxyType(v) for k, v in partitions.items()}),
        origins=MappingProxyType(origins),
    )


def _contradictions(found: Settings) -> Iterator[Problem]:
    """Keys that each are right and together are not. Pure."""
    config = found.config
    if config.peers.enabled and not (config.digest and config.engine == "chunks"):
        # A peer's bytes are proven by the chunk's digest.
        yield Problem(
            found.origins["peers.enabled"],
            "peers.enabled",
            "needs `digest: true` and `engine: chunks`",
        )


def dotted(partition: str | None, key: str) -> str:
    """A key's name in messages and origins: `deadline`, `partitions.gpu.deadline`."""
    return key if partition is None else f"partitions.{partition}.{key}"


def _read_all(etc: Path, owner: int | None) -> Iterator[_Value | Problem]:
    yield from _read(etc / "forestage.yaml", owner, optional=True)
    parts = etc / "conf.d"
    try:
        paths = sorted(parts.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        yield Problem(str(parts), "", f"cannot be listed: {error.strerror}")
        return
    for path in paths:
        # Editors and package managers leave .x.yaml.swp, x.yaml~ and x.yaml.dpkg-old behind.
        if path.name.endswith(".yaml") and not path.name.startswith("."):
            yield from _read(path, owner, optional=False)


def _read(path: Path, owner: int | None, optional: bool) -> Iterator[_Value | Problem]:
    where = str(path)
    try:
        document = _parse(_text(path, owner))
    except OSError as error:
        # A dangling link is not a missing file: somebody meant it to say something.
        missing = isinstance(error, FileNotFoundError) and not path.is_symlink()
        if not (optional and missing):
            yield Problem(where, "", f"cannot be read: {error.strerror}")
    except ValueError as error:
        yield Problem(where, "", str(error))
    else:
        yield from _check(where, (), document)


def _text(path: Path, owner: int | None) -> str:
    """The file's text. Raises OSError, or ValueError with the reason not to use it."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a FIFO must not hold up a hook

    with open(path, "rb", opener=opener) as file:
        # What is checked is what was opened: the path may lead elsewhere by now.
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        if owner is not None and status.st_uid != owner:
            raise ValueError(f"belongs to uid {status.st_uid}, expected uid {owner}")
        if owner is not None and status.st_mode & 0o022:
            raise ValueError("group or others may write it, expected its owner only")
        content = file.read(MAX_FILE_SIZE + 1)
    if len(content) > MAX_FILE_SIZE:
        raise ValueError(f"is larger than {exact_size(MAX_FILE_SIZE)}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (at byte {error.start})") from error


def _parse(text: str) -> object:
    """The YAML document, None if there is none. Raises ValueError."""
    import yaml  # here, since a node without a configuration file need not pay for it

    cls: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse(_beyond_plain(yaml.parse(text, cls)))
        _refuse(_repeated(yaml.compose(text, cls)))
        try:
            return yaml.load(text, cls)  # noqa: S506 - one of the two safe loaders
        except ValueError as error:  # it looks like a date or a number and is none
            raise ValueError(f"holds a value that YAML cannot read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", "")
        raise ValueError(f"is not YAML: {line}{reason}") from error


def _refuse(reasons: Iterable[str]) -> None:
    if text := "; ".join(reasons):
        raise ValueError(text)


def _beyond_plain(events: Iterable[Any]) -> Iterator[str]:
    """The parts of YAML that a configuration can do without.

    Looked for before anything is built: the composer in C recurses, so that a file of
    brackets ends the process with SIGSEGV; aliases grow without end; tags call constructors.
    """
    depth = 0
    for event in events:
        kind = type(event).__name__
        line = f"line {event.start_mark.line + 1}"
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        if depth > MAX_DEPTH:
            yield f"{line}: nested too deeply"
            return
        if kind == "AliasEvent" or getattr(event, "tag", None):
            yield f"{line}: an alias (*) or tag (!) cannot be used here"


def _repeated(node: Any) -> Iterator[str]:
    """Keys given twice, of which PyYAML would silently take the last."""
    if node is None or node.id != "mapping":
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = key.value if key.id == "scalar" else None  # else: yaml.load will refuse it
        if name in first:
            yield f"line {line}: {quote(name)} is given again, first in line {first[name]}"
        elif name is not None:
            first[name] = line
        yield from _repeated(value)


def _check(where: str, above: tuple[str, ...], raw: object) -> Iterator[_Value | Problem]:
    """Each value below `above`: (), a group, ("partitions",) or ("partitions", name). Pure."""
    if raw is None:  # all below it is commented out
        return
    if not isinstance(raw, dict):
        yield Problem(where, ".".join(above), f"expected keys and values, got {quote(raw)}")
        return
    for key, value in raw.items():
        if not isinstance(key, str) or not key.isprintable():
            # YAML 1.1 takes no, on, 1 and the like for something else than names.
            yield Problem(where, ".".join((*above, quote(key))), "expected a name in quotes")
        elif not above and key in KEYS and "." in key:
            yield Problem(where, key, "expected as two lines, the second one indented")
        elif above == ("partitions",) or (not above and key in ("partitions", *GROUPS)):
            yield from _check(where, (*above, key), value)
        elif above[:1] == ("partitions",):
            yield _setting(where, above[1], key, value)
        else:
            yield _setting(where, None, ".".join((*above, key)), value)


def _setting(where: str, partition: str | None, key: str, raw: object) -> _Value | Problem:
    try:
        if key not in (KEYS if partition is None else PARTITION_KEYS):
            raise ValueError(_not_a_key(partition, key))
        return _Value(where, partition, key, KEYS[key].kind.parse(raw))
    except ValueError as error:
        return Problem(where, dotted(partition, key), str(error))


def _not_a_key(partition: str | None, key: str) -> str:
    from difflib import get_close_matches  # only a mistake pays for it

    if key in (*KEYS, *GROUPS):
        return "cannot differ between partitions: a node has one cache"
    known = (*KEYS, "partitions") if partition is None else PARTITION_KEYS
    near = get_close_matches(key, known, n=1)
    return f"unknown key, did you mean {near[0]}?" if near else "unknown key"
