"""The configuration's directories where hooks run: users read the files, and list no directory.

    /etc/forestage, /etc/forestage/conf.d    0711, by `forestage enable` and the sweep
    /run/forestage/conf.d.json               `ConfigDirectoryListing`: what is in conf.d, for users'
                                             commands

Who lists a directory can hold up all who make a name in it (system/folders.py): an admin's editor,
configuration management, `forestage off`. Hooks run where one has been called since the boot. A
login node's directories stay as they are.
"""

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from forestage.paths import NodePaths
from forestage.system import folders, records

LISTABLE = stat.S_IRGRP | stat.S_IROTH


class ConfigDirectoryListing(msgspec.Struct, frozen=True):
    """What is in conf.d; `mtime_ns` is that of conf.d from before it was listed."""

    mtime_ns: int
    names: tuple[str, ...]


def has_run_hooks(places: NodePaths) -> bool:
    """Return whether hooks run here."""
    return any(places.hook_call_mark(hook).exists() for hook in ("prolog", "epilog"))


def list_listable_directories(places: NodePaths) -> list[Path]:
    """Return those of the directories that users may list. Raises OSError."""
    found = []
    for path in (places.etc, places.config_parts):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mode & LISTABLE:
                found.append(path)
    return found


def make_directories_unlistable(places: NodePaths) -> None:
    """Has users list none of the directories, and leaves them the names in conf.d. As root.

    What cannot be changed stays: /etc may be read-only, or conf.d a ConfigMap. `check` says so.
    Raises OSError where the names cannot be written.
    """
    record_names(places.config_names, list_config_files(places.config_parts))
    for path in list_listable_directories(places):
        with contextlib.suppress(OSError):
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~LISTABLE)
    with contextlib.suppress(OSError):
        state = places.known_disks.parent
        if state.exists():
            folders.ensure_directory_with_mode(state)


def list_config_files(parts: Path) -> ConfigDirectoryListing:
    """List conf.d, which need not be there. Raises OSError."""
    try:
        mtime_ns = parts.stat().st_mtime_ns
        return ConfigDirectoryListing(mtime_ns, tuple(sorted(os.listdir(parts))))  # noqa: PTH208
    except FileNotFoundError:
        return ConfigDirectoryListing(0, ())


def record_names(file: Path, found: ConfigDirectoryListing) -> None:
    """Writes down what is in conf.d, unless it is there already. As root. Raises OSError.

    A name that is no text is left out: JSON cannot have it.
    """
    names = tuple(name for name in found.names if name.isprintable())
    found = ConfigDirectoryListing(found.mtime_ns, names)
    if _find_record(file) != found:
        folders.ensure_directory(file.parent, folders.PASSABLE)
        records.write(file, msgspec.json.encode(found), 0o644)


def read_recorded_names(parts: Path, file: Path) -> tuple[tuple[str, ...], str]:
    """Return the names in conf.d as root has listed them, and what is not known of them."""
    found = _find_record(file)
    if found is None:
        return (), f"{parts} was not read: users cannot list it, and the sweep has not yet done so"
    with contextlib.suppress(OSError):
        if parts.stat().st_mtime_ns != found.mtime_ns:
            return found.names, f"{parts} has changed: new files count once the sweep has run"
    return found.names, ""


def _find_record(file: Path) -> ConfigDirectoryListing | None:
    with contextlib.suppress(OSError):
        return records.find(file, ConfigDirectoryListing)
    return None
