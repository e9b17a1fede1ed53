"""How the bytes cross: one small interface, and the engines behind it."""

import os
from pathlib import Path
from typing import Protocol

from forestage import run
from forestage.errors import Failed


class Engine(Protocol):
    """Copies an open source into a part whose space is reserved already."""

    name: str

    def copy(self, source: int, part: Path, timeout: float) -> None:
        """Leaves exactly the source's bytes in `part`. Raises Failed, run.TimedOut, OSError."""


class Rsync:
    """The conservative choice: plain rsync, one stream.

    It opens the source again through our descriptor, as root; where root is squashed on the shared
    file system it says so and the job goes on with its original path.
    """

    name = "rsync"

    def copy(self, source: int, part: Path, timeout: float) -> None:
        argv = [
            "rsync",
            "--copy-links",  # /proc/self/fd/N is a link
            "--inplace",  # keeps the blocks that were reserved
            "--whole-file",
            "--ignore-times",  # a part of equal size and time is still not a finished copy
            f"/proc/self/fd/{source}",
            os.fspath(part),
        ]
        ran = run.run(argv, timeout, pass_fds=[source])
        if ran.code != 0:
            raise Failed("copy", ran.explained())


ENGINES: dict[str, Engine] = {"rsync": Rsync()}
