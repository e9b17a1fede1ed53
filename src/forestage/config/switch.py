"""The off switch: a file that turns staging off on this node at once, whatever the configuration.

    /run/forestage/disabled     by hand, by an upgrade; `forestage off` writes it first
    /etc/forestage/disabled     kept over reboots: `off` writes it next, and removes the first one

A user who may list /etc/forestage can hold up all who make a name there (system/folders.py), so a
child process does what is done there, for so long and no longer. Where that one does not end, or
/etc cannot be written, the first file stays.

    until 1795500000            optional: from that second (since the epoch) on the file counts
    INC-42: wrong bytes?        for nothing; the next line is the reason that people are shown

It holds from the next Prolog and the next step on. Running jobs keep what they have, copies under
way go on, the Epilog and the sweep clean up as before. Other nodes get no more chunks from here.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from forestage.config.keys import Config
from forestage.errors import Declined
from forestage.paths import NodePaths
from forestage.system import as_user, folders, records
from forestage.system.files import open_descriptor
from forestage.units import is_number, make_printable

MAX_REASON = 200  # bytes
MAX_UNTIL = 32  # bytes of the line before it
UNTIL = "until "
PATIENCE = 5.0  # seconds for what is done in /etc
TRIES = 3  # of a write whose temporary file another `off` has taken for one that was left


class SwitchChange(msgspec.Struct, frozen=True):
    """The files that `off` has left there, or that `on` has removed.

    `error` says why nothing is known of the file that outlives a reboot; "" where it was changed.
    """

    files: tuple[Path, ...]
    error: str = ""


def find_off_file_reason(places: NodePaths, now: float) -> str:
    """Returns why a file switches staging off at `now` (seconds since the epoch); "" if none does.

    Costs a job two system calls. First the one in which nothing can wait.
    """
    for file in (places.disabled, places.lasting_off_file):
        if said := _read_off_file(file, now):
            return said
    return ""


def find_off_reason(places: NodePaths, config: Config, now: float) -> str:
    """Returns what switches staging off for all jobs with this configuration; "" if nothing."""
    return find_off_file_reason(places, now) or ("" if config.enabled else "`enabled: false`")


def turn_off(places: NodePaths, reason: str, until: float | None) -> SwitchChange:
    """Switches staging off: at once, then for longer than this boot. As root.

    Raises OSError where neither file can be written.
    """
    first = "" if until is None else f"{UNTIL}{int(until)}\n"
    data = f"{first}{make_printable(reason)}\n".encode()
    was_there = os.path.lexists(places.disabled)
    failed: OSError | None = None
    try:
        folders.ensure_directory_with_mode(places.run, folders.PASSABLE)
        _replace_file(places.disabled, data)
    except OSError as raised:  # /run is full
        failed = raised
    try:
        _, why_not = _change_in_child(places, lambda: _replace_file(places.lasting_off_file, data))
    except OSError as raised:  # a node whose /etc is read-only, as of an image that all nodes boot
        why_not = f"{places.lasting_off_file} cannot be written: {raised.strerror}"
    if why_not and failed is not None:
        raise failed
    if why_not:
        return SwitchChange((places.disabled,), why_not)
    if not was_there:  # else an upgrade's own, which ends with the upgrade
        places.disabled.unlink(missing_ok=True)
    return SwitchChange((places.lasting_off_file,))


def turn_on(places: NodePaths) -> SwitchChange:
    """Removes both files. As root. Raises OSError."""
    removed = (places.disabled,) if _remove_file(places.disabled) else ()
    is_removed, error = _change_in_child(places, lambda: _remove_file(places.lasting_off_file))
    return SwitchChange((*removed, *[places.lasting_off_file] * is_removed), error)


def _change_in_child(places: NodePaths, work: Callable[[], bool]) -> tuple[bool, str]:
    """Has a child do what is to be done in /etc; returns its answer, and why there is none.

    Raises OSError.
    """
    try:
        changed, _ = as_user.run_in_child(lambda: (work(), []), bool, PATIENCE)
    except as_user.ChildTimeout:
        # Killed, it ends when whoever holds the directory lets go of it.
        return False, f"{places.etc} did not answer within {PATIENCE:g} s (does a user list it?)"
    except Declined as error:
        return False, f"{places.lasting_off_file} could not be changed: {error}"
    return changed, ""


def _replace_file(file: Path, data: bytes) -> bool:
    """Writes a file, and deletes what killed processes have left beside it. Raises OSError."""
    _delete_temporary_files(file)
    for _ in range(TRIES - 1):
        with contextlib.suppress(FileNotFoundError):  # another `off` is at work
            records.write(file, data, 0o644)
            return True
    records.write(file, data, 0o644)
    return True


def _remove_file(file: Path) -> bool:
    """Removes a file; returns whether it was there. Raises OSError."""
    _delete_temporary_files(file)
    try:
        file.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _delete_temporary_files(file: Path) -> None:
    """Deletes the temporary files of writes that did not end."""
    with contextlib.suppress(OSError):
        for left in file.parent.glob(f".{file.name}.*"):
            left.unlink(missing_ok=True)


def _read_off_file(file: Path, now: float) -> str:
    try:
        # NONBLOCK: a FIFO by that name switches off as well, and must not hold anybody up.
        with open_descriptor(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            text = os.read(fd, MAX_UNTIL + MAX_REASON)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:  # whatever is there, and however it is broken, somebody meant it
        return f"{file} is there"
    first, _, rest = text.decode(errors="replace").partition("\n")
    end = first.removeprefix(UNTIL).strip()
    if not first.startswith(UNTIL) or not is_number(end):
        return _format_reason(file, first)
    if int(end) <= now:
        return ""
    return f"{_format_reason(file, rest.partition(chr(10))[0])} ({UNTIL}{_format_time(int(end))})"


def _format_reason(file: Path, reason: str) -> str:
    reason = make_printable(reason.strip())
    return f"{file}: {reason}" if reason else f"{file} is there"


def _format_time(end: int) -> str:
    """The node's local time, as in its log."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end))
    except (OverflowError, OSError, ValueError):  # a year with ten digits
        return str(end)
