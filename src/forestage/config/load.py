"""Reads the configuration files; all that is wrong with them is reported at once.

    defaults < <etc>/forestage.yaml < <etc>/conf.d/*.yaml (sorted) < the job's partition

A later file wins key by key, and each value remembers the file it is from. Since the files direct
a root hook, root reads only those that are its own and that nobody else may write.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec

from forestage.config.keys import GROUPS, KEYS, PARTITION_KEYS, Config, value_of, with_values
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
        """Returns the settings for a job in this partition; None or an unknown one: the common."""
        return with_values(self.config, self.partitions.get(name or "", {}))

    def rows(self, partition: str | None = None) -> list[Row]:
        """Returns every key as it holds for `partition`; without one, every override follows."""
        config = self.for_partition(partition)
        rows = []
        for name, key in KEYS.items():
            origin = self.origins.get(dotted(partition, name), self.origins[name])
            rows.append(Row(name, key.show(value_of(config, name)), origin))
        if partition is None:
            for place, overrides in self.partitions.items():
                for name, value in overrides.items():
                    full = dotted(place, name)
                    rows.append(Row(full, KEYS[name].show(value), self.origins[full]))
        return rows


class _Value(msgspec.Struct, frozen=True):
    """One value that one file sets."""

    where: str
    partition: str | None
    key: str
    value: object


def load_settings(etc: Path) -> Settings:
    """Reads the configuration below `etc` (/etc/forestage); no file at all is all defaults.

    Raises ConfigError with all problems at once.
    """
    found = list(_read_all(etc))
    if problems := tuple(item for item in found if isinstance(item, Problem)):
        raise ConfigError(problems)
    merged = _merge(item for item in found if isinstance(item, _Value))
    if problems := tuple(_contradictions(merged)):
        raise ConfigError(problems)
    return merged


def dotted(partition: str | None, key: str) -> str:
    """Returns a key's name in messages and origins: `deadline`, `partitions.gpu.deadline`."""
    return key if partition is None else f"partitions.{partition}.{key}"


def _merge(values: Iterable[_Value]) -> Settings:
    common: dict[str, object] = {}
    partitions: dict[str, dict[str, object]] = {}
    origins = dict.fromkeys(KEYS, DEFAULT)
    for it in values:
        target = common if it.partition is None else partitions.setdefault(it.partition, {})
        target[it.key] = it.value
        origins[dotted(it.partition, it.key)] = it.where
    return Settings(
        config=with_values(Config(), common),
        partitions=MappingProxyType({k: MappingProxyType(v) for k, v in partitions.items()}),
        origins=MappingProxyType(origins),
    )


def _contradictions(settings: Settings) -> Iterator[Problem]:
    """Keys whose values cannot be used together, each right by itself. Pure."""
    config = settings.config
    if config.peers.enabled and not (config.digest and config.engine == "chunks"):
        # A peer's bytes are proven by the chunk's digest.
        yield Problem(
            settings.origins["peers.enabled"],
            "peers.enabled",
            "needs `digest: true` and `engine: chunks`",
        )


def _read_all(etc: Path) -> Iterator[_Value | Problem]:
    yield from _read(etc / "forestage.yaml", optional=True)
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
            yield from _read(path, optional=False)


def _read(path: Path, optional: bool) -> Iterator[_Value | Problem]:
    where = str(path)
    try:
        document = _parse(_text(path))
    except OSError as error:
        # A dangling link is not a missing file: somebody meant it to say something.
        missing = isinstance(error, FileNotFoundError) and not path.is_symlink()
        if not (optional and missing):
            yield Problem(where, "", f"cannot be read: {error.strerror}")
    except ValueError as error:
        yield Problem(where, "", str(error))
    else:
        yield from _check(where, (), document)


def _text(path: Path) -> str:
    """Returns the file's text. Raises OSError, or ValueError with the reason not to use it."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a FIFO must not hold up a hook

    with open(path, "rb", opener=opener) as file:
        # What is checked is what was opened: the path may lead elsewhere by now.
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        # Others only look (`forestage config`, `forestage check`), and may look at any file.
        if os.geteuid() == 0 and status.st_uid != 0:
            raise ValueError(f"belongs to uid {status.st_uid}, expected root")
        if os.geteuid() == 0 and status.st_mode & 0o022:
            raise ValueError("group or others may write it, expected its owner only")
        content = file.read(MAX_FILE_SIZE + 1)
    if len(content) > MAX_FILE_SIZE:
        raise ValueError(f"is larger than {exact_size(MAX_FILE_SIZE)}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (at byte {error.start})") from error


def _parse(text: str) -> object:
    """Returns the YAML document, None if there is none. Raises ValueError."""
    import yaml  # here, since a node without a configuration file need not pay for it

    cls: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_beyond_plain(yaml.parse(text, cls))
        loader = cls(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if repeated := "; ".join(_repeated(node)):
            raise ValueError(repeated)
        try:
            return loader.construct_document(node)
        except ValueError as error:  # it looks like a date or a number and is none
            raise ValueError(f"holds a value that YAML cannot read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", "")
        raise ValueError(f"is not YAML: {line}{reason}") from error


def _refuse_beyond_plain(events: Iterable[Any]) -> None:
    """Refuses the parts of YAML that a configuration can do without, before anything is built.

    A line of brackets would end the process with SIGSEGV, as the composer in C recurses; tags
    call constructors that raise whatever they like; aliases grow without end.
    """
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        if depth > MAX_DEPTH:
            raise ValueError(f"line {event.start_mark.line + 1}: nested too deeply")
        if kind == "AliasEvent" or getattr(event, "tag", None):
            raise ValueError(
                f"line {event.start_mark.line + 1}: an alias (*) or tag (!) cannot be used here"
            )


def _repeated(node: Any) -> Iterator[str]:
    """Keys given twice, of which PyYAML would silently take the last."""
    if node.id != "mapping":
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        if key.id != "scalar":  # the constructor refuses it
            continue
        line = key.start_mark.line + 1
        if key.value in first:
            earlier = first[key.value]
            yield f"line {line}: {quote(key.value)} is given again, first in line {earlier}"
        first.setdefault(key.value, line)
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
            group, _, within = key.partition(".")
            yield Problem(where, key, f"expected `{group}:`, and `{within}:` indented below it")
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
        return _Value(where, partition, key, KEYS[key].read(raw))
    except ValueError as error:
        return Problem(where, dotted(partition, key), str(error))


def _not_a_key(partition: str | None, key: str) -> str:
    from difflib import get_close_matches  # only a mistake pays for it

    if key in (*KEYS, *GROUPS):
        return "cannot differ between partitions: a node has one cache"
    known = (*KEYS, "partitions") if partition is None else PARTITION_KEYS
    near = get_close_matches(key, known, n=1)
    return f"unknown key, did you mean {near[0]}?" if near else "unknown key"
