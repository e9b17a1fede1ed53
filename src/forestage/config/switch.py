"""The off switch: a file that turns staging off on this node at once, whatever the configuration.

    /etc/forestage/disabled     written by `forestage off`, kept over reboots
    /run/forestage/disabled     by hand, by an upgrade; and by `off` where /etc cannot be written

    until 1795500000            optional: from that second (since the epoch) on the file counts
    INC-42: wrong bytes?        for nothing; the next line is the reason that people are shown

It holds from the next Prolog and the next step on. Running jobs keep what they have, copies under
way go on, the Epilog and the sweep clean up as before.
"""

import contextlib
import os
import time
from pathlib import Path

from forestage.config.keys import Config
from forestage.paths import Places
from forestage.system import folders, records
from forestage.system.files import opened
from forestage.units import is_number, printable

MAX_REASON = 200  # bytes
MAX_UNTIL = 32  # bytes of the line before it
UNTIL = "until "


def by_file(places: Places, now: float) -> str:
    """Returns why a file switches staging off at `now` (seconds since the epoch); "" if none does.

    Costs a job two system calls.
    """
    for file in (places.kept_off, places.disabled):
        if said := _said(file, now):
            return said
    return ""


def why_off(places: Places, config: Config, now: float) -> str:
    """Returns what switches staging off for all jobs with this configuration; "" if nothing."""
    return by_file(places, now) or ("" if config.enabled else "`enabled: false`")


def turn_off(places: Places, reason: str, until: float | None) -> Path:
    """Writes the file that outlives a reboot, or else the other one; returns which. As root.

    Raises OSError where neither can be written.
    """
    first = "" if until is None else f"{UNTIL}{int(until)}\n"
    data = f"{first}{printable(reason)}\n".encode()
    try:
        records.write(places.kept_off, data, 0o644)
        return places.kept_off
    except OSError:  # a node whose /etc is read-only, as of an image that all nodes boot
        folders.keep(places.run, folders.PASSABLE)
        records.write(places.disabled, data, 0o644)
        return places.disabled


def turn_on(places: Places) -> list[Path]:
    """Removes both files; returns those that were there. As root. Raises OSError."""
    removed = []
    for file in (places.kept_off, places.disabled):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file.unlink()
            removed.append(file)
    return removed


def _said(file: Path, now: float) -> str:
    try:
        # NONBLOCK: a FIFO by that name switches off as well, and must not hold anybody up.
        with opened(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            text = os.read(fd, MAX_UNTIL + MAX_REASON)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:  # whatever is there, and however it is broken, somebody meant it
        return f"{file} is there"
    first, _, rest = text.decode(errors="replace").partition("\n")
    end = first.removeprefix(UNTIL).strip()
    if not first.startswith(UNTIL) or not is_number(end):
        return _worded(file, first)
    if int(end) <= now:
        return ""
    return f"{_worded(file, rest.partition(chr(10))[0])} ({UNTIL}{_moment(int(end))})"


def _worded(file: Path, reason: str) -> str:
    reason = printable(reason.strip())
    return f"{file}: {reason}" if reason else f"{file} is there"


def _moment(end: int) -> str:
    """The node's local time, as in its log."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end))
    except (OverflowError, OSError, ValueError):  # a year with ten digits
        return str(end)
