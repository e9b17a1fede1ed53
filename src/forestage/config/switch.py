"""The off switch: a file that turns staging off on this node at once, whatever the configuration.

It holds from the next Prolog and the next step on. Running jobs keep what they have, copies under
way go on, the Epilog and the sweep clean up as before.
"""

import os

from forestage.paths import Places
from forestage.system.files import opened
from forestage.units import printable

MAX_REASON = 200  # bytes


def by_file(places: Places) -> str:
    """Returns why the file switches staging off; "" without one. Costs a job one system call."""
    try:
        # NONBLOCK: a FIFO by that name switches off as well, and must not hold anybody up.
        with opened(places.disabled, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            text = os.read(fd, MAX_REASON)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:  # whatever is there, and however it is broken, somebody meant it
        return f"{places.disabled} is there"
    reason = printable(text.decode(errors="replace").partition("\n")[0].strip())
    return f"{places.disabled}: {reason}" if reason else f"{places.disabled} is there"
