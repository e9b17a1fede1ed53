"""Memory of the nodes whose peer service did not answer: /run/forestage/unanswered/<node>.

A node that refuses a connection costs nothing, one that says nothing costs seconds to each that
waits for it. So whoever got no answer notes it, for all copies and directories of this node. A
file holds the time (CLOCK_MONOTONIC, seconds) at which the node was silent. An answer deletes it.

Who reads it does without the node at first, and asks it all the same, beside other work: the node
may have been slow for a moment only. A memory that cannot be read or written is none, since all
it saves is time.
"""

import contextlib
import os
import re
from pathlib import Path

from forestage.paths import NodePaths
from forestage.system import files, folders
from forestage.system.files import open_descriptor

SILENCE_LASTS = 300.0  # seconds
MAX_NODES = 1024  # nodes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def is_silent(places: NodePaths, node: str, now: float) -> bool:
    """Return whether the node gave no answer a short while ago; `now` is monotonic."""
    return bool(_NAME.fullmatch(node)) and _is_recent(places.silent_nodes / node, now)


def list_silent_nodes(places: NodePaths, now: float) -> frozenset[str]:
    """Return the nodes that gave no answer a short while ago; `now` is monotonic."""
    with contextlib.suppress(OSError):
        noted = list(places.silent_nodes.iterdir())
        return frozenset(file.name for file in noted if _is_recent(file, now))
    return frozenset()


def record_silence(places: NodePaths, node: str, now: float) -> None:
    """Note that the node gave no answer; `now` is monotonic."""
    if not _NAME.fullmatch(node):
        return
    with contextlib.suppress(OSError):
        folders.ensure_directory_with_mode(places.silent_nodes)
        others = [file for file in places.silent_nodes.iterdir() if file.name != node]
        if len(others) >= MAX_NODES:
            old = [file for file in others if not _is_recent(file, now)]
            for file in old:
                file.unlink(missing_ok=True)
            if len(others) - len(old) >= MAX_NODES:
                return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open_descriptor(places.silent_nodes / node, flags, 0o600) as fd:
            os.write(fd, f"{now!r}\n".encode())


def delete_silence(places: NodePaths, node: str) -> None:
    """Note that the node answered: what was noted before counts no more."""
    if _NAME.fullmatch(node):
        with contextlib.suppress(OSError):
            (places.silent_nodes / node).unlink(missing_ok=True)


def _is_recent(file: Path, now: float) -> bool:
    """Return whether a file says that its node was silent within SILENCE_LASTS."""
    try:
        since = float(files.read_file(file))
    except (OSError, ValueError):  # the latter: a file that is being written, or anything else
        return False
    # A later time is of another boot, or of a file that nobody here wrote.
    return 0 <= now - since <= SILENCE_LASTS
