"""Is staging switched off on this node? By a file, at once; or by the configuration.

It holds from the next Prolog and the next step on. Running jobs keep what they have, copies under
way go on, the Epilog and the sweep clean up as ever.
"""

import os

from forestage.paths import Places
from forestage.units import printable

LONGEST = 200  # bytes of the reason


def by_file(places: Places) -> str:
    """Why nobody is served, if the file says so; else "". It costs a job one system call."""
    try:
        # NONBLOCK: a FIFO by that name switches off as well, and must not hold anybody up.
        fd = os.open(places.disabled, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:  # whatever is there, and however it is broken, somebody meant it
        return f"{places.disabled} is there"
    try:
        text = os.read(fd, LONGEST)
    except OSError:
        text = b""
    finally:
        os.close(fd)
    why = printable(text.decode(errors="replace").partition("\n")[0].strip())
    return f"{places.disabled}: {why}" if why else f"{places.disabled} is there"
