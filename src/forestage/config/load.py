"""Reads the configuration files; all that is wrong with them is reported at once.

    defaults < <etc>/forestage.yaml < <etc>/conf.d/*.yaml, *.yml (sorted) < the job's partition

A later file wins key by key, and each value remembers the file it is from. Since the files direct
a root hook, root reads only those that are its own and that nobody else may write. A user may not
be able to list conf.d (config/directories.py).
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from forestage.config import directories
from forestage.config.directories import ConfigDirectoryListing
from forestage.config.keys import GROUPS, KEYS, PARTITION_KEYS, Config, get_key_value, with_values
from forestage.config.memo import YamlCache
from forestage.errors import ConfigError, ConfigProblem
from forestage.paths import NodePaths
from forestage.units import format_exact_size, quote_value

MAX_FILE_SIZE = 1 << 20  # bytes; a configuration is not a data file
MAX_DEPTH = 4  # the file, its partitions, one partition, a list of sources
DEFAULT = "default"  # the origin of a value that no file sets

REMOVED_KEYS = {
    "prolog_wait": "`cold:` says whether a job waits for its copy",
    "step_wait": "`cold: wait` makes a step wait, up to `deadline:`",
    "on_deadline": "a copy goes on while a job has a use for it",
    "digest": "each chunk of a copy has its digest, whatever the value",
    "direct": "the page cache is passed by where that is a gain, whatever the value",
    "preload": "nothing is read into the page cache after a boot",
    "peers.addresses": "every node is found by `peers.address`, and by DNS or /etc/hosts",
    "peers.uploads": "a node sends 16 chunks at once, and `peers.bandwidth` limits them",
    "peers.downloads": "a copy gets 8 chunks from peers at once",
    "on_error": "no failure of forestage drains a node; NHC's check_forestage does (operations.md)",
}
"""Keys of earlier releases, each with what happens now, whatever its value says.

They are ignored, with a warning. So there is none among them by which an admin kept anything from
being staged: such a key stays unknown, and with it nothing is staged.
"""

_BY_NODE: tuple[str, ...] = ("peers.addresses",)  # of these: below each were names of nodes

REMOVED_KEYS_LOGGED = "removed"  # names, in what hooks keep, the removed keys that were logged

Overrides: TypeAlias = Mapping[str, object]  # key -> value of the key's type in Config


class ConfigRow(NamedTuple):
    """One line of `forestage config`."""

    key: str
    value: str  # as it would be written in the file
    origin: str  # DEFAULT or a file's path


class LoadedConfig(msgspec.Struct, frozen=True):
    """All that the configuration says, and which file said it.

    `unread` says which of its files a user may have missed, and why; "" where all were read.
    `removed` are the keys of REMOVED_KEYS that are still there, each with the files that have it;
    `unlogged` are those of them that no hook has logged since the boot.
    """

    config: Config
    partitions: Mapping[str, Overrides]
    origins: Mapping[str, str]  # "deadline", "partitions.gpu.deadline" -> DEFAULT or path
    unread: str = ""
    removed: Mapping[str, tuple[str, ...]] = {}
    unlogged: tuple[str, ...] = ()

    @property
    def node_config(self) -> Config:
        """What holds where no job is concerned: staging is on if it is for any partition."""
        on = self.config.enabled or any(one.get("enabled") for one in self.partitions.values())
        return msgspec.structs.replace(self.config, enabled=on)

    def for_partition(self, name: str | None) -> Config:
        """Returns the settings for a job in this partition; None or an unknown one: the common."""
        return with_values(self.config, self.partitions.get(name or "", {}))

    def list_configs(self) -> list[tuple[str | None, Config]]:
        """The common settings, of None, and those of each partition that has some of its own."""
        return [(name, self.for_partition(name)) for name in (None, *self.partitions)]

    def list_rows(self, partition: str | None = None) -> list[ConfigRow]:
        """Returns every key as it holds for `partition`; without one, every override follows."""
        config = self.for_partition(partition)
        rows = []
        for name, key in KEYS.items():
            origin = self.origins.get(format_key_name(partition, name), self.origins[name])
            rows.append(ConfigRow(name, key.format_value(get_key_value(config, name)), origin))
        if partition is None:
            for place, overrides in self.partitions.items():
                for name, value in overrides.items():
                    full = format_key_name(place, name)
                    rows.append(ConfigRow(full, KEYS[name].format_value(value), self.origins[full]))
        return rows


class _ConfigDraft(msgspec.Struct):
    """What the files read so far say, and all that is wrong with them."""

    origins: dict[str, str]
    common: dict[str, object] = {}
    partitions: dict[str, dict[str, object]] = {}
    removed: dict[str, tuple[str, ...]] = {}
    problems: list[ConfigProblem] = []


def load_config(etc: Path, memo_file: Path | None = None) -> LoadedConfig:
    """Reads the configuration below `etc` (/etc/forestage); no file at all is all defaults.

    `memo_file` is where hooks keep what YAML they have read (config/memo.py). Raises ConfigError
    with all problems at once.
    """
    documents = YamlCache(memo_file)
    found = _ConfigDraft(dict.fromkeys(KEYS, DEFAULT))
    parts, noted = etc / "conf.d", NodePaths(etc.parent.parent).config_names
    listed, unread = _list_parts(parts, noted, found)
    documents.add_value(parts.name, [listed.mtime_ns, *listed.names])
    # Editors and package managers leave .x.yaml.swp, x.yaml~ and x.yaml.dpkg-old behind.
    names = [name for name in listed.names if name.endswith((".yaml", ".yml")) and name[0] != "."]
    for path in (etc / "forestage.yaml", *(parts / name for name in names)):
        _read_file(path, documents, found)
    config = with_values(Config(), found.common)
    _check_peers_need_chunks(config, found)
    if found.problems:
        raise ConfigError(tuple(found.problems))
    known = documents.stored.get(REMOVED_KEYS_LOGGED)
    unlogged = [key for key in found.removed if not (isinstance(known, list) and key in known)]
    if found.removed:
        documents.add_value(REMOVED_KEYS_LOGGED, sorted(found.removed))
    if documents.save_if_changed() and memo_file is not None:
        with contextlib.suppress(OSError):  # a user's command says that it could not read them
            directories.record_names(memo_file.with_name(noted.name), listed)
    # What could not be noted would be logged for each job.
    logs = tuple(unlogged) if documents.is_written else ()
    return LoadedConfig(config, found.partitions, found.origins, unread, found.removed, logs)


def _check_peers_need_chunks(config: Config, found: _ConfigDraft) -> None:
    """They are proven by the chunk's digest, which rsync does not take."""
    if config.peers.enabled is True and config.engine != "chunks":
        key, what = "peers.enabled", "needs `engine: chunks`"
        found.problems.append(ConfigProblem(found.origins[key], key, what))


def _list_parts(
    parts: Path, noted: Path, found: _ConfigDraft
) -> tuple[ConfigDirectoryListing, str]:
    """Return what is in conf.d, and what is not known of that."""
    try:
        return directories.list_config_files(parts), ""
    except OSError as error:
        if isinstance(error, PermissionError) and os.geteuid() != 0:
            names, unread = directories.read_recorded_names(parts, noted)
            return ConfigDirectoryListing(0, names), unread
        what = f"cannot be listed: {error.strerror}"
        found.problems.append(ConfigProblem(str(parts), "", what))
        return ConfigDirectoryListing(0, ()), ""


def format_key_name(partition: str | None, key: str) -> str:
    """Returns a key's name in messages and origins: `deadline`, `partitions.gpu.deadline`."""
    return key if partition is None else f"partitions.{partition}.{key}"


def _read_file(path: Path, documents: YamlCache, found: _ConfigDraft) -> None:
    try:
        document = documents.parse_cached(_read_text(path), _parse_yaml)
    except OSError as error:
        # A dangling link is not a missing file: somebody meant it to say something.
        if not isinstance(error, FileNotFoundError) or path.is_symlink():
            found.problems.append(ConfigProblem(str(path), "", f"cannot be read: {error.strerror}"))
    except ValueError as error:
        found.problems.append(ConfigProblem(str(path), "", str(error)))
    else:
        _add_values(str(path), (), document, found)


def _read_text(path: Path) -> str:
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
            raise ValueError(f"belongs to uid {status.st_uid}, expected root (chown root)")
        if os.geteuid() == 0 and status.st_mode & 0o022:
            raise ValueError("group or others may write it, expected its owner only (chmod go-w)")
        content = file.read(MAX_FILE_SIZE + 1)
    if len(content) > MAX_FILE_SIZE:
        raise ValueError(f"is larger than {format_exact_size(MAX_FILE_SIZE)}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (at byte {error.start})") from error


def _parse_yaml(text: str) -> object:
    """Returns the YAML document, None if there is none. Raises ValueError."""
    import yaml  # here, since a node without a configuration file need not pay for it

    try:
        _check_depth_and_aliases(yaml.parse(text, yaml.CSafeLoader))
        loader: Any = yaml.CSafeLoader(text)
        node = loader.get_single_node()
        repeated = "; ".join(_list_repeated_keys(node)) if node else ""
        document = loader.construct_document(node) if node and not repeated else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        reason = str(getattr(error, "problem", None) or getattr(error, "reason", ""))
        reason = reason.replace("that cannot start any token", "that nothing begins with, as a tab")
        raise ValueError(f"is not YAML: {line}{reason}") from error
    except _UnsupportedYaml as error:
        raise ValueError(str(error)) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # It looks like a date or a number and is none, or has a tag (!) that it does not fit.
        raise ValueError(f"holds a value that YAML cannot read: {error}") from error
    if repeated:
        raise ValueError(repeated)
    return document


class _UnsupportedYaml(ValueError):
    """A part of YAML that a configuration can do without."""


def _check_depth_and_aliases(events: Iterable[Any]) -> None:
    """Refuses, before anything is built, what would end or hang the process.

    The composer in C recurses: 40,000 brackets are a SIGSEGV. Aliases of aliases never end.
    """
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        if depth > MAX_DEPTH or kind == "AliasEvent":
            what = "an alias (*) cannot be used here" if depth <= MAX_DEPTH else "nested too deeply"
            raise _UnsupportedYaml(f"line {event.start_mark.line + 1}: {what}")


def _list_repeated_keys(node: Any) -> Iterator[str]:
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
            yield f"line {line}: {quote_value(key.value)} is given again, first in line {earlier}"
        first.setdefault(key.value, line)
        yield from _list_repeated_keys(value)


def _add_values(where: str, above: tuple[str, ...], raw: object, found: _ConfigDraft) -> None:
    """Adds each value below `above`: (), a group, ("partitions",) or ("partitions", name)."""
    if raw is None:  # all below it is commented out
        return
    if not isinstance(raw, dict):
        what = f"expected keys and values, got {quote_value(raw)}"
        found.problems.append(ConfigProblem(where, ".".join(above), what))
        return
    for key, value in raw.items():
        if not isinstance(key, str) or not key.isprintable():
            # YAML 1.1 takes no, on, 1 and the like for something else than names.
            name = ".".join((*above, quote_value(key)))
            found.problems.append(ConfigProblem(where, name, "expected a name in quotes"))
        elif above == ("partitions",) or (not above and key in ("partitions", *GROUPS)):
            _add_values(where, (*above, key), value, found)
        elif above[:1] == ("partitions",):
            _set_value(where, above[1], key, value, found)
        elif above or "." not in key:
            _set_value(where, None, ".".join((*above, key)), value, found)
        else:
            group, _, within = key.partition(".")
            what = f"expected `{group}:`, and `{within}:` indented below it"
            found.problems.append(ConfigProblem(where, key, what))


def _set_value(
    where: str, partition: str | None, key: str, raw: object, found: _ConfigDraft
) -> None:
    full = format_key_name(partition, key)
    if key in REMOVED_KEYS and not _has_nested_keys(key, raw):
        found.removed[key] = tuple(dict.fromkeys((*found.removed.get(key, ()), where)))
        return
    try:
        if key not in (KEYS if partition is None else PARTITION_KEYS):
            raise ValueError(_explain_unknown_key(partition, key))
        value = KEYS[key].parse_value(raw)
    except ValueError as error:
        found.problems.append(ConfigProblem(where, full, str(error)))
        return
    values = found.common if partition is None else found.partitions.setdefault(partition, {})
    values[key] = value
    found.origins[full] = where


def _has_nested_keys(key: str, raw: object) -> bool:
    """Whether there are keys below a removed one: one that excludes must not go with it, unread.

    Known or misspelt: with an unknown key nothing is staged.
    """
    if key in _BY_NODE and isinstance(raw, dict):
        return not all(isinstance(address, str) for address in raw.values())
    return isinstance(raw, (dict, list))


def _explain_unknown_key(partition: str | None, key: str) -> str:
    from difflib import get_close_matches  # only a mistake pays for it

    if key in (*KEYS, *GROUPS):
        return "cannot differ between partitions: a node has one cache"
    if key in REMOVED_KEYS:
        return "was removed, and there are keys below it (remove its line, and indent them less)"
    known = (*KEYS, "partitions") if partition is None else PARTITION_KEYS
    near = get_close_matches(key, known, n=1)
    return f"unknown key, did you mean {near[0]}?" if near else "unknown key"
